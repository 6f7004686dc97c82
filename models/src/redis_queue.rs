//! The queue of one Redis server.
//!
//! [`server`] is what the scripts do. [`model`] adds clients and is visited exhaustively. [`trace`] replays what a real server answered.

pub mod model;
pub mod server;
pub mod state;
pub mod trace;

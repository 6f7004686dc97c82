//! The fenced Redlock protocol: one lock on N independent nodes.
//!
//! [`node`] is what one node does with a request. [`model`] puts N nodes and several acquisitions together and is visited
//! exhaustively. [`trace`] replays what real nodes answered.

pub mod bounds;
pub mod model;
pub mod node;
mod place;
pub mod properties;
mod replay;
pub mod state;
pub mod steps;
pub mod trace;

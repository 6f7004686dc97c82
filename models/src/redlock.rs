//! The fenced Redlock protocol: one lock on N independent nodes.
//!
//! [`node`] is what one node does with a request. [`model`] puts N nodes and several acquisitions together and is visited
//! exhaustively.

pub mod bounds;
pub mod model;
pub mod node;
pub mod properties;
pub mod state;
pub mod steps;

//! Tests that take longer, or need what not every machine has.

mod log;
mod processes;
mod read_only;
mod tokens;
mod while_open;

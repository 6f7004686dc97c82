//! Tests that take long, need other programs or several servers, or show figures.

mod abandoned;
mod bad_input;
mod ceiling;
mod clock;
mod crowd;
mod defaults;
mod failover;
mod figures;
mod inquiry;
mod many;
mod pooler;
mod reserve;
mod silence;
mod tokens;
mod waiting;

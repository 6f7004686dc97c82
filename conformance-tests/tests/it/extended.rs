//! What takes several servers, or long.

#[cfg(target_os = "linux")]
mod examples;
mod moving;
mod redis_failover;

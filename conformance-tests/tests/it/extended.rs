//! What takes several servers, or long.

#[cfg(target_os = "linux")]
mod example;
#[cfg(target_os = "linux")]
mod http_shop;
mod moving;
mod redis_failover;
mod servers;
#[cfg(target_os = "linux")]
mod stock;

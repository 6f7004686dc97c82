//! A holder that is stopped.

use std::time::Duration;

use rustix::process::Signal;

use crate::processes::{Holder, next};
use crate::server::Database;

/// Within that a holder that is not stopped is renewed, also on a busy machine.
const TTL: Duration = Duration::from_secs(5);

#[tokio::test]
async fn a_stopped_holder_is_freed_by_the_server_and_can_do_nothing_guarded_when_it_wakes() {
    let server = Database::new().await;
    let other = server.client().await;
    let mut holder = Holder::start(&server, TTL);
    assert_eq!(holder.write(), "true true");
    holder.signal(Signal::STOP);
    let (token, took) = next(&other).await;
    println!("a stopped holder with a ttl of {TTL:?} was freed after {took:?}");
    assert!(token > holder.token);
    holder.signal(Signal::CONT);
    assert_eq!(holder.write(), "false false");
}

//! What is logged about a server whose settings put locks at risk.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod server;

use std::fmt::{self, Write};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lock_core::Locks;
use server::Server;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber, span};

/// Keeps the warnings that are logged.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<String>>>);

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }
    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }
    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn event(&self, event: &Event<'_>) {
        let mut text = Text::default();
        event.record(&mut text);
        self.0.lock().unwrap().push(text.0);
    }
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

#[derive(Default)]
struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        write!(self.0, "{field}={value:?} ").unwrap();
    }
}

#[tokio::test]
async fn an_eviction_policy_that_is_set_under_a_held_lock_is_logged_once() {
    let log = Log::default();
    // For every thread: locks are renewed on one of their own.
    tracing::subscriber::set_global_default(log.clone()).unwrap();
    let server = Server::start();
    let locks = Locks::new(server.client().await);
    let _: () = server.command("CONFIG SET maxmemory 100mb").await;
    let _: () = server.command("CONFIG SET maxmemory-policy allkeys-lru").await;
    let _guard = locks.lock("n").ttl(Duration::from_millis(300)).await.unwrap();
    while locks.stats().renewed < 5 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let evicts = || {
        let log = log.0.lock().unwrap();
        log.iter().filter(|text| text.contains("allkeys-lru")).count()
    };
    while evicts() == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(evicts(), 1, "{:?}", log.0.lock().unwrap());
    let warnings = locks.warnings().await.unwrap();
    assert!(
        warnings.len() == 1 && warnings[0].contains("allkeys-lru"),
        "{warnings:?}"
    );
}

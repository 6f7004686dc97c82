//! What is logged about a server whose settings put locks at risk.

use std::fmt::{self, Write};
use std::sync::{Arc, Mutex};

use lock_core::Locks;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber, span};

use crate::server::{Ask, LONG, start, until};

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
    const POLICY: &str = "volatile-random";
    let log = Log::default();
    // For all threads: locks are renewed on one of their own. No other test has that policy.
    tracing::subscriber::set_global_default(log.clone()).unwrap();
    let logged = || {
        log.0
            .lock()
            .unwrap()
            .iter()
            .filter(|text| text.contains(POLICY))
            .count()
    };
    let server = start().await;
    let locks = Locks::new(server.client().await);
    let _: () = server.command("CONFIG SET maxmemory 100mb").await;
    let _: () = server.command(&format!("CONFIG SET maxmemory-policy {POLICY}")).await;
    let guard = locks.lock("n").ttl(LONG).await.unwrap();
    guard.renew_now().await.unwrap();
    until("the policy is logged", async || logged() > 0).await;
    for _ in 0..5 {
        guard.renew_now().await.unwrap();
    }
    let warnings = locks.server_info().await.unwrap().warnings;
    assert_eq!(logged(), 1);
    assert!(warnings.len() == 1 && warnings[0].contains(POLICY), "{warnings:?}");
}

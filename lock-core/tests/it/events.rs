//! What the client tells a subscriber of `tracing`.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use lock_core::{Locks, MemoryLock};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::child;

/// Level and message of each event with the target of the project.
#[derive(Clone, Default)]
struct Events(Arc<Mutex<Vec<(Level, String)>>>);

struct Message(String);

impl Visit for Message {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            self.0 = format!("{value:?}");
        }
    }
}

impl Subscriber for Events {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "fencelock"
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut message = Message(String::new());
        event.record(&mut message);
        let told = (*event.metadata().level(), message.0);
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(told);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[test]
fn one_target_shows_what_becomes_of_a_lock() {
    // The subscriber is that of the whole process, as the background thread tells it, too.
    child::alone("events::one_target_shows_what_becomes_of_a_lock", tell_of_locks);
}

fn tell_of_locks() {
    let events = Events::default();
    tracing::subscriber::set_global_default(events.clone()).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let memory = MemoryLock::new();
        let locks = Locks::new(memory.client());
        let guard = locks.lock("a").ttl(Duration::from_secs(30)).await.unwrap();
        guard.renew_now().await.unwrap();
        guard.release().await.unwrap();
        let stolen = locks.lock("b").await.unwrap();
        memory.steal(stolen.name()).unwrap();
        stolen.lost().await;
        drop(stolen);
        locks.shutdown().await.unwrap();
    });
    let told = events.0.lock().unwrap();
    for expected in [
        (Level::DEBUG, "acquired"),
        (Level::TRACE, "renewed"),
        (Level::DEBUG, "released"),
        (Level::WARN, "lock lost"),
    ] {
        let found = told
            .iter()
            .any(|(level, message)| (*level, message.as_str()) == expected);
        assert!(found, "{expected:?} is not among {told:?}");
    }
}

//! What the client tells a subscriber of `tracing`.

use std::cell::RefCell;
use std::fmt;
use std::sync::Once;
use std::time::Duration;

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::engine::scripted::{Fate, Op, TTL, World, ask, granted};
use crate::paused;

thread_local! {
    /// Level and message of each event on this thread with the target of the project, and whether it tells of an outage.
    static EVENTS: RefCell<Vec<(Level, String, bool)>> = const { RefCell::new(Vec::new()) };
}

/// The subscriber of the whole program: one of a thread would miss events that another thread, which has none, meets first, since
/// `tracing` remembers for each event whether anything wants it.
struct Events;

impl Events {
    fn begin() {
        static BEGUN: Once = Once::new();
        BEGUN.call_once(|| {
            tracing::subscriber::set_global_default(Self).expect("nothing else in this program subscribes");
            // Other threads may have met some in between.
            tracing::callsite::rebuild_interest_cache();
        });
        EVENTS.take();
    }
}

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
        let is_outage = event.metadata().fields().field("outage").is_some();
        let told = (*event.metadata().level(), message.0, is_outage);
        EVENTS.with_borrow_mut(|events| events.push(told));
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[tokio::test(start_paused = true)]
async fn one_target_shows_what_becomes_of_a_lock() {
    Events::begin();
    let memory = paused::memory();
    let locks = paused::client(memory.client());
    let guard = locks.lock("a").ttl(TTL).await.unwrap();
    guard.renew_now().await.unwrap();
    guard.release().await.unwrap();
    let stolen = locks.lock("b").await.unwrap();
    memory.steal(stolen.name()).unwrap();
    stolen.lost().await;
    drop(stolen);
    locks.shutdown().await.unwrap();
    let told = EVENTS.take();
    for expected in [
        (Level::DEBUG, "acquired"),
        (Level::TRACE, "renewed"),
        (Level::DEBUG, "released"),
        (Level::WARN, "lock lost"),
    ] {
        let found = told.iter().any(|(level, message, _)| (*level, &**message) == expected);
        assert!(found, "{expected:?} is not among {told:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_outage_is_told_once_with_its_reason_and_so_is_its_end() {
    Events::begin();
    let world = World::new();
    let waits = ["a", "b"].map(|name| {
        world.server.occupy(name, 10 * TTL);
        ask(world.lock(name))
    });
    world.settle().await;
    // Both fail several times.
    world.server.next(Op::Acquire, [Fate::Fail; 2]);
    world.server.next(Op::Try, [Fate::Fail; 8]);
    world.pass(Duration::from_secs(5)).await;
    world.server.heal();
    for (name, wait) in ["a", "b"].into_iter().zip(waits) {
        world.server.take_away(name);
        granted(wait).await.release().await.unwrap();
    }
    let told = EVENTS.take();
    let is_shown = |(level, _, is_outage): &&(Level, String, bool)| *is_outage && *level <= Level::INFO;
    let outages: Vec<_> = told.iter().filter(is_shown).collect();
    let [(Level::WARN, begins, _), (Level::INFO, ends, _)] = outages.as_slice() else {
        panic!("{outages:?}")
    };
    assert!(
        begins.contains("refused") && ends.contains("answers"),
        "{begins}, {ends}"
    );
}

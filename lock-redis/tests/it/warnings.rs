//! What is logged about a server whose settings put locks at risk.

use std::fmt::{self, Write};
use std::sync::{Arc, Mutex};

use lock_core::Locks;
use lock_redis::RedisConfig;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber, span};

use crate::process::{Process, listen, tell};
use crate::server::{LONG, Server, until};

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
    let server = Server::start();
    let mut process = Process::start("log warnings", &server);
    let _: () = server.command("CONFIG SET maxmemory 100mb").await;
    let _: () = server.command("CONFIG SET maxmemory-policy allkeys-lru").await;
    process.say("go");
    let told = process.finish();
    assert_eq!(told[0], "1 logged", "{told:?}");
    assert!(told.len() == 2 && told[1].contains("allkeys-lru"), "{told:?}");
}

/// What a process does, as the subscriber is one for all its threads: locks are renewed on one of their own. Renews a lock, and tells how
/// often the policy was logged, and the warnings that there are.
pub(crate) async fn log(port: u16) {
    let log = Log::default();
    tracing::subscriber::set_global_default(log.clone()).unwrap();
    let locks = Locks::new(RedisConfig::new("127.0.0.1", port).connect().await.unwrap());
    tell("ready");
    listen();
    let logged = || {
        let log = log.0.lock().unwrap();
        log.iter().filter(|text| text.contains("allkeys-lru")).count()
    };
    let guard = locks.lock("n").ttl(LONG).await.unwrap();
    guard.renew_now().await.unwrap();
    until("the policy is logged", async || logged() > 0).await;
    for _ in 0..5 {
        guard.renew_now().await.unwrap();
    }
    let warnings = locks.server_info().await.unwrap().warnings;
    tell(format!("{} logged", logged()));
    warnings.iter().for_each(tell);
}

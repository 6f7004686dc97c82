//! Locks in a Postgres.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use conformance_tests::servers::{Data, Kind, Server};
use rustix::process::Signal;
use tokio::runtime::Runtime;

use crate::world::{Backend, CEILING, SECRET, World, misconfigured, unavailable, wait_until, wait_within};

/// A namespace on a server, which ends with the last of its namespaces.
pub(crate) struct PostgresServer {
    running: Arc<Running>,
    namespace: u64,
}

struct Running {
    server: Server,
    runtime: Runtime,
}

impl Running {
    fn start() -> Arc<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let server = runtime.block_on(Server::start_own(&Kind::POSTGRES, &[]));
        Arc::new(Self {
            server: server.unwrap(),
            runtime,
        })
    }
}

impl PostgresServer {
    /// On the server that the tests share which run at this time: it takes seconds to make one.
    pub(crate) fn shared() -> Self {
        static SERVER: Mutex<Weak<Running>> = Mutex::new(Weak::new());
        let mut server = SERVER.lock().unwrap_or_else(PoisonError::into_inner);
        let running = server.upgrade().unwrap_or_else(Running::start);
        *server = Arc::downgrade(&running);
        Self::on(running)
    }

    /// On a server of its own, which may be harmed.
    pub(crate) fn own() -> Self {
        Self::on(Running::start())
    }

    fn on(running: Arc<Running>) -> Self {
        static NAMESPACES: AtomicU64 = AtomicU64::new(0);
        Self {
            running,
            namespace: NAMESPACES.fetch_add(1, Ordering::Relaxed),
        }
    }

    pub(crate) fn url(&self) -> String {
        let (authority, namespace) = (self.running.server.authority(), self.namespace);
        format!("postgres://{authority}/postgres?user=postgres&sslmode=disable&namespace=test-{namespace}")
    }

    fn kill(&self) {
        self.running.runtime.block_on(self.running.server.kill()).unwrap();
    }

    fn restart(&self) {
        self.running
            .runtime
            .block_on(self.running.server.restart(Data::Kept))
            .unwrap();
    }
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

#[test]
fn a_server_that_is_not_there_is_69() {
    unavailable(
        &format!("postgres://joe:{SECRET}@127.0.0.1:{}/shop", free_port()),
        "cannot be reached",
    );
}

#[test]
fn all_servers_that_are_not_there_are_named() {
    let [one, two] = [(); 2].map(|()| format!("127.0.0.1:{}", free_port()));
    let url = format!("postgres://joe:{SECRET}@{one},{two}/shop");
    unavailable(&url, &format!("cannot be reached at {one}: "));
    unavailable(&url, &format!("cannot be reached at {two}: "));
}

#[test]
fn a_server_that_never_answers_is_69_within_the_limit() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = silent.local_addr().unwrap().port();
    let since = Instant::now();
    unavailable(
        &format!("postgres://joe:{SECRET}@127.0.0.1:{port}/shop?op_timeout=300ms"),
        "300ms",
    );
    assert!(since.elapsed() < CEILING, "{:?}", since.elapsed());
}

#[test]
fn a_database_that_does_not_exist_is_78() {
    let world = World::on(Backend::Postgres);
    misconfigured(
        &world.url().replace("/postgres?", "/nowhere?"),
        "correct it in the address",
    );
}

#[test]
fn a_killed_fencelock_frees_its_lock_at_once_and_takes_the_command_along() {
    let world = World::on(Backend::Postgres);
    let mut running = world.start(&["--ttl", "30s", "--grace", "1s"], "trap '' TERM; exec sleep 60");
    running.locker().signal(Signal::KILL);
    // Its connection has ended with it. Nothing is renewed for ten seconds.
    wait_within(Duration::from_secs(5), "a free lock", || {
        world.run(["run", "-n", "lock", "--", "true"]).code == Some(0)
    });
    wait_until("the end of the command", || !running.command.is_alive());
    running.child.wait().unwrap();
}

#[test]
fn a_server_that_dies_ends_the_command_at_once() {
    let world = World::on_own_postgres();
    let running = world.start(&["--ttl", "30s"], "exec sleep 60");
    let command = running.command;
    world.postgres().kill();
    wait_within(Duration::from_secs(5), "the end of the command", || !command.is_alive());
    let line = running.end().one_line(76).to_owned();
    assert!(line.contains("ended the session or lease that kept the lock"), "{line}");
}

#[test]
fn a_server_that_restarts_has_a_free_lock_and_a_higher_token() {
    let world = World::on_own_postgres();
    let token = |world: &World| {
        let done = world.run(["run", "lock", "--", "sh", "-c", "echo $FENCELOCK_TOKEN"]);
        assert_eq!((done.code, done.stderr.as_str()), (Some(0), ""));
        done.stdout.trim().parse::<u64>().unwrap()
    };
    let first = token(&world);
    let running = world.start(&["--ttl", "30s"], "exec sleep 60");
    world.postgres().restart();
    assert!(token(&world) > first);
    let command = running.command;
    running.end().one_line(76);
    assert!(!command.is_alive());
}

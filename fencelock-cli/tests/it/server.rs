//! The servers that keep the locks of tests.

#[cfg(feature = "redis")]
use std::io::{BufRead, BufReader, Write};
#[cfg(feature = "redis")]
use std::net::TcpStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use conformance_tests::servers::{self, Kind};
use tokio::runtime::Runtime;

use crate::world::Backend;

/// A namespace on a server that tests share, or a server of a test's own. The server ends with the last who uses it.
pub(crate) struct Server {
    backend: Backend,
    running: Arc<Running>,
    /// `None` is the one that is not named in an address.
    namespace: Option<String>,
}

struct Running {
    server: servers::Server,
    runtime: Runtime,
}

impl Server {
    /// On the server of that kind that the tests share which run at this time: it takes seconds to start one. What is
    /// never dropped, as a static, would be left behind.
    pub(crate) fn shared(backend: Backend) -> Self {
        static NAMESPACES: AtomicU64 = AtomicU64::new(0);
        let mut shared = shared(backend).lock().unwrap_or_else(PoisonError::into_inner);
        let running = shared.upgrade().unwrap_or_else(|| Running::start(backend));
        *shared = Arc::downgrade(&running);
        let namespace = NAMESPACES.fetch_add(1, Ordering::Relaxed);
        Self {
            backend,
            running,
            namespace: Some(format!("test-{namespace}")),
        }
    }

    /// On a server that no other test uses, which may be harmed.
    pub(crate) fn own(backend: Backend) -> Self {
        Self {
            backend,
            running: Running::start(backend),
            namespace: None,
        }
    }

    pub(crate) fn authority(&self) -> &str {
        self.running.server.authority()
    }

    /// How the command reaches it.
    pub(crate) fn url(&self) -> String {
        let authority = self.authority();
        let (address, parameters) = match self.backend {
            #[cfg(feature = "etcd")]
            Backend::Etcd => (format!("etcd://{authority}"), ""),
            #[cfg(feature = "postgres")]
            Backend::Postgres => (
                format!("postgres://{authority}/postgres"),
                "user=postgres&sslmode=disable",
            ),
            #[cfg(feature = "redis")]
            Backend::Redis => (format!("redis://{authority}"), ""),
            Backend::Sqlite => unreachable!("it is no server"),
        };
        let namespace = self
            .namespace
            .as_ref()
            .map(|namespace| format!("namespace={namespace}"));
        let parameters: Vec<_> = [parameters.to_owned()].into_iter().chain(namespace).collect();
        let parameters = parameters.join("&");
        match parameters.trim_matches('&') {
            "" => address,
            parameters => format!("{address}?{parameters}"),
        }
    }

    /// Runs asynchronous work to its end.
    pub(crate) fn block_on<T>(&self, work: impl Future<Output = T>) -> T {
        self.running.runtime.block_on(work)
    }

    /// Stops it where it is: connections stay open, and nobody gets an answer.
    pub(crate) fn pause(&self) {
        self.block_on(self.running.server.pause()).unwrap();
    }

    /// Lets it go on after a pause.
    pub(crate) fn resume(&self) {
        self.block_on(self.running.server.resume()).unwrap();
    }

    /// Ends it as `kill -9` does.
    pub(crate) fn kill(&self) {
        self.block_on(self.running.server.kill()).unwrap();
    }

    /// Starts it again after a kill.
    #[cfg(feature = "redis")]
    pub(crate) fn restart(&self) {
        self.block_on(self.running.server.restart(servers::Data::Kept)).unwrap();
    }

    /// Runs a command of Redis, written with spaces between its words, and gives the first line of the answer.
    #[cfg(feature = "redis")]
    pub(crate) fn ask(&self, command: &str) -> String {
        let mut stream = TcpStream::connect(self.authority()).unwrap();
        stream.set_read_timeout(Some(crate::world::HANG_LIMIT)).unwrap();
        write!(stream, "{command}\r\n").unwrap();
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }
}

impl Running {
    fn start(backend: Backend) -> Arc<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let arguments: &[&str] = match backend {
            // It waits for no disk.
            #[cfg(feature = "etcd")]
            Backend::Etcd => &["--unsafe-no-fsync"],
            _ => &[],
        };
        let server = runtime.block_on(servers::Server::start_own(kind(backend), arguments));
        Arc::new(Self {
            server: server.unwrap_or_else(|error| panic!("{error}")),
            runtime,
        })
    }
}

/// The server that the tests share which run at this time.
fn shared(backend: Backend) -> &'static Mutex<Weak<Running>> {
    match backend {
        #[cfg(feature = "etcd")]
        Backend::Etcd => {
            static ETCD: Mutex<Weak<Running>> = Mutex::new(Weak::new());
            &ETCD
        }
        #[cfg(feature = "postgres")]
        Backend::Postgres => {
            static POSTGRES: Mutex<Weak<Running>> = Mutex::new(Weak::new());
            &POSTGRES
        }
        #[cfg(feature = "redis")]
        Backend::Redis => {
            static REDIS: Mutex<Weak<Running>> = Mutex::new(Weak::new());
            &REDIS
        }
        Backend::Sqlite => unreachable!("it is no server"),
    }
}

fn kind(backend: Backend) -> &'static Kind {
    match backend {
        #[cfg(feature = "etcd")]
        Backend::Etcd => &Kind::ETCD,
        #[cfg(feature = "postgres")]
        Backend::Postgres => &Kind::POSTGRES,
        #[cfg(feature = "redis")]
        Backend::Redis => &Kind::REDIS,
        Backend::Sqlite => unreachable!("it is no server"),
    }
}

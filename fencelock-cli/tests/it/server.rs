//! The servers that keep the locks of tests.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::Duration;

use test_servers::{self as servers, Kind};
use tokio::runtime::Runtime;

/// How long a test waits for a condition before it fails. A process that is to be ended by something else lives longer.
pub(crate) const HANG_LIMIT: Duration = Duration::from_secs(60);

/// Where a world keeps its locks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Backend {
    Etcd,
    Postgres,
    Redis,
    Sqlite,
}

/// A namespace on a server that tests share, or a server of a test's own. The server ends with the last who uses it.
pub(crate) struct Server {
    running: Arc<Running>,
    address: String,
}

struct Running {
    server: servers::Server,
    runtime: Runtime,
}

impl Server {
    /// On the server of that kind that the tests share which run at this time: it takes seconds to start one. What is
    /// never dropped, as a static, would be left behind.
    pub(crate) fn shared(backend: Backend) -> Self {
        static SHARED: [Mutex<Weak<Running>>; 3] = [const { Mutex::new(Weak::new()) }; 3];
        static NAMESPACES: AtomicU64 = AtomicU64::new(0);
        let mut shared = SHARED[backend as usize].lock().unwrap_or_else(PoisonError::into_inner);
        let running = shared.upgrade().unwrap_or_else(|| Running::start(backend));
        *shared = Arc::downgrade(&running);
        let namespace = NAMESPACES.fetch_add(1, Ordering::Relaxed);
        // With the patience of a busy machine.
        let address = format!("{}?namespace=test-{namespace}&op_timeout=30s", running.address());
        Self { running, address }
    }

    /// On a server that no other test uses, which may be harmed.
    pub(crate) fn own(backend: Backend) -> Self {
        let running = Running::start(backend);
        let address = running.address();
        Self { running, address }
    }

    pub(crate) fn authority(&self) -> &str {
        self.running.server.authority()
    }

    /// How the command reaches it.
    pub(crate) fn url(&self) -> String {
        self.address.clone()
    }

    /// Runs asynchronous work to its end.
    pub(crate) fn block_on<T>(&self, work: impl Future<Output = T>) -> T {
        self.running.runtime.block_on(work)
    }

    /// Ends it as `kill -9` does.
    pub(crate) fn kill(&self) {
        self.block_on(self.running.server.kill()).unwrap();
    }

    /// Starts it again after a kill.
    pub(crate) fn restart(&self) {
        self.block_on(self.running.server.restart(servers::Data::Kept)).unwrap();
    }

    /// Runs a command of Redis, written with spaces between its words, and gives the first line of the answer.
    pub(crate) fn ask(&self, command: &str) -> String {
        let mut stream = TcpStream::connect(self.authority()).unwrap();
        stream.set_read_timeout(Some(HANG_LIMIT)).unwrap();
        write!(stream, "{command}\r\n").unwrap();
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }
}

impl Running {
    fn start(backend: Backend) -> Arc<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.unwrap();
        let (kind, arguments): (_, &[&str]) = match backend {
            // It waits for no disk.
            Backend::Etcd => (&Kind::ETCD, &["--unsafe-no-fsync"]),
            Backend::Postgres => (&Kind::POSTGRES, &[]),
            Backend::Redis => (&Kind::REDIS, &[]),
            Backend::Sqlite => panic!("it is no server"),
        };
        let server = runtime.block_on(servers::Server::start_own(kind, arguments));
        let server = server.unwrap_or_else(|error| panic!("{error}"));
        Arc::new(Self { server, runtime })
    }

    fn address(&self) -> String {
        self.server.url().replace("http:", "etcd:")
    }
}

/// A server that takes connections and never answers.
pub(crate) struct Silent {
    address: SocketAddr,
    requests: Receiver<TcpStream>,
}

impl Silent {
    pub(crate) fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (tell, requests) = channel();
        thread::spawn(move || listener.incoming().flatten().try_for_each(|stream| tell.send(stream)));
        Self { address, requests }
    }

    /// As the address of a Redis, which may take that long to answer.
    pub(crate) fn url(&self, op_timeout: &str) -> String {
        format!("redis://{}?op_timeout={op_timeout}", self.address)
    }

    /// Waits until a client connects.
    pub(crate) fn reached(&self) {
        let mut stream = self.requests.recv_timeout(HANG_LIMIT).unwrap();
        stream.read_exact(&mut [0]).unwrap();
        // It stays open.
        std::mem::forget(stream);
    }
}

//! A nats-server for this run: a process of its own with its data in a temporary folder, or the one that the environment
//! names.

use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use std::{env, fs, io, thread};

use lock_core::LockError;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// Names a server that runs. Nothing can be done to it.
const URL: &str = "FENCELOCK_TEST_NATS_URL";
/// Names the program, if it is not the nats-server on the `PATH`.
const PROGRAM: &str = "NATS_SERVER";

/// Becomes the server, and ends it when nobody holds the other end of its input any more, however that came.
const WATCHED: &str = r#"exec 3<&0; (trap '' HUP INT TERM; read -r _ <&3; kill -9 $$) & exec "$@" </dev/null 3<&-"#;

pub(crate) struct Server {
    pub(crate) url: String,
    pub(crate) version: String,
    machine: Option<Machine>,
}

struct Machine {
    port: u16,
    folder: TempDir,
    child: Arc<Mutex<Option<Child>>>,
}

/// With what a server starts again.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Data {
    Kept,
    Lost,
    Copied,
}

impl Server {
    /// The server that the environment names, or one of our own.
    pub(crate) async fn find() -> Result<Self, LockError> {
        match env::var(URL) {
            Ok(url) if !url.is_empty() => ready(url, None).await,
            _ => Self::start().await,
        }
    }

    pub(crate) async fn start() -> Result<Self, LockError> {
        let started = Machine::start().map_err(|error| {
            let help = "install it (Debian, Ubuntu: apt-get install nats-server)";
            LockError::configuration(format!(
                "nats-server cannot be started: {error}; {help}, or name it in {PROGRAM}, or one that runs in {URL}"
            ))
        })?;
        ready(format!("nats://127.0.0.1:{}", started.port), Some(started)).await
    }

    /// Its host and port.
    pub(crate) fn authority(&self) -> &str {
        self.url.rsplit(['/', '@']).next().unwrap_or_default()
    }

    pub(crate) fn is_ours(&self) -> bool {
        self.machine.is_some()
    }

    /// Ends it as `kill -9` does and starts it again.
    pub(crate) async fn restart(&self, data: Data) -> Result<(), LockError> {
        self.work(|machine| machine.restart(data))?;
        ready(self.url.clone(), None).await.map(drop)
    }

    /// Stops it where it is for that time.
    pub(crate) fn freeze(&self, time: Duration) -> Result<(), LockError> {
        self.work(|machine| {
            signal(machine.child().as_ref(), Signal::STOP)?;
            let child = Arc::clone(&machine.child);
            thread::spawn(move || {
                thread::sleep(time);
                signal(
                    child.lock().unwrap_or_else(PoisonError::into_inner).as_ref(),
                    Signal::CONT,
                )
            });
            Ok(())
        })
    }

    /// Copies its data, for a restart with that.
    pub(crate) fn copy(&self) -> Result<(), LockError> {
        self.work(|machine| {
            let child = machine.child();
            signal(child.as_ref(), Signal::STOP)?;
            let copied = copy(&machine.data(), &machine.copied());
            signal(child.as_ref(), Signal::CONT)?;
            copied
        })
    }

    fn work(&self, work: impl FnOnce(&Machine) -> io::Result<()>) -> Result<(), LockError> {
        let machine = self.machine.as_ref().ok_or_else(|| io::Error::other("it is not ours"));
        machine
            .and_then(work)
            .map_err(|error| LockError::failed("seeing to nats-server", error))
    }
}

/// Waits until JetStream answers.
async fn ready(url: String, machine: Option<Machine>) -> Result<Server, LockError> {
    let began = Instant::now();
    loop {
        let looked = async {
            let client = async_nats::connect(&url).await?;
            let version = client.server_info().version;
            // Nobody answers that unless JetStream is there.
            client.request("$JS.API.INFO", "".into()).await?;
            Ok::<_, async_nats::Error>(version)
        };
        match looked.await {
            Ok(version) => return Ok(Server { url, version, machine }),
            Err(_) if began.elapsed() < Duration::from_secs(10) => tokio::time::sleep(Duration::from_millis(10)).await,
            Err(error) => return Err(LockError::failed("waiting for nats-server with JetStream", error)),
        }
    }
}

impl Machine {
    fn start() -> io::Result<Self> {
        // Below those that systems give to outgoing connections, one of which could take it while the server restarts.
        let port = || fastrand::u16(15_000..32_000);
        let is_free = |port: &u16| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok();
        let machine = Self {
            port: std::iter::repeat_with(port).find(is_free).unwrap_or_default(),
            folder: tempfile::Builder::new().prefix("fencelock-nats-").tempdir()?,
            child: Arc::default(),
        };
        machine.run()?;
        Ok(machine)
    }

    fn run(&self) -> io::Result<()> {
        let program = env::var(PROGRAM).unwrap_or_else(|_| "nats-server".to_owned());
        // Debian's is where root alone looks.
        let path = env::var("PATH").unwrap_or_default() + ":/usr/sbin";
        if !Command::new("sh")
            .args(["-c", "command -v \"$0\"", &program])
            .env("PATH", &path)
            .stdout(Stdio::null())
            .status()?
            .success()
        {
            return Err(io::Error::other(format!("there is no program {program:?}")));
        }
        let mut command = Command::new("sh");
        command.args([
            "-c",
            WATCHED,
            "sh",
            &program,
            "--jetstream",
            "--addr",
            "127.0.0.1",
            "--port",
        ]);
        command.arg(self.port.to_string()).arg("--store_dir").arg(self.data());
        command.arg("--log").arg(self.folder.path().join("log"));
        *self.child() = Some(command.env("PATH", path).stdin(Stdio::piped()).spawn()?);
        Ok(())
    }

    fn restart(&self, data: Data) -> io::Result<()> {
        self.kill();
        if data != Data::Kept {
            fs::remove_dir_all(self.data())?;
        }
        if data == Data::Copied {
            copy(&self.copied(), &self.data())?;
        }
        self.run()
    }

    fn kill(&self) {
        if let Some(mut child) = self.child().take() {
            // What reads from there ends it; until it was waited for its number is nobody else's.
            drop(child.stdin.take());
            let _ = child.wait();
        }
    }

    fn child(&self) -> MutexGuard<'_, Option<Child>> {
        self.child.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    fn copied(&self) -> PathBuf {
        self.folder.path().join("copy")
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.kill();
    }
}

fn signal(child: Option<&Child>, signal: Signal) -> io::Result<()> {
    // One that has ended is sent nothing.
    child.map_or(Ok(()), |child| Ok(kill_process(Pid::from_child(child), signal)?))
}

fn copy(from: &Path, to: &Path) -> io::Result<()> {
    let copied = Command::new("cp").arg("-Rp").args([from, to]).status()?;
    copied
        .success()
        .then_some(())
        .ok_or_else(|| io::Error::other("cp failed"))
}

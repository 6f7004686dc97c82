//! A server as a test holds it.

use std::collections::BTreeSet;
use std::fmt;
use std::io::Write as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::{Arc, Mutex as StdMutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail};
use tokio::sync::Mutex;
use tokio::time::{sleep, timeout};

use crate::container::{self, Container};
use crate::kind::Kind;
use crate::machine::{Data, Machine, background, free_port, in_background};
use crate::process::Process;
use crate::redis;

/// How long a server may take to answer after it was started.
const LONGEST_START: Duration = Duration::from_secs(40);
/// How long one look at it may take.
const LOOK: Duration = Duration::from_secs(2);
/// How long the end of this process waits for a server to be removed.
const LONGEST_END: Duration = Duration::from_secs(20);
/// How often a port is tried that another process may take in the same moment.
const TRIES: usize = 4;

/// A server to test against. It ends, with its data, when this is dropped.
///
/// A server that the environment names [is not ours](Self::is_ours): the methods that stop, end, restart or copy a server fail then.
pub struct Server {
    kind: Kind,
    url: String,
    authority: String,
    version: String,
    way: String,
    /// None if it was not started here.
    machine: Option<Arc<Mutex<Box<dyn Machine>>>>,
}

impl Server {
    /// Starts a server of that kind, or finds the one that the environment names, and waits until it takes requests.
    ///
    /// The first of its kind in this process is told of on standard error, with its version.
    ///
    /// # Errors
    ///
    /// If there is no way to such a server, or if it does not become ready.
    pub async fn start(kind: &'static Kind) -> Result<Self> {
        match kind.named_url() {
            Some(url) => Ok(named(*kind, url).await?.announced()),
            None => Self::start_as(*kind, &[]).await,
        }
    }

    /// Starts a server of that kind with these arguments of its own for the server's program, also if the environment
    /// names another.
    ///
    /// # Errors
    ///
    /// Those of [`start`](Self::start).
    pub async fn start_own(kind: &'static Kind, arguments: &[&str]) -> Result<Self> {
        Self::start_as(*kind, arguments).await
    }

    pub(crate) async fn start_as(kind: Kind, arguments: &[&str]) -> Result<Self> {
        let arguments = arguments.iter().map(|&argument| argument.to_owned()).collect();
        Ok(in_background(started(kind, arguments)).await?.announced())
    }

    /// How a client of its kind connects to it.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The same server, reached at another address: that of a proxy.
    #[must_use]
    pub fn url_at(&self, address: SocketAddr) -> String {
        self.url.replacen(&self.authority, &address.to_string(), 1)
    }

    /// Asks a Redis or a sentinel, with spaces between the words of the command. Returns its reply as text: of an array, a line for each element.
    ///
    /// # Errors
    ///
    /// If it does not answer, or with an error.
    pub async fn redis(&self, command: &str) -> Result<String> {
        redis::command(self, command).await
    }

    /// Its host and port, as a proxy wants them.
    #[must_use]
    pub fn authority(&self) -> &str {
        &self.authority
    }

    /// Its product and version.
    #[must_use]
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Whether it was started for this run, so that it can be paused, killed and restarted.
    #[must_use]
    pub fn is_ours(&self) -> bool {
        self.machine.is_some()
    }

    /// Stops it where it is: connections to it can still be made and stay open, and no request is answered.
    pub async fn pause(&self) -> Result<()> {
        let machine = self.machine()?;
        in_background(async move { machine.lock().await.pause().await }).await
    }

    /// Lets it go on after a pause.
    pub async fn resume(&self) -> Result<()> {
        let machine = self.machine()?;
        in_background(async move { machine.lock().await.resume().await }).await
    }

    /// Pauses it, returns, and resumes it after that time.
    pub async fn pause_for(&self, time: Duration) -> Result<()> {
        self.pause().await?;
        let machine = self.machine()?;
        background().spawn(async move {
            sleep(time).await;
            // A server that has ended meanwhile need not go on.
            let _ = machine.lock().await.resume().await;
        });
        Ok(())
    }

    /// Ends it as `kill -9` does. [`restart`](Self::restart) starts it again.
    pub async fn kill(&self) -> Result<()> {
        let machine = self.machine()?;
        in_background(async move { machine.lock().await.kill().await }).await
    }

    /// Ends it as `kill -9` does, if it runs, starts it again at the same address, and waits until it takes requests.
    pub async fn restart(&self, data: Data) -> Result<()> {
        let (machine, title) = (self.machine()?, self.to_string());
        let (kind, authority) = (self.kind, self.authority.clone());
        in_background(async move {
            let mut machine = machine.lock().await;
            machine.kill().await?;
            machine.start_again(data).await?;
            ready(kind, &authority, &title, &mut **machine).await.map(drop)
        })
        .await
    }

    /// Copies its data as it is at this moment, for a [`restart`](Self::restart) with [`Data::Copied`]. An earlier copy is
    /// forgotten. The server is paused meanwhile.
    pub async fn copy(&self) -> Result<()> {
        let machine = self.machine()?;
        in_background(async move {
            let mut machine = machine.lock().await;
            machine.pause().await?;
            let copied = machine.copy().await;
            machine.resume().await?;
            copied
        })
        .await
    }

    /// Sets its wall clock ahead of this machine's by that many seconds, or behind.
    ///
    /// # Errors
    ///
    /// If it was started without a clock of its own, or the system failed.
    pub async fn set_clock(&self, ahead: i32) -> Result<()> {
        let machine = self.machine()?;
        in_background(async move { machine.lock().await.set_clock(ahead) }).await
    }

    fn machine(&self) -> Result<Arc<Mutex<Box<dyn Machine>>>> {
        let machine = self.machine.clone();
        machine.with_context(|| format!("{self} was not started here: it can be neither stopped nor restarted"))
    }

    /// Tells of the first server of each sort.
    fn announced(self) -> Self {
        static TOLD: StdMutex<BTreeSet<String>> = StdMutex::new(BTreeSet::new());
        let sort = format!("{} {}", self.version, self.way);
        if TOLD.lock().unwrap_or_else(PoisonError::into_inner).insert(sort) {
            // Past the capture of what tests print, which would show it only when they fail.
            let _ = writeln!(std::io::stderr(), "server: {self}");
        }
        self
    }
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} at {}", self.version, self.way, self.authority)
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Server({self})")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let Some(machine) = self.machine.take() else { return };
        let (done, wait) = mpsc::channel();
        background().spawn(async move {
            machine.lock().await.remove().await;
            let _ = done.send(());
        });
        // The process may end right after this.
        let _ = wait.recv_timeout(LONGEST_END);
    }
}

/// Where a server can be started.
enum Way {
    Container(String),
    Path(PathBuf),
}

/// The first way that there is, and its words.
async fn way(kind: &Kind) -> Result<(Way, String)> {
    let only = std::env::var("FENCELOCK_TEST_SERVERS").unwrap_or_default();
    let allowed = |name| match &*only {
        "" => Ok(()),
        only if only == name => Ok(()),
        only => Err(anyhow!("FENCELOCK_TEST_SERVERS allows only {only:?}")),
    };
    let container = match allowed("container") {
        _ if kind.is_local() => Err(anyhow!("it needs a process of this machine")),
        Ok(()) => container::image(kind).await,
        Err(refused) => Err(refused),
    };
    let no_container = match container {
        Ok(image) => return Ok((Way::Container(image.clone()), format!("in a container of {image}"))),
        Err(reason) => reason,
    };
    let path = if kind.is_local() { Ok(()) } else { allowed("path") };
    match path.and_then(|()| kind.program_on_path()) {
        Ok(program) => {
            let words = format!("from {}", program.display());
            Ok((Way::Path(program), words))
        }
        Err(no_program) => bail!(
            "there is no {kind} to test against:\n  - container: {no_container:#}\n  - path: {no_program:#}\nstart a container engine and \
             run `make images`, or install {kind}, or name a server in {}",
            kind.url_variable(),
            kind = kind.title(),
        ),
    }
}

async fn started(kind: Kind, arguments: Vec<String>) -> Result<Server> {
    let (way, words) = way(&kind).await?;
    let mut tries = 0;
    loop {
        tries += 1;
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, free_port()?));
        let title = format!("{} {words} at {address}", kind.title());
        match started_at(kind, &way, address, &title, arguments.clone()).await {
            Ok((machine, version)) => {
                return Ok(Server {
                    kind,
                    url: kind.url(address),
                    authority: address.to_string(),
                    version,
                    way: words,
                    machine: Some(Arc::new(Mutex::new(machine))),
                });
            }
            // Another process may have taken the port in the meantime.
            Err(error) if tries == TRIES || !is_about_the_port(&error) => return Err(error),
            Err(_) => {}
        }
    }
}

async fn started_at(
    kind: Kind,
    way: &Way,
    address: SocketAddr,
    title: &str,
    arguments: Vec<String>,
) -> Result<(Box<dyn Machine>, String)> {
    let mut machine: Box<dyn Machine> = match way {
        Way::Container(image) => Box::new(Container::start(kind, image.clone(), address.port(), arguments).await?),
        Way::Path(program) => {
            let mut process = Process::new(kind, program.clone(), address.port(), arguments)?;
            process.start_again(Data::Lost).await?;
            Box::new(process)
        }
    };
    match ready(kind, &address.to_string(), title, &mut *machine).await {
        Ok(version) => Ok((machine, version)),
        Err(error) => {
            machine.remove().await;
            Err(error)
        }
    }
}

fn is_about_the_port(error: &anyhow::Error) -> bool {
    let text = format!("{error:#}");
    let words = ["already allocated", "ddress already in use", "address in use"];
    words.iter().any(|word| text.contains(word))
}

/// The version of the server, when it answers.
async fn ready(kind: Kind, authority: &str, title: &str, machine: &mut dyn Machine) -> Result<String> {
    const LINES: usize = 20;
    let start = Instant::now();
    loop {
        let last = match timeout(LOOK, kind.probe(authority, None)).await {
            // Another server may have the port while ours could not get it.
            Ok(Ok(version)) if machine.runs().await => return Ok(version),
            Ok(Ok(_)) => "it has ended, and another server answers".to_owned(),
            // Its arguments say that it wants a password.
            Ok(Err(error)) if error.to_string().starts_with("NOAUTH") && machine.runs().await => {
                return Ok(kind.title().to_owned());
            }
            Ok(Err(error)) => format!("{error:#}"),
            Err(_) => "no answer".to_owned(),
        };
        let waited = start.elapsed();
        if waited > LONGEST_START || !machine.runs().await {
            let log = machine.log().await;
            let lines: Vec<_> = log.lines().collect();
            let end = lines[lines.len().saturating_sub(LINES)..].join("\n");
            bail!("{title} did not become ready within {waited:?} ({last}); it wrote:\n{end}");
        }
        sleep(Duration::from_millis(10)).await;
    }
}

/// The server that the environment names.
async fn named(kind: Kind, url: String) -> Result<Server> {
    let (scheme, rest) = url.split_once("://").unwrap_or(("", &url));
    // Of several hosts, the first.
    let rest = rest.split(['/', '?', ',']).next().unwrap_or_default();
    let (user_info, authority) = match rest.rsplit_once('@') {
        Some((user_info, authority)) => (Some(user_info), authority),
        None => (None, rest),
    };
    let mut server = Server {
        kind,
        authority: authority.to_owned(),
        version: kind.title().to_owned(),
        way: format!("of {}", kind.url_variable()),
        machine: None,
        url: url.clone(),
    };
    // Only what speaks without encryption can be looked at from here.
    if kind.url_parts().0.starts_with(&format!("{scheme}://")) {
        let port = if authority.contains(':') {
            String::new()
        } else {
            format!(":{}", kind.port)
        };
        let look = timeout(LOOK, kind.probe(&format!("{authority}{port}"), user_info)).await;
        let version = look.map_err(Into::into).flatten();
        server.version = version.with_context(|| format!("{server} does not answer as such a server does"))?;
    }
    Ok(server)
}

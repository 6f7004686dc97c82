//! Torture on every backend, with faults of the server too where there is one: `make soak`, or
//! `cargo run -p conformance-tests --features servers,torture --example soak -- SECONDS [KIND]...`.

use std::error::Error;
use std::fs::File;
use std::io::{self, BufWriter};
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use conformance_tests::oracle::judge;
use conformance_tests::servers::{Data, Kind, Server};
use conformance_tests::torture::{self, Config, Fault, Figures, Place, Route};

/// What is tortured; a file has no server.
const KINDS: [(&str, Option<&Kind>, usize); 8] = [
    ("sqlite", None, 0),
    ("redis", Some(&Kind::REDIS), 1),
    ("redis-7.0", Some(&Kind::REDIS_7_0), 1),
    ("valkey", Some(&Kind::VALKEY), 1),
    ("redlock", Some(&Kind::REDIS), 5),
    ("postgres", Some(&Kind::POSTGRES), 1),
    ("postgres-15", Some(&Kind::POSTGRES_15), 1),
    ("etcd", Some(&Kind::ETCD), 1),
];

const PAUSE: &str = "pause";
const RESTART: &str = "kill, restart";
const RESTART_WITHOUT_DATA: &str = "kill, restart without data";

/// The longest ttl on several servers: for so long one that was restarted grants nothing.
const MAX_TTL: Duration = Duration::from_secs(3);

/// The faults of servers that this program has started: of the only one, or of a minority of several.
struct Own<'a> {
    servers: &'a [Server],
    name: &'a str,
    minority: Mutex<Minority>,
}

/// Which of several servers have a fault, or had one.
#[derive(Default)]
struct Minority {
    first: usize,
    /// Since when those that were restarted are back.
    restarted: Option<Instant>,
}

impl Own<'_> {
    /// The servers that the next fault befalls: others than the last time, unless those were restarted a short time ago. They count as
    /// lost until they take part again.
    fn next(&self) -> Vec<&Server> {
        let mut minority = self.minority.lock().unwrap_or_else(PoisonError::into_inner);
        if minority.restarted.is_none_or(|since| since.elapsed() > MAX_TTL) {
            minority.first += 1;
            minority.restarted = None;
        }
        drop(minority);
        self.current()
    }

    fn current(&self) -> Vec<&Server> {
        let first = self.minority.lock().unwrap_or_else(PoisonError::into_inner).first;
        let count = self.servers.len();
        (0..count.div_ceil(2).max(2) - 1)
            .map(|at| &self.servers[(first + at) % count])
            .collect()
    }
}

#[async_trait]
impl torture::Server for Own<'_> {
    fn faults(&self) -> Vec<(&'static str, bool)> {
        // The locks of Postgres are its sessions', which no restart survives.
        let is_postgres = self.name.starts_with("postgres");
        let mut faults = vec![(PAUSE, false), (RESTART, is_postgres)];
        if self.name.starts_with("redis") || self.name == "valkey" {
            faults.push((RESTART_WITHOUT_DATA, true));
        }
        if self.servers.len() > 1 {
            faults.push((RESTART_WITHOUT_DATA, false));
        }
        faults
    }

    async fn begin(&self, fault: &str) -> io::Result<()> {
        for server in self.next() {
            let done = match fault {
                PAUSE => server.pause().await,
                _ => server.kill().await,
            };
            done.map_err(io::Error::other)?;
        }
        Ok(())
    }

    async fn end(&self, fault: &str) -> io::Result<()> {
        for server in self.current() {
            let done = match fault {
                PAUSE => server.resume().await,
                RESTART => server.restart(Data::Kept).await,
                _ => server.restart(Data::Lost).await,
            };
            done.map_err(io::Error::other)?;
        }
        if fault != PAUSE {
            let mut minority = self.minority.lock().unwrap_or_else(PoisonError::into_inner);
            minority.restarted = Some(Instant::now());
        }
        Ok(())
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<ExitCode, Box<dyn Error>> {
    if torture::is_client() {
        // A client that is stopped would otherwise stay when this program is killed.
        #[cfg(target_os = "linux")]
        rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
        // The server may be down when a client begins.
        let locks = fencelock::connect_lazy(std::env::var(fencelock::ENV)?)?;
        return Ok(torture::client(&locks).await);
    }
    let mut arguments = std::env::args().skip(1);
    let seconds = arguments.next().map_or(Ok(600), |seconds| seconds.parse())?;
    let wanted: Vec<_> = arguments.collect();
    let mut faults = Config::new().faults;
    match Fault::Clock.can_happen_here() {
        Ok(()) => faults.push(Fault::Clock),
        Err(missing) => println!("no clock steps: {missing}"),
    }
    let mut violations = 0;
    for (name, kind, servers) in KINDS {
        if wanted.is_empty() || wanted.iter().any(|wanted| wanted == name) {
            violations += soak(name, kind, servers, Duration::from_secs(seconds), &faults).await?;
        }
    }
    Ok(ExitCode::from(u8::from(violations > 0)))
}

async fn soak(
    name: &str,
    kind: Option<&'static Kind>,
    count: usize,
    time: Duration,
    faults: &[Fault],
) -> Result<usize, Box<dyn Error>> {
    let mut servers = Vec::new();
    if let Some(kind) = kind {
        for _ in 0..count {
            servers.push(Server::start_own(kind, &[]).await?);
        }
    }
    let server = servers.first();
    let several = servers.len() > 1;
    let folder = tempfile::tempdir()?;
    let authorities: Vec<_> = servers.iter().map(Server::authority).collect();
    let url = match server {
        Some(_) if several => format!("redlock://{}?max_ttl={}s", authorities.join(","), MAX_TTL.as_secs()),
        Some(server) if name == "etcd" => format!("etcd://{}", server.authority()),
        Some(server) => server.url().to_owned(),
        None => format!("sqlite://{}", folder.path().join("locks.db").display()),
    };
    let shown = match server {
        Some(server) if several => format!("{} servers, each {}", servers.len(), server.version()),
        Some(server) => server.to_string(),
        None => "SQLite, a file".to_owned(),
    };
    let locks = fencelock::connect(&url).await?;
    let route = (servers.len() == 1).then(|| Route::of(&url)).transpose()?;
    let own = server.map(|_| Own {
        servers: &servers,
        name,
        minority: Mutex::default(),
    });
    let program = |through: Option<&str>| {
        let mut command = Command::new("/proc/self/exe");
        command.env(fencelock::ENV, through.unwrap_or(&url));
        command
    };
    let place = Place {
        locks: &locks,
        route: route.as_ref(),
        program: &program,
        server: own.as_ref().map(|own| own as &dyn torture::Server),
    };
    let can_happen = |fault: &Fault| route.is_some() || !fault.needs_route();
    // Mostly those of the servers, which are many.
    let is_rare = |fault: &Fault| several && *fault != Fault::Kill;
    let faults = faults
        .iter()
        .copied()
        .filter(can_happen)
        .filter(|fault| !is_rare(fault))
        .collect();
    let mut config = Config::new();
    (config.time, config.faults) = (time, faults);
    if several {
        // A fault every second or so, one minority after the other.
        (config.ttl, config.server_rest) = (Duration::from_secs(1), Duration::ZERO);
    }
    let mut history = torture::run(&config, &place, std::future::pending(), |_| {}).await?;
    history.about = [
        ("server", shown.clone()),
        ("time", format!("{time:?}")),
        ("seed", config.seed.to_string()),
    ]
    .map(|(what, value)| (what.to_owned(), value))
    .into();
    let kept = kept(name)?;
    history.write_json(BufWriter::new(File::create(&kept)?))?;
    let (verdict, figures) = (judge(&history.records), Figures::of(&history.records));
    println!("{shown}: {verdict}");
    let faults: Vec<_> = figures
        .faults
        .iter()
        .map(|(kind, count)| format!("{kind} ({count})"))
        .collect();
    let margin = figures
        .smallest_margin
        .map_or("none".to_owned(), |least| format!("{least:.1?}"));
    println!(
        "  seed {}, {} grants, faults: {}; smallest loss margin {margin} of {} losses, {} stale writes refused, {} permitted \
         overlaps",
        config.seed,
        figures.grants,
        faults.join("; "),
        figures.losses,
        figures.refused,
        verdict.permitted_overlaps
    );
    println!(
        "  as a page: fencelock torture --check {} --report soak.html",
        kept.display()
    );
    Ok(verdict.violations.len())
}

/// Where the history of a server of that kind is kept: in a folder of cargo's.
fn kept(name: &str) -> io::Result<PathBuf> {
    let program = std::env::current_exe()?;
    let folder = program.ancestors().nth(2).unwrap_or(&program).join("soak");
    std::fs::create_dir_all(&folder)?;
    Ok(folder.join(format!("{name}.json")))
}

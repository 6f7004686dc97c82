//! Torture on every backend, with faults of the server too where there is one: `make soak`, or
//! `cargo run -p conformance-tests --features servers,torture --example soak -- SECONDS [KIND]...`.

mod command;
mod failover;
mod minority;

use std::error::Error;
use std::fs::File;
use std::io::{self, BufWriter};
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Duration;

use conformance_tests::oracle::judge;
use conformance_tests::servers::{Kind, Server};
use conformance_tests::torture::{self, Config, Fault, Figures, Place, Route};

use fencelock::Options;

use failover::{Cluster, Sentinels};
use minority::{MAX_TTL, Servers};

/// How many tasks of each client take locks, and for how long it keeps what they release.
const TASKS: usize = 3;
const LINGER: Duration = Duration::from_millis(20);

/// What is tortured.
const KINDS: [(&str, Topology); 14] = [
    ("sqlite", Topology::File),
    ("redis", Topology::Servers(&Kind::REDIS, 1)),
    ("redis-7.0", Topology::Servers(&Kind::REDIS_7_0, 1)),
    ("valkey", Topology::Servers(&Kind::VALKEY, 1)),
    ("redis-sentinel", Topology::Sentinels(&Kind::REDIS)),
    ("redis-7.0-sentinel", Topology::Sentinels(&Kind::REDIS_7_0)),
    ("valkey-sentinel", Topology::Sentinels(&Kind::VALKEY)),
    ("redis-cluster", Topology::Cluster(&Kind::REDIS)),
    ("redis-7.0-cluster", Topology::Cluster(&Kind::REDIS_7_0)),
    ("valkey-cluster", Topology::Cluster(&Kind::VALKEY)),
    ("redlock", Topology::Servers(&Kind::REDIS, 5)),
    ("postgres", Topology::Servers(&Kind::POSTGRES, 1)),
    ("postgres-15", Topology::Servers(&Kind::POSTGRES_15, 1)),
    ("etcd", Topology::Servers(&Kind::ETCD, 1)),
];

/// Which servers there are.
#[derive(Clone, Copy)]
enum Topology {
    /// None: the locks are in a file.
    File,
    /// That many, none of which knows the others.
    Servers(&'static Kind, usize),
    /// A primary with replicas that sentinels watch.
    Sentinels(&'static Kind),
    /// A cluster with replicas.
    Cluster(&'static Kind),
}

/// Those of a topology, once they have been started.
enum Group {
    File(tempfile::TempDir),
    Servers(Servers),
    Sentinels(Sentinels),
    Cluster(Cluster),
}

impl Group {
    async fn start(name: &'static str, topology: Topology) -> Result<Self, Box<dyn Error>> {
        Ok(match topology {
            Topology::File => Self::File(tempfile::tempdir()?),
            Topology::Servers(kind, count) => Self::Servers(Servers::start(name, kind, count).await?),
            Topology::Sentinels(kind) => Self::Sentinels(Sentinels::start(kind).await?),
            Topology::Cluster(kind) => Self::Cluster(Cluster::start(kind).await?),
        })
    }

    /// The address for clients.
    fn url(&self, name: &str) -> String {
        let hosts = |servers: &[Server]| {
            let hosts: Vec<_> = servers.iter().map(Server::authority).collect();
            hosts.join(",")
        };
        match self {
            Self::File(folder) => format!("sqlite://{}", folder.path().join("locks.db").display()),
            Self::Servers(Servers { servers, .. }) if name == "etcd" => format!("etcd://{}", hosts(servers)),
            Self::Servers(Servers { servers, .. }) => match &servers[..] {
                [server] => server.url().to_owned(),
                servers => format!("redlock://{}?max_ttl={}s", hosts(servers), MAX_TTL.as_secs()),
            },
            Self::Sentinels(sentinels) => sentinels.group.url(),
            Self::Cluster(cluster) => format!("redis+cluster://{}", hosts(cluster.group.nodes())),
        }
    }

    fn faults(&self) -> Option<&dyn torture::Server> {
        match self {
            Self::File(_) => None,
            Self::Servers(servers) => Some(servers),
            Self::Sentinels(sentinels) => Some(sentinels),
            Self::Cluster(cluster) => Some(cluster),
        }
    }

    /// Whether most faults are those of the servers, and clients cannot be cut off.
    fn is_several(&self) -> bool {
        match self {
            Self::File(_) => false,
            Self::Servers(Servers { servers, .. }) => servers.len() > 1,
            Self::Sentinels(_) | Self::Cluster(_) => true,
        }
    }

    fn title(&self) -> String {
        let several = |servers: &[Server], what: &str| format!("{} {what}{}", servers.len(), servers[0].version());
        match self {
            Self::File(_) => "SQLite, a file".to_owned(),
            Self::Servers(Servers { servers, .. }) => match &servers[..] {
                [server] => server.to_string(),
                servers => several(servers, "servers, each "),
            },
            Self::Sentinels(sentinels) => several(sentinels.group.servers(), "servers and 3 sentinels of "),
            Self::Cluster(cluster) => several(cluster.group.nodes(), "nodes of a cluster, each "),
        }
    }

    /// What else was done to them.
    fn report(&self) -> String {
        match self {
            Self::File(_) | Self::Servers(_) => String::new(),
            Self::Sentinels(sentinels) => format!(", {} failovers", sentinels.failovers()),
            Self::Cluster(cluster) => {
                let (failovers, moves) = (cluster.failovers(), cluster.moves());
                format!(", {failovers} failovers, {moves} slots moved")
            }
        }
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<ExitCode, Box<dyn Error>> {
    if torture::is_client() {
        // A client that is stopped would otherwise stay when this program is killed.
        #[cfg(target_os = "linux")]
        rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
        // The server may be down when a client begins.
        let options = Options::new().linger(LINGER);
        let locks = fencelock::connect_lazy_with(std::env::var(fencelock::ENV)?, options)?;
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
    for (name, topology) in KINDS {
        if wanted.is_empty() || wanted.iter().any(|wanted| wanted == name) {
            violations += soak(name, topology, Duration::from_secs(seconds), &faults).await?;
        }
    }
    Ok(ExitCode::from(u8::from(violations > 0)))
}

async fn soak(
    name: &'static str,
    topology: Topology,
    time: Duration,
    faults: &[Fault],
) -> Result<usize, Box<dyn Error>> {
    let group = Group::start(name, topology).await?;
    let (url, shown, several) = (group.url(name), group.title(), group.is_several());
    let locks = fencelock::connect(&url).await?;
    let has_route = !several && group.faults().is_some();
    let route = has_route.then(|| Route::of(&url)).transpose()?;
    let program = |through: Option<&str>| {
        let mut command = Command::new("/proc/self/exe");
        command.env(fencelock::ENV, through.unwrap_or(&url));
        command
    };
    let place = Place {
        locks: &locks,
        route: route.as_ref(),
        program: &program,
        server: group.faults(),
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
    (config.time, config.faults, config.tasks) = (time, faults, TASKS);
    match group {
        // A fault every second or so, one minority after the other.
        Group::Servers(_) if several => (config.ttl, config.server_rest) = (Duration::from_millis(700), Duration::ZERO),
        // A lease has to last longer than a failover, or every one loses all locks.
        Group::Sentinels(_) | Group::Cluster(_) => {
            (config.ttl, config.server_rest) = (Duration::from_secs(3), Duration::ZERO);
        }
        _ => {}
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
         overlaps, longest time without a holder {:.1?}{}",
        config.seed,
        figures.grants,
        faults.join("; "),
        figures.losses,
        figures.refused,
        verdict.permitted_overlaps,
        figures.longest_idle,
        group.report()
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

//! The ways to a server, and the first look at it.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Mutex;

use super::container::{self, Container, Wish};
use super::error::{ServerError, chain};
use super::kind::Kind;
use super::machine::Machine;
use super::process::{Home, Process, is_root};
use super::server::Server;
use crate::port::free_port;

/// How long a server may take to answer after it was started.
const PATIENCE: Duration = Duration::from_secs(40);
/// How long one look at it may take.
const LOOK: Duration = Duration::from_secs(2);
/// How often a port is tried that somebody else may take in the same moment.
const TRIES: usize = 4;

/// A way to a server that there is.
#[derive(Clone, Debug)]
enum Way {
    Container(String),
    Process(Home),
}

/// Follows the ways in their order.
pub(super) async fn start_own(kind: &'static Kind, arguments: Vec<String>) -> Result<Server, ServerError> {
    let mut tried = Vec::new();
    let only = std::env::var("FENCELOCK_TEST_SERVERS").unwrap_or_default();
    for name in ["container", "chroot", "path"] {
        if !only.is_empty() && only != name {
            tried.push(format!("{name}: FENCELOCK_TEST_SERVERS allows only {only:?}"));
            continue;
        }
        let way = match name {
            "container" => in_container(kind).await,
            "chroot" => under_chroot(kind),
            _ => kind.program_on_path().map(|program| Way::Process(Home::Path(program))),
        };
        match way {
            Ok(way) => return launch(kind, way, arguments).await,
            Err(reason) => tried.push(format!("{name}: {reason}")),
        }
    }
    Err(ServerError::NotAvailable {
        kind: kind.title,
        variable: kind.url_variable(),
        tried,
    })
}

async fn in_container(kind: &Kind) -> Result<Way, String> {
    let docker = container::engine().await?;
    let image = kind.wanted_image();
    container::has_image(&docker, &image).await?;
    Ok(Way::Container(image))
}

/// The folder is where `scripts/servers.sh` puts it.
fn under_chroot(kind: &Kind) -> Result<Way, String> {
    let set = |variable| {
        std::env::var_os(variable)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    let roots = set("FENCELOCK_TEST_ROOTS").unwrap_or_else(|| {
        let home = || set("HOME").unwrap_or_else(|| "/root".into()).join(".cache");
        set("XDG_CACHE_HOME").unwrap_or_else(home).join("fencelock/roots")
    });
    let root = roots.join(kind.wanted_image().replace(['/', ':'], "-"));
    if !root.is_dir() {
        return Err(format!("{} is not there", root.display()));
    }
    if !is_root() {
        return Err(format!("only root can enter {}", root.display()));
    }
    Ok(Way::Process(Home::Root(root)))
}

async fn launch(kind: &'static Kind, way: Way, arguments: Vec<String>) -> Result<Server, ServerError> {
    let words = match &way {
        Way::Container(image) => format!("in a container of {image}"),
        Way::Process(Home::Root(root)) => format!("under chroot in {}", root.display()),
        Way::Process(Home::Path(program)) => format!("from {}", program.display()),
    };
    let mut tries = 0;
    loop {
        tries += 1;
        let port = free_port().map_err(ServerError::system("finding a free port"))?;
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let title = format!("{} {words} at {address}", kind.title);
        match launch_at(kind, &way, address, &title, &arguments).await {
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
            // Somebody else may have taken the port in the meantime.
            Err(error) if tries == TRIES || !is_about_the_port(&error) => return Err(error),
            Err(_) => {}
        }
    }
}

async fn launch_at(
    kind: &'static Kind,
    way: &Way,
    address: SocketAddr,
    title: &str,
    arguments: &[String],
) -> Result<(Machine, String), ServerError> {
    let (port, arguments) = (address.port(), arguments.to_vec());
    let mut machine = match way {
        Way::Container(image) => {
            let docker = container::engine().await.map_err(ServerError::engine("answering"))?;
            let image = image.clone();
            let wish = Wish {
                kind,
                image,
                port,
                arguments,
            };
            Machine::Container(Box::new(Container::start(docker, wish).await?))
        }
        Way::Process(home) => Machine::Process(Process::start(kind, home.clone(), port, arguments)?),
    };
    match ready(kind, &address.to_string(), title, &mut machine).await {
        Ok(version) => Ok((machine, version)),
        Err(error) => {
            machine.remove().await;
            Err(error)
        }
    }
}

fn is_about_the_port(error: &ServerError) -> bool {
    let words = ["already allocated", "ddress already in use", "address in use"];
    let text = chain(error);
    words.iter().any(|word| text.contains(word))
}

/// The version of the server, when it answers.
pub(super) async fn ready(
    kind: &Kind,
    authority: &str,
    title: &str,
    machine: &mut Machine,
) -> Result<String, ServerError> {
    let start = Instant::now();
    loop {
        let last = match tokio::time::timeout(LOOK, kind.probe(authority, None)).await {
            // Another server may have the port while ours could not get it.
            Ok(Ok(version)) if machine.runs().await => return Ok(version),
            Ok(Ok(_)) => "it has ended, and another server answers".to_owned(),
            Ok(Err(error)) => error.to_string(),
            Err(_) => "no answer".to_owned(),
        };
        if start.elapsed() > PATIENCE || !machine.runs().await {
            return Err(ServerError::NotReady {
                server: title.to_owned(),
                waited: start.elapsed(),
                last,
                log: tail(&machine.log().await),
            });
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// The server that the environment names, if it names one.
pub(super) async fn named(kind: &'static Kind) -> Result<Option<Server>, ServerError> {
    let variable = kind.url_variable();
    let Some(url) = std::env::var(&variable).ok().filter(|url| !url.is_empty()) else {
        return Ok(None);
    };
    let (scheme, rest) = url.split_once("://").unwrap_or(("", &url));
    // Of several hosts, the first.
    let rest = rest.split(['/', '?', ',']).next().unwrap_or_default();
    let (user_info, authority) = rest
        .rsplit_once('@')
        .map_or((None, rest), |(info, rest)| (Some(info), rest));
    let mut server = Server {
        kind,
        authority: authority.to_owned(),
        version: kind.title.to_owned(),
        way: format!("of {variable}"),
        machine: None,
        url: url.clone(),
    };
    let address = if authority.contains(':') {
        authority.to_owned()
    } else {
        format!("{authority}:{}", kind.port)
    };
    // Only what speaks without encryption can be looked at from here.
    if kind
        .url(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))
        .starts_with(&format!("{scheme}://"))
    {
        let look = tokio::time::timeout(LOOK, kind.probe(&address, user_info)).await;
        server.version = match look.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into())) {
            Ok(version) => version,
            Err(error) => {
                return Err(ServerError::NotThere {
                    server: server.to_string(),
                    why: error.to_string(),
                });
            }
        };
    }
    Ok(Some(server))
}

fn tail(log: &str) -> String {
    const LINES: usize = 20;
    let lines: Vec<_> = log.lines().collect();
    lines[lines.len().saturating_sub(LINES)..].join("\n")
}

//! Faults of a minority of the nodes, one after the other, for as long as the suite runs.

use std::collections::HashSet;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use test_servers::{Data, Server, ServerError};

use super::MAX_TTL;
use super::host::Host;

/// Which nodes have a fault, and which namespaces there are.
#[derive(Default)]
pub(crate) struct Disturbance {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    away: HashSet<usize>,
    namespaces: HashSet<String>,
    /// Namespaces that began while these nodes were away.
    missed: Vec<(usize, String)>,
    counts: [usize; FAULTS.len()],
}

const FAULTS: [&str; 4] = ["paused", "restarted", "restarted without data", "emptied"];

/// How long a fault lasts.
const LASTS: Duration = Duration::from_millis(700);

/// Between two faults.
const CALM: Duration = Duration::from_millis(300);

impl Disturbance {
    pub(crate) fn is_away(&self, node: usize) -> bool {
        self.lock().away.contains(&node)
    }

    /// Lets the nodes grant locks in a namespace that begins: none of them can have granted any. Clients let them only if they
    /// reach all.
    pub(crate) fn begin(&self, nodes: &[Server], namespace: &str) {
        let mut state = self.lock();
        if !state.namespaces.insert(namespace.to_owned()) {
            return;
        }
        for (number, node) in nodes.iter().enumerate() {
            if state.away.contains(&number) || !open(node, namespace, nodes.len()) {
                state.missed.push((number, namespace.to_owned()));
            }
        }
    }

    /// Disturbs the nodes until the process ends.
    pub(crate) async fn go_on(self: Arc<Self>, host: Arc<Host>) {
        let nodes = host.nodes();
        let count = nodes.len();
        let minority = count.div_ceil(2) - 1;
        let mut first = 0;
        let mut began: Option<Instant> = None;
        let mut turn = 0;
        loop {
            // Nodes that were restarted or emptied count as lost until they take part again.
            if began.is_none_or(|since| since.elapsed() > MAX_TTL) {
                first = fastrand::usize(..count);
                began = None;
            }
            let chosen: Vec<_> = (0..minority).map(|at| (first + at) % count).collect();
            let fault = turn % FAULTS.len();
            turn += 1;
            self.lock().away.extend(&chosen);
            for &node in &chosen {
                if let Err(error) = disturb(&nodes[node], fault).await {
                    eprintln!("a node could not be {}: {error}", FAULTS[fault]);
                }
            }
            if fault >= 1 {
                began = Some(Instant::now());
            }
            self.back(nodes, &chosen, fault);
            tokio::time::sleep(CALM).await;
        }
    }

    /// The nodes are back from that fault.
    fn back(&self, nodes: &[Server], chosen: &[usize], fault: usize) {
        let mut state = self.lock();
        state.counts[fault] += 1;
        for node in chosen {
            state.away.remove(node);
        }
        for (node, namespace) in std::mem::take(&mut state.missed) {
            if state.away.contains(&node) || !open(&nodes[node], &namespace, nodes.len()) {
                state.missed.push((node, namespace));
            }
        }
        if state.counts.iter().sum::<usize>().is_multiple_of(5 * FAULTS.len()) {
            let each = FAULTS.iter().zip(state.counts);
            let each: Vec<_> = each.map(|(fault, count)| format!("{fault} {count} times")).collect();
            eprintln!("two nodes each time: {}", each.join(", "));
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn disturb(node: &Server, fault: usize) -> Result<(), ServerError> {
    match fault {
        0 => {
            node.pause().await?;
            tokio::time::sleep(LASTS).await;
            node.resume().await
        }
        1 => node.restart(Data::Kept).await,
        2 => node.restart(Data::Lost).await,
        _ => {
            say(node, "FLUSHALL");
            Ok(())
        }
    }
}

/// Whether the node was told that the namespace is new.
fn open(node: &Server, namespace: &str, nodes: usize) -> bool {
    let micros = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_micros());
    let begun = micros.saturating_sub(1_000_000);
    let Some(about) = say(node, "INFO server") else {
        return false;
    };
    let Some(process) = about.lines().find_map(|line| line.strip_prefix("run_id:")) else {
        return false;
    };
    let max_ttl = MAX_TTL.as_millis();
    let born = format!("open {begun} {process} {nodes} {max_ttl}");
    // Also if a client has asked it since: it has granted nothing in this namespace.
    say(node, &format!("SET {{{namespace}:}}:born \"{born}\"")).is_some()
}

/// What the node answers, or the beginning of that.
fn say(node: &Server, command: &str) -> Option<String> {
    let said = || {
        let address = node.authority().parse().map_err(std::io::Error::other)?;
        let mut stream = TcpStream::connect_timeout(&address, Duration::from_millis(300))?;
        stream.set_read_timeout(Some(Duration::from_secs(2)))?;
        stream.write_all(format!("{command}\r\n").as_bytes())?;
        let mut answer = vec![0; 4096];
        let length = stream.read(&mut answer)?;
        answer.truncate(length);
        Ok::<_, std::io::Error>(String::from_utf8_lossy(&answer).into_owned())
    };
    said().ok().filter(|answer| !answer.is_empty())
}

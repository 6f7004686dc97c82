//! B9: a lock on several servers while two of them are down. What does it cost, and how often is one round trip enough?

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use conformance_tests::servers::{Data, Server};
use futures_util::future::try_join_all;
use tokio::time::sleep;

use super::check::warm;
use super::{Arena, Entry, name_for};
use crate::contestant::{Failure, nothing};
use crate::figures::{Kind, MICRO, Measure, Times};
use crate::redis;

/// What two of the nodes do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Case {
    /// Answer, as the others.
    Up,
    /// Refuse connections, since they have been killed.
    Killed,
    /// Accept requests without an answer, since they are stopped.
    Stopped,
}

/// The columns of the time as a multiple of that with all nodes, and of the grants in one round trip.
pub(crate) const RATIO: usize = 2;
pub(crate) const SHARE: usize = 4;

/// The longest time that a contestant has for the pairs of one block.
const LONGEST: Duration = Duration::from_secs(3);
/// Pairs before those that are timed, and the longest time for them.
const WARM_UP: usize = 20;
const LONGEST_WARM_UP: Duration = Duration::from_secs(1);

impl Case {
    pub(crate) const ALL: [Self; 3] = [Self::Up, Self::Killed, Self::Stopped];

    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Up => "5 nodes up",
            Self::Killed => "2 of 5 killed",
            Self::Stopped => "2 of 5 stopped",
        }
    }

    async fn begin(self, nodes: [&Server; 2]) -> Result<(), Failure> {
        for node in nodes {
            match self {
                Self::Up => {}
                Self::Killed => node.kill().await?,
                Self::Stopped => node.pause().await?,
            }
        }
        Ok(())
    }

    async fn end(self, nodes: [&Server; 2]) -> Result<(), Failure> {
        for node in nodes {
            match self {
                Self::Up => {}
                Self::Killed => node.restart(Data::Kept).await?,
                Self::Stopped => node.resume().await?,
            }
        }
        Ok(())
    }

    /// How long fencelock goes on with requests that it does not wait for: to nodes that do not answer half of `op_timeout`.
    fn rest(self) -> Duration {
        match self {
            Self::Up | Self::Killed => Duration::from_millis(300),
            Self::Stopped => Duration::from_secs(3),
        }
    }
}

/// Pairs of one contestant, one after the other.
struct Block {
    times: Times,
    /// Scripts that the nodes ran beside two for each pair.
    confirmations: u64,
}

/// The blocks of each contestant, by its number, in each case.
type Blocks = BTreeMap<(usize, Case), Vec<Block>>;

pub(crate) async fn measure(arena: &Arena) -> Result<Measure, Failure> {
    let mut measure = Measure::new(
        "B9",
        "Lock + release while two of five nodes are down, one task",
        &[
            ("p50", "µs"),
            ("p99", "µs"),
            ("p50 / all up", "x"),
            ("most of any two nodes", "x"),
            ("grants in one round trip", "%"),
            ("confirmations", ""),
            ("pairs", ""),
        ],
    );
    let (mut contestants, mut blocks) = (Vec::new(), Blocks::new());
    let servers = &arena.site.servers;
    let twos = twos(servers.len());
    for (round, &[one, other]) in arena.either(&twos[..], &twos[..2]).iter().enumerate() {
        for case in Case::ALL {
            // All are connected before the two go down.
            let entries = arena.entries().await?;
            for entry in &entries {
                warm(&*entry.contestant).await?;
            }
            let answers = |node| case == Case::Up || ![one, other].contains(&node);
            let live = (0..servers.len()).filter(|node| answers(*node));
            let live: Vec<_> = live.map(|node| servers[node].url()).collect();
            let down = [&servers[one], &servers[other]];
            case.begin(down).await?;
            for i in 0..entries.len() {
                // The one after the slowest is not always the same.
                let i = (i + round) % entries.len();
                let name = name_for(&entries[i].who, &format!("b9-{round}-{}", case.title()));
                match block(arena, &entries[i], case, &name, &live).await {
                    Ok(block) => blocks.entry((i, case)).or_default().push(block),
                    Err(error) if entries[i].kind == Kind::Peer => {
                        let note = format!("{}, {}: {error}.", entries[i].who, case.title());
                        measure.notes.push(note);
                    }
                    Err(error) => return Err(error),
                }
            }
            case.end(down).await?;
            if case == Case::Killed {
                // A restarted node grants nothing for a minute, and the next two would be too many.
                try_join_all(servers.iter().map(|server| redis::begin_anew(server.url()))).await?;
            }
            contestants = entries.into_iter().map(|entry| (entry.who, entry.kind)).collect();
        }
    }
    for (i, (who, kind)) in contestants.into_iter().enumerate() {
        for case in Case::ALL {
            let values = values(&blocks, i, case, kind)?;
            measure.row(&who, kind, case.title(), &values);
        }
    }
    measure.notes.push(
        "Each two of the five nodes are down once. Killed nodes refuse connections; stopped ones accept requests and do not answer. \
         A grant takes one round trip unless tokens have to be confirmed. Confirmations are the scripts that nodes ran beside two \
         for each pair; some come after the grant, so the share of grants is the least."
            .to_owned(),
    );
    Ok(measure)
}

/// Each two of the nodes.
fn twos(nodes: usize) -> Vec<[usize; 2]> {
    (0..nodes)
        .flat_map(|one| (one + 1..nodes).map(move |other| [one, other]))
        .collect()
}

/// Pairs of one contestant, alone: what a client does in the background for nodes that are down is its own cost.
async fn block(arena: &Arena, entry: &Entry, case: Case, name: &str, live: &[&str]) -> Result<Block, Failure> {
    let start = Instant::now();
    for _ in 0..WARM_UP {
        entry.contestant.section(name, nothing()).await?;
        if start.elapsed() > LONGEST_WARM_UP {
            break;
        }
    }
    let before = scripts(live).await?;
    let mut times = Times::new()?;
    let start = Instant::now();
    for _ in 0..arena.either(600, 50) {
        let begun = Instant::now();
        entry.contestant.section(name, nothing()).await?;
        times.add(u64::try_from(begun.elapsed().as_nanos())?)?;
        if start.elapsed() > LONGEST {
            break;
        }
    }
    if entry.kind == Kind::Ours {
        sleep(case.rest()).await;
    }
    let ran = scripts(live)
        .await?
        .into_iter()
        .zip(before)
        .map(|(after, before)| after - before);
    let confirmations = ran.map(|ran| ran.saturating_sub(2 * times.count())).sum();
    Ok(Block { times, confirmations })
}

/// How many scripts each node has run.
async fn scripts(live: &[&str]) -> Result<Vec<u64>, Failure> {
    try_join_all(live.iter().map(|url| redis::scripts(url))).await
}

fn values(blocks: &Blocks, contestant: usize, case: Case, kind: Kind) -> Result<[Option<f64>; 7], Failure> {
    let of = |case| blocks.get(&(contestant, case)).map(Vec::as_slice).unwrap_or_default();
    let medians = |case| of(case).iter().map(|block| block.times.quantile(0.5, MICRO));
    let all = |case| {
        let mut times = Times::new()?;
        of(case).iter().try_for_each(|block| times.append(&block.times))?;
        Ok::<_, Failure>(times)
    };
    let ratio = |(of, to): (Option<f64>, Option<f64>)| Some(of? / to?);
    let (here, up) = (all(case)?, all(Case::Up)?);
    let [p50, p99] = [0.5, 0.99].map(|quantile| here.quantile(quantile, MICRO));
    let most = medians(case).zip(medians(Case::Up)).filter_map(ratio).reduce(f64::max);
    let grants = here.count() as f64;
    // Only fencelock confirms anything.
    let confirmations = of(case).iter().map(|block| block.confirmations).sum::<u64>() as f64;
    let confirmations = (kind == Kind::Ours).then_some(confirmations);
    Ok([
        p50,
        p99,
        ratio((p50, up.quantile(0.5, MICRO))),
        most,
        confirmations.map(|confirmations| 100.0 * (1.0 - confirmations / grants).max(0.0)),
        confirmations,
        Some(grants),
    ])
}

#[cfg(test)]
mod tests {
    use super::twos;

    #[test]
    fn each_two_nodes_are_down_once() {
        let twos = twos(5);
        assert_eq!(twos.len(), 10);
        assert!(twos.iter().all(|[one, other]| one < other && *other < 5));
        assert_eq!((twos[0], twos[9]), ([0, 1], [3, 4]));
    }
}

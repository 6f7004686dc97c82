//! What is to be tried, and which fault happens when, and to which client: all of it follows from the seed.

use std::fmt;
use std::time::Duration;

use conformance_tests::faults::{Direction, Traffic};
use fastrand::Rng;

pub(crate) const CLIENTS: usize = 8;
/// How many tasks of each client take locks.
pub(crate) const WORKERS: usize = 3;
pub(crate) const NAMES: usize = 4;

/// What is to be tried.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) time: Duration,
    pub(crate) ttl: Duration,
    /// For how long the server has no fault after one.
    pub(crate) server_rest: Duration,
    pub(crate) faults: Vec<Kind>,
    /// Whether the wall clock of a client steps with each of its faults.
    pub(crate) clocks: bool,
    pub(crate) seed: u64,
    /// Whether clients have the planted bug.
    pub(crate) plant: bool,
}

impl Config {
    /// Stops and kills of clients.
    pub(crate) fn new(time: Duration, seed: u64) -> Self {
        Self {
            time,
            ttl: Duration::from_secs(2),
            server_rest: Duration::from_secs(8),
            faults: vec![Kind::Pause, Kind::Kill],
            clocks: false,
            seed,
            plant: false,
        }
    }
}

/// What can happen to a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Its process is stopped for up to two ttl.
    Pause,
    /// Its process is killed, and another one takes its place.
    Kill,
    /// What it sends, what it is answered, or both, arrives late or never; or its connections are reset and refused.
    Partition,
    /// Everything takes up to half a ttl longer, each way.
    Latency,
}

/// A fault of a server, and whether two clients may believe in one lock because of it.
pub(crate) type ServerFault = (&'static str, bool);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum What {
    Pause,
    Kill,
    Traffic(Direction, Traffic),
    Refused,
    Server(ServerFault),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Planned {
    /// Since the start.
    pub(crate) at: Duration,
    pub(crate) until: Duration,
    /// Whom it strikes; `None` for the server.
    pub(crate) client: Option<usize>,
    pub(crate) what: What,
}

/// Faults in the order of their times. No client has two at once, and neither has the server. There is one in half a ttl on the average, so
/// that there are calm times too.
pub(crate) fn plan(config: &Config, server: &[ServerFault]) -> Vec<Planned> {
    let mut rng = Rng::with_seed(config.seed);
    let mut free_at = [Duration::ZERO; CLIENTS + 1];
    let (mut plan, mut at) = (Vec::new(), Duration::ZERO);
    let kinds = config.faults.len() + usize::from(!server.is_empty());
    if kinds == 0 {
        return plan;
    }
    loop {
        at += config.ttl.mul_f64(rng.f64()) + Duration::from_millis(1);
        if at >= config.time {
            break;
        }
        let kind = config.faults.get(rng.usize(..kinds));
        let (what, least, most) = match kind {
            Some(Kind::Pause) => (What::Pause, 0.3, 2.0),
            Some(Kind::Kill) => (What::Kill, 0.0, 0.5),
            Some(Kind::Partition) => (partition(&mut rng), 0.3, 1.8),
            Some(Kind::Latency) => {
                let delay = Duration::from_millis(config.ttl.mul_f64(0.5 * rng.f64()).as_millis() as u64);
                (What::Traffic(Direction::Both, Traffic::Delayed(delay)), 0.1, 1.6)
            }
            None => (What::Server(server[rng.usize(..server.len())]), 0.0, 1.5),
        };
        let until = (at + config.ttl.mul_f64(least + (most - least) * rng.f64())).min(config.time);
        let (choices, rest) = match kind {
            Some(_) => (0..CLIENTS, Duration::ZERO),
            None => (CLIENTS..CLIENTS + 1, config.server_rest),
        };
        let free: Vec<_> = choices.filter(|i| free_at[*i] < at).collect();
        let Some(struck) = rng.choice(free) else { continue };
        let client = (struck < CLIENTS).then_some(struck);
        free_at[struck] = until + rest;
        plan.push(Planned {
            at,
            until,
            client,
            what,
        });
    }
    plan
}

fn partition(rng: &mut Rng) -> What {
    let direction = [Direction::ToServer, Direction::ToClient, Direction::Both][rng.usize(..3)];
    match rng.u8(..3) {
        0 => What::Traffic(direction, Traffic::Stalled),
        1 => What::Traffic(direction, Traffic::Lost),
        _ => What::Refused,
    }
}

/// The kind, and perhaps a colon and more.
impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pause => f.write_str("pause"),
            Self::Kill => f.write_str("kill"),
            Self::Traffic(_, Traffic::Delayed(delay)) => write!(f, "latency: {delay:?}"),
            Self::Traffic(direction, traffic) => write!(f, "partition: {traffic:?}, {direction:?}"),
            Self::Refused => f.write_str("partition: connections refused"),
            Self::Server((fault, _)) => write!(f, "server {fault}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(seed: u64, faults: &[Kind]) -> Config {
        Config {
            faults: faults.to_vec(),
            ..Config::new(Duration::from_secs(60), seed)
        }
    }

    const ALL: [Kind; 4] = [Kind::Pause, Kind::Kill, Kind::Partition, Kind::Latency];

    #[test]
    fn no_client_has_two_faults_at_once_and_all_end_in_time() {
        let config = config(1, &ALL);
        let plan = plan(&config, &[("kill", true)]);
        for (i, first) in plan.iter().enumerate() {
            assert!(first.at < first.until && first.until <= config.time, "{first:?}");
            for second in &plan[i + 1..] {
                assert!(second.at >= first.at);
                assert!(
                    first.client != second.client || first.until < second.at,
                    "{first:?} {second:?}"
                );
            }
        }
    }

    #[test]
    fn every_kind_that_is_wanted_happens_and_no_other() {
        let plan_of = |faults: &[Kind], server: &[ServerFault]| plan(&config(2, faults), server);
        let all = plan_of(&ALL, &[("kill", true)]);
        for word in ["pause", "kill", "partition", "latency", "server kill"] {
            assert!(
                all.iter().any(|planned| planned.what.to_string().starts_with(word)),
                "{word}"
            );
        }
        let kills = plan_of(&[Kind::Kill], &[]);
        assert!(kills.len() > 20 && kills.iter().all(|planned| planned.what == What::Kill));
        assert!(plan_of(&[], &[]).is_empty());
        assert_eq!(plan(&config(3, &ALL), &[]), plan(&config(3, &ALL), &[]));
        assert_ne!(plan(&config(3, &ALL), &[]), plan(&config(4, &ALL), &[]));
    }
}

//! Which fault happens when, and to whom: all of it follows from the seed.

use std::fmt;
use std::ops::Deref;
use std::time::Duration;

use fastrand::Rng;

use super::{Config, Fault};
use crate::faults::{Direction, Traffic};

/// One fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Planned {
    /// Since the start.
    pub(super) at: Duration,
    pub(super) until: Duration,
    /// To whom it happens; `None` for the server.
    pub(super) client: Option<usize>,
    pub(super) what: What,
}

/// What is done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum What {
    Pause,
    Kill,
    Traffic(Direction, Traffic),
    Refused,
    /// How far ahead the wall clock is then, in seconds, and whether another process begins with that.
    Clock(i32, bool),
    /// A fault of the server, and whether two may believe because of it.
    Server(&'static str, bool),
}

/// Faults in the order of their times. Nobody has two at once.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Plan(Vec<Planned>);

/// Between two faults, in ttl: on the average half of it, so that there are calm times too.
const GAP: f64 = 1.0;

/// By how many seconds a clock steps.
const LEAST_STEP: f64 = 2.0;
const MOST_STEP: f64 = 3_600.0;

impl Plan {
    pub(super) fn new(config: &Config, server: &[(&'static str, bool)]) -> Self {
        let mut rng = Rng::with_seed(config.seed);
        let mut free_at = vec![Duration::ZERO; config.clients];
        let mut server_free_at = Duration::ZERO;
        let mut plan = Vec::new();
        let kinds = config.faults.len() + usize::from(!server.is_empty());
        let mut at = Duration::ZERO;
        if kinds == 0 {
            return Self(plan);
        }
        loop {
            at += config.ttl.mul_f64(GAP * rng.f64()) + Duration::from_millis(1);
            if at >= config.time {
                break;
            }
            // A fault of its own for the server, if it is its turn.
            let kind = config.faults.get(rng.usize(..kinds));
            let lasts = |share: f64| config.ttl.mul_f64(share);
            let (what, lasts) = match kind {
                Some(Fault::Pause) => (What::Pause, lasts(0.3 + 1.7 * rng.f64())),
                Some(Fault::Kill) => (What::Kill, lasts(0.5 * rng.f64())),
                Some(Fault::Partition) => (partition(&mut rng), lasts(0.3 + 1.5 * rng.f64())),
                Some(Fault::Latency) => {
                    let delay = Duration::from_millis(config.ttl.mul_f64(0.5 * rng.f64()).as_millis() as u64);
                    (
                        What::Traffic(Direction::Both, Traffic::Delayed(delay)),
                        lasts(0.1 + 1.5 * rng.f64()),
                    )
                }
                Some(Fault::Clock) => (step(&mut rng), lasts(0.3 + 1.7 * rng.f64())),
                None => {
                    let (fault, overlap) = server[rng.usize(..server.len())];
                    (What::Server(fault, overlap), lasts(1.5 * rng.f64()))
                }
            };
            let until = (at + lasts).min(config.time);
            let client = match kind {
                Some(_) => {
                    let free: Vec<_> = (0..config.clients).filter(|i| free_at[*i] < at).collect();
                    let Some(client) = rng.choice(free) else { continue };
                    free_at[client] = until;
                    Some(client)
                }
                None if server_free_at >= at => continue,
                None => {
                    server_free_at = until + config.server_rest;
                    None
                }
            };
            plan.push(Planned {
                at,
                until,
                client,
                what,
            });
        }
        Self(plan)
    }
}

fn partition(rng: &mut Rng) -> What {
    let direction = [Direction::ToServer, Direction::ToClient, Direction::Both][rng.usize(..3)];
    match rng.u8(..3) {
        0 => What::Traffic(direction, Traffic::Stalled),
        1 => What::Traffic(direction, Traffic::Lost),
        _ => What::Refused,
    }
}

/// Small steps as often as large ones.
fn step(rng: &mut Rng) -> What {
    let seconds = (LEAST_STEP * (MOST_STEP / LEAST_STEP).powf(rng.f64())).round() as i32;
    What::Clock(if rng.bool() { seconds } else { -seconds }, rng.u8(..3) == 0)
}

impl Deref for Plan {
    type Target = [Planned];

    fn deref(&self) -> &[Planned] {
        &self.0
    }
}

impl What {
    pub(super) fn permits_overlap(&self) -> bool {
        matches!(self, Self::Server(_, true))
    }
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let way = |direction: &Direction| match direction {
            Direction::ToServer => "requests",
            Direction::ToClient => "replies",
            Direction::Both => "everything",
        };
        match self {
            Self::Pause => f.write_str("pause"),
            Self::Kill => f.write_str("kill"),
            Self::Traffic(_, Traffic::Delayed(delay)) => write!(f, "latency: {delay:?}"),
            Self::Traffic(direction, Traffic::Stalled) => write!(f, "partition: {} stalled", way(direction)),
            Self::Traffic(direction, Traffic::Lost) => write!(f, "partition: {} lost", way(direction)),
            Self::Traffic(_, Traffic::Flows) => f.write_str("none"),
            Self::Refused => f.write_str("partition: connections refused"),
            Self::Clock(ahead, anew) => {
                let side = if *ahead < 0 { "behind" } else { "ahead" };
                let whose = if *anew { ", in a new process" } else { "" };
                write!(f, "clock: {} s {side}{whose}", ahead.abs())
            }
            Self::Server(fault, _) => write!(f, "server: {fault}"),
        }
    }
}

impl fmt::Display for Planned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.client {
            Some(client) => write!(f, "client {client}: {}", self.what),
            None => self.what.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(seed: u64) -> Config {
        let mut config = Config { seed, ..Config::new() };
        config.faults.push(Fault::Clock);
        config
    }

    #[test]
    fn the_same_seed_gives_the_same_plan_and_another_one_another() {
        assert_eq!(Plan::new(&config(7), &[]), Plan::new(&config(7), &[]));
        assert_ne!(Plan::new(&config(7), &[]), Plan::new(&config(8), &[]));
    }

    #[test]
    fn nobody_has_two_faults_at_once_and_all_end_in_time() {
        let config = config(1);
        let plan = Plan::new(&config, &[("kill", true)]);
        assert!(plan.len() > 20, "{}", plan.len());
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
        let plan = Plan::new(&config(2), &[("kill", true)]);
        for word in ["pause", "kill", "partition", "latency", "clock", "server: kill"] {
            assert!(
                plan.iter().any(|planned| planned.what.to_string().starts_with(word)),
                "{word}"
            );
        }
        let mut config = config(2);
        config.faults = vec![Fault::Kill];
        assert!(Plan::new(&config, &[]).iter().all(|planned| planned.what == What::Kill));
        config.faults.clear();
        assert!(Plan::new(&config, &[]).is_empty());
    }

    #[test]
    fn clocks_step_both_ways_by_seconds_and_by_most_of_an_hour_and_permit_nothing() {
        let mut config = config(3);
        config.faults = vec![Fault::Clock];
        let plan = Plan::new(&config, &[]);
        let steps: Vec<_> = plan
            .iter()
            .map(|planned| match planned.what {
                What::Clock(ahead, anew) => (ahead, anew),
                ref other => panic!("{other:?}"),
            })
            .collect();
        let size = |ahead: i32| f64::from(ahead.abs());
        assert!(
            steps
                .iter()
                .all(|(ahead, _)| (LEAST_STEP..=MOST_STEP).contains(&size(*ahead)))
        );
        for way in [1, -1] {
            let same = steps.iter().filter(|(ahead, _)| ahead.signum() == way);
            let (small, large): (Vec<_>, Vec<_>) = same.partition(|(ahead, _)| size(*ahead) < 60.0);
            assert!(!small.is_empty() && large.iter().any(|(ahead, _)| size(*ahead) > 1_200.0));
            assert!(large.iter().any(|(_, anew)| *anew) && large.iter().any(|(_, anew)| !anew));
        }
        assert!(!plan.iter().any(|planned| planned.what.permits_overlap()));
        assert_eq!(What::Clock(90, false).to_string(), "clock: 90 s ahead");
        assert_eq!(What::Clock(-2, true).to_string(), "clock: 2 s behind, in a new process");
    }
}

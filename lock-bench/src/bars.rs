//! What the figures should be, and whether they are: ratios within one run, which say the same on any machine.

use crate::backend::{Backend, OURS, OURS_HERE, OURS_LINGERING};
use crate::figures::{Bar, Check, Measure};
use crate::measures::nodes_down::{Case, RATIO, SHARE};
use crate::measures::processes::{WAITERS, case};
use crate::redis_cluster::ONE_SERVER;

/// Each bar that this run has the figures for.
pub(crate) fn bars(backend: Backend, checks: &[Check], measures: &[Measure]) -> Vec<Bar> {
    let all = All {
        backend,
        checks,
        measures,
        bars: Vec::new(),
    };
    match backend {
        Backend::Redis => all.judge(&Wanted {
            pair: 1.5,
            peer: 1.05,
            rate: 0.6,
            sections: 20.0,
            hand_over: 2.0,
        }),
        Backend::Postgres => all.judge(&Wanted {
            pair: 1.3,
            peer: 0.9,
            rate: 0.6,
            sections: 5.0,
            hand_over: 2.0,
        }),
        Backend::Etcd => all.judge(&Wanted {
            pair: 1.15,
            peer: 0.6,
            rate: 0.8,
            sections: 5.0,
            hand_over: 2.5,
        }),
        Backend::RedisCluster => all.judge_cluster(),
        Backend::Redlock => all.judge_nodes(),
        // A file has no round trips to be compared with.
        Backend::Sqlite => Vec::new(),
    }
}

struct Wanted {
    pair: f64,
    peer: f64,
    rate: f64,
    sections: f64,
    hand_over: f64,
}

struct All<'a> {
    backend: Backend,
    checks: &'a [Check],
    measures: &'a [Measure],
    bars: Vec<Bar>,
}

/// Time of a pair while nodes are down, beside that with all nodes; and percent of grants in one round trip.
const DOWN: f64 = 1.3;
const ONE_ROUND_TRIP: f64 = 95.0;
/// Time of a pair on a cluster, beside that on a server of its own.
const CLUSTER: f64 = 1.1;
/// Commands of a server for one acquisition under contention.
const COMMANDS: f64 = 3.0;
/// How many times the sections of the fastest peer, on Redis.
const SECTIONS_OF_PEER: f64 = 20.0;
/// Microseconds for a pair of a client that has kept the lock.
const KEPT: f64 = 5.0;
/// Percent of a core, and bytes, for 10 000 locks on Redis.
const PROCESSOR: f64 = 5.0;
const BYTES: f64 = 1024.0;
/// A lease that all locks share is renewed once per ttl/3; one renewal may fall on the edge of the measured time.
const RENEWALS: f64 = 1.2;

impl All<'_> {
    fn judge(mut self, wanted: &Wanted) -> Vec<Bar> {
        let background = self.backend.background_floor();
        for (who, floor) in [(OURS, background.as_str()), (OURS_HERE, self.backend.floor())] {
            let here = if who == OURS { "" } else { ", on the caller's runtime" };
            let pair = self.value("B1", who, "", 0);
            let bare = self.value("B1", floor, "", 0);
            self.at_most("B1", format!("p50 / floor{here}"), ratio(pair, bare), wanted.pair);
            let peer = self.fastest_pair();
            self.at_most(
                "B1",
                format!("p50 / fastest peer{here}"),
                ratio(pair, peer),
                wanted.peer,
            );
            let rate = ratio(self.value("B2", who, "", 0), self.value("B2", floor, "", 0));
            self.at_least("B2", format!("rate / pipelined floor{here}"), rate, wanted.rate);
            let sections = self.value("B3", who, "", 0);
            // The floor of a pair is two round trips, in microseconds.
            let per_trip = sections.zip(bare).map(|(sections, pair)| sections * pair / 2.0 / 1e6);
            self.at_least(
                "B3",
                format!("sections per round trip{here}"),
                per_trip,
                wanted.sections,
            );
            if self.backend == Backend::Redis {
                let of_peers = self
                    .measure("B3")
                    .and_then(|b3| b3.of_peers("", 0).into_iter().reduce(f64::max));
                let times = ratio(sections, of_peers);
                self.at_least("B3", format!("sections / fastest peer{here}"), times, SECTIONS_OF_PEER);
            }
        }
        let kept = self.value("B1", OURS_LINGERING, "", 0);
        self.at_most("B1", "p50 of a lock that was kept, µs".to_owned(), kept, KEPT);
        // As many as there were: a quick run has no 100.
        let most = WAITERS.iter().rev().map(|waiters| case(*waiters));
        let most = most.into_iter().find(|case| self.value("B4", OURS, case, 0).is_some());
        if let Some(case) = most {
            let pushes = [self.backend.background_push(), self.backend.push().map(str::to_owned)];
            for (who, push) in [OURS, OURS_HERE].into_iter().zip(pushes) {
                let Some(push) = push else { continue };
                let here = if who == OURS { "" } else { ", on the caller's runtime" };
                let hand_over = ratio(self.value("B4", who, &case, 0), self.value("B4", &push, "", 0));
                self.at_most(
                    "B4",
                    format!("hand-over p50 / push, {case}{here}"),
                    hand_over,
                    wanted.hand_over,
                );
                let commands = self.value("B4", who, &case, 2);
                self.at_most(
                    "B4",
                    format!("commands per acquisition, {case}{here}"),
                    commands,
                    COMMANDS,
                );
            }
        }
        if self.backend == Backend::Redis {
            self.at_most("B6", "% of a core".to_owned(), self.value("B6", OURS, "", 0), PROCESSOR);
            self.at_most(
                "B6",
                "bytes per lock, client".to_owned(),
                self.value("B6", OURS, "", 1),
                BYTES,
            );
        } else {
            let renewals = self.value("B6", OURS, "", 4);
            self.at_most("B6", "renewals per ttl/3".to_owned(), renewals, RENEWALS);
        }
        self.bars
    }

    /// What nodes that are down may cost, and how often one round trip has to be enough.
    fn judge_nodes(mut self) -> Vec<Bar> {
        for who in [OURS, OURS_HERE] {
            let here = if who == OURS { "" } else { ", on the caller's runtime" };
            for nodes in Case::ALL {
                let case = nodes.title();
                if nodes != Case::Up {
                    let ratio = self.value("B9", who, case, RATIO);
                    self.at_most("B9", format!("p50, {case} / all up{here}"), ratio, DOWN);
                }
                let share = self.value("B9", who, case, SHARE);
                self.at_least(
                    "B9",
                    format!("% of grants in one round trip, {case}{here}"),
                    share,
                    ONE_ROUND_TRIP,
                );
            }
        }
        self.bars
    }

    /// What a cluster costs beside a server of its own.
    fn judge_cluster(mut self) -> Vec<Bar> {
        let pair = self.value("B1", OURS, "", 0);
        let one = self.value("B1", ONE_SERVER, "", 0);
        self.at_most("B1", "p50 / a server of its own".to_owned(), ratio(pair, one), CLUSTER);
        self.bars
    }

    fn measure(&self, id: &str) -> Option<&Measure> {
        self.measures.iter().find(|measure| measure.id == id)
    }

    fn value(&self, id: &str, who: &str, case: &str, column: usize) -> Option<f64> {
        self.measure(id)?.value(who, case, column)
    }

    /// Of those that are locks.
    fn fastest_pair(&self) -> Option<f64> {
        let locks = self.checks.iter().filter(|check| check.who != OURS && check.excludes());
        let pairs = locks.filter_map(|check| self.value("B1", &check.who, "", 0));
        pairs.reduce(f64::min)
    }

    fn at_most(&mut self, of: &str, figure: String, value: Option<f64>, limit: f64) {
        self.bar(of, figure, value, &format!("<= {limit}"), |value| value <= limit);
    }

    fn at_least(&mut self, of: &str, figure: String, value: Option<f64>, limit: f64) {
        self.bar(of, figure, value, &format!(">= {limit}"), |value| value >= limit);
    }

    fn bar(&mut self, of: &str, figure: String, value: Option<f64>, bar: &str, is_met: impl Fn(f64) -> bool) {
        if let Some(value) = value {
            self.bars.push(Bar {
                of: of.to_owned(),
                figure,
                value,
                bar: bar.to_owned(),
                met: is_met(value),
            });
        }
    }
}

fn ratio(of: Option<f64>, to: Option<f64>) -> Option<f64> {
    of.zip(to).map(|(of, to)| of / to)
}

//! The fenced Redlock protocol.

use libtest_mimic::Trial;
use models::redlock::bounds::{Bounds, Bug};
use models::redlock::properties::{EXCLUSION, RISE, RISE_LATER};
use models::redlock::steps::Redlock;

use crate::report::{holds, violates};

fn plain<const N: usize>(counters: Vec<[u8; N]>) -> Bounds<N> {
    Bounds {
        counters,
        proposals: vec![0],
        repeats: 0,
        amnesias: 0,
        late_acquires: true,
        late_confirms: true,
        lapses: false,
        restart_delay: true,
        retries: 0,
        renewals: false,
    }
}

fn three() -> Bounds<3> {
    plain(vec![[0, 0, 1], [0, 1, 2]])
}

fn five() -> Bounds<5> {
    plain(vec![[0, 0, 1, 1, 2]])
}

/// Requests that arrive after the end of their acquisition are left out, so that there is room for more of the rest.
fn none_late<const N: usize>(bounds: Bounds<N>) -> Bounds<N> {
    Bounds {
        late_acquires: false,
        late_confirms: false,
        ..bounds
    }
}

fn amnesia() -> Bounds<3> {
    Bounds {
        amnesias: 1,
        ..plain(vec![[0, 0, 1]])
    }
}

/// Three acquisitions; a node loses its data and grants at once.
fn no_delay() -> Bounds<3> {
    Bounds {
        amnesias: 1,
        restart_delay: false,
        late_acquires: false,
        ..plain(vec![[0, 0, 1]])
    }
}

fn lapses() -> Bounds<3> {
    Bounds {
        lapses: true,
        repeats: 1,
        ..none_late(plain(vec![[0, 0, 2]]))
    }
}

fn retries() -> Bounds<3> {
    Bounds {
        retries: 1,
        ..plain(vec![[0, 0, 1]])
    }
}

fn two_of_three(bounds: Bounds<3>, bug: Option<Bug>) -> Redlock<3, 2> {
    Redlock { bounds, bug }
}

fn three_of_three(bounds: Bounds<3>, bug: Option<Bug>) -> Redlock<3, 3> {
    Redlock { bounds, bug }
}

fn two_of_five(bounds: Bounds<5>, bug: Option<Bug>) -> Redlock<5, 2> {
    Redlock { bounds, bug }
}

fn sound() -> Vec<Trial> {
    vec![
        holds(
            "redlock",
            "N=3, 2 acquisitions, 1 repeat each, 2 proposals, late requests",
            || {
                let bounds = Bounds {
                    proposals: vec![0, 2],
                    repeats: 1,
                    ..plain(vec![[0, 1, 2]])
                };
                two_of_three(bounds, None)
            },
        ),
        holds("redlock", "N=3, 3 acquisitions, late requests", || {
            three_of_three(plain(vec![[0, 0, 1]]), None)
        }),
        holds(
            "redlock",
            "N=3, 2 acquisitions, 1 repeat each, 1 amnesia with restart delay, late requests",
            || {
                let bounds = Bounds {
                    repeats: 1,
                    ..amnesia()
                };
                two_of_three(bounds, None)
            },
        ),
        holds("redlock", "N=3, 3 acquisitions, 1 amnesia with restart delay", || {
            let bounds = Bounds {
                amnesias: 1,
                ..none_late(plain(vec![[0, 0, 1]]))
            };
            three_of_three(bounds, None)
        }),
        holds(
            "redlock",
            "N=3, 3 acquisitions, 1 amnesia without restart delay, late CONFIRM; tokens only",
            || three_of_three(no_delay(), None),
        ),
        holds(
            "redlock",
            "N=3, 2 acquisitions, renewals, 1 amnesia with restart delay, late requests",
            || {
                let bounds = Bounds {
                    renewals: true,
                    ..amnesia()
                };
                two_of_three(bounds, None)
            },
        ),
        holds(
            "redlock",
            "N=3, 2 acquisitions, 1 repeat each, leases that lapse",
            || two_of_three(lapses(), None),
        ),
        holds(
            "redlock",
            "N=3, 2 acquisitions, one of 2 attempts, late requests",
            || two_of_three(retries(), None),
        ),
        holds(
            "redlock",
            "N=3, 2 acquisitions of 2 attempts each, 1 amnesia with restart delay",
            || {
                let bounds = Bounds {
                    amnesias: 1,
                    retries: 2,
                    ..none_late(retries())
                };
                two_of_three(bounds, None)
            },
        ),
        holds("redlock", "N=5, 2 acquisitions, late requests", || {
            two_of_five(five(), None)
        }),
        holds("redlock", "N=5, 2 acquisitions, 1 amnesia with restart delay", || {
            let bounds = Bounds {
                amnesias: 1,
                ..none_late(five())
            };
            two_of_five(bounds, None)
        }),
    ]
}

fn planted() -> Vec<Trial> {
    vec![
        violates("redlock: a majority of Q1", "N=5, 2 acquisitions", RISE, || {
            two_of_five(five(), Some(Bug::MajorityOfQ1))
        }),
        violates(
            "redlock: unconditional write-back",
            "N=3, 3 acquisitions, 1 amnesia",
            RISE_LATER,
            || three_of_three(no_delay(), Some(Bug::UnconditionalWriteBack)),
        ),
        violates("redlock: the maximum alone", "N=3, 2 acquisitions", RISE, || {
            two_of_three(three(), Some(Bug::MaxAlone))
        }),
        violates(
            "redlock: retry without the stored value",
            "N=3, 2 acquisitions, leases that lapse",
            RISE,
            || two_of_three(lapses(), Some(Bug::RetryWithoutStoredValue)),
        ),
        violates(
            "redlock: a release does not compare the attempt",
            "N=3, 2 acquisitions, one of 2 attempts",
            EXCLUSION,
            || two_of_three(retries(), Some(Bug::ReleaseWithoutAttempt)),
        ),
        violates("redlock: nodes outside Q1 count", "N=3, 2 acquisitions", RISE, || {
            two_of_three(three(), Some(Bug::NodesOutsideQ1))
        }),
        violates(
            "redlock: no restart delay, taken for safe",
            "N=3, 2 acquisitions, 1 amnesia",
            EXCLUSION,
            || two_of_three(amnesia(), Some(Bug::NoRestartDelay)),
        ),
        violates(
            "redlock: a clock behind the tokens drawn",
            "N=3, 3 acquisitions, 1 amnesia",
            RISE_LATER,
            || three_of_three(none_late(no_delay()), Some(Bug::ClockBehindDrawnTokens)),
        ),
        violates(
            "redlock: a renewal by a minority counts",
            "N=3, 2 acquisitions, renewals",
            EXCLUSION,
            || {
                let bounds = Bounds {
                    renewals: true,
                    ..three()
                };
                two_of_three(bounds, Some(Bug::RenewedByMinority))
            },
        ),
    ]
}

pub(crate) fn trials() -> Vec<Trial> {
    sound().into_iter().chain(planted()).collect()
}

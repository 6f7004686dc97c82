//! The deadline of a lease beside a server that keeps it: clocks that drift, machines that are suspended, and answers that are late, are
//! lost, or overtake each other.

use std::time::Duration;

use lock_core::{Clock, Lease, Stamp};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};

const TTL: Duration = Duration::from_secs(10);

#[derive(Clone, Debug)]
enum Step {
    /// Time passes at the server. The client may be suspended meanwhile.
    Pass { millis: u64, suspended: bool },
    /// The client sends a renewal.
    Send,
    /// One of the requests on their way reaches the server.
    Arrive(prop::sample::Index),
    /// One of the answers on their way reaches the client.
    Answer(prop::sample::Index),
    /// A request or an answer is lost.
    Lose(prop::sample::Index),
}

/// How the client counts, and how fast its clock is.
#[derive(Clone, Copy, Debug)]
struct Client {
    /// How much of each second of the server its clock misses, in thousandths. The allowance covers 10.
    slow: u64,
    clock_stops_in_suspend: bool,
    counts_from_the_answer: bool,
}

const SOUND: Client = Client {
    slow: 10,
    clock_stops_in_suspend: false,
    counts_from_the_answer: false,
};

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (1..4_000_u64, prop::bool::weighted(0.2)).prop_map(|(millis, suspended)| Step::Pass { millis, suspended }),
        3 => Just(Step::Send),
        3 => any::<prop::sample::Index>().prop_map(Step::Arrive),
        3 => any::<prop::sample::Index>().prop_map(Step::Answer),
        1 => any::<prop::sample::Index>().prop_map(Step::Lose),
    ];
    prop::collection::vec(step, 1..60)
}

/// Takes one of them, if there are any.
fn take(from: &mut Vec<Stamp>, index: &prop::sample::Index) -> Option<Stamp> {
    (!from.is_empty()).then(|| from.remove(index.index(from.len())))
}

/// Plays a history after a grant that arrived as it was sent, and judges the lease after each step.
fn play(client: Client, steps: &[Step]) -> Result<(), TestCaseError> {
    let (clock, hand) = Clock::manual();
    let (mut now, mut end) = (Duration::ZERO, TTL);
    let lease = Lease::shared("lease", TTL, clock.now());
    let (mut requests, mut answers) = (Vec::new(), Vec::new());
    let (mut deadline, mut passed) = (lease.deadline(), false);
    for step in steps {
        match step {
            Step::Pass { millis, suspended } => {
                let time = Duration::from_millis(*millis);
                now += time;
                if !(*suspended && client.clock_stops_in_suspend) {
                    hand.advance(time - time / 1000 * u32::try_from(client.slow).unwrap());
                }
            }
            Step::Send => requests.push(clock.now()),
            Step::Arrive(index) => {
                if let Some(sent) = take(&mut requests, index)
                    && now < end
                {
                    end = now + TTL;
                    answers.push(sent);
                }
            }
            Step::Answer(index) => {
                if let Some(sent) = take(&mut answers, index) {
                    let late = client.counts_from_the_answer.then(|| clock.now());
                    lease.refreshed(late.unwrap_or(sent), clock.now());
                }
            }
            Step::Lose(index) => drop(take(&mut requests, index).or_else(|| take(&mut answers, index))),
        }
        let held = lease.is_valid(clock.now());
        prop_assert!(!held || now < end, "held although the server has freed: {step:?}");
        prop_assert!(!held || !passed, "held again after its deadline: {step:?}");
        prop_assert!(
            lease.deadline() >= deadline,
            "an answer moved the deadline back: {step:?}"
        );
        deadline = lease.deadline();
        passed |= clock.now() >= deadline;
    }
    Ok(())
}

fn config(cases: u32) -> Config {
    Config {
        cases,
        failure_persistence: None,
        ..Config::default()
    }
}

proptest! {
    #![proptest_config(config(2_000))]

    #[test]
    fn a_lease_is_believed_in_only_while_the_server_keeps_it(steps in steps(), slow in 0..=SOUND.slow) {
        play(Client { slow, ..SOUND }, &steps)?;
    }
}

/// What the lease cannot make good must be found, or the histories would show nothing.
#[test]
fn the_histories_find_clients_that_count_wrongly() {
    let mut wrong = [SOUND; 3];
    wrong[0].counts_from_the_answer = true;
    wrong[1].clock_stops_in_suspend = true;
    wrong[2].slow = 30;
    for client in wrong {
        let mut runner = TestRunner::new(config(20_000));
        let found = runner.run(&steps(), |steps| play(client, &steps)).unwrap_err();
        assert!(
            found.to_string().contains("held although the server has freed"),
            "{client:?}: {found}"
        );
    }
}

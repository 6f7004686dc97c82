//! Several independent servers.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use conformance_tests::servers::Data;
use fastrand::Rng;
use futures_util::future::join_all;
use lock_core::DistributedLock;
use lock_redis::{RedisConfig, RedlockConfig};
use models::redlock::node::Answer;
use models::redlock::trace::{OnBusy, Run, Script, Step};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::decisions::{Decision, Decisions, micros, micros_at};
use crate::proxy::Faults;
use crate::torture::{Connect, Node, ROUNDS, Torture, disturb_traffic, until_enough};
use crate::transcript::{Kind, Ran};

/// The restart delay: the shortest that can be set, in milliseconds.
pub(crate) const MAX_TTL: u64 = 1000;

/// Records so many servers, and returns the trace of a name in each namespace.
pub(crate) async fn record(count: usize, namespaces: &[&'static str], grants: usize, seed: u64) -> Vec<Vec<Step>> {
    let nodes = join_all((0..count as u64).map(|node| Node::start(seed + node))).await;
    let urls: Vec<_> = nodes.iter().map(Node::url).collect();
    let (stop, stopped) = watch::channel(false);
    let mut clients = JoinSet::new();
    let mut decisions = Vec::new();
    for (number, &namespace) in namespaces.iter().enumerate() {
        let connect = connect(urls.clone(), namespace);
        // The nodes grant at once if the first client reaches all.
        drop(connect().await.unwrap());
        let torture = Torture {
            name: "traced",
            connect,
            decisions: Decisions::default(),
            lives: 1000..5000,
            seed: seed + number as u64,
        };
        decisions.push(torture.decisions.clone());
        clients.spawn(Arc::new(torture).run(stopped.clone()));
    }
    let starts = Mutex::default();
    let rounds = AtomicUsize::new(0);
    let enough = async {
        until_enough(&decisions, grants, &rounds).await;
        stop.send_replace(true);
    };
    tokio::join!(enough, disturb(&nodes, &starts, seed, &rounds, &stopped));
    while let Some(client) = clients.join_next().await {
        client.unwrap();
    }
    let mut runs = Vec::new();
    for (number, node) in nodes.iter().enumerate() {
        runs.extend(node.end().await.into_iter().map(|ran| (number, ran)));
    }
    let starts = starts.into_inner().unwrap();
    let of = |(namespace, decisions): (&&str, Decisions)| {
        let key = format!("{{{namespace}:}}:born");
        let runs: Vec<_> = runs.iter().filter(|(_, ran)| ran.keys[4] == key).collect();
        trace(&runs, &starts, decisions.take())
    };
    namespaces.iter().zip(decisions).map(of).collect()
}

fn connect(urls: Vec<String>, namespace: &'static str) -> Connect {
    Arc::new(move || {
        let nodes: Vec<_> = urls.iter().map(|url| RedisConfig::from_url(url).unwrap()).collect();
        Box::pin(async move {
            let config = RedlockConfig::new(nodes).namespace(namespace);
            let config = config.max_ttl(Duration::from_millis(MAX_TTL));
            let config = config.op_timeout(Duration::from_millis(1000));
            Ok(Box::new(config.connect().await?) as Box<dyn DistributedLock>)
        })
    })
}

/// Disturbs a minority at a time, until `stopped`. Notes which nodes were restarted or lost their data, and when.
async fn disturb(
    nodes: &[Node],
    starts: &Mutex<Vec<Step>>,
    seed: u64,
    rounds: &AtomicUsize,
    stopped: &watch::Receiver<bool>,
) {
    let mut random = Rng::with_seed(seed);
    let minority = nodes.len() / 2;
    while !*stopped.borrow() {
        let at = rounds.load(Ordering::Relaxed);
        let first = random.usize(..nodes.len());
        let chosen = || (first..first + minority).map(|node| node % nodes.len());
        for node in chosen() {
            disturb_traffic(&nodes[node].proxy, &mut random);
        }
        sleep(Duration::from_millis(random.u64(200..600))).await;
        for node in nodes {
            node.proxy.set(Faults::default());
        }
        sleep(Duration::from_millis(random.u64(100..400))).await;
        let time = Duration::from_millis(random.u64(100..600));
        let note = |start| starts.lock().unwrap().push(start);
        let disturbed = chosen().map(async |number| {
            let node = &nodes[number];
            match at % ROUNDS {
                0 | 4 => node.pause(time).await,
                2 => {
                    let note = || {
                        note(Step::Restarted {
                            at: micros(),
                            node: number,
                        })
                    };
                    node.restart(Data::Kept, time / 5, note).await;
                }
                1 => {
                    let note = || {
                        note(Step::Emptied {
                            at: micros(),
                            node: number,
                        })
                    };
                    node.restart(Data::Lost, time / 5, note).await;
                }
                _ => node.proxy.cut(),
            }
        });
        join_all(disturbed).await;
        if [1, 2].contains(&(at % ROUNDS)) {
            // Until they grant again they count as lost.
            sleep(Duration::from_millis(MAX_TTL)).await;
        }
        rounds.fetch_add(1, Ordering::Relaxed);
    }
}

/// Puts everything in order: all clocks are one.
fn trace(runs: &[&(usize, Ran)], starts: &[Step], decisions: Vec<Decision>) -> Vec<Step> {
    let coordinators = coordinators(runs, decisions);
    let runs = runs.iter().map(|(node, ran)| Step::Ran(run(*node, ran)));
    let mut all: Vec<_> = runs.chain(starts.iter().cloned()).chain(coordinators).collect();
    all.sort_by_key(|step| match step {
        Step::Ended { at, .. } => (*at, 0),
        Step::Ran(Run { at, .. }) | Step::Emptied { at, .. } | Step::Restarted { at, .. } => (*at, 1),
        Step::Given { at, .. } => (*at, 2),
    });
    all
}

fn coordinators(runs: &[&(usize, Ran)], decisions: Vec<Decision>) -> Vec<Step> {
    let mut deadlines = BTreeMap::new();
    let mut ended = BTreeSet::new();
    let mut steps = Vec::new();
    for Decision { at, owner, granted } in decisions {
        let name = owner.to_string();
        match granted {
            Some((token, lease)) => {
                let q1 = q1(runs, &name, token, at);
                deadlines.insert(name.clone(), micros_at(lease.deadline()));
                steps.push(Step::Given {
                    at,
                    owner: name,
                    token,
                    q1,
                });
            }
            // A release that fails is tried again.
            None if !ended.insert(name.clone()) => {}
            None => {
                let at = deadlines.remove(&name).map_or(at, |deadline| at.min(deadline));
                steps.push(Step::Ended { at, owner: name });
            }
        }
    }
    let never_released = deadlines.into_iter();
    steps.extend(never_released.map(|(owner, at)| Step::Ended { at, owner }));
    steps
}

/// The nodes that were at the token by what the client was answered until then, and what they had granted.
fn q1(runs: &[&(usize, Ran)], owner: &str, token: u64, until: u64) -> Vec<(usize, u64)> {
    let mut at_token = BTreeMap::new();
    for (node, ran) in runs.iter().filter(|(_, ran)| ran.at <= until) {
        let heard = ran
            .push
            .as_ref()
            .filter(|push| push.owner == owner && ran.push_delivered);
        if let Some(push) = heard {
            at_token.insert(*node, push.token);
        }
        if ran.arguments[2] != owner || !ran.delivered {
            continue;
        }
        match (ran.kind, grant(ran)) {
            (Kind::Acquire, Some(granted)) => {
                at_token.insert(*node, granted);
            }
            // Confirmed before a still higher token was known.
            (Kind::Confirm, _) if ran.answer[0] == "confirmed" && ran.arguments[4] != token.to_string() => {
                at_token.insert(*node, ran.arguments[4].parse().unwrap());
            }
            (Kind::Release, _) => {
                at_token.remove(node);
            }
            (Kind::Acquire, None) if ran.answer[0] == "busy" => {
                at_token.remove(node);
            }
            _ => {}
        }
    }
    let confirmed = |node: usize, granted: u64| {
        let confirms = |ran: &Ran| {
            ran.kind == Kind::Confirm
                && ran.at <= until
                && ran.delivered
                && ran.answer[0] == "confirmed"
                && ran.arguments[2..5] == [owner.to_owned(), granted.to_string(), token.to_string()]
        };
        runs.iter().any(|(at, ran)| *at == node && confirms(ran))
    };
    at_token.retain(|node, granted| *granted == token || confirmed(*node, *granted));
    at_token.into_iter().collect()
}

/// The token that the run granted to the client that asked.
fn grant(ran: &Ran) -> Option<u64> {
    (ran.answer[0] == "granted").then(|| ran.answer[2].parse().unwrap())
}

fn run(node: usize, ran: &Ran) -> Run {
    let arguments = &ran.arguments;
    let number = |at: usize| arguments[at].parse().unwrap();
    let owner = arguments[2].clone();
    let answer = answer(&ran.answer);
    let released = ran.answer[0] == "released";
    let script = match ran.kind {
        Kind::Acquire => {
            let on_busy = match &*arguments[8] {
                "0" => OnBusy::Fail,
                "1" => OnBusy::Queue,
                _ => OnBusy::Yield,
            };
            Script::Acquire {
                owner,
                ttl: number(3),
                stop: number(4),
                sent: number(5),
                on_busy,
                answer,
                life: match answer {
                    Answer::Granted(_) => ran.answer[3].parse().unwrap(),
                    Answer::Busy if on_busy != OnBusy::Fail => ran.answer[4].parse().unwrap(),
                    _ => 0,
                },
            }
        }
        Kind::Confirm => Script::Confirm {
            owner,
            presented: number(3),
            token: number(4),
            confirmed: answer == Answer::Confirmed,
        },
        Kind::Renew => Script::Renew {
            owner,
            ttl: number(3),
            stop: number(4),
            answer,
        },
        Kind::Release => Script::Release {
            owner,
            stop: arguments[3].parse().ok(),
            released,
        },
        Kind::Born => Script::Born {
            open: arguments[3].parse().ok(),
            is_new: ran.answer[0] == "new",
            since: ran.answer[3].parse().unwrap(),
        },
    };
    Run {
        at: ran.at,
        node,
        proposal: number(arguments.len() - 3),
        place: number(arguments.len() - 2),
        script,
        push: ran.push.clone(),
        unheard: ran.unheard.clone(),
        swept: ran.swept.clone(),
    }
}

fn answer(answer: &[String]) -> Answer<u64> {
    match &*answer[0] {
        "granted" => Answer::Granted(answer[2].parse().unwrap()),
        "busy" => Answer::Busy,
        "young" => Answer::Young,
        "late" => Answer::Late,
        "confirmed" => Answer::Confirmed,
        "renewed" => Answer::Renewed,
        "released" => Answer::Released,
        // Not an answer that is compared.
        "new" | "open" | "lost" => Answer::Lost,
        other => panic!("{other}"),
    }
}

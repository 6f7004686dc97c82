//! The script of a node of several servers beside the model that the simulation has of a node.

use std::collections::BTreeMap;

use fastrand::Rng;
use lock_core::{Mode, OwnerId};
use lock_redis::redis::aio::MultiplexedConnection;
use lock_redis::redis::{self, FromRedisValue, RedisResult, Value};

use super::node_model::{Acquire, Answer, Lock, MAX_TTL, RETENTION, Stored};
use super::stage::{eval, flag, now, text, word};
use super::texts::{Bug, NODE, bugs, script};
use crate::server::{Ask as _, Server, start};

const KEYS: [&str; 7] = [
    "{t:n}:lock",
    "{t:n}:fence",
    "{t:n}:order",
    "{t:n}:waiters",
    "{t:n}:holders",
    "{t:n}:records",
    "{t:}:born",
];
const OWNERS: usize = 4;
const RUNS: u64 = 60;
const STEPS: usize = 60;
/// Longer than a run takes, in milliseconds.
const TTL: u64 = 100_000;
/// By how much two ends of an exclusive hold may differ, in milliseconds: the server counts from when it stores it.
const INEXACT: u64 = 2_000;

/// What is asked of the node, or happens to it.
#[derive(Clone, Copy, Debug)]
enum Step {
    Acquire(Acquire),
    /// The owner, the token that it presents and the one that it shall have, and whether a majority has that.
    Confirm(OwnerId, u64, u64, bool),
    /// The owner, the client and its last attempt, and whether the claim goes on waiting.
    Release(OwnerId, u64, u64, bool),
    /// Lets it grant at once if it has its data since then, in microseconds.
    Open(u64),
    /// The hold of the owner ends.
    Expire(OwnerId),
    Empty,
    Restart,
    /// It has had its data for so long, in microseconds.
    Grow(u64),
}

/// A real script and the model.
struct Node {
    plain: MultiplexedConnection,
    script: String,
    model: Stored,
    /// What stands for the run id of its process, and whether a request that looks at that is the first since it began or was emptied.
    process: u64,
    is_new: bool,
}

impl Node {
    async fn new(server: &Server, script: &str) -> Self {
        let mut node = Self {
            plain: server.plain().await,
            script: script.to_owned(),
            model: Stored::new(0, false, None),
            process: 1,
            is_new: true,
        };
        let _: () = node.plain("FLUSHALL").await;
        node
    }

    fn step(&self, random: &mut Rng, owners: &[OwnerId], attempts: u64) -> Step {
        let any = owners[random.usize(..owners.len())];
        let held = self.model.locks.get(random.usize(..self.model.locks.len().max(1)));
        let held = held.filter(|_| random.f32() < 0.6);
        let owner = held.map_or(any, |lock| lock.owner);
        let (token, attempt) = held.map_or((1, attempts), |lock| (lock.token, lock.attempt));
        let (client, earlier) = (random.u64(..2), attempt.saturating_sub(1));
        match random.u32(..100) {
            0..50 => Step::Acquire(Acquire {
                owner,
                mode: [Mode::Exclusive, Mode::Shared, Mode::Shared][random.usize(..3)],
                client,
                attempt: if random.f32() < 0.2 { earlier } else { attempts },
                ttl: TTL,
                stop: now() + TTL * [100, 100, 100, 70, 30][random.usize(..5)] / 100,
                // Of the clock, above it or some time ago.
                proposal: now() * 1000 + 1_000_000 - [0, 1_001_000, 1_001_000, 1_400_000, 1_700_000][random.usize(..5)],
                known: if random.bool() { token } else { 0 },
                announced: [0, 0, 30_000][random.usize(..3)],
            }),
            50..64 => {
                let presented = if random.f32() < 0.8 { token } else { token + 1 };
                let raised = token + [0, 1, 1000, 10_000_000_000][random.usize(..4)];
                Step::Confirm(owner, presented, raised, random.bool())
            }
            64..78 => {
                let last = [attempt, earlier, attempts][random.usize(..3)];
                Step::Release(owner, client, last, random.bool())
            }
            78..84 => Step::Open(self.model.since.saturating_sub(random.u64(..2))),
            84..90 => Step::Expire(owner),
            90..92 => Step::Empty,
            92..94 => Step::Restart,
            _ => Step::Grow([MAX_TTL - 1_000_000, MAX_TTL, RETENTION][random.usize(..3)]),
        }
    }

    /// Takes the step on both. An error says how they differ.
    async fn take(&mut self, step: Step) -> Result<(), String> {
        match step {
            Step::Acquire(ask) => {
                let mode = if ask.mode == Mode::Shared { "s" } else { "x" };
                let numbers = [
                    ask.ttl,
                    ask.stop,
                    ask.client,
                    ask.attempt,
                    ask.proposal,
                    ask.known,
                    ask.announced,
                ];
                let [ttl, stop, client, attempt, proposal, known, announced] =
                    &numbers.map(|number| number.to_string());
                let arguments = [
                    "acquire", ttl, stop, client, attempt, "7 host", proposal, mode, known, announced,
                ];
                let (clock, found) = self.ask(ask.owner, &arguments).await?;
                self.begin(clock);
                let expected = self.model.acquire(clock, &ask);
                self.compare(clock, expected, found).await
            }
            Step::Confirm(owner, presented, token, is_agreed) => {
                let [raised, to] = &[presented, token].map(|token| token.to_string());
                let (clock, found) = self.ask(owner, &["confirm", raised, to, flag(is_agreed)]).await?;
                let expected = self.model.confirm(clock, owner, presented, token, is_agreed);
                self.compare(clock, expected, found).await
            }
            Step::Release(owner, client, last, goes_on) => {
                let [by, upto] = &[client, last].map(|number| number.to_string());
                let (clock, found) = self.ask(owner, &["release", by, upto, flag(goes_on)]).await?;
                let expected = self.model.release(clock, owner, client, last, goes_on);
                self.compare(clock, expected, found).await
            }
            Step::Open(since) => {
                let (clock, found) = self.ask(OwnerId::random(), &["born", &since.to_string()]).await?;
                self.begin(clock);
                self.model.is_open |= since == self.model.since;
                let expected = if self.model.is_open { "open" } else { "new" };
                let is_so = found.starts_with(expected);
                is_so.then_some(()).ok_or(format!("expected {expected}, found {found}"))
            }
            Step::Expire(owner) => {
                self.model.locks.retain(|lock| lock.owner != owner);
                let value: Option<String> = self.plain("GET {t:n}:lock").await;
                if value.is_some_and(|value| value.contains(&owner.to_string())) {
                    let _: Value = self.plain("DEL {t:n}:lock").await;
                }
                let end = format!("ZADD {{t:n}}:holders XX {} {owner}", now() - 1);
                let _: Value = self.plain(&end).await;
                Ok(())
            }
            Step::Empty => {
                let _: () = self.plain("FLUSHALL").await;
                self.model.restart(0, true);
                self.is_new = true;
                Ok(())
            }
            Step::Restart => {
                self.process += 1;
                self.is_new = true;
                Ok(())
            }
            Step::Grow(age) => {
                self.model.since = now() * 1000 - age;
                self.is_new = false;
                let state = if self.model.is_open { "open" } else { "new" };
                let (since, process, max_ttl) = (self.model.since, self.process, MAX_TTL / 1000);
                let born = format!("{state} {since} {process} 3 {max_ttl}");
                let set = redis::cmd("SET").arg(KEYS[6]).arg(born).clone();
                set.exec_async(&mut self.plain).await.unwrap();
                Ok(())
            }
        }
    }

    /// A first request at that time (us) finds out that the process has begun anew, or has lost its data.
    fn begin(&mut self, clock: u64) {
        if std::mem::take(&mut self.is_new) {
            self.model.restart(clock, false);
        }
    }

    /// Runs the script: the node's clock (us) as it says, and the words of its answer.
    async fn ask(&mut self, owner: OwnerId, arguments: &[&str]) -> Result<(u64, String), String> {
        let (process, max_ttl) = (self.process.to_string(), (MAX_TTL / 1000).to_string());
        let arguments = [arguments, &["3", &process, &max_ttl]].concat();
        let command = eval(&self.script, &KEYS, &owner.to_string(), &arguments);
        let answer: RedisResult<Vec<Value>> = command.query_async(&mut self.plain).await;
        match answer {
            Ok(fields) => {
                let mut fields: Vec<_> = fields.iter().map(text).collect();
                let clock = fields.remove(1).parse().unwrap();
                Ok((clock, fields.join(" ")))
            }
            error => Err(word(error)),
        }
    }

    async fn plain<T: FromRedisValue>(&mut self, words: &str) -> T {
        let mut command = redis::Cmd::new();
        command.arg(words.split(' ').collect::<Vec<_>>());
        command.query_async(&mut self.plain).await.unwrap()
    }

    /// Compares the answer, and what is stored.
    async fn compare(&mut self, clock: u64, expected: Answer, found: String) -> Result<(), String> {
        let words: Vec<_> = found.split(' ').collect();
        let expected = match expected {
            Answer::Granted { token, life } => format!("granted {token} {life}"),
            // The rest is about the holder.
            Answer::Busy(Some(owner)) if words.contains(&&*owner.to_string()) && words[0] == "busy" => found.clone(),
            Answer::Busy(None) if words.len() == 3 => format!("busy {} ", words[1]),
            Answer::Young(left) => format!("young {left}"),
            Answer::Passed(last) => format!("passed {last}"),
            other => format!("{other:?}").to_lowercase(),
        };
        if expected != found {
            return Err(format!("expected {expected}, found {found}"));
        }
        let (expected, found) = (self.expected(clock / 1000), self.stored(clock / 1000).await);
        let is_near = |key: &String| expected.get(key).is_some_and(|end| end.abs_diff(found[key]) < INEXACT);
        match expected.len() == found.len() && found.keys().all(is_near) {
            true => Ok(()),
            false => Err(format!("expected {expected:?}, found {found:?}")),
        }
    }

    /// What should be stored, and until when.
    fn expected(&mut self, now: u64) -> BTreeMap<String, u64> {
        let lock = |lock: &Lock| {
            let (owner, mode) = (lock.owner, if lock.mode == Mode::Shared { "1s" } else { "1" });
            let (token, client, attempt) = (lock.token, lock.client, lock.attempt);
            (format!("{mode} {owner} {token} {client}#{attempt}"), lock.until)
        };
        let waits = self.model.announced.iter().filter(|(_, until)| **until > now);
        let waits = waits.map(|(owner, until)| (format!("{owner} waits"), *until));
        let counter = self.model.counter.map(|counter| (format!("counter {counter}"), 0));
        self.model.locks.iter().map(lock).chain(waits).chain(counter).collect()
    }

    async fn stored(&mut self, now: u64) -> BTreeMap<String, u64> {
        let mut stored = BTreeMap::new();
        let shown = |record: String| {
            let fields: Vec<_> = record.split(' ').collect();
            format!("{} {} {} {}", fields[0], fields[1], fields[2], fields[4])
        };
        if let Some(value) = self.plain::<Option<String>>("GET {t:n}:lock").await {
            stored.insert(shown(value), self.plain("PEXPIRETIME {t:n}:lock").await);
        }
        let mut records: BTreeMap<String, String> = self.plain("HGETALL {t:n}:records").await;
        for (key, kind) in [("holders", ""), ("order", " waits")] {
            let ends: Vec<(String, f64)> = self.plain(&format!("ZRANGE {{t:n}}:{key} 0 -1 WITHSCORES")).await;
            for (owner, end) in ends.into_iter().filter(|(_, end)| *end as u64 > now) {
                let record = records.remove(&owner).filter(|_| kind.is_empty()).map(shown);
                stored.insert(record.unwrap_or(format!("{owner}{kind}")), end as u64);
            }
        }
        let counter: Option<u64> = self.plain("GET {t:n}:fence").await;
        stored.extend(counter.map(|counter| (format!("counter {counter}"), 0)));
        stored
    }
}

/// Random steps in each run until the script and the model differ; the difference, if there is one.
async fn runs(server: &Server, bug: Option<&Bug>) -> Result<(), String> {
    let text = script(NODE, bug);
    for seed in 0..RUNS {
        let mut random = Rng::with_seed(seed);
        let owners = [(); OWNERS].map(|()| OwnerId::random());
        let mut node = Node::new(server, &text).await;
        let mut history = String::new();
        for attempts in 1..=STEPS as u64 {
            let step = node.step(&mut random, &owners, attempts);
            history += &format!("{step:?}\n");
            let taken = node.take(step).await;
            taken.map_err(|why| format!("{why}, with seed {seed} after\n{history}"))?;
        }
    }
    Ok(())
}

#[tokio::test]
async fn the_script_of_a_node_does_what_the_model_does() {
    runs(&start().await, None).await.unwrap();
}

#[tokio::test]
async fn every_bug_planted_in_the_script_of_a_node_is_caught() {
    let server = start().await;
    let mut escaped = Vec::new();
    for bug in bugs().iter().filter(|bug| bug.file == NODE) {
        match runs(&server, Some(bug)).await {
            Err(why) => println!("{}: {}", bug.what, why.lines().next().unwrap_or_default()),
            Ok(()) => escaped.push(bug.what),
        }
    }
    assert_eq!(escaped, Vec::<&str>::new());
}

//! The scripts on a server, and clients that call them.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use lock_redis::redis::aio::MultiplexedConnection;
use lock_redis::redis::{self, AsyncConnectionConfig, Client, Cmd, PushInfo, PushKind, RedisResult, Value};
use tokio::sync::mpsc;

use super::model::{CLIENTS, FADED, Outcome, Owner, TTL, client_of, name_of, tokens_wanted};
use super::step::Step;
use super::texts::{Bug, script};
use crate::server::{Ask, HANG_LIMIT, Server};

const KEYS: [&str; 6] = [
    "{t:n}:lock",
    "{t:n}:fence",
    "{t:n}:order",
    "{t:n}:waiters",
    "{t:n}:holders",
    "{t:n}:records",
];
/// For how long counters are kept, in milliseconds.
const RETENTION: u64 = 600_000;
const CHANNELS: &str = "t:client:";

/// The texts of the scripts, one of which may have a bug.
struct Scripts {
    acquire: String,
    renew: String,
    renew_share: String,
    release: String,
}

pub(super) struct Stage {
    address: Client,
    scripts: Scripts,
    /// A connection that is no client's.
    plain: MultiplexedConnection,
    clients: Vec<Option<Caller>>,
}

struct Caller {
    con: MultiplexedConnection,
    told: mpsc::UnboundedReceiver<PushInfo>,
}

impl Stage {
    pub(super) async fn new(server: &Server, bug: Option<&Bug>) -> Self {
        let [acquire, renew, renew_share, release] =
            ["acquire.lua", "renew.lua", "renew_share.lua", "release.lua"].map(|name| script(name, bug));
        Self {
            plain: server.plain().await,
            address: Client::open(format!("{}/?protocol=resp3", server.url())).unwrap(),
            scripts: Scripts {
                acquire,
                renew,
                renew_share,
                release,
            },
            clients: (0..CLIENTS).map(|_| None).collect(),
        }
    }

    pub(super) async fn clear(&mut self) {
        let _: () = self.plain("FLUSHALL").await;
        for client in 0..CLIENTS {
            self.connect(client).await;
        }
    }

    /// Takes the step, and looks at what it came to.
    pub(super) async fn take(&mut self, step: Step) -> Outcome {
        let mut outcome = Outcome::default();
        match step {
            Step::Acquire(ask) => {
                let stop = (now() + TTL - TTL * ask.late / 100).to_string();
                let (ttl, client) = (TTL.to_string(), client_of(ask.owner).to_string());
                let (wait, tokens) = (flag(ask.wait), tokens_wanted(ask.owner).to_string());
                let arguments = [&*ttl, &stop, "7", &client, "i", wait, &tokens, ask.mode];
                let answer = self.run(ask.owner, self.scripts.acquire.clone(), &arguments).await;
                attempted(ask.owner, answer, &mut outcome);
            }
            Step::Renew(renew) => {
                let (ttl, stop) = (TTL.to_string(), stop(renew.late));
                let arguments = [&*ttl, &stop, flag(renew.reserves), ""];
                let (script, keys) = match renew.shares {
                    true => (&self.scripts.renew_share, &KEYS[4..]),
                    false => (&self.scripts.renew, &KEYS[..1]),
                };
                let command = eval(script, keys, &name_of(renew.owner), &arguments);
                outcome.answer = word(self.send(renew.owner, command).await);
            }
            Step::Reserve(reserve) => {
                let (length, stop) = ((TTL * reserve.length / 100).to_string(), stop(reserve.late));
                let value: Option<String> = self.plain("GET {t:n}:lock").await;
                let token = value.as_deref().and_then(|value| value.split(' ').nth(2));
                let token = token.filter(|_| !reserve.old).unwrap_or("1");
                let (script, arguments) = match reserve.ends {
                    true => (&self.scripts.release, &[&*length, &stop][..]),
                    false => (&self.scripts.renew, &[&*length, &stop, "1", token][..]),
                };
                outcome.answer = word(self.run(reserve.owner, script.clone(), arguments).await);
            }
            Step::Release(owner) => {
                outcome.answer = word(self.run(owner, self.scripts.release.clone(), &["0", "0"]).await);
            }
            Step::ForceRelease => {
                let command = eval(&self.scripts.release, &KEYS, "*", &["0", "0"]);
                outcome.answer = word(command.query_async(&mut self.plain).await);
            }
            Step::Expire(owner) => {
                let _: Value = self.plain("DEL {t:n}:lock").await;
                self.end(owner, now() - 1).await;
            }
            Step::Age(owner) => {
                let _: Value = self.plain(&format!("PEXPIRE {{t:n}}:lock {}", TTL / 10)).await;
                self.end(owner, now() + TTL / 10).await;
            }
            Step::Fade(owner) => self.fade(&name_of(owner)).await,
            Step::LoseCounter => self.plain("DEL {t:n}:fence").await,
            Step::AdvanceCounter => {
                // Ahead of the clock, and of what was set before.
                let last: Option<String> = self.plain("GET {t:n}:fence").await;
                let last = last.and_then(|last| last.parse().ok()).unwrap_or(0);
                let ahead = (now() * 1000 + 1_000_000_000).max(last + 1_000_000);
                outcome.counter = Some(ahead);
                self.plain(&format!("SET {{t:n}}:fence {ahead}")).await
            }
            Step::SpoilCounter => self.plain("SET {t:n}:fence x").await,
            Step::SpoilLock => drop(self.plain::<Value>("SET {t:n}:lock foreign NX").await),
            Step::Kill(client) => self.kill(client).await,
        }
        self.hear(&mut outcome).await;
        self.look(&mut outcome).await;
        if outcome.holds.contains_key("foreign") && !matches!(step, Step::SpoilLock) {
            let _: () = self.plain("DEL {t:n}:lock").await;
        }
        outcome
    }

    async fn run(&mut self, owner: Owner, script: String, arguments: &[&str]) -> RedisResult<Vec<Value>> {
        let script = eval(&script, &KEYS, &name_of(owner), arguments);
        self.send(owner, script).await
    }

    async fn send(&mut self, owner: Owner, command: Cmd) -> RedisResult<Vec<Value>> {
        self.connect(client_of(owner)).await;
        let caller = self.clients[client_of(owner)].as_mut().unwrap();
        command.query_async(&mut caller.con).await
    }

    /// Has a hold that does not exclude others end then, if it would end later.
    async fn end(&mut self, owner: Owner, at: u64) {
        let set = format!("ZADD {{t:n}}:holders XX LT {at} {}", name_of(owner));
        let _: Value = self.plain(&set).await;
    }

    async fn connect(&mut self, client: usize) {
        if self.clients[client].is_some() {
            return;
        }
        let (tell, told) = mpsc::unbounded_channel();
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(HANG_LIMIT))
            .set_response_timeout(Some(HANG_LIMIT))
            .set_push_sender(tell);
        let mut con = self
            .address
            .get_multiplexed_async_connection_with_config(&config)
            .await
            .unwrap();
        con.subscribe(format!("{CHANNELS}{client}")).await.unwrap();
        self.clients[client] = Some(Caller { con, told });
    }

    /// Leaves that entry little of its life.
    async fn fade(&mut self, owner: &str) {
        let entry: Option<String> = self.plain(&format!("HGET {{t:n}}:waiters {owner}")).await;
        let Some(entry) = entry else { return };
        let mut fields: Vec<_> = entry.split(' ').collect();
        let end = (now() + TTL * FADED / 100).to_string();
        fields[1] = &end;
        let set = redis::cmd("HSET").arg(KEYS[3]).arg(owner).arg(fields.join(" ")).clone();
        let _: Value = set.query_async(&mut self.plain).await.unwrap();
    }

    async fn kill(&mut self, client: usize) {
        self.clients[client] = None;
        let ask = format!("PUBSUB NUMSUB {CHANNELS}{client}");
        while self.plain::<(String, u32)>(&ask).await.1 > 0 {
            tokio::task::yield_now().await;
        }
    }

    /// What the clients were told meanwhile: it comes before the answer to whatever is asked now.
    async fn hear(&mut self, outcome: &mut Outcome) {
        for (client, caller) in self.clients.iter_mut().enumerate() {
            let Some(caller) = caller else { continue };
            redis::cmd("PING").exec_async(&mut caller.con).await.unwrap();
            while let Ok(push) = caller.told.try_recv() {
                if push.kind != PushKind::Message {
                    continue;
                }
                let message = text(&push.data[1]);
                let mut words = message.split(' ');
                let (kind, owner) = (words.next().unwrap(), words.next().unwrap());
                if kind == "granted" {
                    let mut number = |at| words.nth(at).and_then(|word| word.parse().ok());
                    let (last, tokens) = (number(0), number(2));
                    let owner = owner[1..].parse().unwrap();
                    outcome.tokens.push((owner, block(owner, last, tokens)));
                }
                outcome.told.entry(client).or_default().push(format!("{kind} {owner}"));
            }
        }
        // Those of a forced release come first, and in no order.
        for told in outcome.told.values_mut() {
            let taken = told.iter().take_while(|told| told.starts_with("taken")).count();
            told[..taken].sort_unstable();
        }
    }

    /// What is stored now.
    async fn look(&mut self, outcome: &mut Outcome) {
        let value: Option<String> = self.plain("GET {t:n}:lock").await;
        let percent = |left: u64| (left * 10).div_ceil(TTL) * 10;
        match value.as_deref().map(|value| value.split(' ').nth(1)) {
            Some(Some(owner)) => {
                let left = self.plain("PTTL {t:n}:lock").await;
                outcome.holds.insert(format!("x {owner}"), percent(left));
            }
            Some(None) => drop(outcome.holds.insert("foreign".to_owned(), 0)),
            None => {}
        }
        let ends: Vec<(String, f64)> = self.plain("ZRANGE {t:n}:holders 0 -1 WITHSCORES").await;
        let mut records: BTreeMap<String, String> = self.plain("HGETALL {t:n}:records").await;
        let now = now();
        for (owner, end) in ends {
            let record = records.remove(&owner).expect("each hold has a record");
            let (format, rest) = record.split_once(' ').unwrap();
            assert!(rest.starts_with(&format!("{owner} ")), "{record}");
            if end as u64 > now {
                outcome
                    .holds
                    .insert(format!("{} {owner}", &format[1..]), percent(end as u64 - now));
            }
        }
        assert!(records.is_empty(), "each record is of a hold: {records:?}");
        let order: Vec<String> = self.plain("ZRANGE {t:n}:order 0 -1").await;
        let mut known: Vec<String> = self.plain("HKEYS {t:n}:waiters").await;
        outcome.queue = order.iter().map(|owner| owner[1..].parse().unwrap()).collect();
        let mut sorted = order;
        sorted.sort_unstable();
        known.sort_unstable();
        assert_eq!(sorted, known, "each waiter has a place and an entry");
    }

    async fn plain<T: redis::FromRedisValue>(&mut self, words: &str) -> T {
        let mut command = Cmd::new();
        command.arg(words.split(' ').collect::<Vec<_>>());
        command.query_async(&mut self.plain).await.unwrap()
    }
}

/// When a request is too late by the server's clock: half a ttl from now, or already.
fn stop(late: bool) -> String {
    if late { now() - 1 } else { now() + TTL / 2 }.to_string()
}

/// What an acquire was answered.
fn attempted(owner: Owner, answer: RedisResult<Vec<Value>>, outcome: &mut Outcome) {
    let fields = match answer {
        Ok(fields) => fields,
        Err(error) => return outcome.answer = word(Err(error)),
    };
    let mut said = text(&fields[0]);
    if said == "granted" {
        let number = |at: usize| fields.get(at).and_then(|field| text(field).parse().ok());
        outcome.token = Some(block(owner, number(2), number(4)));
    }
    if said == "busy" && text(&fields[5]) == "0" {
        said = "busy, first".to_owned();
    }
    if said == "mode" {
        said = format!("mode {}", text(&fields[2]));
    }
    outcome.answer = said;
}

/// From the first token to the last, or zeros if they are more than were wanted. A grant that does not say how many it has has one.
fn block(owner: Owner, last: Option<u64>, tokens: Option<u64>) -> (u64, u64) {
    match (last, tokens.unwrap_or(1)) {
        (Some(last), tokens) if tokens <= tokens_wanted(owner) => (last + 1 - tokens, last),
        _ => (0, 0),
    }
}

pub(super) fn flag(is_set: bool) -> &'static str {
    if is_set { "1" } else { "0" }
}

pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64
}

pub(super) fn eval(script: &str, keys: &[&str], owner: &str, arguments: &[&str]) -> Cmd {
    let mut eval = redis::cmd("EVAL");
    eval.arg(script)
        .arg(keys.len())
        .arg(keys)
        .arg(CHANNELS)
        .arg(RETENTION)
        .arg(owner)
        .arg(arguments);
    eval
}

/// The first word of the answer.
pub(super) fn word(answer: RedisResult<Vec<Value>>) -> String {
    match answer {
        Ok(fields) => text(&fields[0]),
        Err(error) if error.to_string().contains("foreign value") => "foreign".to_owned(),
        Err(error) => error.to_string(),
    }
}

pub(super) fn text(value: &Value) -> String {
    redis::from_redis_value::<String>(value.clone()).unwrap_or_default()
}

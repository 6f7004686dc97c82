//! The scripts on a server, and clients who call them.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use lock_redis::redis::aio::MultiplexedConnection;
use lock_redis::redis::{self, AsyncConnectionConfig, Client, Cmd, PushInfo, PushKind, RedisResult, Value};
use tokio::sync::mpsc;

use super::model::{CLIENTS, FADED, Outcome, Owner, Step, TTL, client_of, name_of, tokens_wanted};
use crate::server::{HANG_LIMIT, Server};

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
pub(crate) struct Scripts {
    pub(crate) acquire: String,
    renew: String,
    renew_share: String,
    pub(crate) release: String,
}

impl Scripts {
    pub(crate) fn real() -> Self {
        const PRELUDE: &str = include_str!("../../../src/scripts/prelude.lua");
        const SHARES: &str = include_str!("../../../src/scripts/shares.lua");
        const QUEUE: &str = include_str!("../../../src/scripts/queue.lua");
        let whole = |body: &str| {
            let body = body.replace("-- include shares.lua\n", SHARES);
            PRELUDE.to_owned() + &body.replace("-- include queue.lua\n", QUEUE)
        };
        Self {
            acquire: whole(include_str!("../../../src/scripts/acquire.lua")),
            renew: whole(include_str!("../../../src/scripts/renew.lua")),
            renew_share: whole(include_str!("../../../src/scripts/renew_share.lua")),
            release: whole(include_str!("../../../src/scripts/release.lua")),
        }
    }

    /// With `from` replaced by `to`, wherever it is.
    pub(crate) fn with(from: &str, to: &str) -> Self {
        let mut scripts = Self::real();
        let mut found = false;
        let Self {
            acquire,
            renew,
            renew_share,
            release,
        } = &mut scripts;
        for text in [acquire, renew, renew_share, release] {
            assert!(text.matches(from).count() <= 1, "not the only one: {from}");
            found |= text.contains(from);
            *text = text.replace(from, to);
        }
        assert!(found, "no script has {from}");
        scripts
    }
}

pub(crate) struct Stage {
    address: Client,
    scripts: Scripts,
    /// A connection that is nobody's.
    plain: MultiplexedConnection,
    clients: Vec<Option<Caller>>,
}

struct Caller {
    con: MultiplexedConnection,
    told: mpsc::UnboundedReceiver<PushInfo>,
}

impl Stage {
    pub(crate) async fn new(server: &Server, scripts: Scripts) -> Self {
        let address = Client::open(format!("redis://127.0.0.1:{}/?protocol=resp3", server.port())).unwrap();
        Self {
            plain: server.plain().await,
            address,
            scripts,
            clients: (0..CLIENTS).map(|_| None).collect(),
        }
    }

    pub(crate) async fn clear(&mut self) {
        let _: () = self.plain("FLUSHALL").await;
        for client in 0..CLIENTS {
            self.connect(client).await;
        }
    }

    /// Takes the step, and looks at what it came to.
    pub(crate) async fn take(&mut self, step: &Step) -> Outcome {
        let mut outcome = Outcome::default();
        match step {
            Step::Acquire {
                owner,
                mode,
                wait,
                late,
            } => {
                let stop = (now() + TTL - TTL * late / 100).to_string();
                let wait = if *wait { "1" } else { "0" };
                let (ttl, client, tokens) = (TTL.to_string(), client_name(*owner), tokens_wanted(*owner).to_string());
                let arguments = [&*ttl, &stop, "7", &client, "i", wait, &tokens, mode];
                let answer = self.run(*owner, self.scripts.acquire.clone(), &arguments).await;
                attempted(*owner, answer, &mut outcome);
            }
            Step::Renew {
                owner,
                late,
                reserves,
                shares,
            } => {
                let (ttl, stop) = (TTL.to_string(), stop(*late));
                let arguments = [&*ttl, &stop, if *reserves { "1" } else { "0" }, ""];
                let (script, keys) = match shares {
                    true => (&self.scripts.renew_share, &KEYS[4..]),
                    false => (&self.scripts.renew, &KEYS[..1]),
                };
                let renew = eval(script, keys, &name_of(*owner), &arguments);
                let answer = self.send(*owner, renew).await;
                outcome.answer.push(word(answer, 0));
            }
            Step::Reserve {
                owner,
                length,
                late,
                old,
                ends,
            } => {
                let (length, stop) = ((TTL * length / 100).to_string(), stop(*late));
                let value: Option<String> = self.plain("GET {t:n}:lock").await;
                let token = value
                    .as_deref()
                    .and_then(|value| value.split(' ').nth(2))
                    .unwrap_or("1");
                let token = if *old { "1" } else { token };
                let answer = match ends {
                    true => self.run(*owner, self.scripts.release.clone(), &[&length, &stop]).await,
                    false => {
                        let arguments = [&*length, &stop, "1", token];
                        self.run(*owner, self.scripts.renew.clone(), &arguments).await
                    }
                };
                outcome.answer.push(word(answer, 0));
            }
            Step::Release(owner) => {
                let answer = self.run(*owner, self.scripts.release.clone(), &["0", "0"]).await;
                outcome.answer.push(word(answer, 0));
            }
            Step::ForceRelease => {
                let command = eval(&self.scripts.release, &KEYS, "*", &["0", "0"]);
                let answer = command.query_async(&mut self.plain).await;
                outcome.answer.push(word(answer, 0));
            }
            Step::Expire(owner) => {
                let _: Value = self.plain("DEL {t:n}:lock").await;
                self.end(*owner, now() - 1).await;
            }
            Step::Age(owner) => {
                let _: Value = self.plain(&format!("PEXPIRE {{t:n}}:lock {}", TTL / 10)).await;
                self.end(*owner, now() + TTL / 10).await;
            }
            Step::Fade(owner) => self.fade(&name_of(*owner)).await,
            Step::LoseCounter => self.plain("DEL {t:n}:fence").await,
            Step::AdvanceCounter => {
                // Ahead of the clock, and of what was set before.
                let ahead = (now() * 1000 + 1_000_000_000).max(self.last_token().await + 1_000_000);
                outcome.counter = Some(ahead);
                self.plain(&format!("SET {{t:n}}:fence {ahead}")).await
            }
            Step::SpoilCounter => self.plain("SET {t:n}:fence x").await,
            Step::SpoilLock => {
                let set = redis::cmd("SET").arg(KEYS[0]).arg("foreign").arg("NX").clone();
                let _: Value = set.query_async(&mut self.plain).await.unwrap();
            }
            Step::Kill(client) => self.kill(*client).await,
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

    async fn last_token(&mut self) -> u64 {
        let last: Option<String> = self.plain("GET {t:n}:fence").await;
        last.and_then(|last| last.parse().ok()).unwrap_or(0)
    }

    async fn plain<T: redis::FromRedisValue>(&mut self, words: &str) -> T {
        let mut command = Cmd::new();
        words.split(' ').for_each(|word| {
            command.arg(word);
        });
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
        Err(error) => return outcome.answer.push(word(Err(error), 0)),
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
    outcome.answer.push(said);
}

/// From the first token to the last, or zeros if they are more than were wanted. A grant that does not say how many it has has one.
fn block(owner: Owner, last: Option<u64>, tokens: Option<u64>) -> (u64, u64) {
    match (last, tokens.unwrap_or(1)) {
        (Some(last), tokens) if tokens <= tokens_wanted(owner) => (last + 1 - tokens, last),
        _ => (0, 0),
    }
}

fn client_name(owner: Owner) -> String {
    client_of(owner).to_string()
}

pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64
}

fn eval(script: &str, keys: &[&str], owner: &str, arguments: &[&str]) -> Cmd {
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

fn word(answer: RedisResult<Vec<Value>>, at: usize) -> String {
    match answer {
        Ok(fields) => text(&fields[at]),
        Err(error) if error.to_string().contains("foreign value") => "foreign".to_owned(),
        Err(error) => error.to_string(),
    }
}

fn text(value: &Value) -> String {
    redis::from_redis_value::<String>(value.clone()).unwrap_or_default()
}

//! Puts together what the proxy and `MONITOR` have seen of each run of a script.

use std::collections::HashMap;

use lock_redis::redis::{Script, Value};
use models::redis_queue::server::Push;

use crate::frames::{fields, text};
use crate::monitor::Command;
use crate::proxy::{Exchange, Pushed, Record};

/// Which script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Acquire,
    Release,
    Renew,
}

/// How the text of each script ends.
const ENDS: [(Kind, &str); 3] = [
    (
        Kind::Acquire,
        include_str!("../../../lock-redis/src/scripts/acquire.lua"),
    ),
    (
        Kind::Release,
        include_str!("../../../lock-redis/src/scripts/release.lua"),
    ),
    (Kind::Renew, include_str!("../../../lock-redis/src/scripts/renew.lua")),
];

/// One run of a script.
pub(crate) struct Ran {
    pub(crate) kind: Kind,
    /// The server's clock.
    pub(crate) at: u64,
    pub(crate) keys: Vec<String>,
    pub(crate) arguments: Vec<String>,
    pub(crate) answer: Vec<String>,
    pub(crate) push: Option<Push<String>>,
    pub(crate) push_delivered: bool,
    pub(crate) unheard: Vec<String>,
    pub(crate) swept: Vec<String>,
}

/// Every run on one server, in their order. Panics if what the proxy and `MONITOR` have seen does not fit together.
pub(crate) fn transcript(record: &Record, commands: &[Command]) -> Vec<Ran> {
    let kinds = kinds(&record.exchanges);
    let carried_out = record.exchanges.iter().filter(|exchange| !is_refused(&exchange.answer));
    let mut all: Vec<_> = carried_out.map(|exchange| ran(exchange, &kinds)).collect();
    all.sort_by_key(|ran| ran.at);
    let effects = effects(commands);
    assert_eq!(
        all.len(),
        effects.len(),
        "scripts that were answered, and that were run"
    );
    let mut published = HashMap::new();
    for (ran, effects) in all.iter_mut().zip(effects) {
        let call = [&ran.keys[..], &ran.arguments[..]].concat();
        assert_eq!(
            call, effects.call,
            "the scripts did not run in the order of their clocks"
        );
        ran.unheard = effects.unheard;
        ran.swept = effects.swept;
        if let Some(message) = effects.granted {
            ran.push = Some(push(&message));
            ran.push_delivered = record
                .pushes
                .iter()
                .any(|push| push.message == message && push.delivered);
            *published.entry(message).or_insert(0) += 1;
        }
    }
    let is_grant = |pushed: &&Pushed| pushed.message.starts_with("granted ");
    for pushed in record.pushes.iter().filter(is_grant) {
        assert_eq!(
            published.get(&pushed.message),
            Some(&1),
            "{} was pushed by one run",
            pushed.message
        );
    }
    all
}

/// The scripts, by hash and by text. Every server has got the text of every script that it ran.
fn kinds(exchanges: &[Exchange]) -> HashMap<String, Kind> {
    let texts = exchanges
        .iter()
        .filter(|exchange| exchange.request[0] == "EVAL")
        .map(|exchange| &exchange.request[1]);
    let mut kinds = HashMap::new();
    for text in texts {
        if !kinds.contains_key(text) {
            let (kind, _) = ENDS.iter().find(|(_, end)| text.ends_with(end)).unwrap();
            kinds.insert(Script::new(text).get_hash().to_owned(), *kind);
            kinds.insert(text.clone(), *kind);
        }
    }
    kinds
}

/// Whether the server did not know the script, or was not ready.
fn is_refused(answer: &Value) -> bool {
    match answer {
        Value::ServerError(error) => {
            assert!(["NOSCRIPT", "LOADING"].contains(&error.code()), "{error:?}");
            true
        }
        _ => false,
    }
}

fn ran(exchange: &Exchange, kinds: &HashMap<String, Kind>) -> Ran {
    let (kind, call) = (kinds[&exchange.request[1]], &exchange.request[3..]);
    let (keys, arguments) = call.split_at(exchange.request[2].parse().unwrap());
    let answer: Vec<_> = fields(&exchange.answer).unwrap().iter().map(text).collect();
    let at = answer[1].parse().unwrap();
    Ran {
        kind,
        at,
        keys: keys.to_vec(),
        arguments: arguments.to_vec(),
        answer,
        push: None,
        push_delivered: false,
        unheard: Vec::new(),
        swept: Vec::new(),
    }
}

/// What a message `granted OWNER TOKEN SENT LIFE` says.
fn push(message: &str) -> Push<String> {
    let words: Vec<_> = message.split(' ').collect();
    let number = |at: usize| words[at].parse().unwrap();
    Push {
        owner: words[1].to_owned(),
        token: number(2),
        sent: number(3),
        life: number(4),
    }
}

/// What one run of a script did, as `MONITOR` shows it.
struct Effects<'a> {
    /// The keys and arguments of the script.
    call: &'a [String],
    granted: Option<String>,
    unheard: Vec<String>,
    swept: Vec<String>,
}

fn effects(commands: &[Command]) -> Vec<Effects<'_>> {
    let mut all = Vec::new();
    let starts = (0..commands.len()).filter(|at| !commands[*at].by_script);
    for start in starts.filter(|at| commands[*at].words[0].starts_with("EVAL")) {
        let rest = &commands[start + 1..];
        let length = rest.iter().take_while(|command| command.by_script).count();
        let calls: Vec<_> = rest[..length].iter().map(|command| &command.words[..]).collect();
        // A script that the server does not know calls nothing.
        if !calls.is_empty() {
            all.push(effects_of(&commands[start].words[3..], &calls));
        }
    }
    all
}

fn effects_of<'a>(call: &'a [String], calls: &[&[String]]) -> Effects<'a> {
    let mut effects = Effects {
        call,
        granted: None,
        unheard: Vec::new(),
        swept: Vec::new(),
    };
    let mut sweeping = false;
    for (at, words) in calls.iter().enumerate() {
        let next = calls.get(at + 1).map_or("", |words| &words[0]);
        match &*words[0] {
            "PUBLISH" => {
                let owner = words[2].split(' ').nth(1).unwrap().to_owned();
                // What the scripts do if there was no receiver.
                let without = if words[2].starts_with("granted ") {
                    "DEL"
                } else {
                    "ZREM"
                };
                if next == without {
                    effects.unheard.push(owner);
                } else if without == "DEL" {
                    effects.granted = Some(words[2].clone());
                }
            }
            "ZREM" if sweeping => effects.swept.push(words[2].clone()),
            _ => {}
        }
        sweeping = words[0] == "HRANDFIELD" || sweeping && matches!(&*words[0], "ZREM" | "HDEL");
    }
    effects
}

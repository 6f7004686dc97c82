//! Histories as JSON, for whoever has one from elsewhere or wants to keep one.
//!
//! An object with `"format": "fencelock history 1"`, `"about"` (an object of texts) and `"records"`. A record is an object
//! with `at_ns`, `actor` (absent if nobody saw it), `name` (absent if it concerns all), `event`, and what the event has.

use std::io::{self, Write};
use std::time::Duration;

use lock_core::{FencingToken, LockName};
use serde_json::{Map, Value, json};

use super::{Event, History, Record};

const FORMAT: &str = "fencelock history 1";

/// Why a text is no history.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a history: {0}")]
pub struct Damaged(String);

impl History {
    /// Writes the history as JSON, with a record on each line.
    ///
    /// # Errors
    ///
    /// Those of `to`.
    pub fn write_json(&self, mut to: impl Write) -> io::Result<()> {
        let about: Map<_, _> = self
            .about
            .iter()
            .map(|(name, value)| (name.clone(), Value::from(value.as_str())))
            .collect();
        let about = Value::from(about);
        write!(to, "{{\"format\": \"{FORMAT}\", \"about\": {about}, \"records\": [")?;
        for (i, record) in self.records.iter().enumerate() {
            let comma = if i == 0 { "" } else { "," };
            write!(to, "{comma}\n{}", record.to_json())?;
        }
        to.write_all(b"\n]}\n")
    }

    /// Reads what [`write_json`](Self::write_json) has written, or somebody else in that format. Records may come in any
    /// order; their times give it.
    ///
    /// # Errors
    ///
    /// [`Damaged`], which names the first record that is wrong.
    pub fn from_json(text: &str) -> Result<Self, Damaged> {
        let whole: Value = serde_json::from_str(text).map_err(|error| Damaged(error.to_string()))?;
        if whole["format"] != FORMAT {
            return Err(Damaged(format!("its \"format\" is not {FORMAT:?}")));
        }
        let records = whole["records"]
            .as_array()
            .ok_or_else(|| Damaged("it has no array \"records\"".to_owned()))?;
        let records: Result<Vec<_>, _> = records
            .iter()
            .enumerate()
            .map(|(i, record)| {
                Record::from_json(record).map_err(|Damaged(why)| Damaged(format!("record {}: {why}", i + 1)))
            })
            .collect();
        let mut history = Self::new(records?);
        if let Some(about) = whole["about"].as_object() {
            let shown = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            history.about = about.iter().map(|(name, value)| (name.clone(), shown(value))).collect();
        }
        Ok(history)
    }
}

impl Record {
    /// The record as JSON.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let mut fields = Map::new();
        fields.insert("at_ns".to_owned(), nanos(self.at));
        if self.actor != Self::NOBODY {
            fields.insert("actor".to_owned(), json!(self.actor));
        }
        if let Some(name) = &self.name {
            fields.insert("name".to_owned(), json!(name.as_str()));
        }
        let (word, rest) = match &self.event {
            Event::Invoke => ("invoke", json!({})),
            Event::Ok(token) => ("ok", json!({ "token": token.get() })),
            Event::Busy => ("busy", json!({})),
            Event::Unknown => ("unknown", json!({})),
            Event::Held(token) => ("held", json!({ "token": token.get() })),
            Event::Lost(token) => ("lost", json!({ "token": token.get() })),
            Event::Released(token) => ("released", json!({ "token": token.get() })),
            Event::Refreshed { token, sent, ttl } => (
                "refreshed",
                json!({ "token": token.get(), "sent_ns": nanos(*sent), "ttl_ns": nanos(*ttl) }),
            ),
            Event::Write { token, accepted } => ("write", json!({ "token": token.get(), "accepted": accepted })),
            Event::Fault { what, overlap } => ("fault", json!({ "what": what, "overlap": overlap })),
            Event::Over { what } => ("over", json!({ "what": what })),
            Event::Clock { ahead_ns } => ("clock", json!({ "ahead_ns": ahead_ns })),
            Event::Healed => ("healed", json!({})),
        };
        fields.insert("event".to_owned(), json!(word));
        if let Value::Object(rest) = rest {
            fields.extend(rest);
        }
        Value::Object(fields)
    }

    /// A record that was written as JSON.
    ///
    /// # Errors
    ///
    /// [`Damaged`], which names the field that is missing or wrong.
    pub fn from_json(record: &Value) -> Result<Self, Damaged> {
        let event = match text(record, "event")? {
            "invoke" => Event::Invoke,
            "ok" => Event::Ok(token(record)?),
            "busy" => Event::Busy,
            "unknown" => Event::Unknown,
            "held" => Event::Held(token(record)?),
            "lost" => Event::Lost(token(record)?),
            "released" => Event::Released(token(record)?),
            "refreshed" => Event::Refreshed {
                token: token(record)?,
                sent: time(record, "sent_ns")?,
                ttl: time(record, "ttl_ns")?,
            },
            "write" => Event::Write {
                token: token(record)?,
                accepted: truth(record, "accepted")?,
            },
            "fault" => Event::Fault {
                what: text(record, "what")?.to_owned(),
                overlap: truth(record, "overlap")?,
            },
            "over" => Event::Over {
                what: text(record, "what")?.to_owned(),
            },
            "clock" => Event::Clock {
                ahead_ns: record["ahead_ns"]
                    .as_i64()
                    .ok_or_else(|| wrong("ahead_ns", "a whole number, or a negative one"))?,
            },
            "healed" => Event::Healed,
            other => return Err(Damaged(format!("there is no event {other:?}"))),
        };
        let of_all = matches!(event, Event::Fault { .. } | Event::Over { .. } | Event::Healed);
        let actor = match record.get("actor") {
            None if of_all => Self::NOBODY,
            _ => usize::try_from(number(record, "actor")?).map_err(|_| wrong("actor", "a number"))?,
        };
        let name = match record.get("name") {
            None if of_all || matches!(event, Event::Clock { .. }) => None,
            _ => Some(LockName::new(text(record, "name")?).map_err(|error| Damaged(error.to_string()))?),
        };
        Ok(Self::new(time(record, "at_ns")?, actor, name, event))
    }
}

fn nanos(time: Duration) -> Value {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).into()
}

fn number(record: &Value, field: &str) -> Result<u64, Damaged> {
    record[field].as_u64().ok_or_else(|| wrong(field, "a whole number"))
}

fn text<'a>(record: &'a Value, field: &str) -> Result<&'a str, Damaged> {
    record[field].as_str().ok_or_else(|| wrong(field, "a text"))
}

fn truth(record: &Value, field: &str) -> Result<bool, Damaged> {
    record[field].as_bool().ok_or_else(|| wrong(field, "true or false"))
}

fn time(record: &Value, field: &str) -> Result<Duration, Damaged> {
    number(record, field).map(Duration::from_nanos)
}

fn token(record: &Value) -> Result<FencingToken, Damaged> {
    FencingToken::new(number(record, "token")?).map_err(|error| Damaged(format!("\"token\" is {error}")))
}

fn wrong(field: &str, wanted: &str) -> Damaged {
    Damaged(format!("{field:?} has to be {wanted}"))
}

#[cfg(test)]
mod tests {
    use super::super::hand_made::{at, token};
    use super::*;

    #[test]
    fn every_event_is_read_as_it_was_written() {
        let (token, what) = (token(5), "pause".to_owned());
        let (sent, ttl) = (Duration::from_nanos(7), Duration::from_secs(1));
        let events = [
            Event::Invoke,
            Event::Ok(token),
            Event::Busy,
            Event::Unknown,
            Event::Held(token),
            Event::Lost(token),
            Event::Released(token),
            Event::Refreshed { token, sent, ttl },
            Event::Write { token, accepted: true },
            Event::fault("kill"),
            Event::Over { what },
            Event::Clock {
                ahead_ns: -3_600_000_000_000,
            },
            Event::Healed,
        ];
        let mut history = History::new(events.into_iter().map(|event| at(3, 1, event)).collect());
        history.about = vec![("seed".to_owned(), "7".to_owned())];
        history
            .records
            .push(Record::new(Duration::from_secs(9), Record::NOBODY, None, Event::Healed));
        let mut text = Vec::new();
        history.write_json(&mut text).unwrap();
        assert_eq!(History::from_json(std::str::from_utf8(&text).unwrap()), Ok(history));
    }

    #[test]
    fn what_is_no_history_is_refused_with_the_place() {
        let of = |records: &str| format!("{{\"format\": {FORMAT:?}, \"records\": [{records}]}}");
        let good = "{\"at_ns\": 1, \"actor\": 1, \"name\": \"n\", \"event\": \"invoke\"}";
        assert!(History::from_json(&of(good)).is_ok());
        for (text, says) in [
            ("{".to_owned(), "line 1"),
            ("{}".to_owned(), "format"),
            (of(good).replace("records", "r"), "records"),
            (of(&format!("{good}, {{}}")), "record 2: \"event\""),
            (of(&good.replace("invoke", "ok")), "record 1: \"token\""),
            (of(&good.replace("invoke", "dance")), "dance"),
            (of(&good.replace("at_ns", "at")), "at_ns"),
            (of(&good.replace("\"n\"", "\"\"")), "empty"),
            (of(&good.replace("\"actor\": 1", "\"actor\": -1")), "actor"),
        ] {
            let damaged = History::from_json(&text).unwrap_err().to_string();
            assert!(damaged.contains(says), "{text}: {damaged}");
        }
    }
}

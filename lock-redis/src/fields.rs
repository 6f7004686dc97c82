//! The answers of scripts, which are lists of fields.

use std::time::Duration;

use redis::{FromRedisValue, Value};

use crate::error::Failure;

/// The fields of an answer, one after the other.
pub(crate) struct Fields(std::vec::IntoIter<Value>);

impl Fields {
    pub(crate) fn read(value: Value) -> Result<Self, Failure> {
        match value {
            Value::Array(fields) => Ok(Self(fields.into_iter())),
            _ => Err(Failure::Nonsense),
        }
    }

    pub(crate) fn field<T: FromRedisValue>(&mut self) -> Result<T, Failure> {
        let value = self.0.next().unwrap_or(Value::Nil);
        redis::from_redis_value(value).map_err(|_| Failure::Nonsense)
    }

    pub(crate) fn word(&mut self) -> Result<String, Failure> {
        self.field()
    }

    pub(crate) fn number(&mut self) -> Result<u64, Failure> {
        self.field()
    }

    pub(crate) fn has_more(&self) -> bool {
        self.0.len() > 0
    }

    pub(crate) fn skip(&mut self) {
        self.0.next();
    }

    /// A time in milliseconds, or `None` for a negative number: a key that has no end.
    pub(crate) fn time(&mut self) -> Result<Option<Duration>, Failure> {
        let millis: i64 = self.field()?;
        Ok(u64::try_from(millis).ok().map(Duration::from_millis))
    }

    /// How the clients before this one know the nodes.
    pub(crate) fn difference(&mut self) -> Result<Failure, Failure> {
        let (nodes, max_ttl) = (self.number()?, Duration::from_millis(self.number()?));
        Ok(Failure::Differs { nodes, max_ttl })
    }
}

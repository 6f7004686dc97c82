//! The scripts, as the server gets them, and their answers, which are lists of fields.

use std::sync::LazyLock;
use std::time::Duration;

use redis::{Cmd, ErrorKind, FromRedisValue, RedisError, Script as Text, ServerErrorKind, Value};

use crate::connection::Connection;
use crate::error::Failure;

/// A script.
pub(crate) struct Script {
    source: String,
    hash: String,
}

macro_rules! scripts {
    ($($name:ident = $file:literal;)+) => {
        $(pub(crate) static $name: LazyLock<Script> = LazyLock::new(|| {
            Script::new(include_str!(concat!("scripts/", $file, ".lua")))
        });)+
    };
}

scripts! {
    ACQUIRE = "acquire";
    RENEW = "renew";
    RENEW_SHARE = "renew_share";
    RELEASE = "release";
    // Only independent nodes run this one.
    NODE = "redlock";
}

const PRELUDE: &str = include_str!("scripts/prelude.lua");
const SHARES: &str = include_str!("scripts/shares.lua");
const QUEUE: &str = include_str!("scripts/queue.lua");

impl Script {
    fn new(body: &str) -> Self {
        let body = body.replace("-- include shares.lua\n", SHARES);
        let source = PRELUDE.to_owned() + &body.replace("-- include queue.lua\n", QUEUE);
        Self {
            hash: Text::new(&source).get_hash().to_owned(),
            source,
        }
    }

    /// Runs the script on those keys. A server that does not know it yet gets its text along, in one request: between two
    /// it could forget it again.
    pub(crate) async fn run(
        &self,
        connection: &Connection,
        keys: &[String],
        arguments: &[&str],
    ) -> Result<Value, RedisError> {
        let call = |command, script| {
            let mut call = Cmd::with_capacity(3 + keys.len() + arguments.len(), 512);
            call.arg(command).arg(script).arg(keys.len()).arg(keys).arg(arguments);
            call
        };
        match connection.request(&call("EVALSHA", &self.hash)).await {
            Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => {
                connection.request(&call("EVAL", &self.source)).await
            }
            answer => answer,
        }
    }
}

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

    /// A time in milliseconds, or `None` for a negative number: a key that has no end.
    pub(crate) fn time(&mut self) -> Result<Option<Duration>, Failure> {
        let millis: i64 = self.field()?;
        Ok(u64::try_from(millis).ok().map(Duration::from_millis))
    }

    pub(crate) fn has_more(&self) -> bool {
        self.0.len() > 0
    }
}

//! The scripts, as the server gets them.

use std::sync::LazyLock;

use redis::{Cmd, ErrorKind, RedisError, Script as Text, ServerErrorKind, Value};

use crate::connection::Connection;

/// A script.
pub(crate) struct Script {
    source: String,
    hash: String,
}

macro_rules! scripts {
    ($($name:ident = $($file:literal),+;)+) => {
        $(pub(crate) static $name: LazyLock<Script> = LazyLock::new(|| {
            Script::new(concat!($(include_str!(concat!("scripts/", $file, ".lua"))),+))
        });)+
    };
}

scripts! {
    ACQUIRE = "shared", "acquire_first", "queue", "acquire";
    RELEASE = "shared", "release_first", "queue", "release";
    RENEW = "shared", "renew";
    RESERVE = "shared", "queue", "reserve";
    FORCE_RELEASE = "shared", "queue", "force_release";
    // Only independent nodes run these.
    NODE_ACQUIRE = "shared", "redlock", "redlock_acquire";
    NODE_CONFIRM = "shared", "redlock", "redlock_confirm";
    NODE_RELEASE = "shared", "redlock", "redlock_release";
    NODE_BORN = "shared", "redlock", "redlock_born";
}

impl Script {
    fn new(source: &str) -> Self {
        Self {
            hash: Text::new(source).get_hash().to_owned(),
            source: source.to_owned(),
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

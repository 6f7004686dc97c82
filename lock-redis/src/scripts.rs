//! The scripts, as the server gets them.

use std::sync::{Arc, LazyLock};

use redis::{Cmd, ErrorKind, RedisError, Script, ServerErrorKind, Value};

use crate::link::Link;

/// A script, in the two forms in which servers take it.
pub(crate) struct Source {
    plain: Text,
    /// With leave to write on a full server: what it frees is more than what it writes.
    flagged: Option<Text>,
}

struct Text {
    source: String,
    hash: String,
}

macro_rules! scripts {
    ($($(#[$doc:meta])* $name:ident = $file:literal, $kind:ident;)+) => {
        $($(#[$doc])* pub(crate) static $name: LazyLock<Source> =
            LazyLock::new(|| Source::$kind(include_str!(concat!("scripts/", $file, ".lua"))));)+
    };
}

scripts! {
    ACQUIRE = "acquire", shared;
    RENEW = "renew", shared;
    RELEASE = "release", releasing;
    HAND_OVER = "hand_over", releasing;
    FORCE_RELEASE = "force_release", releasing;
    HOLDER = "holder", alone;
}

const SHARED: &str = include_str!("scripts/shared.lua");

impl Source {
    fn alone(text: &str) -> Self {
        Self {
            plain: Text::new(text.to_owned()),
            flagged: None,
        }
    }

    fn shared(text: &str) -> Self {
        Self::alone(&format!("{SHARED}{text}"))
    }

    fn releasing(text: &str) -> Self {
        let plain = Self::shared(text).plain;
        let flagged = Text::new(format!("#!lua flags=allow-oom\n{}", plain.source));
        Self {
            plain,
            flagged: Some(flagged),
        }
    }

    /// Runs the script on those keys. A server that does not know it yet gets its text along, in one request: between two
    /// it could forget it again.
    pub(crate) async fn run(&self, link: &Arc<Link>, keys: &[String], arguments: &[&str]) -> Result<Value, RedisError> {
        let text = self
            .flagged
            .as_ref()
            .filter(|_| link.knows_flags())
            .unwrap_or(&self.plain);
        let call = |command, script| {
            let mut call = Cmd::with_capacity(3 + keys.len() + arguments.len(), 512);
            call.arg(command).arg(script).arg(keys.len()).arg(keys).arg(arguments);
            call
        };
        match link.ask(&call("EVALSHA", &text.hash)).await {
            Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => {
                link.ask(&call("EVAL", &text.source)).await
            }
            answer => answer,
        }
    }
}

impl Text {
    fn new(source: String) -> Self {
        let hash = Script::new(&source).get_hash().to_owned();
        Self { source, hash }
    }
}

//! The scripts, as the server gets them.

use std::sync::Arc;

use lock_core::process::Computed;
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
    ($($name:ident = $kind:ident($($file:literal),+);)+) => {
        $(pub(crate) static $name: Computed<Source> = Computed::new(|| {
            Source::$kind(concat!($(include_str!(concat!("scripts/", $file, ".lua"))),+))
        });)+
    };
}

scripts! {
    ACQUIRE = plain("shared", "acquire_first", "queue", "acquire");
    RENEW = plain("shared", "renew_first", "queue", "renew");
    RELEASE = releasing("shared", "release_first", "queue", "release");
    HAND_OVER = releasing("shared", "hand_over_first", "queue", "hand_over");
    RESERVE = releasing("shared", "queue", "reserve");
    FORCE_RELEASE = releasing("shared", "queue", "force_release");
    HOLDER = plain("holder");
}

impl Source {
    fn plain(text: &str) -> Self {
        Self {
            plain: Text::new(text.to_owned()),
            flagged: None,
        }
    }

    fn releasing(text: &str) -> Self {
        Self {
            flagged: Some(Text::new(format!("#!lua flags=allow-oom\n{text}"))),
            ..Self::plain(text)
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

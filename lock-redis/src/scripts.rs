//! The scripts, as the server gets them.

use std::sync::Arc;

use lock_core::process::Computed;
use redis::{Cmd, ErrorKind, RedisError, Script, ServerErrorKind, Value};

use crate::link::Link;

/// A script, for a server of its own and for a node of several.
pub(crate) struct Source {
    alone: Forms,
    node: Forms,
}

/// A script in the two forms in which servers take it.
struct Forms {
    plain: Text,
    /// With leave to write on a full server: what it frees is more than what it writes.
    flagged: Option<Text>,
}

struct Text {
    source: String,
    hash: String,
}

macro_rules! text {
    ($($file:literal),+) => { concat!($(include_str!(concat!("scripts/", $file, ".lua"))),+) };
}

macro_rules! scripts {
    ($($name:ident = $kind:ident($($file:literal),+; $($of_node:literal),+);)+) => {
        $(pub(crate) static $name: Computed<Source> = Computed::new(|| Source {
            alone: Forms::$kind(text!($($file),+)),
            node: Forms::$kind(text!($($of_node),+)),
        });)+
    };
}

scripts! {
    ACQUIRE = plain(
        "shared", "acquire_first", "queue", "acquire";
        "shared", "redlock", "redlock_acquire", "acquire_first", "queue", "redlock_yield", "acquire"
    );
    RENEW = plain(
        "shared", "renew_first", "queue", "renew";
        "shared", "redlock", "renew_first", "queue", "renew"
    );
    RELEASE = releasing(
        "shared", "release_first", "queue", "release";
        "shared", "redlock", "redlock_release", "release_first", "queue", "release"
    );
    HAND_OVER = releasing(
        "shared", "hand_over_first", "queue", "hand_over";
        "shared", "redlock", "redlock_hand_over", "hand_over_first", "queue", "hand_over"
    );
    RESERVE = releasing("shared", "queue", "reserve"; "shared", "redlock", "queue", "reserve");
    FORCE_RELEASE = releasing("shared", "queue", "force_release"; "shared", "redlock", "queue", "force_release");
    HOLDER = plain("holder"; "holder");
    // Only nodes run these.
    CONFIRM = plain("shared", "confirm"; "shared", "redlock", "confirm");
    BORN = plain("shared", "born"; "shared", "redlock", "born");
}

impl Source {
    /// Runs the script on those keys; `node` if the server is one of several.
    pub(crate) async fn run(
        &self,
        link: &Arc<Link>,
        node: bool,
        keys: &[String],
        arguments: &[&str],
    ) -> Result<Value, RedisError> {
        let forms = if node { &self.node } else { &self.alone };
        forms.run(link, keys, arguments).await
    }
}

impl Forms {
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
    async fn run(&self, link: &Arc<Link>, keys: &[String], arguments: &[&str]) -> Result<Value, RedisError> {
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

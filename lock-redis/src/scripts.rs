//! The scripts, as the server gets them.

use std::ops::Range;
use std::sync::Arc;
use std::sync::LazyLock;

use redis::{Cmd, ErrorKind, RedisError, Script, ServerErrorKind, Value};

use crate::link::Link;

/// A script, for each kind of server.
pub(crate) struct Source {
    alone: Forms,
    cluster: Forms,
}

/// The kind of server that a script runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Setting {
    Alone,
    Cluster {
        /// Whether it is to serve a slot that is only being moved to it.
        asking: bool,
    },
}

/// A script in the two forms in which servers take it.
pub(crate) struct Forms {
    plain: Text,
    /// With leave to write on a full server: what it frees is more than what it writes.
    flagged: Option<Text>,
    /// Which of the keys it needs.
    keys: Range<usize>,
}

struct Text {
    source: String,
    hash: String,
}

macro_rules! text {
    ($($file:literal),+) => { concat!($(include_str!(concat!("scripts/", $file, ".lua"))),+) };
}

macro_rules! scripts {
    ($($name:ident = $kind:ident($($file:literal),+; $($of_cluster:literal),+) $(.$adjust:ident())?;)+) => {
        $(pub(crate) static $name: LazyLock<Source> = LazyLock::new(|| Source {
            alone: Forms::$kind(text!($($file),+)),
            cluster: Forms::$kind(text!($($of_cluster),+))$(.$adjust())?,
        });)+
    };
}

scripts! {
    ACQUIRE = plain(
        "shared", "acquire_first", "queue", "acquire";
        "shared", "cluster", "acquire_first", "queue", "acquire"
    );
    RENEW = plain(
        "shared", "renew_first", "queue", "renew";
        "shared", "renew_first", "cluster_renew"
    ).lock_only();
    RELEASE = releasing(
        "shared", "release_first", "queue", "release";
        "shared", "cluster", "release_first", "queue", "release"
    );
    RESERVE = releasing(
        "shared", "queue", "reserve";
        "shared", "cluster", "queue", "reserve"
    );
    FORCE_RELEASE = releasing(
        "shared", "queue", "force_release";
        "shared", "cluster", "queue", "force_release"
    );
    HOLDER = plain("holder"; "holder");
    // Only nodes of a cluster run this.
    KEEP_PLACE = plain("keep_place"; "keep_place").queue_only();
}

macro_rules! of_node {
    ($($name:ident = $kind:ident($($file:literal),+);)+) => {
        $(pub(crate) static $name: LazyLock<Forms> = LazyLock::new(|| Forms::$kind(text!($($file),+)));)+
    };
}

// Only independent nodes run these.
of_node! {
    NODE_ACQUIRE = plain("shared", "redlock", "redlock_acquire");
    NODE_CONFIRM = plain("shared", "redlock", "redlock_confirm");
    NODE_RELEASE = releasing("shared", "redlock", "redlock_release");
    NODE_BORN = plain("shared", "redlock", "redlock_born");
}

impl Source {
    /// Runs the script on those keys.
    pub(crate) async fn run(
        &self,
        link: &Arc<Link>,
        setting: Setting,
        keys: &[String],
        arguments: &[&str],
    ) -> Result<Value, RedisError> {
        let (forms, asking) = match setting {
            Setting::Alone => (&self.alone, false),
            Setting::Cluster { asking } => (&self.cluster, asking),
        };
        let needed = keys.get(forms.keys.clone()).unwrap_or(keys);
        forms.run(link, asking, needed, arguments).await
    }
}

impl Forms {
    fn plain(text: &str) -> Self {
        Self {
            plain: Text::new(text.to_owned()),
            flagged: None,
            keys: 0..usize::MAX,
        }
    }

    /// Needs no key but that of the lock.
    fn lock_only(self) -> Self {
        Self { keys: 0..1, ..self }
    }

    /// Needs no keys but those of the queue.
    fn queue_only(self) -> Self {
        Self { keys: 2..4, ..self }
    }

    fn releasing(text: &str) -> Self {
        Self {
            flagged: Some(Text::new(format!("#!lua flags=allow-oom\n{text}"))),
            ..Self::plain(text)
        }
    }

    /// Runs the script on those keys. A server that does not know it yet gets its text along, in one request: between two
    /// it could forget it again.
    pub(crate) async fn run(
        &self,
        link: &Arc<Link>,
        asking: bool,
        keys: &[String],
        arguments: &[&str],
    ) -> Result<Value, RedisError> {
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
        let ask = async |call: Cmd| match asking {
            true => link.ask_moving(&call).await,
            false => link.ask(&call).await,
        };
        match ask(call("EVALSHA", &text.hash)).await {
            Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => {
                ask(call("EVAL", &text.source)).await
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

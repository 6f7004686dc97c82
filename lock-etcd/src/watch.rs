//! How a waiter learns that keys go.

use std::collections::HashSet;

use etcd_client::{EventType, WatchFilterType, WatchOptions, WatchStream};

use crate::connection::Connection;
use crate::error::Failure;

/// Watches keys, on a stream of its own, until it is dropped.
///
/// The watches begin with the next revision, because etcd serves those at once: a watch that begins with a revision that there is already
/// is served when etcd next looks for those that lag, which it does ten times a second.
pub(crate) struct Watch {
    keys: Vec<String>,
    connection: u64,
    stream: WatchStream,
    /// The watches that have begun.
    begun: HashSet<i64>,
    /// The last revision before the last of them.
    began: i64,
    /// When a key was deleted last since then.
    deleted: i64,
}

impl Watch {
    /// Watches these keys.
    pub(crate) async fn start(connection: &Connection, keys: Vec<String>) -> Result<Self, Failure> {
        let options = |id: usize| {
            WatchOptions::new()
                .with_watch_id(id as i64 + 1)
                .with_filters([WatchFilterType::NoPut])
        };
        let mut watching = connection.client().watch_client();
        let stream = connection.call(async {
            let mut stream = watching.watch(&*keys[0], Some(options(0))).await?;
            for (at, key) in keys.iter().enumerate().skip(1) {
                stream.watch(&**key, Some(options(at))).await?;
            }
            Ok(stream)
        });
        Ok(Self {
            stream: stream.await?,
            keys,
            connection: connection.serial(),
            begun: HashSet::new(),
            began: 0,
            deleted: 0,
        })
    }

    /// Whether it watches these keys over that connection.
    pub(crate) fn is_of(&self, connection: &Connection, keys: &[String]) -> bool {
        self.connection == connection.serial() && self.keys == keys
    }

    /// Returns when a key that was there at revision `looked` was deleted, or may have been. Dropping the future loses nothing.
    ///
    /// **Invariant.** Nothing is lost between the look and the watch: the watch tells of every revision after the one that it began with, and
    /// if that is later than the look, the keys are to be looked up once more.
    ///
    /// # Errors
    ///
    /// If the stream ended or the server ends a watch. The caller looks again, and starts another watch.
    pub(crate) async fn changed(&mut self, looked: i64) -> Result<(), Failure> {
        loop {
            let have_begun = self.begun.len() == self.keys.len();
            if self.deleted > looked || have_begun && self.began > looked {
                return Ok(());
            }
            let answer = self.stream.message().await?.ok_or(Failure::Broken)?;
            if answer.canceled() {
                return Err(Failure::Broken);
            }
            if answer.created() {
                self.begun.insert(answer.watch_id());
                let revision = answer.header().map_or(0, |header| header.revision());
                self.began = self.began.max(revision);
            }
            let deletions = answer
                .events()
                .iter()
                .filter(|event| event.event_type() == EventType::Delete);
            let deleted = deletions.filter_map(|event| Some(event.kv()?.mod_revision())).max();
            self.deleted = self.deleted.max(deleted.unwrap_or_default());
        }
    }
}

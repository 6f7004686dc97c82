//! One connection to a NATS server, and requests over it that end.

use std::time::Duration;

use async_nats::connection::State;
use async_nats::jetstream::kv::Store;
use async_nats::jetstream::stream::{Config, Republish};
use async_nats::jetstream::{self, Context};
use async_nats::{ConnectOptions, Error, Event, Subscriber};
use futures_util::TryStreamExt as _;
use lock_core::{LockError, background};
use tokio::{select, sync::watch, time::timeout};

/// A connection that is made again whenever it has ended, and the bucket that is used over it.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) bucket: Store,
    pub(crate) op_timeout: Duration,
    server: Context,
    ends: watch::Receiver<()>,
}

impl Connection {
    pub(crate) async fn open(url: &str, bucket: &str, op_timeout: Duration) -> Result<Self, LockError> {
        let (end, ends) = watch::channel(());
        let options = ConnectOptions::new().connection_timeout(op_timeout);
        let options = options.event_callback(move |event| {
            if event == Event::Disconnected {
                end.send_replace(());
            }
            async {}
        });
        let (url, bucket) = (url.to_owned(), bucket.to_owned());
        let connecting = async move {
            let server = jetstream::new(options.connect(url).await?);
            server.create_stream(config(&bucket)).await?;
            let bucket = server.get_key_value(bucket).await?;
            Ok((server, bucket))
        };
        // On fencelock's own thread: the connection must outlive the runtime that it was asked for from.
        let connected = background()?.spawn(async move { timeout(op_timeout, connecting).await? });
        let connected: Result<_, Error> = connected.await.map_err(Error::from).flatten();
        let (server, bucket) = connected.map_err(|error| LockError::failed("connecting", error))?;
        Ok(Self {
            bucket,
            op_timeout,
            server,
            ends,
        })
    }

    /// Does the work. If it fails, ends with its connection, or takes too long, nobody knows what it came to at the server.
    pub(crate) async fn ask<T>(
        &self,
        what: &'static str,
        work: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, LockError> {
        let client = self.server.client();
        let is_connected = client.connection_state() == State::Connected;
        // While there is no connection nobody waits for long: whoever asks can ask again.
        let limit = if is_connected {
            self.op_timeout
        } else {
            self.op_timeout / 4
        };
        let work = async {
            let done = work.await;
            if done.is_err() {
                // A server that lost its data has no bucket either. One that has it is not changed by this.
                let _ = self.server.create_stream(config(&self.bucket.name)).await;
            }
            done.map_err(|error| LockError::failed(what, error))
        };
        let done = select! {
            done = timeout(limit, work) => done,
            () = self.end() => return Err(LockError::unavailable(what, "the connection ended")),
        };
        if done.is_err() && is_connected {
            // Perhaps nothing will come over it any more, and nobody is told. All that waits on it ends, too.
            let _ = client.force_reconnect().await;
        }
        done.unwrap_or_else(|_| Err(LockError::no_answer(what, limit)))
    }

    /// Waits for the end of the connection that there is when this is called.
    pub(crate) fn end(&self) -> impl Future<Output = ()> + use<> {
        let mut ends = self.ends.clone();
        ends.mark_unchanged();
        async move {
            // Without a client nothing is connected any more either.
            let _ = ends.changed().await;
        }
    }

    /// Whatever is stored under the key from now on is pushed to this client.
    pub(crate) async fn changes(&self, key: &str) -> Result<Subscriber, LockError> {
        let (client, subject) = (self.server.client(), format!("fencelock.{}.{key}", self.bucket.name));
        let changes = client.subscribe(subject).await;
        changes.map_err(|error| LockError::failed("subscribing", error))
    }

    /// All that is stored.
    pub(crate) async fn keys(&self) -> Result<Vec<String>, Error> {
        let subjects = self.bucket.stream.info_with_subjects(">").await?;
        let keys = subjects.map_ok(|(subject, _)| subject[self.bucket.prefix.len()..].to_owned());
        Ok(keys.try_collect().await?)
    }

    /// Deletes the bucket.
    pub(crate) async fn remove(&self) -> Result<(), Error> {
        self.server.delete_stream(&self.bucket.stream_name).await?;
        Ok(())
    }
}

/// A bucket is a stream of that name. It is asked itself ("direct"): a server that is asked for a record of a bucket that it is
/// just making falls over, as of version 2.9. Were there more replicas than one, one that is behind could answer.
fn config(bucket: &str) -> Config {
    Config {
        name: format!("KV_{bucket}"),
        subjects: vec![format!("$KV.{bucket}.>")],
        max_messages_per_subject: 1,
        // Longer than any ttl; and by then the clock has passed every token.
        max_age: Duration::from_secs(48 * 60 * 60),
        allow_direct: true,
        // Once it is stored: a subscription to the key itself could be told too early.
        republish: Some(Republish {
            source: format!("$KV.{bucket}.>"),
            destination: format!("fencelock.{bucket}.>"),
            headers_only: false,
        }),
        ..Config::default()
    }
}

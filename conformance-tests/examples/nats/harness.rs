//! What the suite needs to know of the backend, and what it may do to its server.

use std::collections::HashMap;
use std::env;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_nats::Error;
use async_nats::jetstream::kv::Store;
use async_trait::async_trait;
use conformance_tests::{Fault, Harness, Injection, Namespace};
use futures_util::future::try_join_all;
use lock_core::{DistributedLock, LockError, LockName, OwnerId};
use tokio::sync::OnceCell;

use crate::connection::Connection;
use crate::server::{Data, Server};
use crate::{CLOCK, NatsLock, Record, key, parse, text};

/// Tells a child process where the server of its namespace is.
const PLACE: &str = "FENCELOCK_NATS_EXAMPLE_URL";

type Place = Arc<OnceCell<Arc<Server>>>;

/// One server for all namespaces, each of which is a bucket, and one more for each that wants its own.
#[derive(Default)]
pub(crate) struct NatsHarness {
    shared: Place,
    own: Mutex<HashMap<String, Place>>,
}

#[async_trait]
impl Harness for NatsHarness {
    fn name(&self) -> &str {
        "NATS"
    }

    async fn begin(&self) -> Result<Option<String>, LockError> {
        let server = self.shared().await?;
        Ok(Some(format!(
            "nats-server {} at {}",
            server.version,
            server.authority()
        )))
    }

    async fn client(&self, namespace: &Namespace) -> Result<Arc<dyn DistributedLock>, LockError> {
        Ok(Arc::new(NatsLock(self.connection(namespace).await?)))
    }

    async fn address(&self, namespace: &Namespace) -> Result<Option<String>, LockError> {
        Ok(Some(self.server(namespace).await?.authority().to_owned()))
    }

    async fn client_at(
        &self,
        namespace: &Namespace,
        address: SocketAddr,
    ) -> Result<Arc<dyn DistributedLock>, LockError> {
        let server = self.server(namespace).await?;
        let url = server.url.replacen(server.authority(), &address.to_string(), 1);
        let connection = Connection::open(&url, namespace.name(), Duration::from_secs(2)).await?;
        Ok(Arc::new(NatsLock(connection)))
    }

    fn committing_request(&self) -> &[u8] {
        // A write on a condition has a header; the others have none.
        b"HPUB $KV."
    }

    fn is_reply(&self, bytes: &[u8]) -> bool {
        // The server pings, too.
        bytes.windows(4).any(|window| window == b"MSG ")
    }

    async fn leftovers(&self, namespace: &Namespace) -> Result<Option<Vec<String>>, LockError> {
        let lock = NatsLock(self.connection(namespace).await?);
        let mut held = lock.0.keys().await.map_err(failed)?;
        held.retain(|key| key != CLOCK);
        // Records of what was released stay for two days.
        let seen = try_join_all(held.iter().map(|key| lock.look(key)))
            .await
            .map_err(failed)?;
        let mut seen = seen.iter();
        held.retain(|_| seen.next().is_some_and(|seen| seen.holder.is_some()));
        Ok(Some(held))
    }

    async fn inject(&self, namespace: &Namespace, fault: &Fault) -> Result<Injection, LockError> {
        let connection = self.connection(namespace).await?;
        let bucket = &connection.bucket;
        match fault {
            Fault::Expire(name) => rewrite(bucket, name, |(holder, _, token)| (holder, 0, token)).await,
            Fault::Steal(name) => {
                let stranger = Some(OwnerId::random());
                rewrite(bucket, name, |(_, ttl, token)| (stranger, ttl, token + 1)).await
            }
            Fault::Delete(name) => forget(bucket, &key(name)).await,
            Fault::DeleteAll => forget(bucket, ">").await,
            fault => return self.inject_into_server(namespace, fault).await,
        }
        .map_err(failed)?;
        Ok(Injection::Done)
    }

    async fn over(&self, namespace: &Namespace) {
        if self.own().remove(namespace.name()).is_none()
            && let Ok(connection) = self.connection(namespace).await
        {
            // A bucket that stays is in nobody's way: the server ends with the run.
            let _ = connection.remove().await;
        }
    }

    fn child_environment(&self, namespace: &Namespace) -> Vec<(String, String)> {
        let server = self.place(namespace).get().cloned();
        server
            .map(|server| (PLACE.to_owned(), server.url.clone()))
            .into_iter()
            .collect()
    }

    // Sent by one task, answered by another.
    fn fewest_polls(&self) -> usize {
        2
    }
}

impl NatsHarness {
    /// What is done to the whole server is felt by all who use it.
    async fn inject_into_server(&self, namespace: &Namespace, fault: &Fault) -> Result<Injection, LockError> {
        if !self.shared().await?.is_ours() {
            return Ok(Injection::NotPossible);
        }
        if !namespace.wants_own_server() {
            return Ok(Injection::NeedsOwnServer);
        }
        let server = self.server(namespace).await?;
        match fault {
            Fault::Freeze(time) => server.freeze(*time)?,
            Fault::Restart => server.restart(Data::Kept).await?,
            Fault::RestartWithoutData => server.restart(Data::Lost).await?,
            Fault::Copy => server.copy()?,
            Fault::Restore => server.restart(Data::Copied).await?,
            _ => return Ok(Injection::NotPossible),
        }
        Ok(Injection::Done)
    }

    async fn connection(&self, namespace: &Namespace) -> Result<Connection, LockError> {
        let url = match env::var(PLACE) {
            Ok(url) => url,
            Err(_) => self.server(namespace).await?.url.clone(),
        };
        Connection::open(&url, namespace.name(), Duration::from_secs(5)).await
    }

    fn place(&self, namespace: &Namespace) -> Place {
        if namespace.wants_own_server() {
            Arc::clone(self.own().entry(namespace.name().to_owned()).or_default())
        } else {
            Arc::clone(&self.shared)
        }
    }

    async fn server(&self, namespace: &Namespace) -> Result<Arc<Server>, LockError> {
        if !namespace.wants_own_server() {
            return self.shared().await;
        }
        let place = self.place(namespace);
        let server = place.get_or_try_init(async || Server::start().await.map(Arc::new));
        server.await.cloned()
    }

    async fn shared(&self) -> Result<Arc<Server>, LockError> {
        let server = self.shared.get_or_try_init(async || Server::find().await.map(Arc::new));
        server.await.cloned()
    }

    fn own(&self) -> MutexGuard<'_, HashMap<String, Place>> {
        self.own.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Writes a record that no client wrote.
async fn rewrite(bucket: &Store, name: &LockName, change: impl FnOnce(Record) -> Record) -> Result<(), Error> {
    let entry = bucket.entry(key(name)).await?.ok_or("nobody holds it")?;
    let record = parse(&entry.value).ok_or("that is no record")?;
    bucket.put(key(name), text(change(record)).into()).await?;
    Ok(())
}

async fn forget(bucket: &Store, keys: &str) -> Result<(), Error> {
    bucket.stream.purge().filter(format!("{}{keys}", bucket.prefix)).await?;
    Ok(())
}

fn failed(error: Error) -> LockError {
    LockError::failed("looking at the server", error)
}

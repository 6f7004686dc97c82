//! What the suite needs to know of the Postgres backend.

mod admin;
mod resource;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use conformance_tests::servers::{Data, Kind, Server, ServerError};
use conformance_tests::{Fault, Harness, Injection, Namespace, Resource};
use lock_core::{DistributedLock, LockError, LockName};
use lock_postgres::{PostgresConfig, PostgresLock};
use tokio::sync::OnceCell;

use admin::{ROLE, admin};
use resource::FencedRow;

/// Tells a child process where the server of its namespace is.
const URL: &str = "FENCELOCK_CONFORMANCE_POSTGRES";

/// Cases run beside each other, and each has several clients. A thousand locks take room.
const ROOM: [&str; 4] = ["-c", "max_connections=400", "-c", "max_locks_per_transaction=128"];

type Place = Arc<OnceCell<Arc<Server>>>;

/// One server for all namespaces, each with a database of its own, and one more for each that wants its own.
pub(crate) struct PostgresHarness {
    kind: &'static Kind,
    shared: Place,
    own: Mutex<HashMap<String, Place>>,
    /// Whether the database of a namespace is there.
    made: Mutex<HashMap<String, Arc<OnceCell<()>>>>,
}

impl PostgresHarness {
    pub(crate) fn new(kind: &'static Kind) -> Self {
        Self {
            kind,
            shared: Place::default(),
            own: Mutex::default(),
            made: Mutex::default(),
        }
    }
}

#[async_trait]
impl Harness for PostgresHarness {
    fn name(&self) -> &str {
        self.kind.title()
    }

    async fn begin(&self) -> Result<Option<String>, LockError> {
        let server = self.shared().await?;
        Ok(Some(format!(
            "{server}, as the role {ROLE:?} with the rights that lock_postgres::schema_sql lists"
        )))
    }

    async fn client(&self, namespace: &Namespace) -> Result<Arc<dyn DistributedLock>, LockError> {
        Ok(Arc::new(self.lock(namespace).await?))
    }

    async fn address(&self, namespace: &Namespace) -> Result<Option<String>, LockError> {
        Ok(Some(self.server(namespace).await?.authority().to_owned()))
    }

    async fn client_at(
        &self,
        namespace: &Namespace,
        address: SocketAddr,
    ) -> Result<Arc<dyn DistributedLock>, LockError> {
        self.prepared(namespace).await?;
        let url = self.server(namespace).await?.url_at(address);
        let config = config(&url, namespace)?.op_timeout(Duration::from_secs(2));
        Ok(Arc::new(config.connect().await?))
    }

    async fn in_line(&self, namespace: &Namespace, name: &LockName) -> Result<Option<usize>, LockError> {
        let [high, low] = self.key(namespace, name).await?;
        let waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted \
                       AND classid = $1::bigint::oid AND objid = $2::bigint::oid";
        let row = self.admin(namespace).await?.query_one(waiting, &[&high, &low]).await;
        let waiting: i64 = row.map_err(admin::failed)?.get(0);
        Ok(usize::try_from(waiting).ok())
    }

    async fn over(&self, namespace: &Namespace) {
        lock(&self.made).remove(namespace.name());
        let own = lock(&self.own).remove(namespace.name());
        if own.is_some() {
            // That takes as long as the engine takes.
            let _ = tokio::task::spawn_blocking(move || drop(own)).await;
        } else if let Ok(url) = self.url(namespace).await {
            let _ = admin::remove(&url, namespace.name()).await;
        }
    }

    async fn leftovers(&self, namespace: &Namespace) -> Result<Option<Vec<String>>, LockError> {
        let client = self.admin(namespace).await?;
        let rows = client
            .query(
                "SELECT concat_ws(' ', l.pid, l.classid, l.objid, l.granted, a.application_name, a.state, a.query) \
                 FROM pg_locks l JOIN pg_stat_activity a USING (pid) WHERE l.locktype = 'advisory' \
                 AND a.datname = current_database()",
                &[],
            )
            .await
            .map_err(admin::failed)?;
        Ok(Some(rows.iter().map(|row| row.get(0)).collect()))
    }

    async fn inject(&self, namespace: &Namespace, fault: &Fault) -> Result<Injection, LockError> {
        match fault {
            // The only thing that ends before its time is a session.
            Fault::Expire(name) => self.end_session(namespace, name).await,
            Fault::DeleteCounter(_) => {
                let client = self.admin(namespace).await?;
                let reset = client.batch_execute("SELECT setval('fencelock.token', 1)").await;
                reset.map(|()| Injection::Done).map_err(admin::failed)
            }
            fault => self.inject_into_server(namespace, fault).await,
        }
    }

    async fn resource(&self, namespace: &Namespace, resource: &str) -> Result<Option<Arc<dyn Resource>>, LockError> {
        let client = self.admin(namespace).await?;
        Ok(Some(Arc::new(FencedRow::new(client, resource).await?)))
    }

    fn child_environment(&self, namespace: &Namespace) -> Vec<(String, String)> {
        let server = self.place(namespace).get().cloned();
        let url = server.map(|server| (URL.to_owned(), server.url().to_owned()));
        url.into_iter().collect()
    }

    fn leases_are_connections(&self) -> bool {
        true
    }
}

impl PostgresHarness {
    /// What is done to the whole server is felt by all who use it.
    async fn inject_into_server(&self, namespace: &Namespace, fault: &Fault) -> Result<Injection, LockError> {
        if !self.shared().await?.is_ours() {
            return Ok(Injection::NotPossible);
        }
        match fault {
            // Without its data the server would have neither the database nor the role.
            Fault::Freeze(_) | Fault::Restart | Fault::Copy | Fault::Restore => {}
            _ => return Ok(Injection::NotPossible),
        }
        if !namespace.wants_own_server() {
            return Ok(Injection::NeedsOwnServer);
        }
        let server = self.server(namespace).await?;
        match fault {
            Fault::Freeze(time) => server.pause_for(*time).await,
            Fault::Restart => server.restart(Data::Kept).await,
            Fault::Copy => server.copy().await,
            Fault::Restore => server.restart(Data::Copied).await,
            _ => return Ok(Injection::NotPossible),
        }
        .map_err(no_server)?;
        Ok(Injection::Done)
    }

    async fn end_session(&self, namespace: &Namespace, name: &LockName) -> Result<Injection, LockError> {
        let [high, low] = self.key(namespace, name).await?;
        let end = "SELECT pg_terminate_backend(pid, 5000) FROM pg_locks WHERE locktype = 'advisory' AND granted \
                   AND classid = $1::bigint::oid AND objid = $2::bigint::oid";
        let ended = self.admin(namespace).await?.execute(end, &[&high, &low]).await;
        ended.map(|_| Injection::Done).map_err(admin::failed)
    }

    async fn lock(&self, namespace: &Namespace) -> Result<PostgresLock, LockError> {
        self.prepared(namespace).await?;
        config(&self.url(namespace).await?, namespace)?.connect().await
    }

    /// The halves of the key, as the server shows them.
    async fn key(&self, namespace: &Namespace, name: &LockName) -> Result<[i64; 2], LockError> {
        let lock = config(&self.url(namespace).await?, namespace)?.connect_lazy()?;
        let key = lock.key(name);
        Ok([(key as u64 >> 32) as i64, key & 0xffff_ffff])
    }

    async fn admin(&self, namespace: &Namespace) -> Result<lock_postgres::tokio_postgres::Client, LockError> {
        self.prepared(namespace).await?;
        admin(&self.url(namespace).await?, namespace.name()).await
    }

    /// Makes the database of the namespace, with the schema and a role of few rights. A child process finds it made.
    async fn prepared(&self, namespace: &Namespace) -> Result<(), LockError> {
        if std::env::var(URL).is_ok() {
            return Ok(());
        }
        let made = Arc::clone(lock(&self.made).entry(namespace.name().to_owned()).or_default());
        let url = self.url(namespace).await?;
        made.get_or_try_init(|| admin::make(&url, namespace.name())).await?;
        Ok(())
    }

    async fn url(&self, namespace: &Namespace) -> Result<String, LockError> {
        match std::env::var(URL) {
            Ok(url) => Ok(url),
            Err(_) => Ok(self.server(namespace).await?.url().to_owned()),
        }
    }

    fn place(&self, namespace: &Namespace) -> Place {
        if namespace.wants_own_server() {
            Arc::clone(lock(&self.own).entry(namespace.name().to_owned()).or_default())
        } else {
            Arc::clone(&self.shared)
        }
    }

    async fn server(&self, namespace: &Namespace) -> Result<Arc<Server>, LockError> {
        if !namespace.wants_own_server() {
            return self.shared().await;
        }
        let place = self.place(namespace);
        let server = place.get_or_try_init(async || Server::start_own(self.kind, &ROOM).await.map(Arc::new));
        server.await.cloned().map_err(no_server)
    }

    async fn shared(&self) -> Result<Arc<Server>, LockError> {
        let server = self.shared.get_or_try_init(async || {
            let named = std::env::var(self.kind.url_variable()).is_ok_and(|url| !url.is_empty());
            let server = if named {
                Server::start(self.kind).await
            } else {
                Server::start_own(self.kind, &ROOM).await
            };
            server.map(Arc::new).map_err(no_server)
        });
        server.await.cloned()
    }
}

/// As a role that may do no more than a role should be allowed to, in the namespace's own database.
fn config(url: &str, namespace: &Namespace) -> Result<PostgresConfig, LockError> {
    let mut server: lock_postgres::tokio_postgres::Config = url.parse().map_err(admin::failed)?;
    server.user(ROLE).password(admin::PASSWORD).dbname(namespace.name());
    Ok(PostgresConfig::new(server))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Its debug output is what people should read.
fn no_server(error: ServerError) -> LockError {
    LockError::unavailable("seeing to a server", format!("{error:?}"))
}

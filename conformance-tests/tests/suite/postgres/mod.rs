//! What the suite needs to know of the Postgres backend.

mod admin;
mod resource;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use conformance_tests::{Fault, Harness, Injection, Namespace, Resource};
use lock_core::{DistributedLock, LockError, LockName};
use lock_postgres::tokio_postgres::Client;
use lock_postgres::{PostgresConfig, PostgresLock, schema_sql};
use test_servers::{Kind, PgBouncer, Server};
use tokio::runtime::Handle;
use tokio::sync::OnceCell;

use crate::hosts::{Hosts, inject_into, locked, no_server};
use admin::{PASSWORD, ROLE, admin};
use resource::FencedRow;

/// Tells a child process where the server of its namespace is.
const URL: &str = "FENCELOCK_CONFORMANCE_POSTGRES";
/// And where clients reach it.
const ENTRANCE: &str = "FENCELOCK_CONFORMANCE_POSTGRES_ENTRANCE";

/// Cases run beside each other, and each has several clients. A thousand locks take room.
const SETTINGS: [&str; 4] = ["-c", "max_connections=400", "-c", "max_locks_per_transaction=128"];

/// One server for all cases at once may be slow on a small machine.
const OP_TIMEOUT: Duration = Duration::from_secs(30);

/// The advisory locks of one key, in the database of the namespace alone. Of the two spaces of keys the second one has those
/// that wait, as shared locks.
const LOCKS: &str = "FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1 \
                     AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) \
                     AND classid = $1::bigint::oid AND objid = $2::bigint::oid";

/// One server for all namespaces, each with a database of its own, and one more for each that wants its own.
pub(crate) struct PostgresHarness {
    kind: &'static Kind,
    name: String,
    /// By the address of the server behind it; none if clients go to the server itself.
    bouncers: Option<Mutex<HashMap<String, Arc<PgBouncer>>>>,
    servers: Hosts<Server>,
    /// What looks at the server, for each namespace, as each has a runtime of its own.
    admins: Mutex<HashMap<String, Arc<Client>>>,
    /// Sessions that are in the way of those under test.
    strangers: Mutex<HashMap<String, Client>>,
    /// Whether the database of a namespace is there.
    made: Mutex<HashMap<String, Arc<OnceCell<()>>>>,
}

impl PostgresHarness {
    /// On such servers, or on a PgBouncer before each of them.
    pub(crate) fn new(kind: &'static Kind, bounced: bool) -> Self {
        let title = kind.title();
        Self {
            kind,
            name: if bounced {
                format!("{title} behind PgBouncer")
            } else {
                title.to_owned()
            },
            bouncers: bounced.then(Mutex::default),
            servers: Hosts::new(move |is_own| start(kind, is_own)),
            admins: Mutex::default(),
            strangers: Mutex::default(),
            made: Mutex::default(),
        }
    }
}

#[async_trait]
impl Harness for PostgresHarness {
    fn name(&self) -> &str {
        &self.name
    }

    fn known_skips(&self) -> Option<&str> {
        let skips = include_str!("../skips/postgres.txt");
        Some(skips).filter(|_| self.kind.is_started_here())
    }

    async fn begin(&self) -> Result<Option<String>, LockError> {
        let server = self.servers.shared().await?;
        Ok(Some(format!(
            "{server}, as the role {ROLE:?} with the rights that lock_postgres::schema_sql lists"
        )))
    }

    async fn client(&self, namespace: &Namespace) -> Result<Arc<dyn DistributedLock>, LockError> {
        Ok(Arc::new(self.lock(namespace).await?))
    }

    async fn client_on(&self, namespace: &Namespace, runtime: Handle) -> Result<Arc<dyn DistributedLock>, LockError> {
        self.prepared(namespace).await?;
        let config = config(&self.entrance(namespace).await?, namespace)?.session_pooler(self.bouncers.is_some());
        Ok(Arc::new(config.runtime(runtime).connect().await?))
    }

    async fn address(&self, namespace: &Namespace) -> Result<Option<String>, LockError> {
        let server = self.servers.of(namespace).await?;
        let bouncer = self.bouncer(&server)?;
        Ok(Some(match bouncer {
            Some(bouncer) => bouncer.address().to_string(),
            None => server.authority().to_owned(),
        }))
    }

    async fn client_at(
        &self,
        namespace: &Namespace,
        address: SocketAddr,
    ) -> Result<Arc<dyn DistributedLock>, LockError> {
        self.prepared(namespace).await?;
        let url = self.servers.of(namespace).await?.url_at(address);
        let config = config(&url, namespace)?
            .op_timeout(Duration::from_secs(5))
            .session_pooler(self.bouncers.is_some());
        Ok(Arc::new(config.connect().await?))
    }

    async fn in_line(&self, namespace: &Namespace, name: &LockName) -> Result<Option<usize>, LockError> {
        let [high, low] = self.key(namespace, name).await?;
        let waiting = format!("SELECT count(*) {}", LOCKS.replace("objsubid = 1", "objsubid = 2"));
        let row = self.look(namespace).await?.query_one(&waiting, &[&high, &low]).await;
        let waiting: i64 = row.map_err(admin::failed)?.get(0);
        Ok(usize::try_from(waiting).ok())
    }

    async fn over(&self, namespace: &Namespace) {
        locked(&self.made).remove(namespace.name());
        locked(&self.admins).remove(namespace.name());
        locked(&self.strangers).remove(namespace.name());
        if namespace.wants_own_server()
            && let (Some(server), Some(bouncers)) = (self.servers.known(namespace), &self.bouncers)
        {
            locked(bouncers).remove(server.authority());
        }
        if !self.servers.end(namespace).await
            && let Ok(url) = self.url(namespace).await
        {
            let _ = admin::remove(&url, namespace.name()).await;
        }
    }

    async fn leftovers(&self, namespace: &Namespace) -> Result<Option<Vec<String>>, LockError> {
        let client = self.look(namespace).await?;
        let rows = client
            .query(
                "SELECT concat_ws(' ', l.pid, l.classid, l.objid, l.granted, a.application_name, a.state, a.query) \
                 FROM pg_locks l JOIN pg_stat_activity a USING (pid) WHERE l.locktype = 'advisory' \
                 AND a.datname = current_database() \
                 UNION ALL SELECT concat_ws(' ', 'reserved:', key, owner, holder) FROM fencelock.reservation \
                 WHERE until > extract(epoch FROM clock_timestamp()) * 1000000",
                &[],
            )
            .await
            .map_err(admin::failed)?;
        Ok(Some(rows.iter().map(|row| row.get(0)).collect()))
    }

    async fn inject(&self, namespace: &Namespace, fault: &Fault) -> Result<Injection, LockError> {
        match fault {
            // The only thing that ends before its time is a session, and nothing else says who holds.
            Fault::Expire(name) | Fault::Delete(name) => self.end_session(namespace, name).await,
            Fault::Steal(name) => self.steal(namespace, name).await,
            Fault::DeleteAll => self.delete_all(namespace).await,
            Fault::SetBackCounter(_) => {
                let client = self.admin(namespace).await?;
                let set_back = client.batch_execute("SELECT setval('fencelock.token', 5)").await;
                set_back.map(|()| Injection::Done).map_err(admin::failed)
            }
            Fault::DeleteCounter(_) => {
                let client = self.admin(namespace).await?;
                let reset = client.batch_execute("SELECT setval('fencelock.token', 1)").await;
                reset.map(|()| Injection::Done).map_err(admin::failed)
            }
            // Each namespace has a database of its own.
            Fault::Revoke => {
                let revoke = format!(
                    "REVOKE ALL ON ALL SEQUENCES IN SCHEMA fencelock FROM {ROLE};
                     REVOKE ALL ON ALL TABLES IN SCHEMA fencelock FROM {ROLE}"
                );
                let revoked = self.admin(namespace).await?.batch_execute(&revoke).await;
                revoked.map(|()| Injection::Done).map_err(admin::failed)
            }
            Fault::Permit => {
                let grant = schema_sql("fencelock", Some(ROLE))?;
                let granted = self.admin(namespace).await?.batch_execute(&grant).await;
                granted.map(|()| Injection::Done).map_err(admin::failed)
            }
            fault => self.inject_into_server(namespace, fault).await,
        }
    }

    async fn resource(&self, namespace: &Namespace, resource: &str) -> Result<Option<Arc<dyn Resource>>, LockError> {
        let (client, writer) = (self.admin(namespace).await?, self.admin(namespace).await?);
        Ok(Some(Arc::new(FencedRow::new(client, writer, resource).await?)))
    }

    fn child_environment(&self, namespace: &Namespace) -> Vec<(String, String)> {
        let Some(server) = self.servers.known(namespace) else {
            return Vec::new();
        };
        let mut environment = vec![(URL.to_owned(), server.url().to_owned())];
        if let Ok(Some(bouncer)) = self.bouncer(&server) {
            environment.push((ENTRANCE.to_owned(), server.url_at(bouncer.address())));
        }
        environment
    }

    fn leases_are_connections(&self) -> bool {
        true
    }

    fn connects_without_runtime(&self) -> bool {
        true
    }
}

impl PostgresHarness {
    /// What is done to the whole server is felt by all who use it.
    async fn inject_into_server(&self, namespace: &Namespace, fault: &Fault) -> Result<Injection, LockError> {
        if !self.servers.shared().await?.is_ours() {
            return Ok(Injection::NotPossible);
        }
        match fault {
            // Without its data the server would have neither the database nor the role; and with its table of locks full to
            // the last place it cannot even be asked who holds what.
            Fault::Freeze(_) | Fault::Restart | Fault::Copy | Fault::Restore => {}
            _ => return Ok(Injection::NotPossible),
        }
        if !namespace.wants_own_server() {
            return Ok(Injection::NeedsOwnServer);
        }
        let server = self.servers.of(namespace).await?;
        inject_into(std::slice::from_ref(&*server), fault).await
    }

    async fn end_session(&self, namespace: &Namespace, name: &LockName) -> Result<Injection, LockError> {
        let [high, low] = self.key(namespace, name).await?;
        let end = format!("SELECT pg_terminate_backend(pid, 5000) {LOCKS} AND granted");
        let ended = self.admin(namespace).await?.execute(&end, &[&high, &low]).await;
        ended.map(|_| Injection::Done).map_err(admin::failed)
    }

    /// A stranger's session takes the lock in the moment in which its holder's ends, and then falls silent.
    async fn steal(&self, namespace: &Namespace, name: &LockName) -> Result<Injection, LockError> {
        let key = self.key(namespace, name).await?;
        let stranger = self.admin(namespace).await?;
        let steal = format!(
            "SET idle_session_timeout = '8s'; SELECT pg_terminate_backend(pid) {}; SELECT pg_advisory_lock({})",
            LOCKS
                .replace("$1", &key[0].to_string())
                .replace("$2", &key[1].to_string()),
            key[0] << 32 | key[1]
        );
        stranger.batch_execute(&steal).await.map_err(admin::failed)?;
        locked(&self.strangers).insert(namespace.name().to_owned(), stranger);
        Ok(Injection::Done)
    }

    /// What is on the disk, and the sessions, which are all else that there is.
    async fn delete_all(&self, namespace: &Namespace) -> Result<Injection, LockError> {
        let anew = format!(
            "BEGIN; DROP SCHEMA fencelock CASCADE; {} SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
             WHERE datname = current_database() AND application_name LIKE 'fencelock %'; COMMIT",
            schema_sql("fencelock", Some(ROLE))?
        );
        let deleted = self.admin(namespace).await?.batch_execute(&anew).await;
        deleted.map(|()| Injection::Done).map_err(admin::failed)
    }

    async fn lock(&self, namespace: &Namespace) -> Result<PostgresLock, LockError> {
        self.prepared(namespace).await?;
        let config = config(&self.entrance(namespace).await?, namespace)?;
        config.session_pooler(self.bouncers.is_some()).connect().await
    }

    /// The halves of the key, as the server shows them.
    async fn key(&self, namespace: &Namespace, name: &LockName) -> Result<[i64; 2], LockError> {
        let lock = config(&self.url(namespace).await?, namespace)?.connect_lazy()?;
        let key = lock.key(name);
        Ok([(key as u64 >> 32) as i64, key & 0xffff_ffff])
    }

    async fn admin(&self, namespace: &Namespace) -> Result<Client, LockError> {
        self.prepared(namespace).await?;
        admin(&self.url(namespace).await?, namespace.name()).await
    }

    /// A session that stays, since cases look every few milliseconds.
    async fn look(&self, namespace: &Namespace) -> Result<Arc<Client>, LockError> {
        let known = locked(&self.admins).get(namespace.name()).cloned();
        if let Some(known) = known
            && known.check_connection().await.is_ok()
        {
            return Ok(known);
        }
        let client = Arc::new(self.admin(namespace).await?);
        locked(&self.admins).insert(namespace.name().to_owned(), Arc::clone(&client));
        Ok(client)
    }

    /// Makes the database of the namespace, with the schema and a role of few rights. A child process finds it made.
    async fn prepared(&self, namespace: &Namespace) -> Result<(), LockError> {
        if std::env::var(URL).is_ok() {
            return Ok(());
        }
        let made = Arc::clone(locked(&self.made).entry(namespace.name().to_owned()).or_default());
        let url = self.url(namespace).await?;
        let with_template = self.kind.is_started_here();
        made.get_or_try_init(|| admin::make(&url, namespace.name(), with_template))
            .await?;
        Ok(())
    }

    async fn url(&self, namespace: &Namespace) -> Result<String, LockError> {
        match std::env::var(URL) {
            Ok(url) => Ok(url),
            Err(_) => Ok(self.servers.of(namespace).await?.url().to_owned()),
        }
    }

    /// Where the clients under test connect.
    async fn entrance(&self, namespace: &Namespace) -> Result<String, LockError> {
        if let Ok(url) = std::env::var(ENTRANCE) {
            return Ok(url);
        }
        if self.bouncers.is_none() || std::env::var(URL).is_ok() {
            return self.url(namespace).await;
        }
        let server = self.servers.of(namespace).await?;
        let bouncer = self.bouncer(&server)?;
        Ok(bouncer.map_or_else(|| server.url().to_owned(), |bouncer| server.url_at(bouncer.address())))
    }

    fn bouncer(&self, server: &Server) -> Result<Option<Arc<PgBouncer>>, LockError> {
        let Some(bouncers) = &self.bouncers else {
            return Ok(None);
        };
        let mut bouncers = locked(bouncers);
        if let Some(bouncer) = bouncers.get(server.authority()) {
            return Ok(Some(Arc::clone(bouncer)));
        }
        // One that gives each client a session of its own, as the role that may do no more than it must.
        let (host, port) = server
            .authority()
            .rsplit_once(':')
            .unwrap_or((server.authority(), "5432"));
        let place = format!("host={host} port={port} user={ROLE} password={PASSWORD}");
        let bouncer = PgBouncer::start(&place, "pool_mode = session\ndefault_pool_size = 300").map_err(no_server)?;
        let bouncer = Arc::new(bouncer);
        bouncers.insert(server.authority().to_owned(), Arc::clone(&bouncer));
        Ok(Some(bouncer))
    }
}

async fn start(kind: &'static Kind, is_own: bool) -> Result<Server, LockError> {
    let server = match is_own || kind.is_started_here() {
        true => Server::start_own(kind, &SETTINGS).await,
        false => Server::start(kind).await,
    };
    server.map_err(no_server)
}

/// As a role that may do no more than a role should be allowed to, in the namespace's own database.
fn config(url: &str, namespace: &Namespace) -> Result<PostgresConfig, LockError> {
    let mut server: lock_postgres::tokio_postgres::Config = url.parse().map_err(admin::failed)?;
    server.user(ROLE).password(admin::PASSWORD).dbname(namespace.name());
    Ok(PostgresConfig::new(server)
        .namespace(namespace.name())
        .op_timeout(OP_TIMEOUT))
}

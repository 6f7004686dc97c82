//! Locks that move from one backend to the next, while the marks at the resources stay what they are.

use std::time::Duration;

use fencelock::FencingToken;
use fencelock::etcd::etcd_client::Client as EtcdClient;
use fencelock::etcd::fence as etcd_fence;
use fencelock::fence::{Fence, StaleToken};
use fencelock::postgres::fence::{self as postgres_fence, FenceTable};
use fencelock::postgres::tokio_postgres::{self, NoTls};
use fencelock::redis::fence as redis_fence;
use fencelock::redis::redis;
use fencelock::redis::redis::aio::MultiplexedConnection;
use fencelock::sqlite::fence as sqlite_fence;
use fencelock::sqlite::rusqlite::Connection;
use tempfile::TempDir;
use test_servers::{Kind, Server};

const RESOURCE: &str = "stock/10000";

#[tokio::test(flavor = "multi_thread")]
async fn marks_go_on_refusing_when_the_lock_moves_from_backend_to_backend_and_back() {
    let world = World::start().await;
    let etcd = world.etcd.url().replacen("http:", "etcd:", 1);
    let backends = [&*world.sqlite, &etcd, world.redis.url(), world.postgres.url()];
    let mut resources = world.resources().await;
    // There, and back.
    let way: Vec<_> = backends.iter().chain(backends.iter().rev().skip(1)).collect();
    let mut last: Option<FencingToken> = None;
    for url in &way {
        let locks = fencelock::connect(url).await.unwrap();
        // Twice, so that a backend is left while it knows of more than one grant.
        for _ in 0..2 {
            let guard = locks.lock(RESOURCE).wait_for(Duration::from_secs(30)).await.unwrap();
            let token = guard.token();
            for resource in &mut resources {
                assert_eq!(resource.admit(token).await, Ok(()), "the holder of now, by {url}");
                if let Some(last) = last {
                    assert!(last < token, "tokens rise from {last} to {token} at {url}");
                    let refused = StaleToken::new(RESOURCE, last, token);
                    assert_eq!(resource.admit(last).await, Err(refused), "an earlier holder");
                }
            }
            last = Some(token);
            guard.release().await.unwrap();
        }
        locks.shutdown().await.unwrap();
    }
    assert_eq!(way.len(), 2 * backends.len() - 1);
}

/// Every backend there is, by its address.
struct World {
    folder: TempDir,
    sqlite: String,
    etcd: Server,
    redis: Server,
    postgres: Server,
}

impl World {
    async fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        Self {
            sqlite: format!("sqlite:{}", folder.path().join("locks.db").display()),
            etcd: Server::start(&Kind::ETCD).await.unwrap(),
            redis: Server::start(&Kind::REDIS).await.unwrap(),
            postgres: Server::start(&Kind::POSTGRES).await.unwrap(),
            folder,
        }
    }

    async fn resources(&self) -> Vec<Resource> {
        let sqlite = Connection::open(self.folder.path().join("resource.db")).unwrap();
        sqlite.execute_batch(sqlite_fence::CREATE_SQL).unwrap();
        let etcd = EtcdClient::connect([self.etcd.authority()], None).await.unwrap();
        let client = redis::Client::open(self.redis.url()).unwrap();
        let (postgres, connection) = tokio_postgres::connect(self.postgres.url(), NoTls).await.unwrap();
        tokio::spawn(connection);
        postgres.batch_execute(marks().create_sql()).await.unwrap();
        vec![
            Resource::Memory(Fence::new(RESOURCE, ())),
            Resource::Sqlite(sqlite),
            Resource::Etcd(Box::new(etcd)),
            Resource::Redis(client.get_multiplexed_async_connection().await.unwrap()),
            Resource::Postgres(postgres),
        ]
    }
}

/// A table for one session alone.
fn marks() -> FenceTable {
    FenceTable::in_schema("pg_temp").unwrap()
}

/// A mark in each of the kits.
enum Resource {
    Memory(Fence<()>),
    Sqlite(Connection),
    Etcd(Box<EtcdClient>),
    Redis(MultiplexedConnection),
    Postgres(tokio_postgres::Client),
}

impl Resource {
    async fn admit(&mut self, token: FencingToken) -> Result<(), StaleToken> {
        match self {
            Self::Memory(fence) => fence.admit(token),
            Self::Sqlite(connection) => {
                let transaction = connection.transaction().unwrap();
                match sqlite_fence::admit(&transaction, RESOURCE, token) {
                    Ok(()) => {
                        transaction.commit().unwrap();
                        Ok(())
                    }
                    Err(sqlite_fence::FenceError::Stale(stale)) => Err(stale),
                    Err(error) => panic!("{error}"),
                }
            }
            Self::Etcd(client) => match etcd_fence::admit(client, RESOURCE, token).await {
                Ok(()) => Ok(()),
                Err(etcd_fence::FenceError::Stale(stale)) => Err(stale),
                Err(error) => panic!("{error}"),
            },
            Self::Postgres(client) => {
                let transaction = client.transaction().await.unwrap();
                match marks().admit(&transaction, RESOURCE, token).await {
                    Ok(()) => {
                        transaction.commit().await.unwrap();
                        Ok(())
                    }
                    Err(postgres_fence::FenceError::Stale(stale)) => Err(stale),
                    Err(error) => panic!("{error}"),
                }
            }
            Self::Redis(connection) => match redis_fence::admit(connection, RESOURCE, token).await {
                Ok(()) => Ok(()),
                Err(redis_fence::FenceError::Stale(stale)) => Err(stale),
                Err(error) => panic!("{error}"),
            },
        }
    }
}

//! The store in a Postgres database: a schema for each run, so that nothing meets what is there already.

use std::time::Duration;

use async_trait::async_trait;
use fencelock::FencingToken;
use fencelock::postgres::fence::{self, FenceError};
use fencelock::postgres::tokio_postgres::{Client, Config, NoTls};
use tokio::sync::{Mutex, MutexGuard};

use super::{Books, Sale, Store, StoreError};
use crate::Outcome;

/// How long the store may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);

pub(crate) struct Postgres {
    client: Mutex<Client>,
    schema: String,
    act: i64,
}

impl Postgres {
    pub(crate) async fn connect(url: &str, run: &str, act: usize) -> Outcome<Self> {
        // What follows a question mark is for the locks.
        let (url, _) = url.split_once('?').unwrap_or((url, ""));
        let mut server: Config = url.parse()?;
        let schema = format!("stock_{run}");
        server.connect_timeout(PATIENCE);
        server.options(format!(
            "-c search_path={schema} -c statement_timeout={}",
            PATIENCE.as_millis()
        ));
        let (client, connection) = server.connect(NoTls).await?;
        // What ends it is told to whoever asks the client.
        tokio::spawn(connection);
        Ok(Self {
            client: Mutex::new(client),
            schema,
            act: act as i64,
        })
    }

    /// One at a time, as a transaction takes the whole connection.
    async fn client(&self) -> MutexGuard<'_, Client> {
        self.client.lock().await
    }
}

#[async_trait]
impl Store for Postgres {
    async fn open(&self, stock: u32) -> Outcome<()> {
        let mut client = self.client().await;
        let step = client.transaction().await?;
        let tables = format!(
            "CREATE SCHEMA IF NOT EXISTS {};
             {};
             CREATE TABLE IF NOT EXISTS stock (act bigint PRIMARY KEY, \"left\" bigint NOT NULL);
             CREATE TABLE IF NOT EXISTS sale (act bigint, buyer bigint, \"left\" bigint NOT NULL, token bigint,
                 PRIMARY KEY (act, buyer));
             CREATE TABLE IF NOT EXISTS sign (act bigint PRIMARY KEY, until timestamptz NOT NULL)",
            self.schema,
            fence::CREATE_SQL
        );
        step.batch_execute(&tables).await?;
        let books = "INSERT INTO stock VALUES ($1, $2)";
        step.execute(books, &[&self.act, &i64::from(stock)]).await?;
        Ok(step.commit().await?)
    }

    async fn admit(&self, token: FencingToken) -> Result<(), StoreError> {
        let mut client = self.client().await;
        let step = client.transaction().await?;
        fence::admit(&step, &self.act.to_string(), token)
            .await
            .map_err(refusal)?;
        Ok(step.commit().await?)
    }

    async fn left(&self) -> Outcome<u32> {
        let query = "SELECT \"left\" FROM stock WHERE act = $1";
        let left: i64 = self.client().await.query_one(query, &[&self.act]).await?.get(0);
        Ok(left.try_into()?)
    }

    async fn sell(&self, sale: &Sale, fenced: bool) -> Result<(), StoreError> {
        let Sale { buyer, left, token } = *sale;
        let (buyer, left) = (i64::from(buyer), i64::from(left));
        let mut client = self.client().await;
        let step = client.transaction().await?;
        if let Some(token) = token.filter(|_| fenced) {
            fence::admit(&step, &self.act.to_string(), token)
                .await
                .map_err(refusal)?;
        }
        let token = token.map(FencingToken::as_i64);
        let stock = "UPDATE stock SET \"left\" = $2 WHERE act = $1";
        step.execute(stock, &[&self.act, &left]).await?;
        let note = "INSERT INTO sale VALUES ($1, $2, $3, $4)";
        step.execute(note, &[&self.act, &buyer, &left, &token]).await?;
        Ok(step.commit().await?)
    }

    async fn books(&self) -> Outcome<Books> {
        let left = self.left().await?;
        let query = "SELECT buyer, \"left\", token FROM sale WHERE act = $1";
        let mut sales = Vec::new();
        for row in self.client().await.query(query, &[&self.act]).await? {
            sales.push(Sale {
                buyer: row.get::<_, i64>(0).try_into()?,
                left: row.get::<_, i64>(1).try_into()?,
                token: row.get::<_, Option<i64>>(2).map(FencingToken::try_from).transpose()?,
            });
        }
        Ok(Books { left, sales })
    }

    async fn put_up_sign(&self, ttl: Option<Duration>) -> Outcome<bool> {
        let put_up = "INSERT INTO sign
            VALUES ($1, coalesce(clock_timestamp() + $2::bigint * interval '1 ms', 'infinity'))
            ON CONFLICT (act) DO UPDATE SET until = excluded.until WHERE sign.until <= clock_timestamp()
            RETURNING act";
        let ttl = ttl.map(|ttl| ttl.as_millis() as i64);
        let taken = self.client().await.query_opt(put_up, &[&self.act, &ttl]).await?;
        Ok(taken.is_some())
    }

    async fn take_down_sign(&self) -> Outcome<()> {
        let take_down = "DELETE FROM sign WHERE act = $1";
        self.client().await.execute(take_down, &[&self.act]).await?;
        Ok(())
    }

    async fn clear(&self) -> Outcome<()> {
        let all = format!("DROP SCHEMA IF EXISTS {} CASCADE", self.schema);
        Ok(self.client().await.batch_execute(&all).await?)
    }
}

fn refusal(error: FenceError) -> StoreError {
    match error {
        FenceError::Stale(stale) => StoreError::Stale(stale),
        error => error.into(),
    }
}

//! The store on a Redis or Valkey server: one hash for the books, so that one command writes the stock and notes the sale.

use std::time::Duration;

use async_trait::async_trait;
use fencelock::FencingToken;
use fencelock::redis::fence::{self, FenceError};
use fencelock::redis::redis::aio::MultiplexedConnection;
use fencelock::redis::redis::{self, AsyncConnectionConfig, Client, Cmd, FromRedisValue, Value};

use super::{Books, Sale, Store, StoreError};
use crate::Outcome;

/// How long a run that was killed leaves its books behind.
const KEPT: Duration = Duration::from_secs(60 * 60);

pub(crate) struct Redis {
    connection: MultiplexedConnection,
    // All keys begin with it, and so share a hash slot.
    act: String,
}

impl Redis {
    pub(crate) async fn connect(url: &str, run: &str, act: usize) -> Outcome<Self> {
        // What follows a question mark is for the locks.
        let (url, _) = url.split_once('?').unwrap_or((url, ""));
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(Duration::from_secs(10)))
            .set_response_timeout(Some(Duration::from_secs(10)));
        let client = Client::open(url)?;
        Ok(Self {
            connection: client.get_multiplexed_async_connection_with_config(&config).await?,
            act: format!("{{stock:{run}:{act}}}"),
        })
    }

    fn key(&self, kind: &str) -> String {
        format!("{}:{kind}", self.act)
    }

    async fn ask<T: FromRedisValue>(&self, command: &Cmd) -> Outcome<T> {
        Ok(command.query_async(&mut self.connection.clone()).await?)
    }
}

#[async_trait]
impl Store for Redis {
    async fn open(&self, stock: u32) -> Outcome<()> {
        let mut open = redis::pipe();
        open.atomic();
        open.cmd("HSET").arg(self.key("books")).arg("left").arg(stock).ignore();
        open.cmd("EXPIRE").arg(self.key("books")).arg(KEPT.as_secs()).ignore();
        Ok(open.exec_async(&mut self.connection.clone()).await?)
    }

    async fn admit(&self, token: FencingToken) -> Result<(), StoreError> {
        fence::admit(&mut self.connection.clone(), &self.act, token)
            .await
            .map_err(refusal)
    }

    async fn left(&self) -> Outcome<u32> {
        self.ask(redis::cmd("HGET").arg(self.key("books")).arg("left")).await
    }

    async fn sell(&self, sale: &Sale, fenced: bool) -> Result<(), StoreError> {
        let note = format!("{} {}", sale.left, sale.token.map_or(0, FencingToken::get));
        let mut write = redis::cmd("HSET");
        write.arg(self.key("books")).arg("left").arg(sale.left);
        write.arg(sale.buyer).arg(note);
        match sale.token {
            Some(token) if fenced => fence::write(&mut self.connection.clone(), &self.act, token, &write)
                .await
                .map_err(refusal),
            _ => Ok(self.ask(&write).await?),
        }
    }

    async fn books(&self) -> Outcome<Books> {
        let mut fields: Vec<(String, String)> = self.ask(redis::cmd("HGETALL").arg(self.key("books"))).await?;
        let left = fields.iter().position(|(field, _)| field == "left");
        let (_, left) = fields.swap_remove(left.ok_or("the books are gone")?);
        let mut sales = Vec::new();
        for (buyer, note) in fields {
            let (left, token) = note.split_once(' ').ok_or("a sale was noted in another way")?;
            sales.push(Sale {
                buyer: buyer.parse()?,
                left: left.parse()?,
                token: FencingToken::new(token.parse()?).ok(),
            });
        }
        Ok(Books {
            left: left.parse()?,
            sales,
        })
    }

    async fn put_up_sign(&self, ttl: Option<Duration>) -> Outcome<bool> {
        let mut set = redis::cmd("SET");
        set.arg(self.key("sign")).arg(1).arg("NX");
        if let Some(ttl) = ttl {
            set.arg("PX").arg(ttl.as_millis() as u64);
        }
        let answer: Value = self.ask(&set).await?;
        Ok(answer != Value::Nil)
    }

    async fn take_down_sign(&self) -> Outcome<()> {
        self.ask(redis::cmd("DEL").arg(self.key("sign"))).await
    }

    async fn clear(&self) -> Outcome<()> {
        let keys = [self.key("books"), self.key("sign"), fence::mark_key(&self.act)];
        self.ask(redis::cmd("DEL").arg(&keys[..])).await
    }
}

fn refusal(error: FenceError) -> StoreError {
    match error {
        FenceError::Stale(stale) => StoreError::Stale(stale),
        error => error.into(),
    }
}

//! A web service with its data in SQLite through sqlx, and with locks of fencelock in a SQLite file, both in one program.

use std::error::Error;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::post;
use fencelock::Locks;
use sqlx::SqlitePool;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

#[derive(Clone)]
struct Shop {
    locks: Locks,
    data: SqlitePool,
}

impl Shop {
    /// Sells one piece under a lock. The row takes no write with a lower token than it has seen.
    async fn sell(&self) -> Result<u64, Box<dyn Error + Send + Sync>> {
        let guard = self.locks.lock("stock/10000").wait_for(Duration::from_secs(5)).await?;
        let token = guard.token().get();
        let sold = sqlx::query("UPDATE stock SET amount = amount - 1, fence = ?1 WHERE id = 10000 AND fence <= ?1")
            .bind(i64::try_from(token)?)
            .execute(&self.data)
            .await?;
        guard.release().await?;
        match sold.rows_affected() {
            1 => Ok(token),
            _ => Err("the token is stale".into()),
        }
    }
}

async fn sell(State(shop): State<Shop>) -> Result<String, (StatusCode, String)> {
    match shop.sell().await {
        Ok(token) => Ok(format!("sold with token {token}")),
        Err(error) => Err((StatusCode::INTERNAL_SERVER_ERROR, error.to_string())),
    }
}

#[tokio::test]
async fn a_shop_with_sqlx_sells_one_piece_under_a_lock() -> Result<(), Box<dyn Error + Send + Sync>> {
    let folder = tempfile::tempdir()?;
    let data = SqlitePool::connect(&format!("sqlite:{}?mode=rwc", folder.path().join("shop.db").display())).await?;
    sqlx::query("CREATE TABLE stock (id INTEGER PRIMARY KEY, amount INTEGER NOT NULL, fence INTEGER NOT NULL)")
        .execute(&data)
        .await?;
    sqlx::query("INSERT INTO stock VALUES (10000, 100, 0)")
        .execute(&data)
        .await?;
    let locks = fencelock::connect(format!("sqlite:{}", folder.path().join("locks.db").display())).await?;
    let shop = Shop { locks, data };

    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let service = Router::new().route("/sell", post(sell)).with_state(shop.clone());
    let server = tokio::spawn(async move { axum::serve(listener, service).await });

    let mut client = TcpStream::connect(address).await?;
    let request = format!("POST /sell HTTP/1.1\r\nHost: {address}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    client.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    client.read_to_string(&mut answer).await?;
    server.abort();
    let body = answer.lines().last().unwrap_or_default();
    assert!(
        answer.starts_with("HTTP/1.1 200 ") && body.starts_with("sold with token "),
        "{answer}"
    );

    let (amount, fence): (i64, i64) = sqlx::query_as("SELECT amount, fence FROM stock")
        .fetch_one(&shop.data)
        .await?;
    assert_eq!((amount, body), (99, &*format!("sold with token {fence}")));
    Ok(())
}

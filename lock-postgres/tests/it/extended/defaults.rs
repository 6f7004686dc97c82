//! What a role or a database has for defaults makes no difference.

use std::time::Duration;

use lock_core::DistributedLock;

use crate::server::{Server, claim, granted};

const TTL: Duration = Duration::from_secs(30);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn defaults_of_the_role_and_of_the_database_do_not_matter() {
    let server = Server::with(&["max_connections=200"]);
    for (setting, value) in [
        ("default_transaction_read_only", "on"),
        ("default_transaction_isolation", "serializable"),
        ("default_transaction_isolation", "'repeatable read'"),
        ("default_transaction_deferrable", "on"),
        ("idle_session_timeout", "2000"),
        ("synchronous_commit", "off"),
        ("search_path", "nowhere"),
        ("standard_conforming_strings", "off"),
        ("quote_all_identifiers", "on"),
        ("backslash_quote", "off"),
    ] {
        for place in ["ROLE postgres", "DATABASE postgres"] {
            server.run_sql("DROP SCHEMA IF EXISTS fencelock CASCADE").await;
            server.run_sql(&format!("ALTER {place} SET {setting} = {value}")).await;
            let starts = (0..24).map(|_| tokio::spawn(server.config().connect()));
            let mut failed = Vec::new();
            for start in starts.collect::<Vec<_>>() {
                match start.await.unwrap() {
                    Ok(lock) => lock.close().await.unwrap(),
                    Err(error) => failed.push(format!("{error:#}")),
                }
            }
            assert!(
                failed.is_empty(),
                "{place} {setting}: {} failed: {failed:?}",
                failed.len()
            );
            let lock = server.client().await;
            let claim = claim("Joe's \\", TTL);
            let token = granted(&lock, &claim).await.token;
            let holder = lock.holders(claim.name()).await.unwrap().pop().expect("a holder");
            assert_eq!(holder.token, Some(token), "{place} {setting}");
            lock.close().await.unwrap();
            let admin = server.plain().await;
            admin
                .batch_execute("SET default_transaction_read_only = off")
                .await
                .unwrap();
            admin
                .batch_execute(&format!("ALTER {place} RESET {setting}"))
                .await
                .unwrap();
        }
    }
}

//! Failovers behind one address: a proxy, a virtual IP, a DNS name.

use std::time::Duration;

use lock_core::{DistributedLock, LockError, Locks};
use lock_postgres::{PostgresConfig, Tls};

use crate::server::proxy::Proxy;
use crate::server::{HANG_LIMIT, Server, claim, granted, in_time};
use test_servers::LocalPostgres;

const TTL: Duration = Duration::from_secs(2);

/// A client that waits reconnects while the address leads to a standby, which is promoted only later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_goes_on_while_the_address_leads_to_a_standby() {
    let primary = Server::start();
    // Which a standby refuses.
    primary
        .run_sql("CREATE ROLE joe LOGIN SUPERUSER; ALTER ROLE joe SET default_transaction_isolation = serializable")
        .await;
    let holder = primary.client().await;
    let held = granted(&holder, &claim("a", 2 * HANG_LIMIT)).await;
    let folder = LocalPostgres::folder().unwrap();
    let data = folder.path().join("data");
    primary.copy_for_standby(&data);
    let standby = Server::on_data(&data, &[]);
    let proxy = Proxy::to(primary.port()).await;
    let as_joe = |ports: &[u16]| {
        let mut login = primary.login_at(ports[0]);
        login.user("joe");
        for &port in &ports[1..] {
            login.host("127.0.0.1").port(port);
        }
        PostgresConfig::new(login).tls(Tls::Disable)
    };
    // Of several servers standbys are passed over.
    granted(
        &as_joe(&[standby.port(), primary.port()]).connect().await.unwrap(),
        &claim("b", TTL),
    )
    .await;
    is_standby(as_joe(&[standby.port(), standby.port()])).await;
    let config = as_joe(&[proxy.port()]);
    let locks = Locks::new(config.clone().connect().await.unwrap());
    let waiting = tokio::spawn(locks.lock("a").ttl(TTL).wait_for(HANG_LIMIT).into_future());
    primary.until_waiting("a", 1).await;

    proxy.lead_to(standby.port());
    // Several of its connections have found a standby.
    in_time(proxy.until_made(3)).await;
    assert!(!waiting.is_finished(), "{:?}", waiting.await);
    // A client that never found a primary is refused.
    is_standby(config).await;

    standby
        .plain()
        .await
        .batch_execute("SELECT pg_promote()")
        .await
        .unwrap();
    let guard = in_time(waiting).await.unwrap().unwrap();
    assert!(guard.token() > held.token, "{} after {}", guard.token(), held.token);
    guard.release().await.unwrap();
    holder.close().await.unwrap();
}

async fn is_standby(config: PostgresConfig) {
    let refused = config.connect().await.map(|_| "it connected").unwrap_err();
    assert!(matches!(refused, LockError::UnsafeConfiguration { .. }), "{refused:?}");
    assert!(format!("{refused:#}").contains("standby"), "{refused}");
}

//! Forced releases that take long.

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use lock_core::DistributedLock;
use lock_postgres::PostgresLock;

use crate::bad_input::is_configuration;
use crate::inquiry::{TTL, behind, names};
use crate::server::proxy::Proxy;
use crate::server::{Database, HANG_LIMIT, claim, granted, in_time, name, until};

/// How long an operation of a victim may take: it is busy with a forced release for a sixth of that.
const SHORT: Duration = Duration::from_secs(6);

/// Whether a client has asked others, and waits for their answers.
const ASKED: &str = "SELECT count(*) > 0 FROM pg_stat_activity \
                     WHERE state = 'idle' AND query LIKE 'LISTEN %pg_notify(%' AND datname = current_database()";

/// A client whose requests are sent as soon as they are polled.
async fn victim(proxy: &Proxy, server: &Database) -> PostgresLock {
    let config = server
        .config_at(proxy.port())
        .runtime(tokio::runtime::Handle::current());
    config.op_timeout(SHORT).connect().await.unwrap()
}

/// Sends a request, which goes on by itself.
async fn send(request: impl Future) {
    let mut request = pin!(request);
    poll_fn(|cx| {
        let _ = request.as_mut().poll(cx);
        Poll::Ready(())
    })
    .await;
}

async fn until_held(proxy: &Proxy) {
    until("a request comes", async || proxy.left() == 0).await;
}

/// Waits until that question yields true.
async fn until_true(server: &Database, sql: &str) {
    let plain = server.plain().await;
    until(sql, async || plain.query_one(sql, &[]).await.unwrap().get(0)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_forced_release_of_a_lock_that_its_client_is_busy_with_is_no_success_before_it_is_free() {
    let server = Database::new().await;
    let proxy = Proxy::to(server.port()).await;
    let (lock, other) = (victim(&proxy, &server).await, server.client().await);
    let mine = claim("a", TTL);
    let grant = granted(&lock, &mine).await;
    let asker = server.config().op_timeout(HANG_LIMIT * 2).connect().await.unwrap();
    // What has the turn until it is answered.
    proxy.hold_requests_after(1);
    let theirs = lock.clone();
    let busy = tokio::spawn(async move { theirs.try_acquire(&mine).await });
    until_held(&proxy).await;
    let releasing = tokio::spawn(async move { asker.force_release(&name("a")).await });
    until_true(&server, ASKED).await;
    // Mostly the client has answered by then that it could not. Whether it has or not, the outcome is the same.
    tokio::time::sleep(SHORT / 3).await;
    proxy.pass();
    let hit = in_time(releasing).await.unwrap().unwrap().pop().unwrap();
    let next = granted(&other, &claim("a", TTL)).await;
    println!("{hit:?}");
    assert!(busy.await.unwrap().is_ok());
    assert!(next.token > grant.token, "{} after {}", next.token, grant.token);
    assert!(grant.revoked().is_some(), "its holder was not told");
    assert_eq!(
        hit.also_released, None,
        "it was released, and its session was not ended"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_does_not_answer_is_shown_by_its_session_within_a_bound() {
    let server = Database::new().await;
    let proxy = Proxy::to(server.port()).await;
    let (silent, living) = (behind(&proxy, &server).await, server.client().await);
    granted(&silent, &claim("a", TTL)).await;
    granted(&living, &claim("b", TTL)).await;
    proxy.hold_answers();
    let looker = server.client().await;
    let listed = in_time(looker.list("")).await.unwrap();
    assert_eq!(names(&listed), ["?", "b"]);
    assert!(listed[0].key.is_some() && listed[0].pid == Some(std::process::id()));
    // It may be of that prefix or not.
    assert_eq!(names(&in_time(looker.list("b")).await.unwrap()), ["b"]);
    // Who asks for a name knows it.
    let holder = in_time(looker.holders(&name("a"))).await.unwrap().pop().unwrap();
    assert_eq!((holder.name, holder.token), (Some(name("a")), None));
    // Another role may lock, and may not end its session.
    let grants = lock_postgres::schema_sql("fencelock", Some("other_role")).unwrap();
    server.run_sql(&format!("CREATE ROLE other_role LOGIN; {grants}")).await;
    let joe = server.config_as("other_role").connect().await.unwrap();
    let error = in_time(joe.force_release(&name("a"))).await.unwrap_err();
    is_configuration(&error, "GRANT pg_signal_backend");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_forced_release_that_is_given_up_on_the_way_leaves_no_lock_that_nobody_knows_of() {
    let server = Database::new().await;
    let proxy = Proxy::to(server.port()).await;
    let (lock, plain) = (victim(&proxy, &server).await, server.plain().await);
    let grant = granted(&lock, &claim("a", TTL)).await;
    let session = "SELECT pid, split_part(application_name, ' ', 2) FROM pg_stat_activity JOIN pg_locks USING (pid) \
                   WHERE application_name LIKE 'fencelock %' AND datname = current_database() AND locktype = 'advisory'";
    let row = plain.query_one(session, &[]).await.unwrap();
    let (pid, mark): (i32, String) = (row.get(0), row.get(1));
    // As many statements as are under way at once: the release is behind them.
    proxy.hold_requests_after(0);
    for number in 0..8 {
        send(lock.try_acquire(&claim(&format!("n {number}"), TTL))).await;
    }
    let request = format!(
        "SELECT pg_notify((SELECT name FROM fencelock.channel), 'release {} {mark} fencelock_nobody {pid}')",
        lock.key(&name("a"))
    );
    plain.batch_execute(&request).await.unwrap();
    in_time(grant.revocation().revoked()).await;
    // Mostly the client has given up its release by then. Whether it has or not, the outcome is the same.
    tokio::time::sleep(SHORT / 4).await;
    proxy.pass();
    server.until_locks(0).await;
    assert_eq!(server.sessions().await, [pid]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_forced_release_whose_last_request_is_lost_is_no_success() {
    /// What ends the question before that. The next request is longer.
    const LAST: usize = "Q1234UNLISTEN \"fencelock_01234567-0123-0123-0123-0123456789ab\"0".len();
    let server = Database::new().await;
    let (theirs, ours) = (Proxy::to(server.port()).await, Proxy::to(server.port()).await);
    let silent = behind(&theirs, &server).await;
    let grant = granted(&silent, &claim("a", TTL)).await;
    theirs.hold_answers();
    // It waits for the answer for a third of that.
    let config = server.config_at(ours.port()).op_timeout(2 * SHORT);
    let asker = config.connect().await.unwrap();
    let asking = asker.clone();
    let releasing = tokio::spawn(async move { asking.force_release(&name("a")).await });
    until_true(&server, ASKED).await;
    ours.hold_requests_after(LAST + 9);
    until_held(&ours).await;
    ours.cut();
    until_true(
        &server,
        "SELECT count(*) = 1 FROM pg_stat_activity WHERE application_name LIKE 'fencelock %' AND datname = current_database()",
    )
    .await;
    ours.pass();
    let said = in_time(releasing).await.unwrap();
    println!("{said:?}");
    assert!(said.is_err() || server.locks().await == 0, "{said:?}, and it is held");
    assert!(in_time(asker.force_release(&name("a"))).await.unwrap().pop().is_some());
    server.until_locks(0).await;
    drop(grant);
}

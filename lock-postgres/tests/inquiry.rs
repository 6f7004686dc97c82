//! Who holds what, as clients tell each other, and how a lock is taken away from one of them.

#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test may fail")]

mod server;

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;
use std::time::{Duration, Instant, SystemTime};

use lock_core::{DistributedLock, Holder, LockError, Locks, LossReason};
use lock_postgres::tokio_postgres::NoTls;
use lock_postgres::{PostgresConfig, PostgresLock, Tls};
use rustix::process::Signal;
use server::proxy::Proxy;
use server::{PATIENCE, Server, claim, granted, in_time, is_busy, name, signal_process};

const TTL: Duration = Duration::from_secs(20);

fn names(holders: &[Holder]) -> Vec<String> {
    let shown = |holder: &Holder| holder.name.as_ref().map_or("?".to_owned(), ToString::to_string);
    holders.iter().map(shown).collect()
}

/// A client behind a proxy, which can make it silent.
async fn behind(proxy: &Proxy, server: &Server) -> PostgresLock {
    at(proxy, server).connect().await.unwrap()
}

fn at(proxy: &Proxy, server: &Server) -> PostgresConfig {
    PostgresConfig::new(server.login_at(proxy.port())).tls(Tls::Disable)
}

/// How long an operation of a victim may take: it is busy with a forced release for a sixth of that.
const SHORT: Duration = Duration::from_secs(6);

/// A client whose requests are sent as soon as they are polled.
async fn victim(proxy: &Proxy, server: &Server) -> PostgresLock {
    let config = at(proxy, server).runtime(tokio::runtime::Handle::current());
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
    let start = Instant::now();
    while !proxy.holds_requests() {
        assert!(start.elapsed() < PATIENCE, "no request comes");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Waits until that question yields true.
async fn until(server: &Server, sql: &str) {
    let plain = server.plain().await;
    let start = Instant::now();
    while !plain.query_one(sql, &[]).await.unwrap().get::<_, bool>(0) {
        assert!(start.elapsed() < PATIENCE, "never true: {sql}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Whether a client has asked others, and waits for their answers.
const ASKED: &str =
    "SELECT count(*) > 0 FROM pg_stat_activity WHERE state = 'idle' AND query LIKE 'LISTEN %pg_notify(%'";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_client_sees_names_tokens_labels_and_times() {
    let server = Server::start();
    let (one, two, looker) = (server.client().await, server.client().await, server.client().await);
    let (locks, alone) = (Locks::new(one.clone()), claim("b/2", TTL).with_own_lease());
    let guard = locks.lock("b/1").ttl(TTL).label("a label").await.unwrap();
    let other = locks.lock("c").ttl(TTL).await.unwrap();
    let grant = granted(&two, &alone).await;
    let listed = looker.list("b/").await.unwrap();
    assert_eq!(names(&listed), ["b/1", "b/2"]);
    assert_eq!(listed[0].token, Some(guard.token()));
    assert_eq!(listed[0].label.as_deref(), Some("a label"));
    assert_eq!(listed[0].pid, Some(std::process::id()));
    let since = SystemTime::now()
        .duration_since(listed[0].acquired_at.unwrap())
        .unwrap();
    assert!(since < PATIENCE, "{since:?}");
    assert!(
        listed
            .iter()
            .all(|holder| holder.remaining.is_some_and(|left| left <= TTL))
    );
    assert_eq!(
        (listed[1].token, listed[1].owner),
        (Some(grant.token), Some(alone.owner()))
    );
    assert_eq!(names(&looker.list("").await.unwrap()), ["b/1", "b/2", "c"]);
    assert_eq!(names(&looker.list("d").await.unwrap()), [""; 0]);
    let holder = looker.holder(&name("c")).await.unwrap().unwrap();
    assert_eq!((holder.token, holder.owner), (Some(other.token()), holder.owner));
    // Another namespace is another one.
    let elsewhere = server.config().namespace("elsewhere").connect().await.unwrap();
    assert_eq!(elsewhere.list("").await.unwrap(), []);
    assert_eq!(elsewhere.holder(&name("c")).await.unwrap(), None);
    // With another schema it is the same lock.
    let schema = server.config().schema("elsewhere").connect().await.unwrap();
    assert!(is_busy(&schema, &claim("c", TTL)).await);
    // What clients take turns by while they open sessions is nobody's lock.
    let mark: String = server
        .value("SELECT split_part(application_name, ' ', 2) FROM pg_stat_activity WHERE application_name LIKE 'fencelock %' ORDER BY backend_start LIMIT 1")
        .await;
    let opening = server.plain().await;
    let take = format!(
        "SET application_name = 'fencelock {mark} 1 elsewhere'; \
         SELECT pg_advisory_lock(x) FROM unnest(ARRAY[x'66656e63656c6f63'::bigint, x'66656e63656c6f64'::bigint]) x"
    );
    opening.batch_execute(&take).await.unwrap();
    assert_eq!(names(&looker.list("").await.unwrap()), ["b/1", "b/2", "c"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_and_labels_need_no_letters_of_the_database() {
    let server = Server::start();
    server
        .run_sql("CREATE DATABASE latin ENCODING 'LATIN1' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'")
        .await;
    let mut login = server.login();
    login.dbname("latin");
    let config = PostgresConfig::new(login).tls(Tls::Disable);
    let (one, looker) = (config.clone().connect().await.unwrap(), config.connect().await.unwrap());
    let wanted = [
        ("\u{17c}\u{f3}\u{142}w 100%41", "\u{6f22} 100%"),
        ("ascii", "\u{e9}"),
        ("\u{6f22}", "label"),
    ];
    for (name, label) in wanted {
        granted(&one, &claim(name, TTL).with_label(label)).await;
    }
    let listed = looker.list("").await.unwrap();
    let mut listed: Vec<_> = listed
        .iter()
        .map(|holder| {
            (
                holder.name.as_ref().map_or("?", |name| name.as_str()),
                holder.label.as_deref(),
            )
        })
        .collect();
    listed.sort_unstable();
    let mut wanted = wanted.map(|(name, label)| (name, Some(label)));
    wanted.sort_unstable();
    assert_eq!(listed, wanted);
    let released = looker.force_release(&name("\u{6f22}")).await.unwrap().unwrap();
    assert_eq!(released.label.as_deref(), Some("label"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_has_as_many_parts_as_it_takes() {
    const LOCKS: usize = 700;
    let server = Server::start();
    let (one, looker) = (server.client().await, server.client().await);
    for number in 0..LOCKS {
        granted(&one, &claim(&format!("{number:0400}"), TTL).with_label("x".repeat(200))).await;
    }
    let listed = looker.list("").await.unwrap();
    assert_eq!(listed.len(), LOCKS);
    for (number, holder) in listed.iter().enumerate() {
        assert_eq!(holder.name.as_ref().unwrap().as_str(), format!("{number:0400}"));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_does_not_answer_is_shown_by_its_session_within_a_bound() {
    let server = Server::start();
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
    let holder = in_time(looker.holder(&name("a"))).await.unwrap().unwrap();
    assert_eq!((holder.name, holder.token), (Some(name("a")), None));
    // Another role may lock, and may not end its session.
    let grants = lock_postgres::schema_sql("fencelock", Some("joe")).unwrap();
    server.run_sql(&format!("CREATE ROLE joe LOGIN; {grants}")).await;
    let mut joe = server.login();
    joe.user("joe");
    let joe = PostgresConfig::new(joe).tls(Tls::Disable).connect().await.unwrap();
    let error = in_time(joe.force_release(&name("a"))).await.unwrap_err();
    assert!(matches!(error, LockError::Configuration { .. }), "{error:?}");
    let said = format!("{error:#}");
    assert!(said.contains("GRANT pg_signal_backend"), "{said}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_forced_release_takes_one_lock_from_a_client_that_answers() {
    let server = Server::start();
    let (victim, other) = (Locks::new(server.client().await), server.client().await);
    let mut spared = Vec::new();
    for number in 0..5 {
        spared.push(victim.lock(format!("n {number}")).ttl(TTL).await.unwrap());
    }
    let guard = victim.lock("a").ttl(TTL).await.unwrap();
    let sessions = server.sessions().await;
    let hit = other.force_release(&name("a")).await.unwrap().unwrap();
    assert_eq!((hit.token, hit.also_released), (Some(guard.token()), None));
    // It was told before the lock was free.
    assert!(!guard.is_held());
    assert_eq!(guard.lost().wait().await, LossReason::NotHeld);
    let next = granted(&other, &claim("a", TTL)).await;
    assert!(next.token > guard.token());
    for guard in &spared {
        assert!(guard.is_held());
        guard.renew_now().await.unwrap();
    }
    assert_eq!(server.locks().await, 6);
    let left = server.sessions().await;
    assert!(
        sessions.iter().all(|session| left.contains(session)),
        "{sessions:?} {left:?}"
    );
    // A lock that has its session to itself, too.
    let alone = claim("alone", TTL).with_own_lease();
    let grant = granted(&other, &alone).await;
    let asker = server.client().await;
    let hit = asker.force_release(&name("alone")).await.unwrap().unwrap();
    assert_eq!((hit.token, hit.also_released), (Some(grant.token), None));
    assert!(grant.revoked().is_some());
    assert_eq!(asker.force_release(&name("alone")).await.unwrap(), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_forced_release_ends_the_session_of_a_client_that_does_not_answer_and_says_what_goes_with_it() {
    let server = Server::start();
    let proxy = Proxy::to(server.port()).await;
    let (silent, other) = (behind(&proxy, &server).await, server.client().await);
    for lock in ["a", "b", "c"] {
        granted(&silent, &claim(lock, TTL)).await;
    }
    proxy.hold_answers();
    let hit = in_time(other.force_release(&name("a"))).await.unwrap().unwrap();
    assert_eq!(hit.also_released, Some(2));
    server.until_locks(0, PATIENCE).await;
}

#[tokio::test]
async fn a_role_without_rights_on_the_schema_cannot_ask() {
    let server = Server::start();
    let lock = server.client().await;
    let grant = granted(&lock, &claim("a", TTL)).await;
    server.run_sql("CREATE ROLE joe LOGIN").await;
    let mut login = server.login();
    let (joe, connection) = login.user("joe").connect(NoTls).await.unwrap();
    tokio::spawn(connection);
    let refused = joe.query_one("SELECT name FROM fencelock.channel", &[]).await;
    assert!(refused.is_err());
    // Nor does a guess do anything.
    joe.batch_execute("SELECT pg_notify('fencelock', 'release 1 x y 1')")
        .await
        .unwrap();
    assert_eq!(lock.holder(&name("a")).await.unwrap().unwrap().token, Some(grant.token));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_forced_release_that_is_given_up_on_the_way_leaves_no_lock_that_nobody_knows_of() {
    let server = Server::start();
    let proxy = Proxy::to(server.port()).await;
    let (lock, plain) = (victim(&proxy, &server).await, server.plain().await);
    let grant = granted(&lock, &claim("a", TTL)).await;
    let session = "SELECT pid, split_part(application_name, ' ', 2) FROM pg_stat_activity JOIN pg_locks USING (pid) \
                   WHERE application_name LIKE 'fencelock %' AND locktype = 'advisory'";
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
    let start = Instant::now();
    while grant.revoked().is_none() {
        assert!(start.elapsed() < PATIENCE, "the request never came");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    // The client has answered by then that it could not.
    tokio::time::sleep(SHORT / 4).await;
    proxy.pass();
    server.until_locks(0, PATIENCE).await;
    assert_eq!(server.sessions().await, [pid]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_forced_release_of_a_lock_that_its_client_is_busy_with_is_no_success_before_it_is_free() {
    let server = Server::start();
    let proxy = Proxy::to(server.port()).await;
    let (lock, other) = (victim(&proxy, &server).await, server.client().await);
    let mine = claim("a", TTL);
    let grant = granted(&lock, &mine).await;
    let asker = server.config().op_timeout(PATIENCE * 2).connect().await.unwrap();
    // What has the turn until it is answered.
    proxy.hold_requests_after(1);
    let theirs = lock.clone();
    let busy = tokio::spawn(async move { theirs.try_acquire(&mine).await });
    until_held(&proxy).await;
    let releasing = tokio::spawn(async move { asker.force_release(&name("a")).await });
    until(&server, ASKED).await;
    // The client has answered by then that it could not.
    tokio::time::sleep(SHORT / 3).await;
    proxy.pass();
    let hit = in_time(releasing).await.unwrap().unwrap().unwrap();
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

/// A client takes its time to answer, in which the lock may be released: then its session would be ended for nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whether_a_session_still_has_the_lock_is_asked_of_the_server_alone() {
    let server = Server::with(&["log_statement=all"]);
    let lock = server.config().op_timeout(SHORT).connect().await.unwrap();
    let asker = server.config().op_timeout(PATIENCE * 2).connect().await.unwrap();
    // Another session of the client, which answers for the one with the lock.
    granted(&lock, &claim("other", TTL)).await;
    granted(&lock, &claim("a", TTL).with_own_lease()).await;
    let key = lock.key(&name("a")) as u64;
    let (high, low) = (key >> 32, key & 0xffff_ffff);
    let session = format!("SELECT pid FROM pg_locks WHERE objsubid = 1 AND classid = {high} AND objid = {low}");
    let session = server.value::<i32>(&session).await.try_into().unwrap();
    // Its client cannot release the lock, and says so.
    signal_process(session, Signal::STOP);
    let releasing = tokio::spawn(async move { asker.force_release(&name("a")).await });
    in_time(async {
        while !server.log().contains("'tell ") && !server.log().contains("SELECT pg_terminate_backend") {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    signal_process(session, Signal::CONT);
    let hit = in_time(releasing).await.unwrap().unwrap().unwrap();
    assert!(
        !server.log().contains("'tell "),
        "a client was asked whether the lock is still held"
    );
    assert_eq!(hit.also_released, Some(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_forced_release_whose_last_request_is_lost_is_no_success() {
    /// What ends the question before that. The next request is longer.
    const LAST: usize = "Q1234UNLISTEN \"fencelock_01234567-0123-0123-0123-0123456789ab\"0".len();
    let server = Server::start();
    let (theirs, ours) = (Proxy::to(server.port()).await, Proxy::to(server.port()).await);
    let silent = behind(&theirs, &server).await;
    let grant = granted(&silent, &claim("a", TTL)).await;
    theirs.hold_answers();
    // It waits for the answer for a third of that.
    let asker = at(&ours, &server).op_timeout(2 * SHORT).connect().await.unwrap();
    let asking = asker.clone();
    let releasing = tokio::spawn(async move { asking.force_release(&name("a")).await });
    until(&server, ASKED).await;
    ours.hold_requests_after(LAST + 9);
    until_held(&ours).await;
    ours.cut();
    until(
        &server,
        "SELECT count(*) = 1 FROM pg_stat_activity WHERE application_name LIKE 'fencelock %'",
    )
    .await;
    ours.pass();
    let said = in_time(releasing).await.unwrap();
    println!("{said:?}");
    assert!(said.is_err() || server.locks().await == 0, "{said:?}, and it is held");
    assert!(in_time(asker.force_release(&name("a"))).await.unwrap().is_some());
    server.until_locks(0, PATIENCE).await;
    drop(grant);
}

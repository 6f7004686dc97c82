//! Who holds what, as clients tell each other, and how a lock is taken away from one of them.

use std::time::{Duration, SystemTime};

use lock_core::{DistributedLock, Holder, Locks, LossReason};
use lock_postgres::tokio_postgres::NoTls;
use lock_postgres::{PostgresConfig, PostgresLock, Tls};

use crate::server::proxy::Proxy;
use crate::server::{Database, HANG_LIMIT, claim, granted, in_time, is_busy, name};

pub(crate) const TTL: Duration = Duration::from_secs(30);

pub(crate) fn names(holders: &[Holder]) -> Vec<String> {
    let shown = |holder: &Holder| holder.name.as_ref().map_or("?".to_owned(), ToString::to_string);
    holders.iter().map(shown).collect()
}

/// A client behind a proxy, which can make it silent.
pub(crate) async fn behind(proxy: &Proxy, server: &Database) -> PostgresLock {
    server.config_at(proxy.port()).connect().await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_client_sees_names_tokens_labels_and_times() {
    let server = Database::new().await;
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
    assert!(since < HANG_LIMIT, "{since:?}");
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
    let holder = looker.holders(&name("c")).await.unwrap().pop().unwrap();
    assert_eq!((holder.token, holder.owner), (Some(other.token()), holder.owner));
    // Another namespace is another one.
    let elsewhere = server.config().namespace("elsewhere").connect().await.unwrap();
    assert_eq!(elsewhere.list("").await.unwrap(), []);
    assert_eq!(elsewhere.holders(&name("c")).await.unwrap().pop(), None);
    // With another schema it is the same lock.
    let schema = server.config().schema("elsewhere").connect().await.unwrap();
    assert!(is_busy(&schema, &claim("c", TTL)).await);
    // What clients take turns by while they open sessions is nobody's lock.
    let mark: String = server
        .value("SELECT split_part(application_name, ' ', 2) FROM pg_stat_activity WHERE application_name LIKE 'fencelock %' AND datname = current_database() ORDER BY backend_start LIMIT 1")
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
    let server = Database::new().await;
    let latin = format!("{}_latin", server.name());
    server
        .run_sql(&format!(
            "CREATE DATABASE {latin} ENCODING 'LATIN1' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'"
        ))
        .await;
    let mut login = server.login();
    login.dbname(&latin);
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
    let released = looker.force_release(&name("\u{6f22}")).await.unwrap().pop().unwrap();
    assert_eq!(released.label.as_deref(), Some("label"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_has_as_many_parts_as_it_takes() {
    const LOCKS: usize = 700;
    let server = Database::new().await;
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
async fn a_forced_release_takes_one_lock_from_a_client_that_answers() {
    let server = Database::new().await;
    let (victim, other) = (Locks::new(server.client().await), server.client().await);
    let mut spared = Vec::new();
    for number in 0..5 {
        spared.push(victim.lock(format!("n {number}")).ttl(TTL).await.unwrap());
    }
    let guard = victim.lock("a").ttl(TTL).await.unwrap();
    let sessions = server.sessions().await;
    let hit = other.force_release(&name("a")).await.unwrap().pop().unwrap();
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
    let hit = asker.force_release(&name("alone")).await.unwrap().pop().unwrap();
    assert_eq!((hit.token, hit.also_released), (Some(grant.token), None));
    assert!(grant.revoked().is_some());
    assert_eq!(asker.force_release(&name("alone")).await.unwrap(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_forced_release_ends_the_session_of_a_client_that_does_not_answer_and_says_what_goes_with_it() {
    let server = Database::new().await;
    let proxy = Proxy::to(server.port()).await;
    let (silent, other) = (behind(&proxy, &server).await, server.client().await);
    for lock in ["a", "b", "c"] {
        granted(&silent, &claim(lock, TTL)).await;
    }
    proxy.hold_answers();
    let hit = in_time(other.force_release(&name("a"))).await.unwrap().pop().unwrap();
    assert_eq!(hit.also_released, Some(2));
    server.until_locks(0).await;
}

#[tokio::test]
async fn a_role_without_rights_on_the_schema_cannot_ask() {
    let server = Database::new().await;
    let lock = server.client().await;
    let grant = granted(&lock, &claim("a", TTL)).await;
    server.run_sql("CREATE ROLE no_asker LOGIN").await;
    let mut login = server.login();
    let (joe, connection) = login.user("no_asker").connect(NoTls).await.unwrap();
    tokio::spawn(connection);
    let refused = joe.query_one("SELECT name FROM fencelock.channel", &[]).await;
    assert!(refused.is_err());
    // Nor does a guess do anything.
    joe.batch_execute("SELECT pg_notify('fencelock', 'release 1 x y 1')")
        .await
        .unwrap();
    assert_eq!(
        lock.holders(&name("a")).await.unwrap().pop().unwrap().token,
        Some(grant.token)
    );
}

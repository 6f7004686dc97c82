//! Observers: one session listens for all of them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lock_core::{Changes, DistributedLock, Locks};
use lock_postgres::{PostgresConfig, Tls};
use tokio::sync::Notify;

use crate::server::{Database, HANG_LIMIT, in_time, name};

const NAMES: usize = 50;
const OBSERVERS: usize = 2000;

/// Whether there is a change by now.
async fn has_changed(changes: &mut Changes) -> bool {
    tokio::time::timeout(Duration::from_millis(50), changes.next())
        .await
        .is_ok_and(|change| change.is_some())
}

async fn until_in_log(server: &Database, text: &str, count: usize) {
    let start = Instant::now();
    while server.log().matches(text).count() < count {
        assert!(start.elapsed() < HANG_LIMIT, "{text} is not in the log {count} times");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousands_of_observers_are_one_session_that_is_replaced_and_given_back() {
    let server = Database::with_statements_logged().await;
    let leader = server.client().await;
    let observer = server.client().await;
    let mut all = Vec::new();
    for number in 0..OBSERVERS {
        let changes = observer.changes(&name(&format!("n {}", number % NAMES))).await.unwrap();
        all.push(changes.expect("it is pushed"));
    }
    assert_eq!(server.sessions().await.len(), 2);
    assert_eq!(server.log().matches("LISTEN \"fencelock changes\"").count(), 1);
    leader.announce(&name("n 7")).await.unwrap();
    for (number, changes) in all.iter_mut().enumerate().filter(|(number, _)| number % NAMES == 7) {
        in_time(changes.next())
            .await
            .unwrap_or_else(|| panic!("{number} has ended"));
    }
    assert!(!has_changed(&mut all[6]).await, "the change of another name");

    server.end_sessions().await;
    for changes in &mut all {
        in_time(changes.next()).await.expect("the end of a session is a change");
    }
    let leader = server.client().await;
    leader.announce(&name("n 8")).await.unwrap();
    in_time(all[8].next()).await.unwrap();

    drop(all.split_off(1));
    leader.announce(&name("n 0")).await.unwrap();
    in_time(all[0].next()).await.unwrap();
    assert_eq!(server.log().matches("UNLISTEN \"fencelock changes\"").count(), 0);
    drop(all);
    until_in_log(&server, "UNLISTEN \"fencelock changes\"", 1).await;
    let mut again = observer.changes(&name("n 0")).await.unwrap().unwrap();
    leader.announce(&name("n 0")).await.unwrap();
    in_time(again.next()).await.unwrap();
    observer.close().await.unwrap();
    assert!(in_time(again.next()).await.is_none(), "the client is closed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_only_reads_observes() {
    let server = Database::new().await;
    let locks = Locks::new(server.client().await);
    let reader = PostgresConfig::new(server.login()).tls(Tls::Disable).read_only(true);
    let reader = Locks::new(reader.connect().await.unwrap());
    let mut leaders = reader.observe("leader");
    assert!(leaders.next().await.unwrap().is_none());
    let stop = Arc::new(Notify::new());
    let leads = Arc::clone(&stop);
    let leading = tokio::spawn(locks.lock("leader").label("host 7").lead(move |_| {
        let stop = Arc::clone(&leads);
        async move { stop.notified().await }
    }));
    let start = Instant::now();
    let leader = in_time(leaders.next()).await.unwrap().unwrap();
    println!("seen after {:?}", start.elapsed());
    assert_eq!(leader.label.as_deref(), Some("host 7"));
    stop.notify_one();
    in_time(leading).await.unwrap().unwrap();
    assert!(in_time(leaders.next()).await.unwrap().is_none());
}

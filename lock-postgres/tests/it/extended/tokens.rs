//! Tokens across all that happens to a server, with clocks that are wrong.

use std::process::{Command, Stdio};

use lock_postgres::{PostgresConfig, Tls};
use rustix::process::Signal;

use crate::server::{self, SESSIONS, Server, claim};
use crate::tokens::{Crowd, MANY, TTL, TURN, TheClock, TheServer, check, check_clock, claim_of, rise_across};
use test_servers::LocalPostgres;

/// A server that has handed out tokens and was then started again with a clock that is an hour behind.
async fn set_back() -> Server {
    let mut server = Server::start();
    server::granted(&server.client().await, &claim("a", TTL)).await;
    server.set_clock_back();
    server.restart(Signal::INT);
    check_clock(&server, TheClock::IsAnHourBehind).await;
    server
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_rise_across_the_promotion_of_a_standby_that_lags() {
    promotion(TheClock::IsRight).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_rise_across_the_promotion_of_a_standby_that_lags_with_a_clock_that_is_an_hour_behind() {
    promotion(TheClock::IsAnHourBehind).await;
}

async fn promotion(clock: TheClock) {
    let mut primary = Server::start();
    // Makes the schema.
    drop(primary.client().await);
    let folder = LocalPostgres::folder().unwrap();
    let data = folder.path().join("data");
    primary.copy_for_standby(&data);
    // It gets everything and shows none of it.
    let mut standby = Server::on_data(&data, &["recovery_min_apply_delay=1h"]);
    if clock == TheClock::IsAnHourBehind {
        standby.set_clock_back();
        standby.restart(Signal::INT);
    }
    let mut login = primary.login();
    login.host("127.0.0.1").port(standby.port());
    let turn = TURN.lock().await;
    let crowd = Crowd::start(&PostgresConfig::new(login).tls(Tls::Disable));
    crowd.grants(MANY).await;
    primary.end(Signal::KILL);
    standby
        .plain()
        .await
        .batch_execute("SELECT pg_promote(false)")
        .await
        .unwrap();
    check_clock(&standby, clock).await;
    crowd.grants(500).await;
    let drawn = crowd.end().await;
    drop(turn);
    println!("{} tokens, all rising", check(drawn));
}

fn url(server: &Server) -> [String; 2] {
    [
        "-d".to_owned(),
        format!("postgres://postgres@127.0.0.1:{}/postgres", server.port()),
    ]
}

fn output(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// With a clock that is right it is in the first tier.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_rise_across_a_crash_with_a_clock_that_is_an_hour_behind() {
    rise_across(
        TheClock::IsAnHourBehind,
        TheServer::IsStartedAgain,
        async |server: &mut Server, _: &Crowd| {
            server.restart(Signal::KILL);
        },
    )
    .await;
}

#[tokio::test]
async fn sessions_use_up_no_tokens_while_the_clock_is_behind() {
    let server = set_back().await;
    // The first session goes on above the ceiling.
    drop(server.client().await);
    let before: i64 = server.value("SELECT last_value FROM fencelock.token").await;
    for _ in 0..20 {
        server::granted(&server.client().await, &claim("a", TTL)).await;
        server.until_locks(0).await;
    }
    let after: i64 = server.value("SELECT last_value FROM fencelock.token").await;
    assert_eq!(after - before, 20);
}

#[tokio::test]
async fn a_token_above_the_ceiling_is_handed_out_when_a_higher_ceiling_will_survive_a_crash() {
    let mut server = set_back().await;
    let lock = server.client().await;
    server::granted(&lock, &claim("a", TTL)).await;
    server
        // Farther than a crash would make it go on from by itself.
        .run_sql("SELECT setval('fencelock.token', ceiling + (1::bigint << 38)) FROM fencelock.counter")
        .await;
    let above = server::granted(&lock, &claim_of("b", 16)).await.token;
    server.restart(Signal::KILL);
    let next = server::granted(&server.client().await, &claim_of("b", 16)).await;
    let next = next.first_token();
    assert!(next > above, "{next} came after {above}");
}

/// Not a promise but its limit, as docs/postgres.md states it, with the way out of it.
#[tokio::test]
async fn a_copy_from_before_a_clock_error_needs_its_ceiling_raised_by_hand() {
    let mut server = Server::start();
    server::granted(&server.client().await, &claim("a", TTL)).await;
    server.end(Signal::INT);
    let older = server.data().with_file_name("older");
    LocalPostgres::copy(&server.data(), &older).unwrap();
    server.set_clock_back();
    server.start_again();
    let ahead = server::granted(&server.client().await, &claim("a", TTL)).await.token;
    let restore = |server: &mut Server| {
        server.end(Signal::INT);
        std::fs::remove_dir_all(server.data()).unwrap();
        LocalPostgres::copy(&older, &server.data()).unwrap();
        server.set_clock_right();
        server.start_again();
    };
    restore(&mut server);
    check_clock(&server, TheClock::IsRight).await;
    let fallen = server::granted(&server.client().await, &claim("a", TTL)).await.token;
    // Up to 2^36 microseconds.
    let lead = ahead.get() - fallen.get();
    println!("{} hours", lead as f64 / 3.6e9);
    assert!(lead < 1 << 36, "{lead}");

    restore(&mut server);
    let raise = format!("UPDATE fencelock.counter SET ceiling = {ahead} + 65536, era = ''");
    server.run_sql(&raise).await;
    let next = server::granted(&server.client().await, &claim("a", TTL)).await.token;
    assert!(next > ahead, "{next} came after {ahead}");
}

/// The test, with both clocks.
macro_rules! tokens_rise_across {
    ($($name:ident, the server $server:ident: $fault:expr;)+) => {$(
        mod $name {
            use super::*;

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn with_a_clock_that_is_right() {
                rise_across(TheClock::IsRight, TheServer::$server, $fault).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn with_a_clock_that_is_an_hour_behind() {
                rise_across(TheClock::IsAnHourBehind, TheServer::$server, $fault).await;
            }
        }
    )+};
}

tokens_rise_across! {
    a_killed_walwriter, the server GoesOn: async |server: &mut Server, _: &Crowd| {
        server.survives_the_end_of("SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'").await;
    };
    a_killed_backend, the server GoesOn: async |server: &mut Server, _: &Crowd| {
        server.survives_the_end_of(SESSIONS).await;
    };
    an_immediate_restart, the server IsStartedAgain: async |server: &mut Server, _: &Crowd| server.restart(Signal::QUIT);
    a_clean_restart, the server IsStartedAgain: async |server: &mut Server, _: &Crowd| server.restart(Signal::INT);
    a_sequence_with_a_log_that_came_back_older, the server IsStartedAgain: async |server: &mut Server, _: &Crowd| {
        // As in version 14, which has no other.
        server.run_sql("ALTER SEQUENCE fencelock.token SET LOGGED").await;
        server.restart(Signal::KILL);
    };
    a_killed_backend_and_a_sequence_with_a_log, the server GoesOn: async |server: &mut Server, crowd: &Crowd| {
        // What of it was not on the disk yet comes back older, and the server's start is still the same.
        server.run_sql("ALTER SEQUENCE fencelock.token SET LOGGED").await;
        crowd.grants(500).await;
        server.survives_the_end_of(SESSIONS).await;
    };
    an_older_copy, the server IsStartedAgain: async |server: &mut Server, crowd: &Crowd| {
        server.end(Signal::INT);
        let older = server.data().with_file_name("older");
        LocalPostgres::copy(&server.data(), &older).unwrap();
        server.start_again();
        crowd.grants(500).await;
        server.end(Signal::INT);
        std::fs::remove_dir_all(server.data()).unwrap();
        std::fs::rename(&older, server.data()).unwrap();
        server.start_again();
    };
    a_dump_that_is_restored, the server GoesOn: async |server: &mut Server, crowd: &Crowd| {
        let dump = output(LocalPostgres::program("pg_dump").unwrap().args(url(server)).args(["--schema", "fencelock", "--inserts"]));
        crowd.grants(500).await;
        // Clients would make the schema anew in between: the number keeps them from it, as it keeps them from each other.
        let restore: Vec<_> = dump.lines().filter(|line| !line.starts_with('\\')).collect();
        server
            .run_sql(&format!(
                "SELECT pg_advisory_xact_lock(7378424937698848611); SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                 WHERE application_name LIKE 'fencelock %'; DROP SCHEMA fencelock CASCADE; {}",
                restore.join("\n")
            ))
            .await;
    };
}

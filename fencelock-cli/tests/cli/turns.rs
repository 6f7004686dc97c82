//! Several processes take turns.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::thread;
use std::time::Duration;

use crate::world::{Backend, CEILING, World, wait_until};

on_every_backend! {
    twenty_processes_count_to_twenty_five_times_in_a_row,
    a_waiter_goes_on_as_soon_as_the_lock_is_free,
}

fn twenty_processes_count_to_twenty_five_times_in_a_row(backend: Backend) {
    for round in 1..=5 {
        let world = World::on(backend);
        fs::write(world.path("n"), "0").unwrap();
        let script = "n=$(cat n); sleep 0.02; echo $((n+1)) > n; echo $FENCELOCK_TOKEN >> tokens";
        let start = |_| {
            world
                .fencelock()
                .args(["run", "counter", "--", "sh", "-c", script])
                .spawn()
                .unwrap()
        };
        let mut children: Vec<Child> = (0..20).map(start).collect();
        for child in &mut children {
            assert!(child.wait().unwrap().success());
        }
        assert_eq!(
            fs::read_to_string(world.path("n")).unwrap().trim(),
            "20",
            "round {round}"
        );
        let tokens = fs::read_to_string(world.path("tokens")).unwrap();
        let tokens: Vec<u64> = tokens.lines().map(|token| token.parse().unwrap()).collect();
        assert_eq!(tokens.len(), 20);
        assert!(tokens.is_sorted_by(|a, b| a < b), "round {round}: {tokens:?}");
    }
}

fn a_waiter_goes_on_as_soon_as_the_lock_is_free(backend: Backend) {
    let world = World::on(backend);
    let running = world.start(&[], "exec sleep 60");
    let waiting = world.fencelock().args(["run", "lock", "--", "true"]).spawn().unwrap();
    running.command.signal(rustix::process::Signal::TERM);
    running.end();
    assert!(waiting.wait_with_output().unwrap().status.success());
}

#[test]
fn a_wait_that_others_hold_up_says_so_once_and_goes_on() {
    let world = World::new();
    let url = format!("{}?op_timeout=1s", world.url());
    let holder = world.start(&["--ttl", "2s"], "exec sleep 60");
    let [mut waiting, quiet] = [&[][..], &["--quiet"]].map(|options| {
        let mut waiting = world.fencelock();
        waiting
            .args(["--url", &url])
            .args(options)
            .args(["run", "lock", "--", "true"]);
        let waiting = waiting.stderr(Stdio::piped()).spawn().unwrap();
        // It is woken through a pipe.
        let descriptors = format!("/proc/{}/fd", waiting.id());
        wait_until("it waits", || {
            let mut open = fs::read_dir(&descriptors).unwrap().flatten();
            open.any(|open| fs::read_link(open.path()).is_ok_and(|file| file == world.path("locks.db-wake")))
        });
        waiting
    });
    // The holder cannot renew its lock from here on, so that it is free after its ttl.
    let others = rusqlite::Connection::open(world.path("locks.db")).unwrap();
    others.busy_timeout(CEILING).unwrap();
    others.execute_batch("BEGIN IMMEDIATE").unwrap();
    let mut lines = BufReader::new(waiting.stderr.take().unwrap()).lines();
    let told = lines.next().unwrap().unwrap();
    assert!(
        told.contains("waiting goes on") && told.contains("did not answer within"),
        "{told}"
    );
    // Several looks more come to nothing.
    thread::sleep(Duration::from_secs(2));
    others.execute_batch("COMMIT").unwrap();
    assert!(waiting.wait().unwrap().success());
    let rest: Vec<_> = lines.map(Result::unwrap).collect();
    assert_eq!(rest.len(), 1, "{rest:?}");
    assert!(rest[0].contains("answers those who wait again"), "{rest:?}");
    let quiet = quiet.wait_with_output().unwrap();
    assert!(quiet.status.success() && quiet.stderr.is_empty(), "{quiet:?}");
    holder.end();
}

#[test]
fn who_waits_for_the_lock_waits_for_a_busy_file_too() {
    let world = World::new();
    assert_eq!(world.run(["run", "lock", "--", "true"]).code, Some(0));
    // As many others do together.
    let others = rusqlite::Connection::open(world.path("locks.db")).unwrap();
    others.execute_batch("BEGIN IMMEDIATE").unwrap();
    let mut patient = world.fencelock().args(["run", "lock", "--", "true"]).spawn().unwrap();
    let done = world.run(["run", "-n", "lock", "--", "true"]);
    assert!(done.one_line(69).contains("did not answer within"), "{done:?}");
    assert!(patient.try_wait().unwrap().is_none());
    others.execute_batch("COMMIT").unwrap();
    assert!(patient.wait().unwrap().success());
}

#[test]
fn who_does_not_wait_does_not_wait_for_a_file_that_nobody_writes_to() {
    let world = World::new();
    assert_eq!(world.run(["run", "lock", "--", "true"]).code, Some(0));
    let others = rusqlite::Connection::open(world.path("locks.db")).unwrap();
    others.execute_batch("BEGIN IMMEDIATE").unwrap();
    // Much longer than anything takes.
    let url = format!("{}?op_timeout=90s", world.url());
    let start = std::time::Instant::now();
    let done = world.run(["run", "-n", "--url", &url, "lock", "--", "true"]);
    assert!(done.one_line(69).contains("did not answer within"), "{done:?}");
    assert!(start.elapsed() < crate::world::CEILING, "{:?}", start.elapsed());
}

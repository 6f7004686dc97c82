//! Short runs of the program, and bugs that it has to find.

#![allow(clippy::unwrap_used, reason = "clippy sees no tests in the helpers of a test")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use lock_core::Locks;
use lock_sqlite::SqliteLock;

fn soak(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_soak"));
    command.args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// An address in a folder, and where its runs leave their histories. Tests that run side by side must not share those.
fn store(folder: &Path) -> String {
    format!("sqlite:{}", folder.join("locks.db").display())
}

/// A run on a store of its own, with a history of its own.
fn run(folder: &Path, arguments: &[&str]) -> (Output, PathBuf) {
    let (url, history) = (store(folder), folder.join("history.json"));
    let output = soak(&[
        "8",
        "--ttl",
        "500",
        "--url",
        &url,
        "--history",
        history.to_str().unwrap(),
    ])
    .args(arguments)
    .output()
    .unwrap();
    (output, history)
}

#[test]
fn a_short_run_has_no_violation_and_the_promise_behind_every_grant() {
    let folder = tempfile::tempdir().unwrap();
    let (output, history) = run(folder.path(), &["--seed", "7"]);
    let said = said(&output);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(said.contains(" / 0 violations\n") && said.contains("seed: 7"), "{said}");
    let history = fs::read_to_string(&history).unwrap();
    let count = |event: &str| history.matches(event).count();
    assert!(count("\"fault\"") > 0 && count("\"held\"") > 0, "{said}");
    // Those of the client that takes every name in the end have none.
    let (grants, first) = (count("{\"ok\":") - 4, history.matches("\"refreshed\"").count());
    assert!(
        grants > 0 && first > grants,
        "{grants} grants, {first} promises, {said}"
    );
    assert!(
        !history.contains("\"sent_ns\":0,\"ttl_ns\":0"),
        "a token that no server granted"
    );
}

#[test]
fn a_client_that_takes_renewals_for_granted_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let (output, history) = run(folder.path(), &["--plant"]);
    let said = said(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains("although the server had promised it only until"),
        "{said}"
    );
    let again = soak(&["--check", history.to_str().unwrap()]).output().unwrap();
    assert_eq!((again.status.code(), &again.stdout), (Some(1), &output.stdout));
    assert!(
        fs::read_to_string(history.with_extension("svg"))
            .unwrap()
            .contains("class='two'")
    );
}

#[tokio::test]
async fn a_store_that_forgets_its_locks_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let locks = Locks::new(SqliteLock::open(folder.path().join("locks.db")).await.unwrap());
    let path = folder.path().to_owned();
    let running = tokio::task::spawn_blocking(move || run(&path, &[]).0);
    while !running.is_finished() {
        let held = locks.list("soak/").await.unwrap_or_default();
        for name in held.into_iter().filter_map(|holder| holder.name) {
            let _ = locks.force_release(&name).await;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let output = running.await.unwrap();
    let said = said(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("two held"), "{said}");
    assert!(!said.contains("although the server had promised"), "{said}");
}

#[test]
fn what_is_no_history_is_refused_with_the_place() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("h.json");
    for (text, says) in [
        ("{\"format\": \"fencelock hist", "line 1"),
        (
            "{\"format\": \"x\", \"about\": {}, \"records\": []}",
            "fencelock history 2",
        ),
        (
            "{\"format\": \"fencelock history 2\", \"about\": {}, \"records\": [\n{}]}",
            "line 2",
        ),
    ] {
        fs::write(&path, text).unwrap();
        let output = soak(&["--check", path.to_str().unwrap()]).output().unwrap();
        let said = said(&output);
        assert!(
            !output.status.success() && said.contains(says) && said.contains("h.json"),
            "{said}"
        );
    }
}

#[test]
fn no_client_outlives_a_run_that_is_killed() {
    let folder = tempfile::tempdir().unwrap();
    let mut run = soak(&["600", "--ttl", "500", "--url", &store(folder.path())])
        .spawn()
        .unwrap();
    let children = format!("/proc/{0}/task/{0}/children", run.id());
    let state = |pid: &str| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit(") ").next().unwrap_or_default().chars().next()
    };
    let until = Instant::now() + Duration::from_secs(60);
    let clients = loop {
        let clients = fs::read_to_string(&children).unwrap_or_default();
        // Also none that is stopped.
        if clients.split_whitespace().any(|pid| state(pid) == Some('T')) {
            break clients;
        }
        assert!(Instant::now() < until, "no client is stopped");
        std::thread::sleep(Duration::from_millis(5));
    };
    run.kill().unwrap();
    run.wait().unwrap();
    while clients
        .split_whitespace()
        .any(|pid| !matches!(state(pid), None | Some('Z' | 'X')))
    {
        assert!(Instant::now() < until, "a client is left");
        std::thread::sleep(Duration::from_millis(5));
    }
}

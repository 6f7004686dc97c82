//! `fencelock torture`: short runs, and histories that must not pass.
//!
//! A run is not shorter than some seconds: on a busy machine its clients take that long to start.

use std::fs;
use std::process::Stdio;

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::world::{Backend, Done, Process, World, wait_until};

const SHORT: [&str; 8] = ["torture", "--for", "8s", "--clients", "4", "--ttl", "500ms", "--seed=7"];

#[test]
fn a_short_run_on_sqlite_finds_no_violation_and_writes_what_it_saw() {
    short_run(Backend::Sqlite);
}

#[cfg(feature = "redis")]
#[test]
fn a_short_run_on_redis_finds_no_violation_and_writes_what_it_saw() {
    short_run(Backend::Redis);
}

#[track_caller]
fn short_run(backend: Backend) {
    let world = World::on(backend);
    let done = world.run(
        SHORT
            .iter()
            .copied()
            .chain(["--report", "page.html", "--history", "history.json"]),
    );
    assert_eq!(done.code, Some(0), "{done:?}");
    let headline = done.stdout.lines().next().unwrap().to_owned();
    let numbers: Vec<f64> = headline.split(' ').filter_map(|word| word.parse().ok()).collect();
    let [operations, faults, seconds, violations] = numbers[..] else {
        panic!("{headline}")
    };
    assert!(operations > 0.0 && faults > 0.0 && seconds >= 8.0, "{headline}");
    assert_eq!(violations, 0.0);
    for line in [
        "smallest loss margin",
        "hand-over, calm",
        "stale writes refused",
        "seed                  7\n",
    ] {
        assert!(done.stdout.contains(line), "{line}: {done:?}");
    }
    let report = world.run(["torture", "--check", "history.json", "--json"]);
    let report: Value = serde_json::from_str(&report.stdout).unwrap();
    assert_eq!((&report["ok"], &report["violations"]), (&json!(true), &json!([])));
    assert_eq!(report["operations"].as_f64(), Some(operations));
    assert_eq!(report["about"]["seed"], "7");
    for figure in [
        "/grants",
        "/losses",
        "/hand_over_calm/count",
        "/stale_writes_refused",
        "/permitted_overlaps",
    ] {
        assert!(report.pointer(figure).is_some_and(Value::is_u64), "{figure}: {report}");
    }
    let page = fs::read_to_string(world.path("page.html")).unwrap();
    assert!(page.contains("No violation") && page.ends_with("</html>\n"));
    let again = world.run(["torture", "--check", "history.json", "--report", "again.html"]);
    assert_eq!(
        (again.code, again.stdout, again.stderr),
        (Some(0), done.stdout, String::new())
    );
}

#[test]
fn what_cannot_be_injected_is_said_in_a_line_each() {
    let world = World::new();
    let done = world.run([
        "torture",
        "--for=8s",
        "--ttl=500ms",
        "--faults=kill,partition,server-kill",
    ]);
    assert_eq!(done.code, Some(0), "{done:?}");
    let lines: Vec<_> = done.stderr.lines().collect();
    assert_eq!(lines.len(), 2, "{done:?}");
    for (line, fault) in lines.iter().zip(["partition", "server-kill"]) {
        assert!(
            line.starts_with(&format!("fencelock: {fault}: not applicable, because ")),
            "{line}"
        );
    }
}

#[test]
fn without_libfaketime_clocks_do_not_step_unless_that_is_asked_for_and_then_it_is_64() {
    let world = World::new();
    let run = |options: &[&str]| {
        let mut command = world.fencelock();
        // No programs are there at all, so neither is the one that knows the library.
        command.env("PATH", world.dir());
        Done::of(command.args(["torture", "--for=8s", "--ttl=500ms"]).args(options))
    };
    let usual = run(&["--history=history.json"]);
    assert_eq!(usual.code, Some(0), "{usual:?}");
    let lines: Vec<_> = usual.stderr.lines().filter(|line| line.contains("clock")).collect();
    assert_eq!(lines.len(), 1, "{usual:?}");
    assert!(
        lines[0].starts_with("fencelock: clock: not applicable, because "),
        "{lines:?}"
    );
    assert!(lines[0].contains("apt-get install faketime"), "{lines:?}");
    let history = history(&world);
    assert!(
        history["about"]["not applicable"]
            .as_str()
            .unwrap()
            .contains("clock (wall clocks")
    );
    let asked_for = run(&["--faults=kill,clock"]);
    let line = asked_for.one_line(64);
    assert!(line.contains("apt-get install faketime"), "{line}");
}

fn clients_see_their_wall_clocks_step_and_lose_nothing_by_it(backend: Backend) {
    let world = World::on(backend);
    let mut args = vec![
        "torture",
        "--clients=4",
        "--seed=7",
        "--faults=clock",
        "--history=history.json",
    ];
    args.extend(match backend {
        // Its leases are not shorter.
        #[cfg(feature = "etcd")]
        Backend::Etcd => ["--for=12s", "--ttl=2s"],
        _ => ["--for=8s", "--ttl=500ms"],
    });
    let done = world.run(args);
    assert_eq!(done.code, Some(0), "{done:?}");
    assert!(done.stdout.contains(" / 0 violations\n"), "{done:?}");
    assert!(done.stdout.contains("permitted overlaps    0\n"), "{done:?}");
    let history = history(&world);
    let records = history["records"].as_array().unwrap();
    let mut faults = 0;
    for (i, fault) in records
        .iter()
        .enumerate()
        .filter(|(_, record)| record["event"] == "fault")
    {
        let what = fault["what"].as_str().unwrap();
        let words: Vec<_> = what.split([' ', ',']).collect();
        let ["clock:", seconds, "s", side, ..] = words[..] else {
            panic!("{what}")
        };
        let seconds: i64 = seconds.parse().unwrap();
        let wanted = if side == "ahead" { seconds } else { -seconds };
        let mut later = records[i..].iter().filter(|record| record["actor"] == fault["actor"]);
        let seen = later
            .by_ref()
            .take_while(|record| record["event"] != "over")
            .filter(|record| record["event"] == "clock")
            .map(|record| record["ahead_ns"].as_i64().unwrap())
            .any(|ahead| ahead.abs_diff(wanted * 1_000_000_000) < 1_000_000_000);
        assert!(seen, "{what} of client {} was not seen", fault["actor"]);
        faults += 1;
    }
    assert!(faults > 0, "{faults}");
    // In the middle of what they do, and between two locks.
    let holds = records.iter().filter(|record| record["event"] == "held").count();
    assert!(holds > 0, "{holds}");
}

on_every_backend!(clients_see_their_wall_clocks_step_and_lose_nothing_by_it);

/// What the run in that world has written.
fn history(world: &World) -> Value {
    serde_json::from_str(&fs::read_to_string(world.path("history.json")).unwrap()).unwrap()
}

#[test]
fn the_same_seed_gives_the_same_faults() {
    let world = World::new();
    let faults = |seed: &str| {
        let args = [
            "torture",
            "--for=5s",
            "--clients=3",
            "--ttl=500ms",
            "--history=h.json",
            "--seed",
            seed,
        ];
        let done = world.run(args);
        assert_eq!(done.code, Some(0), "{done:?}");
        let history: Value = serde_json::from_str(&fs::read_to_string(world.path("h.json")).unwrap()).unwrap();
        let records = history["records"].as_array().unwrap().clone();
        let faults = records.into_iter().filter(|record| record["event"] == "fault");
        faults
            .map(|fault| json!([fault["actor"], fault["what"]]))
            .collect::<Vec<_>>()
    };
    let first = faults("5");
    assert!(!first.is_empty());
    assert_eq!(faults("5"), first);
    assert_ne!(faults("6"), first);
}

#[cfg(feature = "redis")]
#[test]
fn a_server_that_forgets_its_locks_is_caught() {
    let world = World::on_own(Backend::Redis);
    let mut command = world.fencelock();
    command.args([
        "torture",
        "--for=8s",
        "--clients=6",
        "--names=1",
        "--ttl=1500ms",
        "--faults=latency",
    ]);
    command.args(["--report=page.html", "--history=history.json"]);
    let mut run = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // Nothing permits that, so whoever still believes is one too many.
    while run.try_wait().unwrap().is_none() {
        world.server().ask("FLUSHALL");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let done = Done::from(run.wait_with_output().unwrap());
    assert_eq!(done.code, Some(70), "{done:?}");
    assert!(done.stdout.contains("violation: two held"), "{done:?}");
    assert!(
        fs::read_to_string(world.path("page.html"))
            .unwrap()
            .contains("class='bad' x=")
    );
    let again = world.run(["torture", "--check", "history.json"]);
    assert_eq!((again.code, again.stdout), (Some(70), done.stdout));
}

#[cfg(feature = "redis")]
#[test]
fn nothing_secret_is_shown_or_told_by_an_argument() {
    let world = World::on_own(Backend::Redis);
    world.server().ask("CONFIG SET requirepass hunter2");
    let url = world.url().replace("redis://", "redis://:hunter2@");
    let mut command = world.fencelock();
    command.env("FENCELOCK_URL", url);
    command.args([
        "torture",
        "--for=5s",
        "--ttl=500ms",
        "--report=page.html",
        "--history=history.json",
        "-vv",
    ]);
    let run = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let arguments = wait_for_clients(Process(run.id() as i32));
    assert!(
        arguments.iter().all(|(_, arguments)| !arguments.contains("hunter2")),
        "{arguments:?}"
    );
    let done = Done::from(run.wait_with_output().unwrap());
    assert_eq!(done.code, Some(0), "{done:?}");
    let files = ["page.html", "history.json"].map(|file| fs::read_to_string(world.path(file)).unwrap());
    for text in [&done.stdout, &done.stderr, &files[0], &files[1]] {
        assert!(!text.contains("hunter2"), "{text}");
    }
}

#[test]
fn no_client_outlives_a_run_that_is_killed() {
    let world = World::new();
    let mut command = world.fencelock();
    command.args(["torture", "--for=10min", "--ttl=500ms", "--faults=pause"]);
    let mut run = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let clients = wait_for_clients(Process(run.id() as i32));
    // Also none that is stopped.
    wait_until("a client is stopped", || {
        clients.iter().any(|(client, _)| client.state() == Some('T'))
    });
    run.kill().unwrap();
    run.wait().unwrap();
    wait_until("the end of all clients", || {
        !clients.iter().any(|(client, _)| client.is_alive())
    });
}

#[test]
fn a_signal_ends_the_run_early_with_a_verdict() {
    let world = World::new();
    let mut command = world.fencelock();
    command.args(["torture", "--for=10min", "--ttl=500ms", "--clients=2"]);
    let run = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let process = Process(run.id() as i32);
    let clients = wait_for_clients(process);
    // There has to be something to judge.
    std::thread::sleep(std::time::Duration::from_secs(1));
    process.signal(Signal::TERM);
    let done = Done::from(run.wait_with_output().unwrap());
    assert_eq!(done.code, Some(143), "{done:?}");
    assert!(done.stdout.contains(" / 0 violations\n"), "{done:?}");
    assert!(!clients.iter().any(|(client, _)| client.is_alive()));
}

/// The clients that a run has started, with their arguments.
fn wait_for_clients(run: Process) -> Vec<(Process, String)> {
    let mut found = Vec::new();
    wait_until("clients", || {
        let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", run.0)).unwrap_or_default();
        let children = children.split_whitespace().map(|pid| Process(pid.parse().unwrap()));
        let arguments = |child: Process| fs::read_to_string(format!("/proc/{}/cmdline", child.0)).unwrap_or_default();
        found = children
            .map(|child| (child, arguments(child)))
            .filter(|(_, arguments)| arguments.starts_with("lock-client"))
            .collect();
        found.len() > 1
    });
    found
}

/// A history that is good, and ends well, except for these records.
fn judged(bad: &[Value]) -> Done {
    let world = World::new();
    let mut records = bad.to_vec();
    records.extend([
        json!({ "at_ns": 900, "event": "healed" }),
        json!({ "at_ns": 901, "actor": 9, "name": "n", "event": "invoke" }),
        json!({ "at_ns": 902, "actor": 9, "name": "n", "event": "ok", "token": 90 }),
    ]);
    let history = json!({ "format": "fencelock history 1", "records": records });
    fs::write(world.path("h.json"), history.to_string()).unwrap();
    world.run(["torture", "--check", "h.json"])
}

fn event(at: u64, actor: u64, event: &str, token: u64) -> Value {
    json!({ "at_ns": at, "actor": actor, "name": "n", "event": event, "token": token })
}

fn write(at: u64, token: u64, accepted: bool) -> Value {
    json!({ "at_ns": at, "actor": 1, "name": "n", "event": "write", "token": token, "accepted": accepted })
}

#[test]
fn a_bad_history_is_70_and_the_violation_is_named() {
    for (bad, says) in [
        (vec![event(1, 1, "ok", 5), event(3, 2, "ok", 4)], "tokens do not rise"),
        (
            vec![write(1, 5, true), write(2, 6, true), write(3, 5, true)],
            "took a write with 5",
        ),
        (
            vec![event(1, 1, "ok", 5), event(2, 2, "ok", 6), event(3, 1, "held", 5)],
            "two held",
        ),
        (
            vec![event(1, 1, "lost", 5), event(2, 1, "held", 5)],
            "was lost and came back",
        ),
        (
            vec![json!({ "at_ns": 1, "actor": 1, "name": "m", "event": "invoke" })],
            "could not be acquired again",
        ),
    ] {
        let done = judged(&bad);
        assert_eq!(done.code, Some(70), "{done:?}");
        assert!(done.stdout.contains(" / 1 violation\n"), "{done:?}");
        let violation = done.stdout.lines().find(|line| line.starts_with("violation: "));
        assert!(
            violation.is_some_and(|violation| violation.contains(says)),
            "{says}: {done:?}"
        );
    }
    let done = judged(&[]);
    assert_eq!(done.code, Some(0), "{done:?}");
}

#[test]
fn what_cannot_be_run_or_read_is_64_with_one_line() {
    let world = World::new();
    fs::write(
        world.path("damaged.json"),
        "{\"format\": \"fencelock history 1\", \"records\": [{}]}",
    )
    .unwrap();
    fs::write(world.path("cut.json"), "{\"format\": \"fencelock hist").unwrap();
    for (args, says) in [
        (&["--faults", "pause,flood"][..], "flood"),
        (&["--clients", "0"], "--clients"),
        (&["--names", "0"], "--names"),
        (&["--for", "soon"], "--for"),
        (&["--ttl", "1ms", "--faults", "kill"], "choose one from"),
        (&["--seed", "x"], "--seed"),
        (&["--check", "missing.json"], "missing.json"),
        (&["--check", "damaged.json"], "record 1: \"event\""),
        (&["--check", "cut.json"], "line 1"),
        (&["--check", "cut.json", "--seed", "1"], "cannot be used with"),
    ] {
        let done = world.run(["torture"].iter().chain(args));
        let line = done.one_line(64);
        assert!(line.contains(says), "{says}: {line}");
    }
}

#[test]
fn a_file_that_cannot_be_written_is_74_before_the_run() {
    let world = World::new();
    for option in ["--report=none/page.html", "--history=none/history.json"] {
        let done = world.run(["torture", "--for=10min", option]);
        let line = done.one_line(74);
        assert!(line.contains("none/") && line.contains("cannot be written"), "{line}");
    }
}

//! What only a server can do to a command: be out of reach, refuse, forget.

use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::thread;
use std::time::Duration;

use conformance_tests::servers::{Kind, RedisSentinels};
use rustix::process::Signal;

use super::{SECRET, fails};
use crate::server::Server;
use crate::world::{Backend, ClosedPort, Done, SHORT_TTL, World};

#[test]
fn a_server_that_is_not_there_is_69() {
    let closed = ClosedPort::new();
    fails(
        &format!("redis://joe:{SECRET}@{}", closed.address()),
        69,
        "cannot be reached",
    );
}

#[test]
fn a_wrong_or_missing_password_is_78_and_not_shown() {
    let world = World::new();
    let server = Server::own(Backend::Redis);
    assert_eq!(server.ask("CONFIG SET requirepass correct"), "+OK");
    let address = server.authority();
    fails(&format!("redis://:{SECRET}@{address}"), 78, "password");
    fails(&format!("redis://{address}"), 78, "password");
    let right = format!("redis://:correct@{address}");
    let done = Done::of(
        world
            .fencelock()
            .env("FENCELOCK_URL", right)
            .args(["run", "lock", "--", "true"]),
    );
    assert_eq!((done.code, done.stderr.as_str()), (Some(0), ""));
}

/// Greetings, and the choice of a database other than 0.
const NOT_NEEDED_HERE: [&str; 2] = ["+hello", "+select"];

/// A check passes with the rights that the documentation lists, and with none of them missing, also of those that only a waiter
/// or who releases to one needs.
#[test]
fn a_check_needs_every_right_that_the_documentation_lists() {
    let page = include_str!("../../../../docs/redis.md");
    let rule = page
        .split_once("ACL SETUSER locks ")
        .and_then(|(_, rest)| rest.split_once("```"));
    let rule: Vec<_> = rule.unwrap().0.split_whitespace().collect();
    let missing = rule
        .iter()
        .filter(|word| word.starts_with(['+', '&']) && !NOT_NEEDED_HERE.contains(word));
    // The rights are those for the namespace that is not named.
    let world = World::on_own(Backend::Redis);
    let (world, server, rule) = (&world, world.server(), &rule);
    thread::scope(|scope| {
        // All at once, each as a user of its own: some wait in vain for seconds.
        for (number, missing) in missing.chain([&""]).enumerate() {
            scope.spawn(move || {
                let words: Vec<_> = rule.iter().copied().filter(|word| word != missing).collect();
                let user = format!("locks-{number}");
                assert_eq!(server.ask(&format!("ACL SETUSER {user} {}", words.join(" "))), "+OK");
                let url = server.url().replace("redis://", &format!("redis://{user}:PASSWORD@"));
                let done = Done::of(world.fencelock().env("FENCELOCK_URL", url).arg("check"));
                let expected = match *missing {
                    "" => 0,
                    _ => 78,
                };
                assert_eq!(done.code, Some(expected), "without {missing:?}: {done:?}");
                assert_eq!(
                    done.stdout.contains(" refused "),
                    !missing.is_empty(),
                    "without {missing:?}: {done:?}"
                );
            });
        }
    });
}

/// The rights that the documentation lists for looking are enough to look, none of them is too much, and they change nothing.
#[test]
fn a_user_who_may_only_read_sees_the_locks_and_needs_every_right_that_the_documentation_lists() {
    let page = include_str!("../../../../docs/redis.md");
    let rule = page
        .split_once("ACL SETUSER look ")
        .and_then(|(_, rest)| rest.split_once("```"));
    let rule: Vec<_> = rule.unwrap().0.split_whitespace().collect();
    let world = World::on_own(Backend::Redis);
    let server = world.server();
    let running = world.start(&["--ttl", "1h"], "exec sleep 600");
    // As the user without one of the rights. The server knows no script, so that its text must be sent along.
    let run = |without: &str, args: &[&str]| {
        let words: Vec<_> = rule.iter().copied().filter(|word| *word != without).collect();
        let set = server.ask(&format!("ACL SETUSER look reset {}", words.join(" ")));
        assert_eq!((set.as_str(), server.ask("SCRIPT FLUSH").as_str()), ("+OK", "+OK"));
        let url = server.url().replace("redis://", "redis://look:PASSWORD@");
        Done::of(world.fencelock().env("FENCELOCK_URL", url).args(args))
    };
    let list = run("", &["list", "--names"]);
    assert_eq!((list.code, list.stdout.as_str()), (Some(0), "lock\n"), "{list:?}");
    assert_eq!(run("", &["holder", "lock"]).code, Some(0));
    let needed = rule
        .iter()
        .filter(|word| word.starts_with(['+', '&']) && !NOT_NEEDED_HERE.contains(word));
    for missing in needed {
        let list = run(missing, &["list"]);
        assert_eq!(list.code, Some(78), "without {missing}: {list:?}");
    }
    run("", &["run", "-n", "other", "--", "true"]).one_line(78);
    run("", &["release", "--force", "lock"]).one_line(78);
    assert_eq!(world.run(["holder", "lock"]).code, Some(0));
    running.stop();
}

#[test]
fn a_check_prints_what_the_backend_warns_of_and_passes() {
    let world = World::on(Backend::Redis);
    let quiet = world.run(["check"]);
    assert_eq!(
        (quiet.code, quiet.stdout.contains("  warning  ")),
        (Some(0), false),
        "{quiet:?}"
    );

    // The sentinel that comes with the replica does nothing.
    let group = RedisSentinels::start(&Kind::REDIS, 1, 1, Duration::from_secs(3600), &[]);
    let group = world.server().block_on(group).unwrap();
    let url = format!("redis://{}", group.servers()[0].authority());
    let check = |options: &[&str]| {
        let mut command = world.fencelock();
        Done::of(command.env("FENCELOCK_URL", &url).arg("check").args(options))
    };
    let done = check(&[]);
    assert_eq!((done.code, done.stderr.as_str()), (Some(0), ""));
    assert!(done.stdout.contains("  warning  "), "{done:?}");
    assert!(done.stdout.contains("min-replicas-to-write"), "{done:?}");
    let done = check(&["--json"]);
    assert_eq!(done.code, Some(0), "{done:?}");
    let report: serde_json::Value = serde_json::from_str(&done.stdout).unwrap();
    assert_eq!(report["ok"], true);
    assert!(
        report["warnings"][0]
            .as_str()
            .unwrap()
            .contains("min-replicas-to-write"),
        "{report}"
    );
}

#[test]
fn a_server_that_never_answers_is_69_within_the_limit() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = silent.local_addr().unwrap().port();
    thread::spawn(move || {
        for stream in silent.incoming().flatten() {
            thread::spawn(move || { &stream }.read_to_end(&mut Vec::new()));
        }
    });
    fails(&format!("redis://127.0.0.1:{port}?op_timeout=300ms"), 69, "300ms");
}

#[test]
fn a_server_that_dies_ends_the_command_before_its_lease() {
    let world = World::on_own(Backend::Redis);
    let running = world.start(&SHORT_TTL, "exec sleep 600");
    let command = running.command;
    world.server().kill();
    let done = running.end();
    assert!(!command.is_alive());
    assert_eq!(done.code, Some(76), "{done:?}");
    // A warning first, once.
    let lines: Vec<_> = done.stderr.lines().collect();
    assert!(
        lines.len() == 2 && lines[0].contains("renewal failed; trying again"),
        "{done:?}"
    );
    assert!(
        lines[1].contains("could not be renewed in time (") && lines[1].contains("cannot be reached"),
        "{done:?}"
    );
}

#[test]
fn a_server_that_stops_for_a_while_costs_nothing() {
    let world = World::on_own(Backend::Redis);
    let url = format!("{}?op_timeout=500ms", world.url());
    let mut running = world.start(&["--verbose", "--url", &url, "--ttl", "15s"], "exec sleep 600");
    world.server().pause();
    let mut told = BufReader::new(running.child.stderr.take().unwrap()).lines();
    assert!(told.any(|line| line.unwrap().contains("renewal failed; trying again")));
    world.server().resume();
    // It must not wait for a reader.
    thread::spawn(move || told.for_each(drop));
    world.renewed();
    assert!(running.command.is_alive());
    running.fencelock().signal(Signal::TERM);
    assert_eq!(running.end().code, Some(143));
}

#[test]
fn a_wait_reaches_a_server_that_comes_up_later() {
    let world = World::on_own(Backend::Redis);
    world.server().kill();
    let mut waiting = world.fencelock();
    waiting.args(["run", "--wait", "60s", "lock", "--", "true"]);
    let mut waiting = waiting.stderr(std::process::Stdio::piped()).spawn().unwrap();
    let mut told = BufReader::new(waiting.stderr.take().unwrap()).lines();
    let line = told.next().unwrap().unwrap();
    assert!(line.contains("waiting goes on"), "{line}");
    world.server().restart();
    assert_eq!(crate::world::wait_for(&mut waiting), Some(0));
    let rest: Vec<_> = told.map(Result::unwrap).collect();
    assert!(
        rest.len() == 1 && rest[0].contains("answers those who wait again"),
        "{rest:?}"
    );
}

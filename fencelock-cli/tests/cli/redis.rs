//! What only a server can do to a command: be out of reach, refuse, forget.

use std::io::Read;
use std::net::TcpListener;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::server::Server;
use crate::world::{Backend, CEILING, Done, SECRET, World, misconfigured, unavailable, wait_within};

#[test]
fn a_server_that_is_not_there_is_69() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    unavailable(&format!("redis://joe:{SECRET}@127.0.0.1:{port}"), "cannot be reached");
}

#[test]
fn a_wrong_or_missing_password_is_78_and_not_shown() {
    let world = World::new();
    let server = Server::start(world.dir(), &["--requirepass", "correct"]);
    let address = server.url().replace("redis://", "");
    misconfigured(&format!("redis://:{SECRET}@{address}"), "password");
    misconfigured(&format!("redis://{address}"), "password");
    let right = format!("redis://:correct@{address}");
    let done = Done::of(
        world
            .fencelock()
            .env("FENCELOCK_URL", right)
            .args(["run", "lock", "--", "true"]),
    );
    assert_eq!((done.code, done.stderr.as_str()), (Some(0), ""));
}

#[test]
fn a_database_that_does_not_exist_is_78() {
    let world = World::new();
    let server = Server::start(world.dir(), &[]);
    misconfigured(&format!("{}/99", server.url()), "database");
}

#[test]
fn a_server_that_evicts_is_78_unless_that_is_allowed() {
    let world = World::new();
    let server = Server::start(
        world.dir(),
        &["--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"],
    );
    misconfigured(&server.url(), "noeviction");
    let url = format!("{}?allow_unsafe_configuration=true", server.url());
    let done = Done::of(
        world
            .fencelock()
            .env("FENCELOCK_URL", url)
            .args(["run", "lock", "--", "true"]),
    );
    assert_eq!((done.code, done.stderr.as_str()), (Some(0), ""));
}

/// Greetings, the choice of a database other than 0, and what leaders and their observers need, which poll without it.
const NOT_NEEDED_HERE: [&str; 4] = ["+hello", "+select", "&fencelock:changes:*", "+unsubscribe"];

/// A check passes with the rights that the documentation lists, and with none of them missing, also of those that only a waiter
/// or who releases to one needs.
#[test]
fn a_check_needs_every_right_that_the_documentation_lists() {
    let page = include_str!("../../../docs/redis.md");
    let rule = page
        .split_once("ACL SETUSER locks ")
        .and_then(|(_, rest)| rest.split_once("```"));
    let rule: Vec<_> = rule.unwrap().0.split_whitespace().collect();
    let missing = rule
        .iter()
        .filter(|word| word.starts_with(['+', '&']) && !NOT_NEEDED_HERE.contains(word));
    let world = World::new();
    let server = Server::start(world.dir(), &[]);
    let (world, server, rule) = (&world, &server, &rule);
    std::thread::scope(|scope| {
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
                    // A lock that was held before is not freed for the lack of it, and is waited for in vain.
                    "+del" => 69,
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
    let page = include_str!("../../../docs/redis.md");
    let rule = page
        .split_once("ACL SETUSER look ")
        .and_then(|(_, rest)| rest.split_once("```"));
    let rule: Vec<_> = rule.unwrap().0.split_whitespace().collect();
    let world = World::on(Backend::Redis);
    let server = world.server();
    let running = world.start(&["--ttl", "1h"], "exec sleep 60");
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
    running.command.signal(Signal::TERM);
    running.end();
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

    let primary = world.server().url().replace("redis://", "").replace(':', " ");
    let folder = world.path("replica");
    std::fs::create_dir(&folder).unwrap();
    let _replica = Server::start(&folder, &["--replicaof", &primary]);
    wait_within(CEILING, "a replica", || {
        world.server().ask("SET here 1");
        world.server().ask("WAIT 1 100") == ":1"
    });
    let done = world.run(["check"]);
    assert_eq!((done.code, done.stderr.as_str()), (Some(0), ""));
    assert!(done.stdout.contains("  warning  "), "{done:?}");
    assert!(done.stdout.contains("min-replicas-to-write"), "{done:?}");
    let done = world.run(["check", "--json"]);
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
    std::thread::spawn(move || {
        for stream in silent.incoming().flatten() {
            std::thread::spawn(move || { &stream }.read_to_end(&mut Vec::new()));
        }
    });
    let since = Instant::now();
    unavailable(&format!("redis://127.0.0.1:{port}?op_timeout=300ms"), "300ms");
    assert!(since.elapsed() < CEILING, "{:?}", since.elapsed());
}

#[test]
fn a_key_of_another_type_in_the_way_is_78_and_stays() {
    let world = World::on(Backend::Redis);
    assert_eq!(world.server().ask("LPUSH {fencelock:lock}:lock one"), ":1");
    let line = world.run(["run", "lock", "--", "true"]).one_line(78).to_owned();
    assert!(line.contains("lock"), "{line}");
    assert_eq!(world.server().ask("LLEN {fencelock:lock}:lock"), ":1");
}

#[test]
fn a_server_that_dies_ends_the_command_before_its_lease() {
    let world = World::on(Backend::Redis);
    let running = world.start(&["--ttl", "2s"], "exec sleep 60");
    let command = running.command;
    world.server().process().signal(Signal::KILL);
    wait_within(Duration::from_secs(2), "the end of the command", || !command.is_alive());
    let done = running.end();
    let line = done.one_line(76);
    assert!(
        line.contains("could not be renewed in time (") && line.contains("cannot be reached"),
        "{line}"
    );
}

#[test]
fn a_server_that_stops_for_a_while_costs_nothing() {
    let world = World::on(Backend::Redis);
    let running = world.start(&["--ttl", "6s"], "exec sleep 60");
    world.server().process().signal(Signal::STOP);
    // Past the renewal that is due after a third of the ttl, and before the command has to go.
    std::thread::sleep(Duration::from_millis(2_700));
    world.server().process().signal(Signal::CONT);
    std::thread::sleep(Duration::from_millis(2_700));
    assert!(running.command.is_alive());
    running.locker().signal(Signal::TERM);
    assert_eq!(running.end().code, Some(143));
}

#[test]
fn a_server_that_forgets_its_locks_ends_the_command_at_the_next_renewal() {
    let world = World::on(Backend::Redis);
    let running = world.start(&["--ttl", "2s"], "exec sleep 60");
    assert_eq!(world.server().ask("FLUSHALL"), "+OK");
    let command = running.command;
    let done = running.end();
    assert!(done.one_line(76).contains(crate::world::TAKEN_AWAY), "{done:?}");
    assert!(!command.is_alive());
}

#[test]
fn nothing_but_the_counter_is_left_on_the_server() {
    let world = World::on(Backend::Redis);
    assert_eq!(world.run(["run", "lock", "--", "true"]).code, Some(0));
    assert_eq!(world.run(["run", "lock", "--", "no-such-command"]).code, Some(127));
    assert_eq!(world.server().ask("DBSIZE"), ":1");
    assert_eq!(world.server().ask("EXISTS {fencelock:lock}:fence"), ":1");
}

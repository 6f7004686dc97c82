//! What only a server can do to a command: be out of reach, refuse, forget.

use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::thread;

use crate::server::{Server, Silent};
use crate::world::{Backend, SHORT_TTL, World, wait_for};

/// What no output shows.
const SECRET: &str = "hunter2";

/// Tries each way to need the server, and checks that each fails with that code, in one line that holds `says` and no secret. A run that waits
/// may say first that it goes on.
#[track_caller]
fn fails(url: &str, code: i32, says: &str) {
    let world = World::new();
    for line in [
        "run lock -- true",
        "run -n lock -- true",
        "holder lock",
        "list",
        "release --force lock",
    ] {
        let mut done = world.run_at(url, line);
        assert!(!done.stderr.contains(SECRET), "{done:?}");
        if let Some((first, rest)) = done.stderr.split_once('\n')
            && line == "run lock -- true"
            && first.starts_with("fencelock: waiting goes on after a failure that may pass: ")
        {
            done.stderr = rest.to_owned();
        }
        done.fails(code, says);
    }
    let done = world.run_at(url, "check");
    done.shows(code, &[says]);
    assert!(!done.stdout.contains(SECRET), "{done:?}");
}

#[test]
fn each_failure_of_a_server_has_its_code_within_the_limit_and_shows_no_password() {
    let world = World::new();
    let server = Server::own(Backend::Redis);
    assert_eq!(server.ask("CONFIG SET requirepass correct"), "+OK");
    let address = server.authority();
    let right = format!("redis://:correct@{address}");
    world.run_at(&right, "run lock -- true").is(0, "", "");
    for (url, code, says) in [
        (format!("redis://joe:{SECRET}@127.0.0.1:1"), 69, "cannot be reached"),
        (Silent::new().url("300ms"), 69, "300ms"),
        (format!("redis://:{SECRET}@{address}"), 78, "password"),
        (format!("redis://{address}"), 78, "password"),
    ] {
        fails(&url, code, says);
    }
}

/// The rule for that user in the documentation, and those of its words that the user needs here, without greetings and the choice of a database
/// other than 0.
fn rights(user: &str) -> (Vec<&'static str>, Vec<&'static str>) {
    let page = include_str!("../../../../docs/redis.md");
    let (_, rule) = page.split_once(&format!("ACL SETUSER {user} ")).unwrap();
    let rule: Vec<_> = rule.split_once("```").unwrap().0.split_whitespace().collect();
    let is_right = |word: &&str| word.starts_with(['+', '&']) && !["+hello", "+select"].contains(word);
    let needed = rule.iter().copied().filter(is_right).collect();
    (rule, needed)
}

/// Makes a user with that rule, but for one word, and gives the address for it.
fn user_without(server: &Server, user: &str, rule: &[&str], missing: &str) -> String {
    let words: Vec<_> = rule.iter().copied().filter(|word| *word != missing).collect();
    let made = server.ask(&format!("ACL SETUSER {user} reset {}", words.join(" ")));
    assert_eq!(made, "+OK");
    server.url().replace("redis://", &format!("redis://{user}:PASSWORD@"))
}

/// Also those that only a waiter needs, or who releases to one. The rights are those for the namespace that is not named.
#[test]
fn a_check_needs_every_right_that_the_documentation_lists() {
    let (rule, needed) = rights("locks");
    let world = World::on_own(Backend::Redis);
    let (world, rule) = (&world, &rule);
    thread::scope(|scope| {
        // All at once, each as a user of its own: some wait in vain for seconds.
        for (number, missing) in needed.into_iter().chain([""]).enumerate() {
            scope.spawn(move || {
                let url = user_without(world.server(), &format!("locks-{number}"), rule, missing);
                let done = world.run_at(&url, "check");
                let is_refused = !missing.is_empty();
                let expected = if is_refused { 78 } else { 0 };
                let is_right = done.code == Some(expected) && done.stdout.contains(" refused ") == is_refused;
                assert!(is_right, "without {missing:?}: {done:?}");
            });
        }
    });
}

/// The rights for looking are enough to look, none of them is too much, and they change nothing.
#[test]
fn a_user_who_may_only_read_sees_the_locks_and_needs_every_right_that_the_documentation_lists() {
    let (rule, needed) = rights("look");
    let world = World::on_own(Backend::Redis);
    let running = world.sleeper("--ttl 1h");
    let run = |missing: &str, line: &str| {
        let url = user_without(world.server(), "look", &rule, missing);
        // The server knows no script, so that its text must be sent along.
        assert_eq!(world.server().ask("SCRIPT FLUSH"), "+OK");
        world.run_at(&url, line)
    };
    run("", "list --names").is(0, "lock\n", "");
    run("", "holder lock").ends_with(0);
    for missing in needed {
        run(missing, "list").ends_with(78);
    }
    run("", "run -n other -- true").one_line(78);
    run("", "release --force lock").one_line(78);
    assert!(!world.is_free());
    running.stop();
}

#[test]
fn a_server_that_dies_ends_the_command_before_its_lease() {
    let world = World::on_own(Backend::Redis);
    let running = world.sleeper(SHORT_TTL);
    let command = running.command;
    world.server().kill();
    let done = running.end();
    assert!(!command.is_alive() && done.code == Some(76), "{done:?}");
    // A warning first, once.
    let lines: Vec<_> = done.stderr.lines().collect();
    assert!(
        lines.len() == 2 && lines[0].contains("renewal failed; trying again"),
        "{done:?}"
    );
    let says = lines[1].contains("could not be renewed in time (") && lines[1].contains("cannot be reached");
    assert!(says, "{done:?}");
}

#[test]
fn a_wait_reaches_a_server_that_comes_up_later() {
    let world = World::on_own(Backend::Redis);
    world.server().kill();
    let mut waiting = world.fencelock();
    waiting.args("run --wait 60s lock -- true".split(' '));
    let mut waiting = waiting.stderr(Stdio::piped()).spawn().unwrap();
    let mut told = BufReader::new(waiting.stderr.take().unwrap()).lines();
    let line = told.next().unwrap().unwrap();
    assert!(line.contains("waiting goes on"), "{line}");
    world.server().restart();
    assert_eq!(wait_for(&mut waiting), Some(0));
    let rest: Vec<_> = told.map(Result::unwrap).collect();
    assert!(
        rest.len() == 1 && rest[0].contains("answers those who wait again"),
        "{rest:?}"
    );
}

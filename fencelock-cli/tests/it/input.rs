//! What is refused: one clear line, the right code, and no secret in it.

use std::fs;

use crate::world::{Done, World};

#[track_caller]
fn refused(args: &[&str], code: i32, says: &str) {
    World::new().run_words(args).fails(code, says);
}

#[track_caller]
fn run_refused(options: &str, says: &str) {
    World::new().run(&format!("run {options} lock -- true")).fails(64, says);
}

#[test]
fn a_run_without_a_command_says_how_to_give_one() {
    let says = "there is no command to run: fencelock run NAME -- COMMAND";
    for line in ["run lock", "run lock --", "run -n lock --", "run -- -n --"] {
        World::new().run(line).fails(64, says);
    }
    World::new().run("run").fails(64, "<NAME>");
}

#[test]
fn an_address_that_cannot_be_or_would_exclude_nobody_is_refused() {
    run_refused("--url mysql://h/shop", "postgres, redis, sqlite");
    run_refused("--url locks.db", "does not start with a scheme");
    run_refused("--url memory:", "exclude nobody");
    let done = World::new().run("run --url mysql://h/shop lock -- true");
    assert!(
        !done.stderr.contains("memory:"),
        "no advice that is refused in turn: {done:?}"
    );
}

#[test]
fn times_and_numbers_that_cannot_be_are_refused_with_their_option() {
    for option in ["--ttl", "--wait", "--grace", "--max-hold", "--min-hold"] {
        for time in ["soon", "10parsecs", "", "-1s"] {
            run_refused(&format!("{option}={time}"), option);
        }
        run_refused(&format!("{option} -5"), "cannot be negative");
    }
    for code in ["256", "-1", "busy"] {
        run_refused(&format!("-E={code}"), "--conflict-exit-code");
    }
    for holders in ["0", "many"] {
        run_refused(&format!("--max-holders {holders}"), "--max-holders");
    }
    for (ttl, shown) in [("1ms", "1ms"), ("0", "0s"), ("100000", "1day 3h 46m 40s")] {
        let says = format!("a ttl of {shown} is not possible here; choose one from 100ms to 1day");
        run_refused(&format!("--ttl {ttl}"), &says);
    }
    run_refused("--grace 20s", "give at most 9s, or a longer --ttl");
    run_refused("--ttl 3s --grace 3s", "at most 700ms");
    run_refused("--min-hold 1e18", "--min-hold is too long; give at most 1year 18h");
}

#[test]
fn contradictory_and_unknown_arguments_are_refused() {
    for options in [
        "-n --wait 1s",
        "--shared --max-holders 2",
        "--shared --min-hold 1m",
        "-q -v",
    ] {
        run_refused(options, "cannot be used with");
    }
    run_refused("--nonsense", "--nonsense");
    for (line, says) in [
        ("run -x -- true", "use '-- -x'"),
        ("frobnicate", "unrecognized subcommand"),
        ("man frobnicate", "there are run,"),
    ] {
        World::new().run(line).fails(64, says);
    }
    let done = World::new().run("");
    assert!(done.code == Some(64) && done.stdout.is_empty(), "{done:?}");
    assert!(done.stderr.contains("Usage: fencelock"), "{done:?}");
}

#[test]
fn a_name_may_hold_anything_printable_of_512_bytes() {
    let world = World::new();
    let script = "printf %s \"$FENCELOCK_NAME\"";
    for name in ["two words", " Ünïcødé ✓", "a/b:c{d}%20'\"", "-", &"x".repeat(512)] {
        world.run_words(["run", name, "-c", script]).is(0, name, "");
    }
    world.run_words(["run", "-c", "--", "-n", "--", script]).is(0, "-n", "");
    world.run("holder -- -n").is(1, "-n is free\n", "");
    for (name, says) in [
        (&*"x".repeat(600), "longer than 512 bytes"),
        ("", "empty"),
        ("two\nlines", "control character"),
    ] {
        refused(&["run", name, "--", "true"], 64, says);
        refused(&["holder", name], 64, says);
    }
}

#[test]
fn nothing_secret_is_shown_of_an_address_however_it_is_written() {
    const SECRET: &str = "hunter2";
    let world = World::new();
    // A port that nothing listens on.
    let closed = "127.0.0.1:1";
    let mut urls: Vec<String> = [
        "redis://joe:hunter2@localhost/0",
        "postgres://joe:hunter2@localhost/shop?password=hunter2",
        "mysql://hunter2@h",
        "joe:hunter2@h",
        "redis:joe:hunter2@h",
        "redis+unix:/no/such.sock?user=joe&password=hunter2",
        "redis+sentinel://joe:hunter2@localhost/s?sentinel_password=hunter2",
        "sqlite://joe:hunter2@host/locks.db?password=hunter2",
        "host=127.0.0.1 port=1 password=hunter2 dbname=shop",
        "postgres://joe:hunter2?x@h/shop",
        "joe:hunter2",
        "hunter2",
    ]
    .map(str::to_owned)
    .into();
    for scheme in ["postgres", "redis", "etcd", "sqlite", "mysql"] {
        for login in [
            "joe:x@hunter2",
            "joe:hunter2@x",
            "joe:hunter2/x",
            "joe:12/hunter2",
            "joe:hunter2?x",
            "joe:12?hunter2",
            "joe:12?hunter2&hunter2&x",
            "joe:hunter2#x",
            "joe:hunter2 x",
            "joe:x hunter2",
            "joe@hunter2:x",
        ] {
            urls.push(format!("{scheme}://{login}@{closed}/shop"));
        }
        // The path of a file is not secret.
        if scheme != "sqlite" {
            urls.push(format!("{scheme}://joe:hunter2"));
        }
    }
    let mut wrong = Vec::new();
    let mut look = |done: Done, is_refused: bool| {
        if format!("{done:?}").contains(SECRET) || is_refused && done.code == Some(0) {
            wrong.push(format!("{done:?}"));
        }
    };
    for (number, url) in urls.iter().enumerate() {
        let is_like_an_address = number < 10;
        let lines = ["-vv run -n lock -- true", "-v list", "check"];
        for line in &lines[..if is_like_an_address { 3 } else { 2 }] {
            let mut command = world.fencelock();
            command
                .args(["--url", url])
                .args(line.split(' '))
                .env_remove("FENCELOCK_URL");
            look(Done::of(&mut command), true);
            look(world.run_at(url, line), true);
        }
        // In the wrong place it is an unknown argument.
        if is_like_an_address {
            look(world.run_words(["check", url]), true);
            look(world.run_at(url, "run --help"), false);
        }
    }
    assert!(wrong.is_empty(), "{}: {wrong:#?}", wrong.len());
}

#[test]
fn without_a_home_or_a_usable_state_directory_it_says_what_to_do() {
    let world = World::new();
    let run = |line: &str, (name, value): (&str, &str)| {
        let mut command = world.fencelock();
        Done::of(
            command
                .env_remove("FENCELOCK_URL")
                .env(name, value)
                .args(line.split(' ')),
        )
    };
    for home in ["", "relative"] {
        for line in ["run lock -- true", "list"] {
            run(line, ("HOME", home)).fails(64, "HOME is not set to an absolute path; give --url");
        }
    }
    let path = |name: &str| world.path(name).display().to_string();
    // A file where a directory should be stops root too.
    world.write("home", "");
    run("run lock -- true", ("HOME", &path("home"))).fails(78, "home/.local/state/fencelock cannot be made");
    fs::create_dir_all(world.path("state/fencelock/locks.db")).unwrap();
    run("run lock -- true", ("XDG_STATE_HOME", &path("state"))).fails(78, "locks.db is a directory");
}

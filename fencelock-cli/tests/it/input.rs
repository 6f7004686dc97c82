//! What is refused: one clear line, the right code, and no secret in it.

use crate::world::{Done, World};

#[track_caller]
fn run_refused(options: &str, says: &str) {
    World::new().run(&format!("run {options} lock -- true")).fails(64, says);
}

#[test]
fn a_line_that_cannot_be_carried_out_says_why() {
    let world = World::new();
    let no_command = "there is no command to run: fencelock run NAME -- COMMAND";
    for (line, says) in [
        ("run lock", no_command),
        ("run lock --", no_command),
        ("run -n lock --", no_command),
        ("run -- -n --", no_command),
        ("run", "<NAME>"),
        ("run -x -- true", "use '-- -x'"),
        ("frobnicate", "unrecognized subcommand"),
        ("man frobnicate", "there are run,"),
        ("release lock", "say so with --force"),
    ] {
        world.run(line).fails(64, says);
    }
    let done = world.run("");
    assert!(done.code == Some(64) && done.stdout.is_empty(), "{done:?}");
    assert!(done.stderr.contains("Usage: fencelock"), "{done:?}");
}

#[test]
fn an_option_that_cannot_be_says_why() {
    for (options, says) in [
        ("--url mysql://h/shop", "postgres, redis, sqlite"),
        ("--url locks.db", "does not start with a scheme"),
        ("--url memory:", "exclude no other process"),
        ("-E=256", "--conflict-exit-code"),
        ("-E=-1", "--conflict-exit-code"),
        ("-E=busy", "--conflict-exit-code"),
        ("--max-holders 0", "--max-holders"),
        ("--max-holders many", "--max-holders"),
        (
            "--ttl 1ms",
            "a ttl of 1ms is not possible here; choose one from 100ms to 1day",
        ),
        ("--ttl 0", "a ttl of 0s is not possible here"),
        ("--ttl 100000", "a ttl of 1day 3h 46m 40s is not possible here"),
        ("--grace 20s", "give at most 9s, or a longer --ttl"),
        ("--ttl 3s --grace 3s", "at most 700ms"),
        ("--min-hold 1e18", "--min-hold is too long; give at most 1year 18h"),
        ("-n --wait 1s", "cannot be used with"),
        ("--shared --max-holders 2", "cannot be used with"),
        ("--shared --min-hold 1m", "cannot be used with"),
        ("-q -v", "cannot be used with"),
        ("--nonsense", "--nonsense"),
    ] {
        run_refused(options, says);
    }
    for option in ["--ttl", "--wait", "--grace", "--max-hold", "--min-hold"] {
        for time in ["soon", "10parsecs", "", "-1s"] {
            run_refused(&format!("{option}={time}"), option);
        }
        run_refused(&format!("{option} -5"), "cannot be negative");
    }
    let done = World::new().run("run --url mysql://h/shop lock -- true");
    let advice = "no advice that is refused in turn";
    assert!(!done.stderr.contains("memory:"), "{advice}: {done:?}");
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
        world.run_words(["run", name, "--", "true"]).fails(64, says);
        world.run_words(["holder", name]).fails(64, says);
    }
}

#[test]
fn nothing_secret_is_shown_of_an_address_however_it_is_written() {
    const SECRET: &str = "hunter2";
    let world = World::new();
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
            // Nothing listens on that port.
            urls.push(format!("{scheme}://{login}@127.0.0.1:1/shop"));
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
            command.env_remove("FENCELOCK_URL").args(["--url", url]);
            look(Done::of(command.args(line.split(' '))), true);
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

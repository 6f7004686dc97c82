//! What is refused: one clear line, the right code, and no secret in it.

use std::fs;

use crate::world::{Done, World};

#[track_caller]
fn refused(args: &[&str], code: i32, says: &str) {
    let done = World::new().run(args);
    let line = done.one_line(code);
    assert!(line.contains(says), "{line}");
}

#[track_caller]
fn run_refused(options: &[&str], says: &str) {
    refused(&[&["run"], options, &["lock", "--", "true"]].concat(), 64, says);
}

#[test]
fn a_run_without_a_command_says_how_to_give_one() {
    for args in [
        &["run", "lock"][..],
        &["run", "lock", "--"],
        &["run", "-n", "lock", "--"],
        &["run", "--", "-n", "--"],
    ] {
        refused(args, 64, "there is no command to run: fencelock run NAME -- COMMAND");
    }
    refused(&["run"], 64, "<NAME>");
}

#[test]
fn an_address_that_cannot_be_or_would_exclude_nobody_is_refused() {
    run_refused(&["--url", "mysql://h/shop"], "sqlite:");
    run_refused(&["--url", "locks.db"], "does not start with a scheme");
    run_refused(&["--url", "memory:"], "exclude nobody");
    let done = World::new().run(["run", "--url", "mysql://h/shop", "lock", "--", "true"]);
    assert!(
        !done.one_line(64).contains("memory:"),
        "no advice that is refused in turn: {done:?}"
    );
}

#[test]
fn times_and_numbers_that_cannot_be_are_refused_with_their_option() {
    for option in ["--ttl", "--wait", "--grace", "--max-hold", "--min-hold"] {
        for time in ["soon", "10 parsecs", "", "-1s"] {
            run_refused(&[&format!("{option}={time}")], option);
        }
        run_refused(&[option, "-5"], "cannot be negative");
    }
    for code in ["256", "-1", "busy"] {
        run_refused(&[&format!("-E={code}")], "--conflict-exit-code");
    }
    for holders in ["0", "many"] {
        run_refused(&["--max-holders", holders], "--max-holders");
    }
    for (ttl, shown) in [("1ms", "1ms"), ("100000", "1day 3h 46m 40s")] {
        let says = format!("a ttl of {shown} is not possible here; choose one from 100ms to 1day");
        run_refused(&["--ttl", ttl], &says);
    }
    run_refused(&["--grace", "20s"], "give at most 9s, or a longer --ttl");
    run_refused(&["--ttl", "3s", "--grace", "3s"], "at most 700ms");
}

#[test]
fn contradictory_and_unknown_arguments_are_refused() {
    for options in [
        &["-n", "--wait", "1s"][..],
        &["--shared", "--max-holders", "2"],
        &["--shared", "--min-hold", "1m"],
        &["-q", "-v"],
    ] {
        run_refused(options, "cannot be used with");
    }
    run_refused(&["--nonsense"], "--nonsense");
    refused(&["run", "-x", "--", "true"], 64, "use '-- -x'");
    refused(&["frobnicate"], 64, "unrecognized subcommand");
    refused(&["man", "frobnicate"], 64, "there are run,");
    let done = World::new().run([""; 0]);
    assert_eq!((done.code, done.stdout.as_str()), (Some(64), ""));
    assert!(done.stderr.contains("Usage: fencelock"), "{done:?}");
}

#[test]
fn a_name_may_hold_anything_printable_of_512_bytes() {
    let world = World::new();
    for name in ["two words", " Ünïcødé ✓", "a/b:c{d}%20'\"", "-", &"x".repeat(512)] {
        let done = world.run(["run", name, "--", "sh", "-c", "printf %s \"$FENCELOCK_NAME\""]);
        assert_eq!((done.code, done.stdout.as_str()), (Some(0), name), "{done:?}");
    }
    let done = world.run(["run", "--", "-n", "--", "sh", "-c", "printf %s $FENCELOCK_NAME; exit 6"]);
    assert_eq!((done.code, done.stdout.as_str()), (Some(6), "-n"), "{done:?}");
    let done = world.run(["holder", "--", "-n"]);
    assert_eq!((done.code, done.stdout.as_str()), (Some(1), "-n is free\n"));
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
fn nothing_secret_is_echoed() {
    const SECRET: &str = "hunter2";
    let world = World::new();
    let urls = [
        "redis://joe:hunter2@localhost/0",
        "postgres://joe:hunter2@localhost/shop?password=hunter2",
        "mysql://hunter2@h",
        "joe:hunter2@h",
        "redis:joe:hunter2@h",
        "redis+unix:/no/such.sock?user=joe&password=hunter2",
        "redis+sentinel://joe:hunter2@localhost/s?sentinel_password=hunter2",
        "sqlite://joe:hunter2@host/locks.db?password=hunter2",
    ];
    for url in urls {
        for args in [
            &["run", "lock", "--", "true"][..],
            &["list"],
            &["check"],
            &["-v", "holder", "lock"],
        ] {
            let by_option = Done::of(
                world
                    .fencelock()
                    .args(args)
                    .args(["--url", url])
                    .env_remove("FENCELOCK_URL"),
            );
            let by_variable = Done::of(world.fencelock().args(args).env("FENCELOCK_URL", url));
            // In the wrong place it is an argument that nobody expects.
            let misplaced = world.run(["check", url]);
            for done in [by_option, by_variable, misplaced] {
                // After a command, options are the command's.
                let is_run = done.code == Some(0) && args[0] == "run";
                assert!(is_run || done.code.is_some_and(|code| code != 0), "{done:?}");
                assert!(!format!("{done:?}").contains(SECRET), "{done:?}");
            }
        }
    }
    let help = Done::of(world.fencelock().args(["run", "--help"]).env("FENCELOCK_URL", urls[0]));
    assert!(!help.stdout.contains(SECRET), "{help:?}");
}

#[test]
fn nothing_secret_of_a_malformed_address_is_shown() {
    const SECRET: &str = "hunter2";
    let world = World::new();
    // A port that nothing listens on.
    let closed = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let mut urls = Vec::new();
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
        urls.push(format!("{scheme}://joe:hunter2"));
    }
    urls.push(format!(
        "host={} port={} password=hunter2 dbname=shop",
        closed.ip(),
        closed.port()
    ));
    urls.push("joe:hunter2".to_owned());
    urls.push("hunter2".to_owned());
    let commands = [&["-vv", "run", "-n", "lock", "--", "true"][..], &["-v", "list"]];
    let mut shown = Vec::new();
    for url in &urls {
        // The path of a file is not secret.
        if url == "sqlite://joe:hunter2" {
            continue;
        }
        for args in commands {
            let by_option = Done::of(
                world
                    .fencelock()
                    .args(["--url", url])
                    .args(args)
                    .env_remove("FENCELOCK_URL"),
            );
            let by_variable = Done::of(world.fencelock().args(args).env("FENCELOCK_URL", url));
            assert!(by_option.code != Some(0) && by_variable.code != Some(0), "{url}");
            for done in [by_option, by_variable] {
                if format!("{done:?}").contains(SECRET) {
                    shown.push(format!("{url} {args:?}: {done:?}"));
                }
            }
        }
    }
    // As an argument that nobody expects.
    for url in ["host=h password=hunter2 dbname=shop", "postgres://joe:hunter2?x@h/shop"] {
        let done = world.run(["check", url]);
        if format!("{done:?}").contains(SECRET) {
            shown.push(format!("{url}: {done:?}"));
        }
    }
    assert!(shown.is_empty(), "{}: {shown:#?}", shown.len());
}

#[test]
fn without_a_home_there_is_no_default_place() {
    let world = World::new();
    for command in [&["run", "lock", "--", "true"][..], &["list"]] {
        let done = Done::of(world.fencelock().args(command).env_remove("FENCELOCK_URL"));
        let line = done.one_line(64);
        assert!(line.contains("HOME is not set; give --url"), "{line}");
    }
}

#[test]
fn a_state_directory_that_cannot_be_made_or_written_is_named() {
    let world = World::new();
    // A file where a directory should be stops root too.
    fs::write(world.path("home"), "").unwrap();
    let done = Done::of(
        world
            .fencelock()
            .args(["run", "lock", "--", "true"])
            .env_remove("FENCELOCK_URL")
            .env("HOME", world.path("home")),
    );
    let line = done.one_line(78);
    assert!(line.contains("home/.local/state/fencelock cannot be made"), "{line}");

    let state = world.path("state");
    fs::create_dir_all(state.join("fencelock/locks.db")).unwrap();
    let done = Done::of(
        world
            .fencelock()
            .args(["run", "lock", "--", "true"])
            .env_remove("FENCELOCK_URL")
            .env("XDG_STATE_HOME", &state),
    );
    let line = done.one_line(78);
    assert!(line.contains("locks.db is a directory"), "{line}");
}

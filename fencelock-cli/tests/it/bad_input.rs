//! What is refused: one clear line, the right code, and no secret in it.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;

use crate::world::{Done, SHORT_TTL, World};

#[track_caller]
fn refused(args: &[&str], code: i32, says: &str) {
    let done = World::new().run(args);
    let line = done.one_line(code);
    assert!(line.contains(says), "{line}");
}

#[test]
fn a_run_without_a_command_says_how_to_give_one() {
    for args in [
        &["run", "lock"][..],
        &["run", "lock", "--"],
        &["run", "-n", "lock", "--"],
    ] {
        refused(args, 64, "there is no command to run: fencelock run NAME -- COMMAND");
    }
    refused(&["run"], 64, "<NAME>");
}

#[test]
fn an_unknown_scheme_names_those_that_are_known() {
    refused(&["run", "--url", "mysql://h/shop", "lock", "--", "true"], 64, "sqlite:");
    refused(&["list", "--url", "locks.db"], 64, "does not start with a scheme");
}

#[test]
fn an_address_that_would_exclude_nobody_is_refused() {
    refused(&["run", "--url", "memory:", "lock", "--", "true"], 64, "exclude nobody");
}

#[test]
fn a_time_that_cannot_be_read_is_refused_with_its_option() {
    for option in ["--ttl", "--wait", "--grace"] {
        for time in ["soon", "10 parsecs", "", "-1s"] {
            refused(&["run", &format!("{option}={time}"), "lock", "--", "true"], 64, option);
        }
    }
}

#[test]
fn a_negative_time_is_refused_as_one() {
    for option in ["--ttl", "--wait", "--grace"] {
        for time in ["-5s", "-5"] {
            refused(&["run", option, time, "lock", "--", "true"], 64, "cannot be negative");
        }
    }
}

#[test]
fn a_ttl_out_of_bounds_is_refused_with_the_bounds_as_people_write_them() {
    for (ttl, shown) in [("1ms", "1ms"), ("9999999d", "9999999d"), ("100000", "1d 3h 46m 40s")] {
        let says = format!("a ttl of {shown} is not possible here; choose one from 100ms to 1d");
        refused(&["run", "--ttl", ttl, "lock", "--", "true"], 64, &says);
    }
}

#[test]
fn no_advice_is_given_that_is_refused_in_turn() {
    let done = World::new().run(["run", "--url", "mysql://h/shop", "lock", "--", "true"]);
    assert!(!done.one_line(64).contains("memory:"), "{done:?}");
    let world = World::new();
    let running = world.start(&SHORT_TTL, "exec sleep 600");
    world.run(["release", "--force", "lock"]);
    let done = running.end();
    // The locks are in a file.
    assert!(!done.one_line(76).contains("server"), "{done:?}");
}

#[test]
fn quiet_says_nothing_but_errors() {
    let world = World::new();
    let running = world.start(&[], "exec sleep 600");
    let quiet = |args: &[&str]| {
        let done = world.run([&["--quiet"], args].concat());
        (done.code, done.stderr)
    };
    assert_eq!(quiet(&["run", "-n", "lock", "--", "true"]), (Some(75), String::new()));
    assert_eq!(quiet(&["list"]), (Some(0), String::new()));
    running.stop();
    let leaves = [
        "run",
        "-q",
        "lock",
        "--",
        "sh",
        "-c",
        "sleep 600 > /dev/null 2>&1 & true",
    ];
    assert_eq!(quiet(&leaves), (Some(0), String::new()));
    assert!(
        quiet(&["run", "--ttl", "1ms", "lock", "--", "true"])
            .1
            .contains("a ttl of 1ms")
    );
    assert!(
        quiet(&["run", "lock", "--", "no-such-command"])
            .1
            .contains("cannot be run")
    );
    refused(&["-q", "-v", "list"], 64, "cannot be used with");
}

#[test]
fn a_grace_that_does_not_fit_is_refused_with_the_largest_that_does() {
    refused(
        &["run", "--grace", "20s", "lock", "--", "true"],
        64,
        "at most 9s, or a ttl of at least 1m 3s",
    );
    refused(
        &["run", "--ttl", "3s", "--grace", "3s", "lock", "--", "true"],
        64,
        "at most 700ms",
    );
    let done = World::new().run(["run", "--grace", "9s", "lock", "--", "true"]);
    assert_eq!(done.code, Some(0), "{done:?}");
}

#[test]
fn a_name_may_hold_blanks_and_any_letters() {
    for name in ["two words", " Ünïcødé ✓", "a/b:c{d}%20'\"", "-"] {
        let done = World::new().run(["run", name, "--", "sh", "-c", "printf %s \"$FENCELOCK_NAME\""]);
        assert_eq!((done.code, done.stdout.as_str()), (Some(0), name), "{done:?}");
    }
    let longest = "x".repeat(512);
    assert_eq!(World::new().run(["run", &longest, "--", "true"]).code, Some(0));
}

#[test]
fn a_name_that_looks_like_an_option_comes_after_two_dashes() {
    let world = World::new();
    let done = world.run(["run", "--", "-n", "--", "sh", "-c", "printf %s $FENCELOCK_NAME; exit 6"]);
    assert_eq!((done.code, done.stdout.as_str()), (Some(6), "-n"), "{done:?}");
    let done = world.run(["holder", "--", "-n"]);
    assert_eq!((done.code, done.stdout.as_str()), (Some(1), "-n is free\n"));
    refused(&["run", "--", "-n", "--"], 64, "there is no command to run");
    refused(&["run", "-x", "--", "true"], 64, "use '-- -x'");
}

#[test]
fn an_empty_command_is_not_found() {
    refused(&["run", "lock", "--", ""], 127, "an empty name cannot be run");
}

#[test]
fn a_name_that_is_too_long_empty_or_not_printable_is_refused() {
    refused(&["run", &"x".repeat(600), "--", "true"], 64, "longer than 512 bytes");
    refused(&["run", "", "--", "true"], 64, "empty");
    refused(&["run", "two\nlines", "--", "true"], 64, "control character");
    refused(&["holder", &"x".repeat(600)], 64, "longer than 512 bytes");
    let world = World::new();
    let done = Done::of(
        world
            .fencelock()
            .arg("holder")
            .arg(std::ffi::OsStr::from_bytes(b"\xff")),
    );
    done.one_line(64);
}

#[test]
fn a_code_for_busy_that_is_none_is_refused() {
    for code in ["256", "-1", "busy"] {
        refused(
            &["run", &format!("-E={code}"), "lock", "--", "true"],
            64,
            "--conflict-exit-code",
        );
    }
}

#[test]
fn contradictory_and_missing_arguments_are_refused() {
    refused(
        &["run", "-n", "--wait", "1s", "lock", "--", "true"],
        64,
        "cannot be used with",
    );
    refused(&["release", "lock"], 64, "--force");
    refused(&["frobnicate"], 64, "unrecognized subcommand");
    refused(&["man", "frobnicate"], 64, "there are run,");
    let done = World::new().run([""; 0]);
    assert_eq!((done.code, done.stdout.as_str()), (Some(64), ""));
    assert!(done.stderr.contains("Usage: fencelock"), "{done:?}");
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

#[test]
fn a_state_directory_without_the_right_to_write_is_named() {
    let world = World::new();
    let state = world.path("state");
    fs::create_dir_all(state.join("fencelock")).unwrap();
    fs::set_permissions(state.join("fencelock"), fs::Permissions::from_mode(0o500)).unwrap();
    let mut command = world.fencelock();
    command
        .args(["run", "lock", "--", "true"])
        .env_remove("FENCELOCK_URL")
        .env("XDG_STATE_HOME", &state);
    if rustix::process::geteuid().is_root() {
        // Root may write everywhere, so somebody else tries.
        use std::os::unix::process::CommandExt;
        fs::set_permissions(world.dir(), fs::Permissions::from_mode(0o755)).unwrap();
        fs::set_permissions(&state, fs::Permissions::from_mode(0o755)).unwrap();
        fs::set_permissions(state.join("fencelock"), fs::Permissions::from_mode(0o555)).unwrap();
        let copy = world.path("fencelock");
        // By another process: what this one writes, a test beside this one may inherit open, and nobody could run it.
        let copied = std::process::Command::new("cp")
            .arg(crate::world::binary())
            .arg(&copy)
            .status()
            .unwrap();
        assert!(copied.success());
        command = std::process::Command::new(copy);
        command
            .env_clear()
            .env("XDG_STATE_HOME", &state)
            .uid(65_534)
            .gid(65_534)
            .current_dir("/");
        command.args(["run", "lock", "--", "true"]);
    }
    let done = Done::of(&mut command);
    let line = done.one_line(78);
    assert!(line.contains("fencelock is not writable for this process"), "{line}");
}

#[test]
fn the_supervisor_is_not_for_people() {
    use std::os::unix::process::CommandExt;

    let world = World::new();
    let done = Done::of(world.fencelock().arg0("lock-supervisor").args(["lock", "true"]));
    let line = done.one_line(64);
    assert!(line.contains("started by `fencelock run` only"), "{line}");
}

//! `fencelock run`: its exit codes, and what the command finds around it.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::world::{Done, SHORT_TTL, World, binary, wait_for, wait_until};

#[test]
fn the_code_is_the_commands_own_or_128_and_its_signal_and_the_lock_is_free_afterwards() {
    let world = World::new();
    let scripts = [0, 1, 7, 64, 75, 255].map(|code| (format!("exit {code}"), code));
    let signals = [("TERM", 143), ("KILL", 137), ("INT", 130), ("SEGV", 139)];
    let signals = signals.map(|(signal, code)| (format!("kill -{signal} $$"), code));
    for (script, code) in scripts.into_iter().chain(signals) {
        let done = world.run(["run", "lock", "--", "sh", "-c", &script]);
        assert_eq!((done.code, done.stderr.as_str()), (Some(code), ""), "{script}");
        let done = world.run(["holder", "lock"]);
        assert_eq!(
            (done.code, done.stdout.as_str()),
            (Some(1), "lock is free\n"),
            "{script}"
        );
    }
}

#[test]
fn busy_is_75_and_names_the_holder_unless_another_code_is_chosen() {
    let world = World::new();
    let running = world.start(&["--label", "night shift"], "exec sleep 600");
    let holder = format!(":{} (night shift) for ", running.fencelock().0);
    for patience in [
        &["-n"][..],
        &["--nonblock"],
        &["--wait", "30ms"],
        &["-w", "0s"],
        &["--timeout", "0.03"],
    ] {
        let done = world.run([&["run"], patience, &["lock", "--", "true"]].concat());
        let line = done.one_line(75);
        assert!(
            line.starts_with("lock is busy, held by ") && line.contains(&holder),
            "{line}"
        );
    }
    for code in [0, 1, 200] {
        let done = world.run(["run", "-n", "-E", &code.to_string(), "lock", "--", "true"]);
        done.one_line(code);
    }
    let since = Instant::now();
    assert_eq!(world.run(["run", "--wait", "0.7", "lock", "--", "true"]).code, Some(75));
    assert!(since.elapsed() >= Duration::from_millis(700));
    assert_eq!(running.stop().code, Some(143));
}

#[test]
fn what_cannot_be_executed_is_126_and_what_does_not_exist_127_and_the_lock_is_free() {
    let world = World::new();
    fs::write(world.path("letter"), "dear reader").unwrap();
    for (command, code, says) in [
        (
            "./letter",
            126,
            "./letter cannot be run: Permission denied (os error 13)",
        ),
        (
            "no-such-command",
            127,
            "no-such-command cannot be run: No such file or directory (os error 2)",
        ),
        ("", 127, "an empty name cannot be run"),
    ] {
        let done = world.run(["run", "lock", "--", command]);
        assert!(done.one_line(code).starts_with(says), "{done:?}");
        assert_eq!(world.run(["holder", "lock"]).code, Some(1));
    }
}

#[test]
fn a_wrong_configuration_is_78_and_a_file_that_others_keep_is_69() {
    let world = World::new();
    fs::write(
        world.path("letter"),
        "a letter to you that is long enough to be looked at".repeat(9),
    )
    .unwrap();
    let letter = format!("sqlite:{}", world.path("letter").display());
    let done = world.run(["run", "--url", &letter, "lock", "--", "true"]);
    assert!(done.one_line(78).contains("is not an SQLite database"), "{done:?}");
    assert_eq!(world.run(["check", "--url", &letter]).code, Some(78));
    // Nothing is waited for, not even the half second in which a program at its end releases its locks.
    let refusal = || {
        let since = Instant::now();
        world.run(["run", "--url", &letter, "lock", "--", "true"]);
        since.elapsed()
    };
    let fastest = (0..10).map(|_| refusal()).min().unwrap();
    assert!(fastest < Duration::from_millis(450), "{fastest:?}");

    assert_eq!(world.run(["run", "lock", "--", "true"]).code, Some(0));
    let _others = world.keep_file_to_itself();
    let url = format!("{}?op_timeout=100ms", world.url());
    let done = world.run(["run", "--url", &url, "lock", "--", "true"]);
    assert!(done.one_line(69).contains("did not answer within"), "{done:?}");
}

#[test]
fn who_waits_for_the_lock_waits_for_a_busy_file_too_and_who_does_not_does_not() {
    let world = World::new();
    assert_eq!(world.run(["run", "lock", "--", "true"]).code, Some(0));
    let others = world.keep_file_to_itself();
    let mut patient = world.fencelock().args(["run", "lock", "--", "true"]).spawn().unwrap();
    // Much longer than the test waits.
    let url = format!("{}?op_timeout=1h", world.url());
    let done = world.run(["run", "-n", "--url", &url, "lock", "--", "true"]);
    assert!(done.one_line(69).contains("did not answer within"), "{done:?}");
    assert!(patient.try_wait().unwrap().is_none());
    others.execute_batch("COMMIT").unwrap();
    assert_eq!(wait_for(&mut patient), Some(0));
}

#[test]
fn twenty_processes_count_to_twenty_with_rising_tokens() {
    let world = World::new();
    fs::write(world.path("n"), "0").unwrap();
    let script = "n=$(cat n); sleep 0.02; echo $((n+1)) > n; echo $FENCELOCK_TOKEN >> tokens";
    let start = |_| {
        world
            .fencelock()
            .args(["run", "counter", "-c", script])
            .spawn()
            .unwrap()
    };
    let mut children: Vec<Child> = (0..20).map(start).collect();
    for child in &mut children {
        assert!(child.wait().unwrap().success());
    }
    assert_eq!(fs::read_to_string(world.path("n")).unwrap().trim(), "20");
    let tokens = fs::read_to_string(world.path("tokens")).unwrap();
    let tokens: Vec<u64> = tokens.lines().map(|token| token.parse().unwrap()).collect();
    assert!(tokens.len() == 20 && tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
}

#[test]
fn stdin_stdout_and_stderr_are_the_commands_as_they_are() {
    let world = World::new();
    let mut command = world.fencelock();
    command.args(["run", "lock", "--", "sh", "-c", "cat; echo oops >&2"]);
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let text = "line\n".repeat(100_000);
    let mut stdin = child.stdin.take().unwrap();
    let sent = text.clone();
    let writer = std::thread::spawn(move || stdin.write_all(sent.as_bytes()).unwrap());
    let done = Done::from(child.wait_with_output().unwrap());
    writer.join().unwrap();
    assert_eq!(
        (done.code, done.stdout == text, done.stderr.as_str()),
        (Some(0), true, "oops\n")
    );
}

#[test]
fn the_command_finds_name_and_token_and_keeps_arguments_and_environment() {
    let world = World::new();
    let mut command = world.fencelock();
    let script = r#"echo "$FENCELOCK_NAME|$OWN|$1|$2|$FENCELOCK_TOKEN""#;
    command
        .args(["run", "lock", "sh", "-c", script, "sh", "a b", "--url"])
        .env("OWN", "mine");
    let done = Done::of(&mut command);
    let token = done
        .stdout
        .strip_prefix("lock|mine|a b|--url|")
        .unwrap_or_else(|| panic!("{done:?}"));
    let later = world.run(["run", "lock", "--", "sh", "-c", "echo $FENCELOCK_TOKEN"]);
    assert!(later.stdout.trim().parse::<u64>().unwrap() > token.trim().parse().unwrap());
}

#[test]
fn a_line_is_run_by_sh_also_if_it_begins_like_an_option() {
    let world = World::new();
    for option in ["-c", "--shell"] {
        let done = world.run(["run", "lock", option, "echo one | tr o 0; echo \"$1\"; exit 3", "two"]);
        assert_eq!((done.code, done.stdout.as_str()), (Some(3), "0ne\ntwo\n"), "{done:?}");
    }
    for (line, code) in [("-c", 127), ("--version", 127), ("", 0)] {
        let done = world.run(["run", "--shell", "lock", "--", line, "echo one"]);
        assert_eq!((done.code, done.stdout.as_str()), (Some(code), ""), "{done:?}");
    }
}

/// What a shell does, given `fencelock` as `$0`.
fn shell(world: &World, script: &str) -> Done {
    let mut shell = Command::new("setsid");
    shell
        .args(["-w", "sh", "-c", script, binary()])
        .env("FENCELOCK_URL", world.url());
    Done::of(shell.current_dir(world.dir()))
}

#[test]
fn nothing_of_ours_is_left_open_in_the_command_and_what_was_closed_is_closed() {
    let world = World::new();
    // The tests may have something open that is inherited; so look before and after.
    let script = r#"ls /proc/$$/fd > before; exec "$0" run lock -- sh -c 'ls /proc/$$/fd > after'"#;
    assert_eq!(shell(&world, script).code, Some(0));
    let [before, after] = ["before", "after"].map(|name| fs::read_to_string(world.path(name)).unwrap());
    assert_eq!(before, after);

    let look = r#"for fd in 0 1 2; do test -e /proc/$$/fd/$fd && printf $fd >> open; done; true"#;
    for (closed, open) in [
        ("", "012"),
        (">&-", "02"),
        ("2>&-", "01"),
        (">&- 2>&-", "0"),
        ("<&- >&-", "02"),
    ] {
        let done = shell(&world, &format!(r#"exec "$0" run lock -c '{look}' {closed}"#));
        assert_eq!(done.code, Some(0), "{done:?}");
        assert_eq!(fs::read_to_string(world.path("open")).unwrap(), open, "{closed}");
        fs::remove_file(world.path("open")).unwrap();
    }
}

#[test]
fn output_that_cannot_be_written_is_74_and_a_reader_that_leaves_is_no_error() {
    let world = World::new();
    assert_eq!(world.run(["run", "lock", "--", "true"]).code, Some(0));
    for output in [
        "completions bash",
        "--help",
        "--version",
        "run --help",
        "man",
        "list --json",
    ] {
        for to in ["> /dev/full", ">&-"] {
            let done = shell(
                &world,
                &format!(r#"code=$("$0" {output} {to}; echo $? >&3) 3> code; cat code"#),
            );
            assert_eq!(done.stdout, "74\n", "{output} {to}: {done:?}");
        }
        let done = shell(&world, &format!(r#"("$0" {output}; echo $? > code) | true; cat code"#));
        assert_eq!(done.stdout, "0\n", "{output}");
    }
    assert_eq!(shell(&world, r#""$0" run --nonsense 2>&-; echo $?"#).stdout, "64\n");
}

#[test]
fn without_stdin_and_environment_it_behaves() {
    let world = World::new();
    let line = format!(
        r#"exec setsid -w "$0" run --url "{}" lock -- /bin/sh -c 'cat; echo done; exit 4' <&-"#,
        world.url()
    );
    let done = Done::of(
        Command::new("sh")
            .args(["-c", &line, binary()])
            .env_clear()
            .current_dir(world.dir()),
    );
    assert_eq!(
        (done.code, done.stdout.as_str(), done.stderr.as_str()),
        (Some(4), "done\n", "")
    );
}

#[test]
fn the_default_place_is_made_for_the_user_alone() {
    let world = World::new();
    let home = world.path("home");
    fs::create_dir(&home).unwrap();
    let run = |args: &[&str], set: &[(&str, &str)]| {
        let mut command = world.fencelock();
        command.env_remove("FENCELOCK_URL").env("HOME", &home).args(args);
        let done = Done::of(command.envs(set.iter().copied()));
        assert_eq!(done.code, Some(0), "{done:?}");
        done
    };
    let lock = ["run", "lock", "--", "true"];
    run(&lock, &[]);
    let dir = home.join(".local/state/fencelock");
    assert!(dir.join("locks.db").is_file());
    assert_eq!(fs::metadata(&dir).unwrap().permissions().mode() & 0o777, 0o700);
    let done = run(&["list"], &[]);
    assert_eq!(
        done.stderr,
        format!("fencelock: no locks are held in {}/locks.db\n", dir.display())
    );

    let state = world.path("100% ?state#");
    run(&lock, &[("XDG_STATE_HOME", state.to_str().unwrap())]);
    assert!(state.join("fencelock/locks.db").is_file());
    run(&lock, &[("XDG_STATE_HOME", "relative")]);
    assert!(!world.path("relative").exists());
    run(&lock, &[("FENCELOCK_URL", "")]);
}

#[test]
fn a_command_stopped_without_a_terminal_keeps_its_lock() {
    let world = World::new();
    let running = world.start(&SHORT_TTL, "exec sleep 600");
    running.command.signal(Signal::STOP);
    wait_until("the command to stop", || running.command.state() == Some('T'));
    world.renewed();
    running.command.signal(Signal::CONT);
    running.fencelock().signal(Signal::TERM);
    assert_eq!(running.end().code, Some(143));
}

#[test]
fn where_files_run_out_it_says_so_and_leaves_no_lock() {
    let world = World::new();
    assert_eq!(world.run(["run", "lock", "--", "true"]).code, Some(0));
    let mut failed = 0;
    // It needs more files one after the other: where they run out differs.
    for files in 8..40 {
        let name = format!("files-{files}");
        let done = shell(&world, &format!(r#"ulimit -n {files}; exec "$0" run {name} -- true"#));
        failed += i32::from(done.code != Some(0));
        assert!(matches!(done.code, Some(0 | 69 | 126 | 127)), "{files} files: {done:?}");
        assert_eq!(world.run(["holder", &name]).code, Some(1), "{files} files: {done:?}");
    }
    assert!((1..32).contains(&failed), "{failed} of 32 failed");
}

#[test]
fn quiet_says_nothing_but_errors_and_verbose_what_happens() {
    let world = World::new();
    let running = world.start(&[], "exec sleep 600");
    let quiet = |args: &[&str]| {
        let done = world.run([&["--quiet"], args].concat());
        (done.code, done.stderr)
    };
    assert_eq!(quiet(&["run", "-n", "lock", "--", "true"]), (Some(75), String::new()));
    assert_eq!(quiet(&["list"]), (Some(0), String::new()));
    running.stop();
    let leaves = ["run", "-q", "lock", "-c", "sleep 600 > /dev/null 2>&1 & true"];
    assert_eq!(quiet(&leaves), (Some(0), String::new()));
    assert!(
        quiet(&["run", "lock", "--", "no-such-command"])
            .1
            .contains("cannot be run")
    );

    let done = world.run(["-v", "run", "lock", "--", "true"]);
    assert_eq!((done.code, done.stdout.as_str()), (Some(0), ""));
    let place = format!("the locks are kept in {}", world.place());
    assert!(
        done.stderr.contains(&place) && done.stderr.contains("acquired"),
        "{done:?}"
    );
}

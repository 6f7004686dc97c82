//! What the command finds around it.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};

use rustix::process::Signal;

use crate::world::{Backend, Done, SHORT_TTL, World, binary, wait_until};

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

pub(crate) fn the_command_finds_name_and_token_and_keeps_arguments_and_environment(backend: Backend) {
    let world = World::on(backend);
    let mut command = world.fencelock();
    command.args([
        "run",
        "lock",
        "--",
        "sh",
        "-c",
        r#"echo "$FENCELOCK_NAME|$FENCELOCK_TOKEN|$OWN|$1|$2""#,
        "sh",
    ]);
    command.args(["a b", "--url"]).env("OWN", "mine");
    let done = Done::of(&mut command);
    let words: Vec<_> = done.stdout.trim().split('|').collect();
    assert_eq!(
        (words[0], words[2], words[3], words[4]),
        ("lock", "mine", "a b", "--url"),
        "{done:?}"
    );
    let token: u64 = words[1].parse().unwrap();
    let later = world.run(["run", "lock", "--", "sh", "-c", "echo $FENCELOCK_TOKEN"]);
    assert!(later.stdout.trim().parse::<u64>().unwrap() > token);
}

#[test]
fn a_shell_line_is_run_by_sh() {
    let done = World::new().run([
        "run",
        "--shell",
        "lock",
        "--",
        "echo one | tr o 0; echo \"$1\"; exit 3",
        "two",
    ]);
    assert_eq!((done.code, done.stdout.as_str()), (Some(3), "0ne\ntwo\n"), "{done:?}");
}

#[test]
fn a_shell_line_that_begins_like_an_option_is_none() {
    for (line, code) in [("-c", 127), ("--version", 127), ("", 0)] {
        let done = World::new().run(["run", "--shell", "lock", "--", line, "echo one"]);
        assert_eq!((done.code, done.stdout.as_str()), (Some(code), ""), "{done:?}");
    }
}

#[test]
fn nothing_of_ours_is_left_open_in_the_command() {
    let world = World::new();
    // The tests may have something open that is inherited; so look before and after.
    let script = r#"ls /proc/$$/fd > before; exec "$0" run lock -- sh -c 'ls /proc/$$/fd > after'"#;
    let mut command = Command::new("sh");
    let done = Done::of(
        command
            .args(["-c", script, binary()])
            .env("FENCELOCK_URL", world.url())
            .current_dir(world.dir()),
    );
    assert_eq!(done.code, Some(0), "{done:?}");
    let [before, after] = ["before", "after"].map(|name| fs::read_to_string(world.path(name)).unwrap());
    assert_eq!(before, after);
}

#[test]
fn the_default_place_is_made_for_the_user_alone() {
    let world = World::new();
    let home = world.path("home");
    fs::create_dir(&home).unwrap();
    let run = |args: &[&str], set: &[(&str, &str)]| {
        let mut command = world.fencelock();
        command
            .env_remove("FENCELOCK_URL")
            .env("HOME", &home)
            .args(args)
            .envs(set.iter().copied());
        let done = Done::of(&mut command);
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

pub(crate) fn without_terminal_stdin_and_environment_it_behaves(backend: Backend) {
    let world = World::on(backend);
    // As service managers start things: a session of its own, closed stdin, next to no environment.
    let run = |script: &str| {
        let line = format!(
            r#"exec setsid -w "$0" run --url "{}" lock -- /bin/sh -c '{script}' <&-"#,
            world.url()
        );
        Done::of(
            Command::new("sh")
                .args(["-c", &line, binary()])
                .env_clear()
                .current_dir(world.dir()),
        )
    };
    let done = run("cat; echo done; exit 4");
    assert_eq!(
        (done.code, done.stdout.as_str(), done.stderr.as_str()),
        (Some(4), "done\n", ""),
        "{done:?}"
    );
    let done = run("kill -TERM $$");
    assert_eq!((done.code, done.stderr.as_str()), (Some(143), ""));
}

#[test]
fn a_closed_stdout_or_stderr_is_no_obstacle() {
    let world = World::new();
    let run = |script: &str| {
        let url = world.url();
        Done::of(
            Command::new("sh")
                .args(["-c", script, binary()])
                .env("FENCELOCK_URL", url)
                .current_dir(world.dir()),
        )
    };
    assert_eq!(run(r#""$0" run lock -- true >&- 2>&-; echo $?"#).stdout, "0\n");
    assert_eq!(run(r#""$0" run --nonsense 2>&-; echo $?"#).stdout, "64\n");
    assert_eq!(
        run(r#""$0" completions bash | head -n 1 > head; cat head | wc -l"#)
            .stdout
            .trim(),
        "1"
    );
    for output in [
        "completions bash",
        "--help",
        "--version",
        "run --help",
        "help",
        "man",
        "list --json",
    ] {
        for to in ["> /dev/full", ">&-"] {
            let done = run(&format!(r#"code=$("$0" {output} {to}; echo $? >&3) 3> code; cat code"#));
            assert_eq!(done.stdout, "74\n", "{output} {to}: {done:?}");
        }
        assert_eq!(
            run(&format!(r#"("$0" {output}; echo $? > code) | true; cat code"#)).stdout,
            "0\n"
        );
    }
}

#[test]
fn what_is_closed_for_fencelock_is_closed_for_the_command() {
    let world = World::new();
    let look = r#"for fd in 0 1 2; do test -e /proc/$$/fd/$fd && echo "$fd is open" >> open; done; true"#;
    for (closed, open) in [
        ("", "0 is open\n1 is open\n2 is open\n"),
        (">&-", "0 is open\n2 is open\n"),
        ("2>&-", "0 is open\n1 is open\n"),
        (">&- 2>&-", "0 is open\n"),
        // It has always been /dev/null.
        ("<&- >&-", "0 is open\n2 is open\n"),
    ] {
        let mut shell = Command::new("sh");
        shell.args([
            "-c",
            &format!(r#"exec "$0" run lock -- sh -c "$1" {closed}"#),
            binary(),
            look,
        ]);
        let done = Done::of(shell.env("FENCELOCK_URL", world.url()).current_dir(world.dir()));
        assert_eq!(done.code, Some(0), "{done:?}");
        assert_eq!(fs::read_to_string(world.path("open")).unwrap(), open, "{closed}");
        fs::remove_file(world.path("open")).unwrap();
    }
}

#[test]
fn what_the_command_leaves_in_its_session_ends_with_it() {
    let world = World::new();
    let script =
        "(trap '' TERM; echo $BASHPID > /dev/null; sh -c 'echo $$ > left.new; mv left.new left; exec sleep 600') &
                  while ! test -e left; do sleep 0.01; done";
    let done = world.run(["run", "--grace", "300ms", "lock", "--", "sh", "-c", script]);
    assert_eq!(
        done.one_line(0),
        "the command left processes behind in its session; they were ended with it"
    );
    assert!(!world.pid("left").is_alive());
}

#[test]
fn a_daemon_that_left_the_session_stays_when_the_command_ends() {
    let world = World::new();
    let script = "setsid sh -c 'echo $$ > daemon.new; mv daemon.new daemon; exec sleep 600' > /dev/null 2>&1 &
                  while ! test -e daemon; do sleep 0.01; done";
    let done = world.run(["run", "lock", "--", "sh", "-c", script]);
    let daemon = world.pid("daemon");
    let alive = daemon.is_alive();
    daemon.clean_up();
    assert_eq!((done.code, done.stderr.as_str(), alive), (Some(0), "", true));
    assert_eq!(world.run(["holder", "lock"]).code, Some(1));
}

#[test]
fn a_command_stopped_without_a_terminal_keeps_its_lock() {
    let world = World::new();
    let running = world.start(&SHORT_TTL, "exec sleep 600");
    running.command.signal(Signal::STOP);
    wait_until("the command to stop", || running.command.state() == Some('T'));
    world.renewed();
    running.command.signal(Signal::CONT);
    running.locker().signal(Signal::TERM);
    assert_eq!(running.end().code, Some(143));
}

#[test]
fn a_supervisor_that_cannot_be_started_leaves_no_lock() {
    let world = World::new();
    let held = |name: &str| world.run(["holder", name]).code == Some(0);
    let mut failed = 0;
    // It needs more files than that one after the other: where they run out differs.
    for files in 8..40 {
        let name = format!("files {files}");
        let mut shell = Command::new("sh");
        shell.args(["-c", r#"ulimit -n "$1"; exec "$0" run "$2" -- true"#, binary()]);
        shell.args([files.to_string(), name.clone()]);
        let done = Done::of(shell.env("FENCELOCK_URL", world.url()).current_dir(world.dir()));
        failed += i32::from(done.code != Some(0));
        assert!(!held(&name), "{files} files: {done:?}");
        assert!(!done.stderr.contains("killed"), "{files} files: {done:?}");
    }
    assert!((1..32).contains(&failed), "{failed} of 32 failed");
}

#[test]
fn a_number_alone_means_seconds() {
    let world = World::new();
    let running = world.start(&["--ttl", "30"], "exec sleep 600");
    let start = std::time::Instant::now();
    let done = world.run(["run", "--wait", "0.7", "lock", "--", "true"]);
    assert_eq!(done.code, Some(75), "{done:?}");
    assert!(start.elapsed() >= std::time::Duration::from_millis(700));
    running.command.clean_up();
    assert_eq!(world.run(["run", "--wait", "-1", "lock", "--", "true"]).code, Some(64));
}

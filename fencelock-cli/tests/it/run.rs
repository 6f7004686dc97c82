//! `fencelock run`: its exit codes, and what the command finds around it.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::world::{Done, SHORT_TTL, World, wait_for};

#[test]
fn the_code_is_the_commands_own_or_128_and_its_signal_and_the_lock_is_free_afterwards() {
    let world = World::new();
    world.write("letter", "dear reader");
    for (script, code) in [
        ("exit 0", 0),
        ("exit 7", 7),
        ("exit 75", 75),
        ("exit 255", 255),
        ("kill -TERM $$", 143),
        ("kill -KILL $$", 137),
        ("kill -INT $$", 130),
        ("kill -SEGV $$", 139),
    ] {
        world.run_script("", script).is(code, "", "");
        world.run("holder lock").is(1, "lock is free\n", "");
    }
    for (command, code, says) in [
        (
            "./letter",
            126,
            "./letter cannot be run: Permission denied (os error 13)",
        ),
        (
            "no-such",
            127,
            "no-such cannot be run: No such file or directory (os error 2)",
        ),
        ("", 127, "an empty name cannot be run"),
    ] {
        world.run_words(["run", "lock", "--", command]).fails(code, says);
        assert!(world.is_free());
    }
}

#[test]
fn busy_is_75_and_names_the_holder_unless_another_code_is_chosen() {
    let world = World::new();
    let running = world.sleeper("--label nightly");
    let holder = format!(":{} (nightly) for ", running.fencelock().0);
    for patience in ["-n", "--nonblock", "--wait 30ms", "-w 0s", "--timeout 0.03"] {
        let done = world.run_script(patience, "");
        done.fails(75, "lock is busy, held by ");
        done.fails(75, &holder);
    }
    for code in [0, 1, 200] {
        world.run_script(&format!("-n -E {code}"), "").one_line(code);
    }
    let since = Instant::now();
    world.run_script("--wait 0.7", "").ends_with(75);
    assert!(since.elapsed() >= Duration::from_millis(700));
    running.stop();
}

#[test]
fn who_waits_for_the_lock_waits_for_a_busy_file_too_and_who_does_not_does_not() {
    let world = World::new();
    world.run("run lock -- true").is(0, "", "");
    let others = world.keep_file_to_itself();
    let mut patient = world.fencelock().args(["run", "lock", "--", "true"]).spawn().unwrap();
    // Much longer than the test waits.
    let url = format!("{}?op_timeout=1h", world.url());
    let done = world.run_at(&url, "run -n lock -- true");
    done.fails(69, "did not answer within");
    assert!(patient.try_wait().unwrap().is_none());
    others.execute_batch("COMMIT").unwrap();
    assert_eq!(wait_for(&mut patient), Some(0));
}

#[test]
fn stdin_stdout_and_stderr_are_the_commands_as_they_are() {
    let world = World::new();
    let mut command = world.fencelock();
    command.args(["run", "lock", "-c", "cat; echo oops >&2"]);
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
    assert!(done.code == Some(0) && done.stdout == text && done.stderr == "oops\n");
}

#[test]
fn the_command_finds_name_and_token_and_keeps_arguments_and_environment() {
    let world = World::new();
    let script = r#"echo "$FENCELOCK_NAME|$OWN|$1|$2|" >&2; echo $FENCELOCK_TOKEN"#;
    let run = |dashes: &[&str]| {
        let mut command = world.fencelock();
        command.args(["run", "lock"]).args(dashes).env("OWN", "mine");
        let done = Done::of(command.args(["sh", "-c", script, "sh", "a b", "--url"]));
        assert_eq!(done.stderr, "lock|mine|a b|--url|\n");
        done.token()
    };
    assert!(run(&[]) < run(&["--"]));
}

#[test]
fn a_line_is_run_by_sh_also_if_it_begins_like_an_option() {
    let world = World::new();
    for option in ["-c", "--shell"] {
        let line = "echo one | tr o 0; echo \"$1\"; exit 3";
        let done = world.run_words(["run", "lock", option, line, "two"]);
        done.is(3, "0ne\ntwo\n", "");
    }
    for (line, code) in [("-c", 127), ("--version", 127), ("", 0)] {
        let done = world.run_words(["run", "--shell", "lock", "--", line, "echo one"]);
        assert_eq!((done.code, done.stdout.as_str()), (Some(code), ""), "{done:?}");
    }
}

#[test]
fn nothing_of_ours_is_left_open_in_the_command_and_what_was_closed_is_closed() {
    let world = World::new();
    // The tests may have something open that is inherited; so look before and after.
    let script = r#"ls /proc/$$/fd > before; exec "$0" run lock -- sh -c 'ls /proc/$$/fd > after'"#;
    world.shell(script).is(0, "", "");
    let [before, after] = ["before", "after"].map(|name| fs::read_to_string(world.path(name)).unwrap());
    assert_eq!(before, after);

    let look = r#"for fd in 0 1 2; do test -e /proc/$$/fd/$fd && printf $fd >> open; done; exit 4"#;
    for (closed, open) in [
        ("", "012"),
        (">&-", "02"),
        ("2>&-", "01"),
        (">&- 2>&-", "0"),
        ("<&- >&-", "02"),
    ] {
        world.write("open", "");
        let done = world.shell(&format!(r#"exec "$0" run lock -c '{look}' {closed}"#));
        done.ends_with(4);
        assert_eq!(fs::read_to_string(world.path("open")).unwrap(), open, "{closed}");
    }
}

#[test]
fn output_that_cannot_be_written_is_74_and_a_reader_that_leaves_is_no_error() {
    let world = World::new();
    world.run("run lock -- true").is(0, "", "");
    for output in ["completions bash", "--help", "--version", "man", "list --json"] {
        for to in ["> /dev/full", ">&-"] {
            let done = world.shell(&format!(r#"code=$("$0" {output} {to}; echo $? >&3) 3> code; cat code"#));
            assert_eq!(done.stdout, "74\n", "{output} {to}: {done:?}");
        }
        let done = world.shell(&format!(r#"("$0" {output}; echo $? > code) | true; cat code"#));
        assert_eq!(done.stdout, "0\n", "{output}");
    }
    assert_eq!(world.shell(r#""$0" run --nonsense 2>&-; echo $?"#).stdout, "64\n");
}

#[test]
fn the_default_place_is_made_for_the_user_alone_or_it_says_what_to_do() {
    let world = World::new();
    let home = world.path("home");
    fs::create_dir(&home).unwrap();
    let run = |line: &str, (name, value): (&str, &str)| {
        let mut command = world.fencelock();
        command.env_remove("FENCELOCK_URL").env("HOME", &home).env(name, value);
        Done::of(command.args(line.split(' ')))
    };
    let lock = "run lock -- true";
    // The user's own file is made with the first lock.
    run("holder lock", ("OTHER", "")).ends_with(1);
    let dir = home.join(".local/state/fencelock");
    assert!(!dir.exists());
    run(lock, ("OTHER", "")).is(0, "", "");
    assert!(dir.join("locks.db").is_file());
    assert_eq!(fs::metadata(&dir).unwrap().permissions().mode() & 0o777, 0o700);
    let said = format!("fencelock: no locks are held in {}/locks.db\n", dir.display());
    run("list", ("FENCELOCK_URL", "")).is(0, "", &said);

    let state = world.path("100% ?state#");
    for state in [state.to_str().unwrap(), "relative"] {
        run(lock, ("XDG_STATE_HOME", state)).is(0, "", "");
    }
    assert!(state.join("fencelock/locks.db").is_file() && !world.has("relative"));

    for home in ["", "relative"] {
        for line in [lock, "list"] {
            let done = run(line, ("HOME", home));
            done.fails(64, "HOME is not set to an absolute path; give --url");
        }
    }
    // A file where a directory should be stops root too.
    let file = home.join("file");
    fs::write(&file, "").unwrap();
    let done = run(lock, ("HOME", file.to_str().unwrap()));
    done.fails(78, "file/.local/state/fencelock cannot be made");
    fs::create_dir_all(home.join("state/fencelock/locks.db")).unwrap();
    let done = run(lock, ("XDG_STATE_HOME", home.join("state").to_str().unwrap()));
    done.fails(78, "locks.db is a directory");
}

#[test]
fn a_command_stopped_without_a_terminal_keeps_its_lock() {
    let world = World::new();
    let running = world.sleeper(SHORT_TTL);
    running.command.signal(Signal::STOP);
    running.command.comes_to('T');
    world.renewed();
    running.command.signal(Signal::CONT);
    running.stop();
}

#[test]
fn where_files_run_out_it_says_so_and_leaves_no_lock() {
    let world = World::new();
    world.run("run lock -- true").is(0, "", "");
    let mut failed = 0;
    // It needs more files one after the other: where they run out differs.
    for files in 8..40 {
        let done = world.shell(&format!(r#"ulimit -n {files}; exec "$0" run lock -- true"#));
        failed += i32::from(done.code != Some(0));
        assert!(matches!(done.code, Some(0 | 69 | 126 | 127)), "{files} files: {done:?}");
        assert!(world.is_free(), "{files} files: {done:?}");
    }
    assert!((1..32).contains(&failed), "{failed} of 32 failed");
}

#[test]
fn quiet_says_nothing_but_errors_and_verbose_what_happens() {
    let world = World::new();
    let running = world.sleeper("");
    world.run("--quiet run -n lock -- true").is(75, "", "");
    for line in ["-q list", "-qq list", "-q list -q", "list --quiet --quiet"] {
        assert_eq!(world.run(line).stderr, "", "{line}");
    }
    running.stop();
    let leaves = "sleep 600 > /dev/null 2>&1 & true";
    world.run_script("-q", leaves).is(0, "", "");
    world.run("-q run lock -- no-such").fails(127, "cannot be run");

    let said = world.run("-v run lock -- true").stderr;
    let place = format!("the locks are kept in {}", world.url());
    assert!(said.contains(&place) && said.contains("acquired"), "{said}");
}

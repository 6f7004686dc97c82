//! Signals reach the command.

use std::process::{Command, Stdio};

use rustix::process::Signal;

use crate::world::{Done, Process, World, binary, wait_until};

const FORWARDED: [(&str, Signal); 15] = [
    ("TERM", Signal::TERM),
    ("INT", Signal::INT),
    ("HUP", Signal::HUP),
    ("QUIT", Signal::QUIT),
    ("USR1", Signal::USR1),
    ("USR2", Signal::USR2),
    ("ABRT", Signal::ABORT),
    ("ALRM", Signal::ALARM),
    ("IO", Signal::IO),
    ("PROF", Signal::PROF),
    ("PWR", Signal::POWER),
    ("STKFLT", Signal::STKFLT),
    ("TRAP", Signal::TRAP),
    ("VTALRM", Signal::VTALARM),
    ("XCPU", Signal::XCPU),
];

#[test]
fn every_forwarded_signal_reaches_the_command_which_decides() {
    let world = World::new();
    let traps: String = FORWARDED
        .iter()
        .map(|(name, signal)| format!("trap 'touch {name}' {}; ", signal.as_raw()))
        .collect();
    let running = world.start(
        &[],
        &format!("{traps} touch ready; while ! test -e end; do sleep 0.01; done; exit 5"),
    );
    wait_until("the traps", || world.path("ready").exists());
    for (name, signal) in FORWARDED {
        running.fencelock().signal(signal);
        wait_until(name, || world.path(name).exists());
    }
    std::fs::write(world.path("end"), "").unwrap();
    assert_eq!(running.end().code, Some(5));
}

#[test]
fn a_command_that_dies_of_a_forwarded_signal_gives_its_code_and_frees_the_lock() {
    for (name, signal) in [("TERM", Signal::TERM), ("INT", Signal::INT), ("XCPU", Signal::XCPU)] {
        let world = World::new();
        let running = world.start(&[], "exec sleep 600");
        running.fencelock().signal(signal);
        let done = running.end();
        assert_eq!(
            (done.code, done.stderr.as_str()),
            (Some(128 + signal.as_raw()), ""),
            "{name}"
        );
        assert_eq!(world.run(["holder", "lock"]).code, Some(1), "{name}");
    }
}

#[test]
fn a_signal_ends_the_wait_and_leaves_nothing_behind() {
    let world = World::new();
    let running = world.start(&[], "exec sleep 600");
    for (name, signal) in FORWARDED {
        let mut waiting = world.fencelock();
        waiting.args(["run", "lock", "--", "touch", "ran"]);
        let mut waiting = waiting.spawn().unwrap();
        let process = Process(waiting.id() as i32);
        let bit = 1 << (signal.as_raw() - 1);
        wait_until("the signals to be listened to", || process.mask("SigBlk:") & bit != 0);
        process.signal(signal);
        assert_eq!(waiting.wait().unwrap().code(), Some(128 + signal.as_raw()), "{name}");
    }
    running.stop();
    assert_eq!(world.run(["holder", "lock"]).code, Some(1));
    assert!(!world.path("ran").exists());
}

#[test]
fn a_limit_for_the_size_of_files_is_an_error_and_kills_nobody() {
    let world = World::new();
    let mut shell = Command::new("sh");
    shell.args(["-c", r#"ulimit -f 0; exec "$0" run -n lock -- true"#, binary()]);
    let done = Done::of(shell.env("FENCELOCK_URL", world.url()).current_dir(world.dir()));
    assert_eq!(done.code, Some(69), "{done:?}");
}

#[test]
fn what_the_caller_ignores_the_command_ignores_too_and_nothing_of_ours_is_blocked() {
    let world = World::new();
    let script =
        r#"trap '' HUP INT; exec setsid "$0" run lock -- sh -c 'echo $$ > pid.new; mv pid.new pid; exec sleep 600'"#;
    let mut caller = Command::new("sh");
    caller
        .args(["-c", script, binary()])
        .env("FENCELOCK_URL", world.url())
        .current_dir(world.dir());
    let mut caller = caller.stdin(Stdio::null()).spawn().unwrap();
    let (command, fencelock) = (world.asleep(), Process(caller.id() as i32));
    for signal in [Signal::HUP, Signal::INT] {
        let bit = 1 << (signal.as_raw() - 1);
        assert_ne!(command.mask("SigIgn:") & bit, 0);
        assert_ne!(fencelock.mask("SigIgn:") & bit, 0);
    }
    assert_eq!(command.mask("SigBlk:"), 0);
    assert_eq!(command.mask("SigIgn:") & (1 << (Signal::PIPE.as_raw() - 1)), 0);
    fencelock.signal(Signal::HUP);
    fencelock.signal(Signal::TERM);
    assert_eq!(caller.wait().unwrap().code(), Some(143));
}

//! Signals reach the command.

use std::io::Read;
use std::process::Stdio;

use rustix::process::Signal;

use crate::world::{Backend, Process, World, wait_until};

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
    for (name, signal) in FORWARDED {
        let world = World::new();
        let number = signal.as_raw();
        let script = format!("trap 'echo {name} came; exit 5' {number}; touch ready; while :; do sleep 0.01; done");
        let running = world.start(&[], &script);
        wait_until("the trap", || world.path("ready").exists());
        running.locker().signal(signal);
        let done = running.end();
        assert_eq!(
            (done.code, done.stdout.as_str()),
            (Some(5), format!("{name} came\n").as_str()),
            "{done:?}"
        );
    }
}

#[test]
fn a_command_that_dies_of_a_forwarded_signal_gives_its_code() {
    for (name, signal) in FORWARDED {
        let world = World::new();
        let running = world.start(&[], "exec sleep 600");
        running.locker().signal(signal);
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
fn a_limit_for_the_size_of_files_is_an_error_and_kills_nobody() {
    let world = World::new();
    let mut shell = std::process::Command::new("sh");
    shell.args([
        "-c",
        r#"ulimit -f 0; exec "$0" run -n lock -- true"#,
        crate::world::binary(),
    ]);
    let done = crate::world::Done::of(shell.env("FENCELOCK_URL", world.url()).current_dir(world.dir()));
    assert!(done.one_line(69).contains("there is no room to write"), "{done:?}");
}

#[test]
fn signals_to_the_supervisor_change_nothing() {
    let world = World::new();
    let running = world.start(&[], "exec sleep 600");
    let supervisor = running.supervisor();
    for (_, signal) in FORWARDED {
        supervisor.signal(signal);
    }
    wait_until("the signals to be taken", || supervisor.mask("ShdPnd:") == 0);
    assert!(supervisor.is_alive() && running.command.is_alive());
    running.locker().signal(Signal::HUP);
    assert_eq!(running.end().code, Some(129));
}

pub(crate) fn a_signal_ends_the_wait_and_leaves_nothing_behind(backend: Backend) {
    let world = World::on(backend);
    for (name, signal) in FORWARDED {
        let running = world.start(&[], "exec sleep 600");
        let mut waiting = world
            .fencelock()
            .args(["-v", "run", "lock", "--", "touch", "ran"])
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // It listens to signals before it asks for the lock.
        let mut told = waiting.stderr.take().unwrap();
        let mut heard = Vec::new();
        while !String::from_utf8_lossy(&heard).contains("the locks are kept") {
            let mut part = [0; 256];
            let length = told.read(&mut part).unwrap();
            assert!(length > 0, "{}", String::from_utf8_lossy(&heard));
            heard.extend_from_slice(&part[..length]);
        }
        let process = Process(waiting.id() as i32);
        wait_until("the signals to be listened to", || catches(process, signal));
        process.signal(signal);
        let status = waiting.wait().unwrap();
        assert_eq!(status.code(), Some(128 + signal.as_raw()), "{name}");
        running.stop();
        assert_eq!(world.run(["holder", "lock"]).code, Some(1), "{name}");
        assert!(!world.path("ran").exists());
        std::fs::remove_file(world.path("pid")).unwrap();
    }
}

/// Whether a process has a handler for the signal.
fn catches(process: Process, signal: Signal) -> bool {
    process.mask("SigCgt:") & (1 << (signal.as_raw() - 1)) != 0
}

#[test]
fn what_the_caller_ignores_the_command_ignores_too() {
    let world = World::new();
    let mut command = std::process::Command::new("sh");
    let script = r#"trap '' HUP INT; "$0" run lock -- sh -c 'echo $$ > pid.new; mv pid.new pid; exec sleep 600'"#;
    command
        .args(["-c", script, crate::world::binary()])
        .env("FENCELOCK_URL", world.url())
        .current_dir(world.dir());
    let mut caller = command.spawn().unwrap();
    let child = world.asleep();
    let locker = child.parent().parent();
    for signal in [Signal::HUP, Signal::INT] {
        let bit = 1 << (signal.as_raw() - 1);
        assert_ne!(child.mask("SigIgn:") & bit, 0);
        assert_ne!(locker.mask("SigIgn:") & bit, 0);
    }
    // Neither the handlers nor the blocked signals of ours are passed on.
    assert_eq!(child.mask("SigBlk:"), 0);
    assert_eq!(child.mask("SigIgn:") & (1 << (Signal::PIPE.as_raw() - 1)), 0);
    locker.signal(Signal::TERM);
    assert_eq!(caller.wait().unwrap().code(), Some(143));
}

//! Signals reach the command.

use nix::libc::*;
use rustix::process::Signal;

use crate::server::Silent;
use crate::world::{Process, World, binary, wait_for, wait_until};

fn forwarded() -> [Signal; 15] {
    let numbers = [
        SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGABRT, SIGALRM, SIGIO, SIGPROF, SIGPWR, SIGSTKFLT,
        SIGTRAP, SIGVTALRM, SIGXCPU,
    ];
    numbers.map(|number| Signal::from_named_raw(number).unwrap())
}

#[test]
fn every_forwarded_signal_reaches_the_command_which_decides() {
    let world = World::new();
    let traps = forwarded()
        .map(Signal::as_raw)
        .map(|number| format!("trap 'touch {number}' {number}; "));
    let script = "touch ready; while ! test -e end; do sleep 0.01; done; exit 5";
    let running = world.start("", &(traps.concat() + script));
    wait_until("the traps", || world.has("ready"));
    for signal in forwarded() {
        running.fencelock().signal(signal);
        wait_until(&format!("{signal:?}"), || world.has(&signal.as_raw().to_string()));
    }
    world.write("end", "");
    running.end().ends_with(5);
}

#[test]
fn a_signal_ends_the_wait_and_leaves_nothing_behind() {
    let world = World::new();
    let running = world.sleeper("");
    for signal in forwarded() {
        let mut waiting = world.fencelock();
        let mut waiting = waiting.args(["run", "lock", "--", "touch", "ran"]).spawn().unwrap();
        let process = Process(waiting.id() as i32);
        wait_until("the signals to be listened to", || process.has("SigBlk:", signal));
        process.signal(signal);
        assert_eq!(wait_for(&mut waiting), Some(128 + signal.as_raw()));
    }
    running.stop();
    assert!(world.is_free() && !world.has("ran"));
}

#[test]
fn a_signal_ends_the_wait_for_a_server_that_never_answers() {
    let world = World::new();
    // A run inside of another asks first who holds the lock.
    for owner in ["", "1-1"] {
        let silent = Silent::new();
        let mut waiting = world.fencelock();
        waiting
            .args(["run", "lock", "--", "true"])
            .env("FENCELOCK_OWNER", owner);
        let mut waiting = waiting.env("FENCELOCK_URL", silent.url("1h")).spawn().unwrap();
        silent.reached();
        Process(waiting.id() as i32).signal(Signal::TERM);
        assert_eq!(wait_for(&mut waiting), Some(143));
    }
}

#[test]
fn a_limit_for_the_size_of_files_is_an_error_and_kills_nobody() {
    let script = r#"ulimit -f 0; exec "$0" run -n lock -- true"#;
    World::new().shell(script).fails(69, "there is no room to write");
}

#[test]
fn what_the_caller_ignores_the_command_ignores_too_and_nothing_of_ours_is_blocked() {
    let all = [Signal::HUP, Signal::INT, Signal::PIPE];
    for (names, ignored) in [("HUP INT", &all[..2]), ("PIPE", &all[2..]), ("PIPE HUP INT", &all)] {
        let world = World::new();
        world.job("exec sleep 600");
        let script = format!(r#"trap '' {names}; exec "$0" run lock -- sh job"#);
        let mut caller = world.program("setsid");
        caller.args(["sh", "-c", &script, binary()]);
        let caller = world.started(&mut caller, "exec sleep 600");
        for signal in all {
            assert_eq!(
                caller.command.has("SigIgn:", signal),
                ignored.contains(&signal),
                "{signal:?} of {names}"
            );
        }
        assert_eq!(caller.command.mask("SigBlk:"), 0);
        for signal in ignored {
            caller.fencelock().signal(*signal);
        }
        caller.fencelock().signal(Signal::TERM);
        caller.end().is(143, "ready\n", "");
    }
}

//! Job control, as somebody at a terminal meets it: as without `fencelock`.

use std::fs;

use rustix::process::Signal;

use crate::server::Silent;
use crate::session::{CTRL_C, CTRL_Z, Session};
use crate::world::{SHORT_TTL, World, wait_until};

/// A session in which `fencelock run` with `options` runs a script.
fn running(world: &World, options: &str, script: &str) -> Session {
    world.job(script);
    let mut session = Session::new(world);
    session.start(&format!("fencelock run {options} lock -- sh job"));
    session.see("ready");
    session
}

#[test]
fn ctrl_c_ends_the_command_and_gives_130_also_after_it_has_read_the_terminal() {
    let world = World::new();
    let mut session = running(&world, "", "read x; echo got-$x; exec sleep 600");
    session.type_in("hello\n");
    session.see("got-hello");
    let command = world.asleep();
    session.type_in(CTRL_C);
    session.ends_with(130);
    assert!(!command.is_alive() && world.is_free());
}

#[test]
fn ctrl_c_ends_a_script_and_not_only_the_command_in_it() {
    for shell in ["sh", "bash"] {
        let world = World::new();
        world.job("exec sleep 600");
        world.write("script", "for i in 1 2 3; do fencelock run lock -- sh job; done");
        let mut session = Session::new(&world);
        session.start(&format!("{shell} script"));
        session.see("ready");
        world.asleep();
        session.type_in(CTRL_C);
        let rest = session.see("PROMPT> ");
        assert!(!rest.contains("ready"), "{shell}: {rest}");
    }
}

#[test]
fn ctrl_c_reaches_the_command_once_and_it_may_go_on() {
    let world = World::new();
    let script = "trap 'echo caught' INT; echo set; while ! test -e end; do sleep 0.01; done; exit 3";
    let mut session = running(&world, "", script);
    session.see("set");
    session.type_in(CTRL_C);
    session.see("caught");
    world.write("end", "");
    let rest = session.see("PROMPT> ");
    assert!(!rest.contains("caught"), "{rest}");
    assert!(session.line("echo code=$?").contains("code=3"));
}

#[test]
fn a_person_who_waits_is_told_for_whom_and_ctrl_c_ends_the_wait() {
    let world = World::new();
    let holder = world.sleeper("--label nightly");
    let mut session = Session::new(&world);
    session.start("fencelock run lock -- touch ran");
    session.see("waiting for lock, held by ");
    session.see(&format!(":{} (nightly) for ", holder.fencelock().0));
    session.see(&format!(", in {}", world.url()));
    session.type_in(CTRL_C);
    session.ends_with(130);
    assert!(!world.has("ran"));
    holder.stop();
    // Also of a server that does not say who holds the lock.
    let silent = Silent::new();
    session.start(&format!("fencelock run --url '{}' lock -- true", silent.url("1h")));
    session.see("waiting for lock, in redis://127.0.0.1");
    session.type_in(CTRL_C);
    session.ends_with(130);
}

#[test]
fn a_release_that_hangs_beyond_the_lease_ends_nothing_in_the_group() {
    let world = World::new();
    let options = format!("--ttl 12s --url '{}?op_timeout=24s'", world.url());
    let mut session = running(&world, &options, "read x; echo got-$x");
    let others = world.keep_file_to_itself();
    session.type_in("one\n");
    session.see("got-one");
    session.see("the lock frees itself within");
    session.ends_with(0);
    drop(others);
}

#[test]
fn ctrl_z_stops_the_command_and_fg_and_bg_continue_it() {
    let world = World::new();
    let mut session = running(&world, "--ttl 10m", "read x; echo got-$x; exec sleep 600");
    session.type_in("one\n");
    session.see("got-one");
    let command = world.asleep();
    for go_on in ["fg", "fg", "bg"] {
        session.type_in(CTRL_Z);
        session.see("PROMPT> ");
        command.comes_to('T');
        assert!(session.line("jobs").contains("Stopped"));
        session.start(go_on);
        command.comes_to('S');
    }
    command.signal(Signal::TERM);
    session.start("wait; echo over-$((1 + 1))");
    session.see("over-2");
}

#[test]
fn ctrl_z_stops_a_script_too_and_the_script_has_the_terminal_afterwards() {
    let world = World::new();
    world.job("read x; exec sleep 600");
    let script = "fencelock run --ttl 10m lock -- sh job; echo after-$?; read y; echo and-$y";
    world.write("script", script);
    let mut session = Session::new(&world);
    session.start("sh script");
    session.see("ready");
    session.type_in("x\n");
    let command = world.asleep();
    session.type_in(CTRL_Z);
    session.see("PROMPT> ");
    command.comes_to('T');
    session.start("fg");
    command.comes_to('S');
    command.signal(Signal::TERM);
    session.see("after-143");
    session.type_in("two\n");
    session.see("and-two");
}

#[test]
fn a_job_in_the_background_stops_when_it_reads_and_reads_in_the_foreground() {
    let world = World::new();
    let mut session = Session::new(&world);
    session.line("fencelock run lock -- sh -c 'read x; echo got-$x' &");
    wait_until("the job to stop", || session.line("jobs").contains("Stopped"));
    session.start("fg");
    session.type_in("hello\n");
    session.see("got-hello");
    session.see("PROMPT> ");
}

#[test]
fn a_pager_beside_the_command_keeps_the_keyboard() {
    let world = World::new();
    let mut session = Session::new(&world);
    session.start(
        "fencelock run lock -- sh -c 'sleep 0.2; echo page-$((1 + 1))' | sh -c 'cat; read k < /dev/tty; echo key-$k'",
    );
    session.see("page-2");
    session.type_in("q\n");
    session.see("key-q");
    session.see("PROMPT> ");
}

#[test]
fn a_shell_as_the_command_is_a_shell() {
    let world = World::new();
    let mut session = Session::new(&world);
    world.job("exec sleep 600");
    session.start("fencelock run lock -- env PS1='inner> ' sh -i");
    session.see("inner> ");
    for key in [CTRL_C, CTRL_Z] {
        session.start("sh job");
        session.see("ready");
        let job = world.asleep();
        session.type_in(key);
        session.see("inner> ");
        job.clean_up();
        fs::remove_file(world.path("pid")).unwrap();
    }
    session.start("exit 9");
    session.see("inner> ");
    session.start("exit 9");
    session.ends_with(9);
}

#[test]
fn one_that_is_killed_takes_its_command_along_and_leaves_the_shell_alone() {
    let world = World::new();
    let mut session = running(&world, "--grace 300ms", "trap '' TERM; read x; exec sleep 600");
    session.type_in("x\n");
    let command = world.asleep();
    command.parent().signal(Signal::KILL);
    session.see("PROMPT> ");
    command.ends();
    assert!(session.line("echo still-$((1 + 1))").contains("still-2"));
}

#[test]
fn lost_is_76_on_a_terminal_too_and_an_interactive_shell_is_ended() {
    for script in ["trap '' TERM; exec sleep 600", "PS1='inner> ' exec sh -i"] {
        let world = World::new();
        let mut session = running(&world, SHORT_TTL, script);
        let command = world.pid("pid");
        world.take_away();
        session.see("the lock lock was lost");
        assert!(!command.is_alive());
        session.ends_with(76);
    }
}

#[test]
fn a_hung_up_terminal_ends_command_and_lock() {
    let world = World::new();
    let session = running(&world, "", "exec sleep 600");
    let command = world.asleep();
    drop(session);
    command.ends();
    wait_until("the lock to be free", || world.is_free());
}

#[test]
fn a_job_that_stays_stopped_is_warned_of_and_ended_before_its_lock() {
    // Without a grace, too, `fencelock` has the time to leave the group that is killed.
    for options in ["--ttl 12s", "--ttl 15s --grace 0"] {
        let world = World::new();
        let mut session = running(&world, options, "exec sleep 600");
        let command = world.asleep();
        session.type_in(CTRL_Z);
        session.see("PROMPT> ");
        // Somebody else can have the lock, and sees that the command has ended.
        session.start(&format!(
            "fencelock run lock -- sh -c 'kill -0 {} || touch mine'",
            command.0
        ));
        session.see("unless the lock lock is renewed");
        session.see("could not be renewed in time; the command was ended");
        wait_until("the next holder", || world.has("mine"));
    }
}

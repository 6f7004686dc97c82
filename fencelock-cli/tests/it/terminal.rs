//! Job control, as somebody at a terminal meets it.

use std::fs;

use rustix::process::Signal;

use crate::session::{CTRL_C, CTRL_Z, Session};
use crate::world::{Backend, World, wait_until};

/// A session in which `fencelock run` with `options` runs a script.
pub(crate) fn running(world: &World, options: &str, script: &str) -> Session {
    world.script("job", script);
    let mut session = Session::new(world);
    session.start(&format!("fencelock run {options} lock -- sh job"));
    session.see("ready");
    session
}

#[test]
fn ctrl_c_ends_the_command_and_gives_130() {
    let world = World::new();
    let mut session = running(&world, "", "exec sleep 600");
    let command = world.asleep();
    assert!(!command.has_terminal());
    session.type_in(CTRL_C);
    session.see("PROMPT> ");
    assert!(session.line("echo code=$?").contains("code=130"));
    assert!(!command.is_alive());
}

#[test]
fn ctrl_c_reaches_a_command_that_has_read_the_terminal() {
    let world = World::new();
    let mut session = running(&world, "", "read x; echo got-$x; exec sleep 600");
    session.type_in("hello\n");
    session.see("got-hello");
    assert!(world.asleep().has_terminal());
    session.type_in(CTRL_C);
    session.see("PROMPT> ");
    assert!(session.line("echo code=$?").contains("code=130"));
}

#[test]
fn ctrl_c_ends_a_script_and_not_only_the_command_in_it() {
    for reads in ["", "read x;"] {
        for shell in ["sh", "bash"] {
            let world = World::new();
            world.script("job", &format!("{reads} exec sleep 600"));
            fs::write(
                world.path("script"),
                "for i in 1 2 3; do fencelock run lock -- sh job; done",
            )
            .unwrap();
            let mut session = Session::new(&world);
            session.start(&format!("{shell} script"));
            session.see("ready");
            if !reads.is_empty() {
                session.type_in("x\n");
            }
            world.asleep();
            session.type_in(CTRL_C);
            let rest = session.see("PROMPT> ");
            assert!(!rest.contains("ready"), "{shell} {reads}: {rest}");
        }
    }
}

pub(crate) fn ctrl_c_ends_the_wait_for_a_lock(backend: Backend) {
    let world = World::on(backend);
    let holder = world.start(&[], "exec sleep 600");
    let mut session = Session::new(&world);
    session.start("fencelock run lock -- touch ran");
    session.see("waiting for lock");
    session.type_in(CTRL_C);
    session.see("PROMPT> ");
    assert!(session.line("echo code=$?").contains("code=130"));
    assert!(!world.path("ran").exists());
    holder.stop();
}

#[test]
fn a_command_that_ignores_ctrl_c_goes_on() {
    let world = World::new();
    let mut session = running(&world, "", "trap '' INT; echo set; read x; echo got-$x; exit 3");
    session.see("set");
    session.type_in(CTRL_C);
    session.type_in("hello\n");
    session.see("got-hello");
    session.see("PROMPT> ");
    assert!(session.line("echo code=$?").contains("code=3"));
}

#[test]
fn ctrl_z_stops_the_command_and_fg_continues_it() {
    let world = World::new();
    let mut session = running(&world, "", "exec sleep 600");
    let command = world.asleep();
    for _ in 0..3 {
        session.type_in(CTRL_Z);
        session.see("stopped; if it is not continued within ");
        session.see("PROMPT> ");
        assert_eq!(command.state(), Some('T'));
        assert!(session.line("jobs").contains("Stopped"));
        session.start("fg");
        wait_until("the command to go on", || command.state() == Some('S'));
    }
    command.signal(Signal::TERM);
    session.see("PROMPT> ");
    assert!(session.line("echo code=$?").contains("code=143"));
}

#[test]
fn ctrl_z_and_fg_work_for_a_command_that_has_read_the_terminal() {
    let world = World::new();
    let mut session = running(&world, "", "read x; echo got-$x; read y; echo and-$y");
    session.type_in("one\n");
    session.see("got-one");
    let command = world.pid("pid");
    for _ in 0..3 {
        assert!(command.has_terminal());
        session.type_in(CTRL_Z);
        session.see("PROMPT> ");
        assert_eq!(command.state(), Some('T'));
        session.start("fg");
        wait_until("the command to have the terminal", || {
            command.has_terminal() && command.state() == Some('S')
        });
    }
    session.type_in("two\n");
    session.see("and-two");
    session.see("PROMPT> ");
    // The terminal is the shell's again.
    session.start("read z; echo $z-$z");
    session.type_in("three\n");
    session.see("three-three");
}

#[test]
fn ctrl_z_stops_a_script_too() {
    for reads in ["", "read x;"] {
        let world = World::new();
        world.script("job", &format!("{reads} exec sleep 600"));
        fs::write(world.path("script"), "fencelock run lock -- sh job; echo after-$?").unwrap();
        let mut session = Session::new(&world);
        session.start("sh script");
        session.see("ready");
        if !reads.is_empty() {
            session.type_in("x\n");
        }
        let command = world.asleep();
        session.type_in(CTRL_Z);
        session.see("PROMPT> ");
        session.start("fg");
        wait_until("the command to go on", || command.state() == Some('S'));
        command.signal(Signal::TERM);
        session.see("after-143");
    }
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
fn bg_lets_a_stopped_command_go_on() {
    let world = World::new();
    let mut session = running(&world, "", "exec sleep 600");
    let command = world.asleep();
    session.type_in(CTRL_Z);
    session.see("PROMPT> ");
    session.line("bg");
    wait_until("the command to go on", || command.state() == Some('S'));
    command.signal(Signal::TERM);
    session.start("wait $!; wait; echo over-$((1 + 1))");
    session.see("over-2");
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
fn a_script_has_the_terminal_again_after_a_command_that_read_it() {
    let world = World::new();
    let script = "fencelock run lock -- sh -c 'read x; echo got-$x'; read y; echo and-$y";
    fs::write(world.path("script"), script).unwrap();
    let mut session = Session::new(&world);
    session.start("sh script");
    session.type_in("one\n");
    session.see("got-one");
    session.type_in("two\n");
    session.see("and-two");
    session.see("PROMPT> ");
}

#[test]
fn a_shell_as_the_command_is_a_shell() {
    let world = World::new();
    let mut session = Session::new(&world);
    world.script("job", "exec sleep 600");
    session.start("fencelock run lock -- env PS1='inner> ' sh -i");
    session.see("inner> ");
    for key in [CTRL_C, CTRL_Z] {
        session.start("sh job");
        session.see("ready");
        world.asleep();
        session.type_in(key);
        session.see("inner> ");
        fs::rename(world.path("pid"), world.path("last")).unwrap();
    }
    // It warns of the stopped job first, and leaves it behind then.
    session.start("exit 9");
    session.see("inner> ");
    session.start("exit 9");
    session.see("left processes behind");
    session.see("PROMPT> ");
    assert!(session.line("echo code=$?").contains("code=9"));
    assert!(!world.pid("last").is_alive());
}

#[test]
fn a_killed_locker_takes_a_command_that_has_the_terminal_along() {
    let world = World::new();
    let mut session = running(&world, "--grace 300ms", "trap '' TERM; read x; exec sleep 600");
    session.type_in("x\n");
    let command = world.asleep();
    command.parent().parent().signal(Signal::KILL);
    wait_until("the end of the command", || !command.is_alive());
    session.see("PROMPT> ");
    assert!(session.line("echo still-$((1 + 1))").contains("still-2"));
}

#[test]
fn a_hung_up_terminal_ends_command_and_lock() {
    let world = World::new();
    let session = running(&world, "", "exec sleep 600");
    let command = world.asleep();
    drop(session);
    wait_until("the end of the command", || !command.is_alive());
    wait_until("the lock to be free", || world.run(["holder", "lock"]).code == Some(1));
}

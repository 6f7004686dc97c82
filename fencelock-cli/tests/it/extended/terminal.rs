//! Job control that takes its time.

use std::fs;

use rustix::process::Signal;

use crate::session::{CTRL_Z, Session};
use crate::terminal::running;
use crate::world::{Backend, World, wait_until};

on_every_backend! {
    a_person_who_waits_is_told_for_whom,
}

#[test]
fn a_large_job_that_is_continued_at_once_goes_on() {
    let world = World::new();
    world.script("job", "read x; exec sleep 600");
    // The shell sees the script stop long before the last of its processes is told to.
    let script = "for i in $(seq 300); do sleep 600 & all=\"$all $!\"; done; fencelock run lock -- sh job; echo after-$?; kill $all";
    fs::write(world.path("script"), script).unwrap();
    let mut session = Session::new(&world);
    session.start("sh script");
    session.see("ready");
    session.type_in("x\n");
    let command = world.asleep();
    for _ in 0..5 {
        session.type_in(CTRL_Z);
        session.see("PROMPT> ");
        session.start("fg");
        wait_until("the command to have the terminal", || {
            command.has_terminal() && command.state() == Some('S')
        });
    }
    command.signal(Signal::TERM);
    session.see("after-143");
    session.see("PROMPT> ");
}

#[test]
fn a_job_stopped_for_longer_than_its_ttl_is_ended_and_gives_76() {
    let world = World::new();
    let mut session = running(&world, "--ttl 4s", "exec sleep 600");
    let command = world.asleep();
    session.type_in(CTRL_Z);
    session.see("PROMPT> ");
    // Somebody else can have the lock, and sees that the command has ended.
    session.start(&format!(
        "fencelock run lock -- sh -c 'kill -0 {} || echo mine-$((1 + 1))'",
        command.0
    ));
    session.see("mine-2");
    session.see("PROMPT> ");
    session.start("fg");
    session.see("could not be renewed in time");
    session.see("PROMPT> ");
    assert!(session.line("echo code=$?").contains("code=76"));
}

fn a_person_who_waits_is_told_for_whom(backend: Backend) {
    let world = World::on(backend);
    let holder = world.start(&["--label", "nightly"], "exec sleep 600");
    let mut session = Session::new(&world);
    session.start("fencelock run lock -- sh -c 'echo mine-$((1 + 1))'");
    session.see(&format!("the locks are kept in {}", world.place()));
    session.see("waiting for lock, held by ");
    session.see(&format!(":{} (nightly) for ", holder.locker().0));
    // It is written anew in the same line.
    session.see("\r");
    session.see("waiting for lock, held by ");
    holder.stop();
    let rest = session.see("mine-2");
    assert!(rest.contains("\r\u{1b}[K"), "{rest:?}");
}

//! A wait that is held up.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::thread;
use std::time::Duration;

use crate::world::{HANG_LIMIT, World, wait_until};

#[test]
fn a_wait_that_others_hold_up_says_so_once_and_goes_on() {
    let world = World::new();
    let url = format!("{}?op_timeout=1s", world.url());
    let holder = world.start(&["--ttl", "4s"], "exec sleep 600");
    let [mut waiting, quiet] = [&[][..], &["--quiet"]].map(|options| {
        let mut waiting = world.fencelock();
        waiting
            .args(["--url", &url])
            .args(options)
            .args(["run", "lock", "--", "true"]);
        let waiting = waiting.stderr(Stdio::piped()).spawn().unwrap();
        // It is woken through a pipe.
        let descriptors = format!("/proc/{}/fd", waiting.id());
        wait_until("it waits", || {
            let mut open = fs::read_dir(&descriptors).unwrap().flatten();
            open.any(|open| fs::read_link(open.path()).is_ok_and(|file| file == world.path("locks.db-wake")))
        });
        waiting
    });
    // The holder cannot renew its lock from here on, so that it is free after its ttl.
    let others = rusqlite::Connection::open(world.path("locks.db")).unwrap();
    others.busy_timeout(HANG_LIMIT).unwrap();
    others.execute_batch("BEGIN IMMEDIATE").unwrap();
    let mut lines = BufReader::new(waiting.stderr.take().unwrap()).lines();
    let told = lines.next().unwrap().unwrap();
    assert!(
        told.contains("waiting goes on") && told.contains("did not answer within"),
        "{told}"
    );
    // Several looks more come to nothing.
    thread::sleep(Duration::from_secs(4));
    others.execute_batch("COMMIT").unwrap();
    assert!(waiting.wait().unwrap().success());
    let rest: Vec<_> = lines.map(Result::unwrap).collect();
    assert_eq!(rest.len(), 1, "{rest:?}");
    assert!(rest[0].contains("answers those who wait again"), "{rest:?}");
    let quiet = quiet.wait_with_output().unwrap();
    assert!(quiet.status.success() && quiet.stderr.is_empty(), "{quiet:?}");
    holder.end();
}

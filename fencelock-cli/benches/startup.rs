//! How much later a command runs if it is run under a lock: `cargo bench -p fencelock-cli`.
//!
//! Each measured command prints the clock as its first deed; the clock was read just before it was started. Directly
//! and under the lock take turns, so that both meet the same machine.

#![allow(clippy::expect_used, reason = "a benchmark that cannot run may say so by panicking")]

use std::env;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

const ROUNDS: usize = 200;

/// What a run under a lock may cost more.
const AIM: Duration = Duration::from_millis(15);

fn main() {
    if env::args().nth(1).as_deref() == Some("stamp") {
        return println!("{}", now());
    }
    let here = env::current_exe().expect("the path of this program");
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder for the locks");
    let mut direct = Command::new(&here);
    direct.arg("stamp");
    let mut locked = Command::new(env!("CARGO_BIN_EXE_fencelock"));
    locked.args(["run", "bench", "--"]).arg(&here).arg("stamp");
    locked.env("XDG_STATE_HOME", dir.path()).env_remove("FENCELOCK_URL");
    let (mut without, mut with) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        without.push(started_after(&mut direct));
        with.push(started_after(&mut locked));
    }
    let (without, with) = (Percentiles::of(without), Percentiles::of(with));
    println!(
        "from the start to a running command, {ROUNDS} times each, locks in a file on {}",
        dir.path().display()
    );
    println!("  directly            {without}");
    println!("  under a lock        {with}");
    let more = with.median.saturating_sub(without.median);
    println!(
        "  median difference   {:.1} ms, of at most {} ms",
        millis(more),
        AIM.as_millis()
    );
}

fn started_after(command: &mut Command) -> Duration {
    let before = now();
    let Output { status, stdout, .. } = command.stdin(Stdio::null()).output().expect("the command starts");
    assert!(status.success(), "{status}");
    let stamp: u64 = String::from_utf8_lossy(&stdout)
        .trim()
        .parse()
        .expect("the time at which it ran");
    Duration::from_nanos(stamp - before)
}

fn now() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

struct Percentiles {
    median: Duration,
    most: Duration,
    worst: Duration,
}

impl Percentiles {
    fn of(mut times: Vec<Duration>) -> Self {
        times.sort_unstable();
        let at = |share: usize| times[(times.len() - 1) * share / 100];
        Self {
            median: at(50),
            most: at(95),
            worst: at(100),
        }
    }
}

impl std::fmt::Display for Percentiles {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [median, most, worst] = [self.median, self.most, self.worst].map(millis);
        write!(f, "median {median:.1} ms, 95 % below {most:.1} ms, worst {worst:.1} ms")
    }
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1_000.0
}

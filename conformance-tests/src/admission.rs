//! How many trials run at a time: as many as there are threads while they wait, and fewer while the processors are behind.
//!
//! On a busy machine more trials at a time end no sooner, and their servers answer later than any limit for an answer.

use std::fs;
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::thread::{available_parallelism, sleep, spawn};
use std::time::{Duration, Instant};

/// For each processor, of the whole machine. With more tasks that are ready to run, no trial is begun.
const READY: f64 = 6.0;
/// Between two looks at the machine.
const LOOK: Duration = Duration::from_millis(20);
/// The share of a look in the average.
const SHARE: f64 = 0.1;
/// Between two trials that are begun: what one demands is seen in the average after that.
const PACE: Duration = Duration::from_millis(25);

/// What runs, and how busy the machine is.
#[derive(Debug)]
struct State {
    running: usize,
    /// Tasks that are ready to run, on average. Stays at zero where the system does not tell.
    ready: f64,
    begun: Option<Instant>,
}

static STATE: Mutex<State> = Mutex::new(State {
    running: 0,
    ready: 0.0,
    begun: None,
});

/// A trial that runs, until this is dropped.
#[derive(Debug)]
pub(crate) struct Running(());

impl Drop for Running {
    fn drop(&mut self) {
        state().running -= 1;
    }
}

/// Waits until the machine has time for one more trial. As many as there are processors always run.
pub(crate) fn enter() -> Running {
    static LOOKS: Once = Once::new();
    LOOKS.call_once(|| {
        spawn(|| {
            while let Some(ready) = ready() {
                let mut state = state();
                state.ready += (ready - state.ready) * SHARE;
                drop(state);
                sleep(LOOK);
            }
        });
    });
    let processors = available_parallelism().map_or(1, usize::from);
    loop {
        let mut state = state();
        if state.has_room(processors, Instant::now()) {
            state.running += 1;
            state.begun = Some(Instant::now());
            return Running(());
        }
        drop(state);
        sleep(LOOK);
    }
}

impl State {
    fn has_room(&self, processors: usize, now: Instant) -> bool {
        let is_paced = self.begun.is_none_or(|begun| now.duration_since(begun) >= PACE);
        self.running < processors || (is_paced && self.ready < READY * processors as f64)
    }
}

/// How many tasks are ready to run, without the one that asks.
fn ready() -> Option<f64> {
    let load = fs::read_to_string("/proc/loadavg").ok()?;
    let ready = load.split_whitespace().nth(3)?.split('/').next()?;
    Some(ready.parse::<f64>().ok()? - 1.0)
}

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_machine_is_given_as_many_trials_as_it_has_processors() {
        let now = Instant::now();
        for (running, ready, since, expected) in [
            (1, 100.0, Duration::ZERO, true),
            (2, 12.0, PACE, false),
            (2, 11.9, PACE, true),
            (2, 0.0, PACE / 2, false),
            (19, 0.0, PACE, true),
        ] {
            let state = State {
                running,
                ready,
                begun: Some(now),
            };
            assert_eq!(state.has_room(2, now + since), expected, "{state:?}");
        }
    }
}

//! The queue, the guard and the engine under a checker of schedules, which decides at each use of a shared primitive which task runs next.
//!
//! Run with `RUSTFLAGS="--cfg shuttle" cargo test -p lock-core --lib schedules`. A failure prints its schedule. `SHUTTLE_RANDOM_SEED`
//! chooses other schedules than those of the last run, and `FENCELOCK_SCHEDULES` multiplies how many random ones are tried.

mod loss;
mod queue;
mod server;
mod shutdown;
mod waiting;

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use shuttle::rand::{Rng, thread_rng};
use shuttle::scheduler::{DfsScheduler, PctScheduler, RandomScheduler, Schedule, Scheduler, Task, TaskId};
use shuttle::{Config, Runner};

use crate::sync::checked::time;
use crate::{Clock, ManualClock};

const SEED: u64 = 0x5eed;

/// How many preemptions the second half of the random schedules have at most.
const PREEMPTIONS: usize = 4;

/// A step is what one task does before another one may run. No execution here takes a twentieth of that.
const STEPS: usize = 200_000;

/// When time passes in an execution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Time {
    /// When there is nothing else to do.
    WhenIdle,
    /// Also at any other step, once in so many, from [`time::let_pass`] on.
    OnceIn(u32),
}

fn config() -> Config {
    let mut config = Config::new();
    config.stack_size = 512 * 1024;
    config.max_steps = shuttle::MaxSteps::FailAfter(STEPS);
    config.silence_warnings = true;
    config
}

/// Runs a scene under every schedule that there is.
fn exhaust(scene: impl Fn() + Send + Sync + 'static) {
    let report = Report::new("all there are");
    let explored = Arc::clone(&report.explored);
    Runner::new(DfsScheduler::new(None, false), config()).run(move || {
        explored.fetch_add(1, Ordering::Relaxed);
        scene();
    });
}

/// Runs a scene under that many schedules: half of them choose each step at random, half of them have few preemptions.
fn explore<F: Future<Output = ()>>(
    count: usize,
    time: Time,
    scene: impl Fn(Clock, ManualClock) -> F + Send + Sync + 'static,
) {
    let report = Report::new("random");
    let times = std::env::var("FENCELOCK_SCHEDULES").map_or(1, |times| times.parse().expect("a number"));
    let half = count / 2 * times;
    let scene = Arc::new(scene);
    let run = |scheduler: Box<dyn Scheduler + Send>| {
        let (scene, explored) = (Arc::clone(&scene), Arc::clone(&report.explored));
        let scheduler = Passing {
            scheduler,
            time,
            chance: fastrand::Rng::with_seed(SEED),
        };
        Runner::new(scheduler, config()).run(move || {
            explored.fetch_add(1, Ordering::Relaxed);
            // Before any other task: the scheduler knows it by its number.
            drop(shuttle::future::spawn(time::pass()));
            fastrand::seed(thread_rng().r#gen());
            let (clock, hand) = time::start();
            shuttle::future::block_on(scene(clock, hand));
        });
    };
    run(Box::new(RandomScheduler::new_from_seed(SEED, half)));
    run(Box::new(PctScheduler::new_from_seed(SEED, PREEMPTIONS, half)));
}

/// Says how many schedules were explored when it is dropped.
struct Report {
    test: Option<String>,
    which: &'static str,
    explored: Arc<AtomicUsize>,
    began: Instant,
}

impl Report {
    fn new(which: &'static str) -> Self {
        Self {
            // libtest names the thread.
            test: thread::current().name().map(str::to_owned),
            which,
            explored: Arc::default(),
            began: Instant::now(),
        }
    }
}

impl Drop for Report {
    fn drop(&mut self) {
        let outcome = if thread::panicking() {
            "the last one failed"
        } else {
            self.which
        };
        println!(
            "{}: {} schedules, {outcome}, {:.1} s",
            self.test.as_deref().unwrap_or("a test"),
            self.explored.load(Ordering::Relaxed),
            self.began.elapsed().as_secs_f64()
        );
    }
}

/// Lets time pass as the scene wants it to, and leaves all else to another scheduler.
struct Passing {
    scheduler: Box<dyn Scheduler + Send>,
    time: Time,
    chance: fastrand::Rng,
}

impl Scheduler for Passing {
    fn new_execution(&mut self) -> Option<Schedule> {
        self.scheduler.new_execution()
    }

    fn next_task(&mut self, runnable: &[&Task], current: Option<TaskId>, yields: bool) -> Option<TaskId> {
        // The main task is the one before it.
        let passing = TaskId::from(1);
        let others: Vec<_> = runnable.iter().copied().filter(|task| task.id() != passing).collect();
        let may_pass = others.len() < runnable.len() && time::passes_any_time();
        let passes = match self.time {
            _ if others.is_empty() => true,
            Time::WhenIdle => false,
            Time::OnceIn(steps) => may_pass && self.chance.u32(..steps) == 0,
        };
        if passes {
            return Some(passing);
        }
        self.scheduler
            .next_task(&others, current, yields && current != Some(passing))
    }

    fn next_u64(&mut self) -> u64 {
        self.scheduler.next_u64()
    }
}

/// Lets other tasks run, up to `most` times.
async fn dawdle(most: usize) {
    for _ in 0..thread_rng().gen_range(0..=most) {
        shuttle::future::yield_now().await;
    }
}

/// True once in so many.
fn once_in(times: u32) -> bool {
    thread_rng().gen_ratio(1, times)
}

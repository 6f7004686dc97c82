//! A client: a process that asks for locks, holds them, and writes with their tokens.

use std::env;
use std::error::Error;
use std::io::{BufRead, stdin};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use conformance_tests::faults::WallClock;
use conformance_tests::oracle::Event;
use fastrand::Rng;
use lock_core::{LockError, LockGuard, LockName, Locks, Options, Renew};
use rustix::process::{Signal, set_parent_process_death_signal};
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::recorder::{Line, Recorder, Teller, print, since_boot};

/// The environment variable with the task of a client.
pub(crate) const TASK: &str = "FENCELOCK_SOAK_TASK";

/// How long a client keeps what its workers release, so that locks also pass from one worker to the next without a request.
const LINGER: Duration = Duration::from_millis(20);

/// What a client is to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Task {
    /// May be secret, so the task is no argument of the process.
    pub(crate) url: String,
    /// The numbers of its workers in the history.
    pub(crate) actors: Vec<usize>,
    pub(crate) names: Vec<LockName>,
    pub(crate) ttl: Duration,
    pub(crate) seed: u64,
    pub(crate) plant: bool,
}

impl Task {
    /// The task of this process, if it was started as a client.
    pub(crate) fn of_this_process() -> Option<Self> {
        serde_json::from_str(&env::var(TASK).ok()?).ok()
    }
}

/// By how many seconds the wall clock is ahead of the time since the boot.
pub(crate) fn wall_ahead() -> i64 {
    let wall = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
    wall.as_secs().cast_signed() - since_boot().as_secs().cast_signed()
}

/// Carries out the task until the input ends.
pub(crate) async fn run(task: Task) -> Result<(), Box<dyn Error>> {
    // A client that is stopped does not see that its input has ended.
    set_parent_process_death_signal(Some(Signal::KILL))?;
    WallClock::leave_nothing_behind();
    print(&Line::Wall(wall_ahead()));
    let (task, teller) = (Arc::new(task), Arc::new(Teller::default()));
    let backend = Recorder::new(&task.url, Arc::clone(&teller), task.plant)?;
    let locks = Locks::with_options(backend, Options::new().linger(LINGER));
    let (mut answers, mut workers) = (Vec::new(), JoinSet::new());
    for (number, actor) in task.actors.iter().enumerate() {
        let (answer, answered) = mpsc::unbounded_channel();
        answers.push((*actor, answer));
        let mut worker = Worker {
            actor: *actor,
            task: Arc::clone(&task),
            locks: locks.clone(),
            teller: Arc::clone(&teller),
            // Apart from those of its siblings, also after many lives.
            rng: Rng::with_seed(task.seed.wrapping_add((number as u64) << 20)),
            answered,
        };
        workers.spawn(async move { worker.work().await });
    }
    let (end, mut ended) = watch::channel(false);
    std::thread::spawn(move || {
        for line in stdin().lock().lines().map_while(Result::ok) {
            let answer = answers.iter().find(|(actor, _)| line == actor.to_string());
            answer.map(|(_, answer)| answer.send(()));
        }
        end.send_replace(true);
    });
    tokio::select! {
        _ = ended.wait_for(|ended| *ended) => {}
        _ = workers.join_next() => {}
    }
    workers.shutdown().await;
    let _ = timeout(task.ttl + Duration::from_secs(5), locks.shutdown()).await;
    Ok(())
}

struct Worker {
    actor: usize,
    task: Arc<Task>,
    locks: Locks,
    teller: Arc<Teller>,
    rng: Rng,
    answered: mpsc::UnboundedReceiver<()>,
}

impl Worker {
    async fn work(&mut self) {
        loop {
            self.turn().await;
            sleep(self.up_to(0.02)).await;
        }
    }

    /// Asks for a lock in some way, and does something with it if it is granted.
    async fn turn(&mut self) {
        let task = Arc::clone(&self.task);
        let Some(name) = self.rng.choice(&task.names) else {
            return;
        };
        let request = self.locks.lock(name).ttl(task.ttl);
        let request = match self.rng.u8(..4) {
            0 => request.no_wait(),
            _ => request.wait_for(self.up_to(2.0)),
        };
        let request = match self.rng.u8(..8) {
            0 => request.renew(Renew::Never),
            _ => request,
        };
        self.tell(name, Event::Invoke);
        let answer = match self.rng.u8(..6) {
            0 => timeout(self.up_to(0.2), request.into_future()).await.ok(),
            _ => Some(request.await),
        };
        match answer {
            Some(Ok(guard)) => {
                if self.teller.look(self.actor, &guard, true) {
                    self.hold(name, guard).await;
                }
            }
            Some(Err(LockError::TimedOut { .. })) => self.tell(name, Event::Busy),
            Some(Err(error)) => {
                self.tell(name, Event::Unknown);
                print(&Line::Failed(error.to_string().chars().take(1_000).collect()));
            }
            None => self.tell(name, Event::Unknown),
        }
    }

    async fn hold(&mut self, name: &LockName, guard: LockGuard) {
        let longest = if self.rng.u8(..5) > 0 { 0.02 } else { 1.5 };
        let until = since_boot() + self.up_to(longest);
        let mut next_write = Duration::ZERO;
        loop {
            let at = since_boot();
            if !self.teller.look(self.actor, &guard, false) {
                if self.rng.bool() {
                    // As a holder does that has looked earlier.
                    self.write(name, &guard).await;
                }
                return;
            }
            if at >= next_write {
                // What a holder does between its look and its write takes a while.
                sleep(self.up_to(0.05)).await;
                self.write(name, &guard).await;
                next_write = since_boot() + self.up_to(0.1);
            }
            if at >= until {
                break;
            }
            sleep((self.task.ttl / 400).clamp(Duration::from_millis(1), Duration::from_millis(10))).await;
        }
        self.tell(name, Event::Released(guard.token()));
        match self.rng.u8(..3) {
            0 => drop(guard),
            // Whether it worked is shown by what happens next.
            _ => drop(guard.release().await),
        }
    }

    async fn write(&mut self, name: &LockName, guard: &LockGuard) {
        print(&Line::Write(self.actor, name.clone(), guard.token()));
        let _ = self.answered.recv().await;
    }

    /// Up to that share of the ttl.
    fn up_to(&mut self, share: f64) -> Duration {
        self.task.ttl.mul_f64(share * self.rng.f64())
    }

    fn tell(&self, name: &LockName, event: Event) {
        self.teller.tell(self.actor, name, event);
    }
}

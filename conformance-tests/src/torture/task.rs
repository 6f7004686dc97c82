//! A client as it sees itself.

use std::collections::VecDeque;
use std::env;
use std::fmt;
use std::io::{self, BufRead, Write};
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fastrand::Rng;
use lock_core::{FencingToken, LockError, LockGuard, LockName, Locks, Renew};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::Config;
use super::clock::since_boot;
use super::wall;
use crate::oracle::{Event, Record};

/// The environment variable with the task of a client.
pub(super) const TASK: &str = "FENCELOCK_TORTURE_TASK";

/// What a client is told when it is to end.
pub(super) const END: &str = "end";

/// What a client is told to do.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Task {
    client: usize,
    clients: usize,
    /// How many of its tasks take locks.
    workers: usize,
    names: usize,
    ttl: Duration,
    pub(super) seed: u64,
    prefix: String,
}

impl Task {
    pub(super) fn new(client: usize, prefix: &str, config: &Config) -> Self {
        Self {
            client,
            clients: config.clients,
            workers: config.tasks,
            names: config.names,
            ttl: config.ttl,
            // Far from those of the other clients, also after many lives.
            seed: config.seed.wrapping_add((client as u64 + 1) << 40),
            prefix: prefix.to_owned(),
        }
    }

    /// Number of the worker in the history. The first worker of a client has the client's number, as the client's faults have.
    fn actor(&self, worker: usize) -> usize {
        self.client + worker * self.clients
    }
}

impl fmt::Display for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            client,
            clients,
            workers,
            names,
            ttl,
            seed,
            prefix,
        } = self;
        let ttl = ttl.as_nanos();
        write!(f, "{client} {clients} {workers} {names} {ttl} {seed} {prefix}")
    }
}

impl FromStr for Task {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        fn number<T: FromStr>(word: Option<&str>) -> Result<T, ()> {
            word.and_then(|word| word.parse().ok()).ok_or(())
        }
        let mut words = text.splitn(7, ' ');
        Ok(Self {
            client: number(words.next())?,
            clients: number(words.next())?,
            workers: number(words.next())?,
            names: number(words.next())?,
            ttl: Duration::from_nanos(number(words.next())?),
            seed: number(words.next())?,
            prefix: words.next().ok_or(())?.to_owned(),
        })
    }
}

/// Whether [`run`](super::run) has started this program as a client.
#[must_use]
pub fn is_client() -> bool {
    env::var_os(TASK).is_some()
}

/// What a program does that [`run`](super::run) has started as a client: uses these locks until it is told to end.
///
/// Ends the whole process when the one that started it is gone.
pub async fn client(locks: &Locks) -> ExitCode {
    let Some(task) = env::var(TASK).ok().and_then(|task| task.parse::<Task>().ok()) else {
        return ExitCode::FAILURE;
    };
    wall::leave_nothing_behind();
    let writes = Arc::new(Writes::default());
    let (end, mut ended) = watch::channel(false);
    let answered = Arc::clone(&writes);
    std::thread::spawn(move || listen(&answered, &end));
    let task = Arc::new(task);
    let mut workers = JoinSet::new();
    for number in 0..task.workers {
        let mut worker = Worker {
            actor: task.actor(number),
            // Apart from those of its siblings, also after many lives.
            rng: Rng::with_seed(task.seed.wrapping_add((number as u64) << 20)),
            task: Arc::clone(&task),
            locks: locks.clone(),
            writes: Arc::clone(&writes),
        };
        workers.spawn(async move { worker.work().await });
    }
    tokio::select! {
        // The thread that has the sender goes on for ever.
        _ = ended.wait_for(|ended| *ended) => {}
        Some(_) = workers.join_next() => {}
        () = wall::watch(|reading| print(&format!("wall {reading}"))) => {}
    }
    workers.shutdown().await;
    let _ = timeout(task.ttl + Duration::from_secs(5), locks.shutdown()).await;
    ExitCode::SUCCESS
}

/// Writes without a response so far, in the order in which they were sent.
#[derive(Default)]
struct Writes(Mutex<VecDeque<oneshot::Sender<()>>>);

impl Writes {
    async fn write(&self, actor: usize, token: FencingToken, name: &LockName) {
        let (answer, answered) = oneshot::channel();
        {
            // With the mutex, so that the answers come in this order.
            let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            open.push_back(answer);
            print(&format!("write {actor} {token} {name}"));
        }
        let _ = answered.await;
    }

    fn answered(&self) {
        let first = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
        if let Some(first) = first {
            let _ = first.send(());
        }
    }
}

fn listen(writes: &Writes, end: &watch::Sender<bool>) {
    for line in io::stdin().lock().lines().map_while(Result::ok) {
        if line == END {
            end.send_replace(true);
        } else {
            writes.answered();
        }
    }
    // Nobody wants to know any more.
    std::process::exit(0);
}

struct Worker {
    actor: usize,
    task: Arc<Task>,
    locks: Locks,
    rng: Rng,
    writes: Arc<Writes>,
}

impl Worker {
    async fn work(&mut self) {
        loop {
            self.turn().await;
            let rest = self.some_time(0.02);
            sleep(rest).await;
        }
    }

    /// Asks for a lock in some way, and does something with it if it comes.
    async fn turn(&mut self) {
        let name = format!("{}/{}", self.task.prefix, self.rng.usize(..self.task.names));
        let Ok(name) = LockName::new(name) else { return };
        let request = self.locks.lock(&name).ttl(self.task.ttl);
        let request = match self.rng.u8(..4) {
            0 => request.no_wait(),
            _ => request.wait_for(self.some_time(2.0)),
        };
        let request = match self.rng.u8(..8) {
            0 => request.renew(Renew::Never),
            _ => request,
        };
        self.say(since_boot(), &name, Event::Invoke);
        let answer = if self.rng.u8(..6) == 0 {
            let patience = self.some_time(0.2);
            timeout(patience, request.into_future()).await.ok()
        } else {
            Some(request.await)
        };
        let answered = since_boot();
        match answer {
            // Before anything else can come in between: whoever is stopped here holds nothing when it wakes.
            Some(Ok(guard)) if guard.is_held() => {
                self.say(answered, &name, Event::Ok(guard.token()));
                self.hold(&name, guard).await;
            }
            Some(Err(LockError::TimedOut { .. })) => self.say(answered, &name, Event::Busy),
            other => {
                self.say(answered, &name, Event::Unknown);
                if let Some(Err(error)) = other {
                    let line: String = error
                        .to_string()
                        .chars()
                        .map(|c| if c.is_control() { ' ' } else { c })
                        .collect();
                    print(&format!("trouble {line}"));
                }
            }
        }
    }

    async fn hold(&mut self, name: &LockName, guard: LockGuard) {
        let token = guard.token();
        let share = if self.rng.u8(..5) > 0 {
            0.02 * self.rng.f64()
        } else {
            1.5 * self.rng.f64()
        };
        let until = since_boot() + self.task.ttl.mul_f64(share);
        let mut next_write = Duration::ZERO;
        loop {
            // Read before the look: whoever holds then has held at that time.
            let at = since_boot();
            if !guard.is_held() {
                self.say(at, name, Event::Lost(token));
                if self.rng.bool() {
                    // As one does who has looked earlier.
                    self.write(name, &guard).await;
                }
                return;
            }
            self.say(at, name, Event::Held(token));
            if at >= next_write {
                // What a holder does between its look and its write takes a while.
                let work = self.some_time(0.05);
                sleep(work).await;
                self.write(name, &guard).await;
                next_write = since_boot() + self.some_time(0.1);
            }
            if at >= until {
                break;
            }
            sleep((self.task.ttl / 400).clamp(Duration::from_millis(1), Duration::from_millis(10))).await;
        }
        self.say(since_boot(), name, Event::Released(token));
        match self.rng.u8(..3) {
            0 => drop(guard),
            // Whether it worked is told by what happens next.
            _ => drop(guard.release().await),
        }
    }

    async fn write(&mut self, name: &LockName, guard: &LockGuard) {
        self.writes.write(self.actor, guard.token(), name).await;
    }

    /// Up to that share of the ttl.
    fn some_time(&mut self, share: f64) -> Duration {
        self.task.ttl.mul_f64(share * self.rng.f64())
    }

    fn say(&self, at: Duration, name: &LockName, event: Event) {
        print(&Record::new(at, self.actor, name.clone(), event).to_json().to_string());
    }
}

/// A line in one piece, so that a kill leaves all of it or nothing.
fn print(line: &str) {
    let _ = io::stdout().write_all(format!("{line}\n").as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_is_read_as_it_was_told() {
        let task = Task::new(3, "torture/1 2", &Config::new());
        assert_eq!(task.to_string().parse(), Ok(task));
    }
}

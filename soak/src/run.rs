//! A run: client processes, the faults that happen to them, and the history of it.

use std::collections::HashMap;
use std::io::{self, IsTerminal, Write, stderr};
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use conformance_tests::faults::{Proxy, Traffic, WallClock};
use conformance_tests::oracle::{Event, Record};
use lock_core::fence::Fence;
use lock_core::{LockName, Locks};
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use crate::client::{TASK, Task, wall_ahead};
use crate::plan::{CLIENTS, Config, NAMES, WORKERS, What, plan};
use crate::recorder::{Line, Recorder, since_boot};
use crate::servers::Group;

/// The history while it happens, and the registers that the clients write to.
struct Story {
    start: Duration,
    state: Mutex<State>,
}

/// Under one mutex, so that the writes to a register and their records are in one order.
#[derive(Default)]
struct State {
    records: Vec<Record>,
    registers: HashMap<LockName, Fence<()>>,
    grants: usize,
    /// Whether a client has seen that its wall clock was off.
    saw_step: bool,
    /// Why an operation failed last.
    failure: Option<String>,
}

impl Story {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Duration {
        since_boot().saturating_sub(self.start)
    }

    fn record(&self, actor: usize, name: Option<&LockName>, event: Event) {
        let mut state = self.state();
        let record = Record::new(self.now(), actor, name.cloned(), event);
        state.records.push(record);
    }

    /// Takes down a line of a client. Gives the number of a worker that waits for it.
    fn hear(&self, line: &str) -> io::Result<Option<usize>> {
        let mut state = self.state();
        match serde_json::from_str(line)? {
            Line::Saw(mut record) => {
                record.at = record.at.saturating_sub(self.start);
                if let Event::Refreshed { sent, .. } = &mut record.event {
                    *sent = sent.saturating_sub(self.start);
                }
                state.grants += usize::from(matches!(record.event, Event::Ok(_)));
                state.records.push(record);
            }
            Line::Write(actor, name, token) => {
                let register = state.registers.entry(name.clone());
                let register = register.or_insert_with(|| Fence::new(name.as_str(), ()));
                let accepted = register.write(token, |()| ()).is_ok();
                let event = Event::Write { token, accepted };
                state.records.push(Record::new(self.now(), actor, name, event));
                return Ok(Some(actor));
            }
            Line::Failed(why) => state.failure = Some(why),
            Line::Wall(ahead) => state.saw_step |= ahead.abs_diff(wall_ahead()) > 60,
        }
        Ok(None)
    }
}

/// A client, with the proxy on its way to the server and its wall clock.
struct Client {
    task: Task,
    proxy: Option<Proxy>,
    clock: Option<WallClock>,
    story: Arc<Story>,
    /// `None` between two lives.
    life: Option<Life>,
}

struct Life {
    process: Child,
    /// Dropped, it ends the input of the process, which then ends too.
    input: Option<oneshot::Sender<()>>,
    hearing: JoinHandle<io::Result<()>>,
}

impl Client {
    fn live(&mut self) -> io::Result<()> {
        let mut command = Command::new("/proc/self/exe");
        command.env(TASK, serde_json::to_string(&self.task)?);
        // Out of reach of what is typed: this process ends them.
        command.process_group(0).kill_on_drop(true);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        if let Some(clock) = &self.clock {
            clock.set(fastrand::i32(-3_600..=3_600))?;
            clock.govern(command.as_std_mut());
        }
        // Another life makes other choices.
        self.task.seed += 1;
        let mut process = command.spawn()?;
        let (Some(to), Some(from)) = (process.stdin.take(), process.stdout.take()) else {
            return Err(io::Error::other("a client has no pipe"));
        };
        let (input, ended) = oneshot::channel();
        self.life = Some(Life {
            process,
            input: Some(input),
            hearing: tokio::spawn(hear(Arc::clone(&self.story), from, to, ended)),
        });
        Ok(())
    }

    /// Fails if the process has ended without being killed.
    fn must_live(&mut self) -> io::Result<()> {
        match self.life.as_mut().map(|life| life.process.try_wait()).transpose()? {
            Some(Some(status)) => Err(io::Error::other(format!("a client ended by itself: {status}"))),
            _ => Ok(()),
        }
    }

    /// Kills the process, and hears to the end what it has said.
    async fn die(&mut self) -> io::Result<()> {
        let Some(mut life) = self.life.take() else {
            return Ok(());
        };
        // It may have ended by itself.
        let _ = life.process.start_kill();
        life.process.wait().await?;
        life.hearing.await.map_err(io::Error::other)?
    }

    fn signal(&self, signal: Signal) -> io::Result<()> {
        let id = self.life.as_ref().and_then(|life| life.process.id());
        let pid = id.and_then(|id| Pid::from_raw(id.cast_signed()));
        pid.map_or(Ok(()), |pid| kill_process(pid, signal)).map_err(Into::into)
    }

    /// Begins a fault, or ends it. The wall clock steps with both, by up to an hour.
    async fn suffer(&mut self, fault: &What, begins: bool) -> io::Result<()> {
        if let Some(clock) = &self.clock {
            clock.set(fastrand::i32(-3_600..=3_600))?;
        }
        match (fault, &self.proxy) {
            (What::Pause, _) => self.signal(if begins { Signal::STOP } else { Signal::CONT })?,
            (What::Kill, _) if begins => self.die().await?,
            (What::Kill, _) => self.live()?,
            (What::Traffic(direction, traffic), Some(proxy)) => {
                proxy.set(*direction, if begins { *traffic } else { Traffic::Flows });
            }
            (What::Refused, Some(proxy)) if begins => {
                proxy.refuse().await;
                proxy.cut();
            }
            (What::Refused, Some(proxy)) => proxy.heal().await,
            _ => {}
        }
        Ok(())
    }
}

/// Hears what a client says until it ends, and answers.
async fn hear(
    story: Arc<Story>,
    from: ChildStdout,
    to: ChildStdin,
    mut ended: oneshot::Receiver<()>,
) -> io::Result<()> {
    let (mut lines, mut input) = (BufReader::new(from).lines(), Some(to));
    loop {
        let line = tokio::select! {
            line = lines.next_line() => line?,
            _ = &mut ended, if input.is_some() => {
                input = None;
                continue;
            }
        };
        let Some(line) = line else { return Ok(()) };
        if let (Some(worker), Some(input)) = (story.hear(&line)?, &mut input) {
            // A client that was killed hears no answer.
            let _ = input.write_all(format!("{worker}\n").as_bytes()).await;
        }
    }
}

/// Runs the clients and the faults until the time is over, and gives the records in the order of their times.
pub(crate) async fn run(config: &Config, group: &mut Group) -> io::Result<Vec<Record>> {
    // A run of its own, beside others on the same server.
    let prefix = format!("soak/{:08x}", fastrand::u32(..));
    let names = (0..NAMES).map(|i| LockName::new(format!("{prefix}/{i}")));
    let names: Vec<_> = names.collect::<Result<_, _>>().map_err(io::Error::other)?;
    let locks = Recorder::new(&group.url(), Arc::default(), false).map_err(io::Error::other)?;
    let locks = Locks::new(locks);
    // Whether locks can be had at all, before any client is started. New nodes of Redlock grant nothing for a while.
    let first = locks.lock(format!("{prefix}/try")).ttl(config.ttl);
    let first = first
        .wait_for(Duration::from_secs(60))
        .await
        .map_err(io::Error::other)?;
    first.release().await.map_err(io::Error::other)?;

    let (start, state) = (since_boot(), Mutex::default());
    let story = Arc::new(Story { start, state });
    let mut clients = Vec::new();
    for number in 0..CLIENTS {
        let (url, proxy) = group.through_proxy().await?;
        // The first worker of a client has its number, as its faults have.
        let actors = (0..WORKERS).map(|worker| number + worker * CLIENTS);
        let task = Task {
            url,
            actors: actors.collect(),
            names: names.clone(),
            ttl: config.ttl,
            // Far from those of the other clients, also after many lives.
            seed: config.seed.wrapping_add((number as u64 + 1) << 40),
            plant: config.plant,
        };
        let mut client = Client {
            task,
            proxy,
            clock: config.clocks.then(WallClock::new).transpose()?,
            story: Arc::clone(&story),
            life: None,
        };
        client.live()?;
        clients.push(client);
    }
    carry_out(config, &mut clients, group, &story).await?;
    for client in &mut clients {
        client.life.as_mut().and_then(|life| life.input.take());
    }
    for client in &mut clients {
        if let Some(life) = &mut client.life {
            let _ = timeout(config.ttl + Duration::from_secs(10), life.process.wait()).await;
        }
        client.die().await?;
    }
    if story.state().grants == 0 {
        let why = story.state().failure.take();
        let why = format!("no client was granted a lock; the last failure: {why:?}");
        return Err(io::Error::other(why));
    }
    if config.clocks && !story.state().saw_step {
        return Err(io::Error::other(
            "no client saw its wall clock step: libfaketime has no effect",
        ));
    }
    // Every name once more, now that all faults are over.
    story.record(Record::NOBODY, None, Event::Healed);
    let actor = CLIENTS * WORKERS;
    for name in &names {
        story.record(actor, Some(name), Event::Invoke);
        let limit = 3 * config.ttl + Duration::from_secs(20);
        if let Ok(guard) = locks.lock(name).ttl(config.ttl).wait_for(limit).await {
            story.record(actor, Some(name), Event::Ok(guard.token()));
            let _ = guard.release().await;
        }
    }
    let mut records = std::mem::take(&mut story.state().records);
    records.sort_by_key(|record| record.at);
    Ok(records)
}

/// One line that is written anew, for a person at a terminal; none if it is empty.
pub(crate) fn progress(line: &str) {
    if stderr().is_terminal() {
        let _ = write!(stderr(), "\r{line}\x1b[K");
    }
}

/// Carries out the plan of the faults.
async fn carry_out(config: &Config, clients: &mut [Client], group: &mut Group, story: &Story) -> io::Result<()> {
    let plan = plan(config, group.faults());
    // What is carried out later than planned comes in the planned order all the same.
    let mut steps: Vec<_> = plan.iter().map(|fault| (fault.at, true, Some(fault))).collect();
    steps.extend(plan.iter().map(|fault| (fault.until, false, Some(fault))));
    steps.push((config.time, true, None));
    steps.sort_by_key(|(at, begins, _)| (*at, *begins));
    let mut faults = 0;
    for (at, begins, fault) in steps {
        while story.now() < at {
            clients.iter_mut().try_for_each(Client::must_live)?;
            let (now, grants) = (story.now().as_secs(), story.state().grants);
            progress(&format!(
                "{now} of {} s, {grants} grants, {faults} faults",
                config.time.as_secs()
            ));
            sleep(Duration::from_millis(200).min(at.saturating_sub(story.now()))).await;
        }
        let Some(fault) = fault else { continue };
        let (what, actor) = (fault.what.to_string(), fault.client.unwrap_or(Record::NOBODY));
        if begins {
            faults += 1;
            let overlap = matches!(fault.what, What::Server((_, true)));
            // Before it is done, so that whatever comes of it comes later.
            let what = what.clone();
            story.record(actor, None, Event::Fault { what, overlap });
            if fault.what == What::Refused && group.frees_with_the_connection() {
                // It takes no time, and the client hears of it as the server does: which of them first, nothing can promise.
                let (what, overlap) = ("connections reset".to_owned(), true);
                story.record(actor, None, Event::Fault { what, overlap });
            }
        }
        match (fault.client, &fault.what) {
            (Some(client), what) => clients[client].suffer(what, begins).await?,
            (None, What::Server((what, _))) if begins => group.begin(what).await?,
            (None, What::Server((what, _))) => group.end(what).await?,
            (None, _) => {}
        }
        if !begins {
            story.record(actor, None, Event::Over { what });
        }
    }
    Ok(())
}

//! A client as the run sees it: a process, and proxies on its way.

use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tokio::time::{Instant, sleep};

use super::field::Field;
use super::plan::What;
use super::task::{END, TASK, Task};
use super::wall::{STEP, WallClock};
use super::{Config, Place};
use crate::faults::{Direction, Proxy, Traffic};

/// A client, in whichever life it is.
pub(super) struct Client {
    number: usize,
    command: Command,
    task: Task,
    proxies: Vec<Proxy>,
    /// If it can be set.
    wall_clock: Option<WallClock>,
    field: Arc<Field>,
    /// `None` between two lives.
    life: Option<Life>,
}

/// For how long a client may not see that its wall clock has stepped.
const PATIENCE: Duration = Duration::from_secs(10);

struct Life {
    process: Child,
    input: Arc<Mutex<ChildStdin>>,
    hearing: JoinHandle<Result<(), String>>,
}

impl Client {
    pub(super) async fn start(
        number: usize,
        prefix: &str,
        config: &Config,
        place: &Place<'_>,
        wall_clock: Option<WallClock>,
        field: &Arc<Field>,
    ) -> io::Result<Self> {
        let (address, proxies) = match place.route {
            Some(route) => {
                let (address, proxies) = route.through_proxies().await?;
                (Some(address), proxies)
            }
            None => (None, Vec::new()),
        };
        let mut command = (place.program)(address.as_deref());
        if let Some(wall_clock) = &wall_clock {
            wall_clock.govern(&mut command);
        }
        let mut client = Self {
            number,
            command,
            task: Task::new(number, prefix, config),
            proxies,
            wall_clock,
            field: Arc::clone(field),
            life: None,
        };
        client.live()?;
        Ok(client)
    }

    fn live(&mut self) -> io::Result<()> {
        self.command.env(TASK, self.task.to_string());
        // Another life makes other choices.
        self.task.seed = self.task.seed.wrapping_add(1);
        let mut process = self.command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let (Some(input), Some(output)) = (process.stdin.take(), process.stdout.take()) else {
            return Err(io::Error::other("a client has no pipe"));
        };
        let input = Arc::new(Mutex::new(input));
        let (field, number, answers) = (Arc::clone(&self.field), self.number, Arc::clone(&input));
        let hearing = std::thread::spawn(move || hear(&field, number, output, &answers));
        self.life = Some(Life {
            process,
            input,
            hearing,
        });
        Ok(())
    }

    /// Fails if the process has ended without being killed.
    pub(super) fn must_live(&mut self) -> io::Result<()> {
        if let Some(life) = &mut self.life
            && let Some(status) = life.process.try_wait()?
        {
            return Err(io::Error::other(format!(
                "client {} ended by itself: {status}",
                self.number
            )));
        }
        Ok(())
    }

    pub(super) async fn begin(&mut self, fault: &What) -> io::Result<()> {
        match fault {
            What::Pause => self.signal(Signal::STOP)?,
            What::Kill => self.die()?,
            What::Traffic(direction, traffic) => self.set(*direction, *traffic),
            What::Refused => {
                for proxy in &self.proxies {
                    proxy.refuse().await;
                    proxy.cut();
                }
            }
            What::Clock(ahead, anew) => {
                if *anew {
                    self.die()?;
                }
                self.set_wall_clock(*ahead)?;
                if *anew {
                    self.live()?;
                }
            }
            What::Server(..) => {}
        }
        Ok(())
    }

    pub(super) async fn heal(&mut self, fault: &What) -> io::Result<()> {
        match fault {
            What::Pause => self.signal(Signal::CONT)?,
            What::Kill => self.live()?,
            What::Traffic(direction, _) => self.set(*direction, Traffic::Flows),
            What::Refused => {
                for proxy in &self.proxies {
                    proxy.heal().await;
                }
            }
            What::Clock(ahead, _) => {
                self.must_see(*ahead).await?;
                self.set_wall_clock(0)?;
            }
            What::Server(..) => {}
        }
        Ok(())
    }

    fn set_wall_clock(&self, ahead: i32) -> io::Result<()> {
        self.wall_clock.as_ref().map_or(Ok(()), |clock| clock.set(ahead))
    }

    /// Waits until the process has told that its wall clock is ahead by that many seconds: a step that nobody has seen
    /// would show nothing.
    async fn must_see(&mut self, ahead: i32) -> io::Result<()> {
        let wanted = i64::from(ahead) * 1_000_000_000;
        let until = Instant::now() + PATIENCE;
        while self.field.ahead(self.number).abs_diff(wanted) > STEP {
            self.must_live()?;
            if Instant::now() >= until {
                return Err(io::Error::other(format!(
                    "client {} does not see its wall clock step: libfaketime has no effect on it",
                    self.number
                )));
            }
            sleep(Duration::from_millis(10)).await;
        }
        Ok(())
    }

    /// Tells the process to end in good order.
    pub(super) fn tell_end(&self) {
        if let Some(life) = &self.life {
            // Whoever is gone already does not hear it.
            let _ = say(&life.input, END);
        }
    }

    /// Waits for the end that it was told of, and kills it if that does not come by then.
    pub(super) async fn end(&mut self, until: Instant) -> io::Result<()> {
        let Some(life) = &mut self.life else {
            return Ok(());
        };
        while life.process.try_wait()?.is_none() && Instant::now() < until {
            sleep(Duration::from_millis(10)).await;
        }
        self.die()
    }

    /// Kills the process, and hears to the end what it has said.
    fn die(&mut self) -> io::Result<()> {
        let Some(mut life) = self.life.take() else {
            return Ok(());
        };
        life.process.kill()?;
        life.process.wait()?;
        match life.hearing.join() {
            Ok(Ok(())) => Ok(()),
            Ok(Err(why)) => Err(io::Error::other(format!("client {} said {why}", self.number))),
            Err(_) => Err(io::Error::other("a thread panicked")),
        }
    }

    fn signal(&self, signal: Signal) -> io::Result<()> {
        let pid = self
            .life
            .as_ref()
            .and_then(|life| Pid::from_raw(life.process.id().cast_signed()));
        pid.map_or(Ok(()), |pid| kill_process(pid, signal)).map_err(Into::into)
    }

    fn set(&self, direction: Direction, traffic: Traffic) {
        for proxy in &self.proxies {
            proxy.set(direction, traffic);
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.die();
    }
}

/// Hears what a client says, until it ends.
fn hear(field: &Field, number: usize, output: ChildStdout, answers: &Mutex<ChildStdin>) -> Result<(), String> {
    let mut lines = BufReader::new(output);
    let mut line = String::new();
    // What was cut off by a kill was not said.
    while lines.read_line(&mut line).is_ok_and(|length| length > 0) && line.ends_with('\n') {
        let said = line.trim_end();
        let answer = field.hear(number, said).map_err(|why| format!("{said:?}: {why}"))?;
        if let Some(accepted) = answer {
            let _ = say(answers, if accepted { "accepted" } else { "refused" });
        }
        line.clear();
    }
    Ok(())
}

fn say(input: &Mutex<ChildStdin>, line: &str) -> io::Result<()> {
    let mut input = input.lock().unwrap_or_else(PoisonError::into_inner);
    input.write_all(format!("{line}\n").as_bytes())
}

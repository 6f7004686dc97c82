//! How everything that descends from a command is ended.

use std::collections::HashSet;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};

use crate::channel::Why;
use crate::processes::{Process, descendants, own};
use crate::timing::Instant;

/// Between looks at what is left, where nothing tells that it ended.
const LOOK: Duration = Duration::from_millis(20);

/// How long what was left behind has to end by itself or to make a session of its own, as a daemon does only after its
/// parent has ended.
const SETTLE: Duration = Duration::from_millis(200);

/// Between rounds of SIGKILL: what was being forked in one round is met in the next.
const ROUND: Duration = Duration::from_millis(5);

/// An end that is under way.
///
/// When the *lock* ends, everything that descends from the command has to go. When the *command* ends, what it left
/// behind in its session has to go; what made a session of its own, as daemons do, was meant to stay.
#[derive(Debug)]
pub(crate) struct Ending {
    why: Why,
    /// When SIGTERM is due for those who have not got it.
    term_at: Instant,
    kill_at: Instant,
    next_step: Instant,
    /// Whom SIGTERM was sent to.
    told: HashSet<i32>,
}

impl Ending {
    /// Tells everything to go. `group` is the command's, as long as its number is sure to be the command's.
    pub(crate) fn of_all(why: Why, group: Option<Pid>, kill_at: Instant) -> Self {
        let now = Instant::now();
        let mut ending = Self::new(why, now, kill_at);
        if let Some(group) = group {
            // SIGCONT, because what is stopped cannot act on SIGTERM.
            for signal in [Signal::TERM, Signal::CONT] {
                let _ = kill_process_group(group, signal);
            }
        }
        let group = group.map(|group| group.as_raw_nonzero().get());
        let others: Vec<Process> = ending
            .concerned()
            .into_iter()
            .filter(|p| Some(p.group) != group)
            .collect();
        ending.tell(&others);
        ending
    }

    /// The command has ended: what it left behind is told to go if it is not about to.
    pub(crate) fn of_leftovers(grace: Duration, limit: Instant) -> Self {
        let term_at = Instant::now().after(SETTLE);
        Self::new(Why::Leftovers, term_at, term_at.after(grace).min(limit))
    }

    fn new(why: Why, term_at: Instant, kill_at: Instant) -> Self {
        Self {
            why,
            term_at,
            kill_at,
            next_step: Instant::now(),
            told: HashSet::new(),
        }
    }

    /// Why it ends, or that there was nothing to end.
    pub(crate) fn why(&self) -> Why {
        if self.why == Why::Leftovers && self.told.is_empty() {
            Why::Itself
        } else {
            self.why
        }
    }

    /// Whether nothing more would be ended for the reason `why`.
    pub(crate) fn covers(&self, why: Why) -> bool {
        self.why != Why::Leftovers || why == Why::Leftovers
    }

    /// When [`step`](Self::step) is due.
    pub(crate) fn next_step(&self) -> Instant {
        self.next_step
    }

    /// Does what is due. True if nothing was left that had to go; where everything has to, waiting for the last child
    /// tells that better.
    pub(crate) fn step(&mut self, group: Option<Pid>) -> bool {
        let now = Instant::now();
        if now >= self.kill_at {
            if let Some(group) = group {
                let _ = kill_process_group(group, Signal::KILL);
            }
            let left = self.concerned();
            for process in &left {
                self.told.insert(process.pid);
                process.signal(Signal::KILL);
            }
            self.next_step = now.after(ROUND);
            return self.why == Why::Leftovers && left.is_empty();
        }
        self.next_step = self.kill_at;
        if self.why != Why::Leftovers {
            return false;
        }
        let left = self.concerned();
        if now >= self.term_at {
            self.tell(&left);
        }
        self.next_step = self.kill_at.min(now.after(LOOK));
        left.is_empty()
    }

    fn concerned(&self) -> Vec<Process> {
        let mut all = descendants();
        if self.why == Why::Leftovers {
            let own = own().map(|own| own.session);
            all.retain(|process| Some(process.session) == own);
        }
        all
    }

    fn tell(&mut self, processes: &[Process]) {
        for process in processes {
            if self.told.insert(process.pid) {
                process.signal(Signal::TERM);
                process.signal(Signal::CONT);
            }
        }
    }
}

//! What all clients share: the history that they tell, and the registers that they write to.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lock_core::fence::Fence;
use lock_core::{FencingToken, LockName};

use super::Progress;
use super::clock::since_boot;
use super::wall::{Reading, STEP};
use crate::oracle::{Event, History, Record};

/// The history of a run while it happens.
pub(super) struct Field {
    start: Duration,
    state: Mutex<State>,
}

/// Under one mutex, so that the writes to a register and their records are in one order.
struct State {
    records: Vec<Record>,
    registers: HashMap<LockName, Fence<u64>>,
    /// How far ahead the wall clock of each client is, in nanoseconds, where it is.
    ahead: HashMap<usize, i64>,
    grants: usize,
    refused: usize,
    /// What a client was told last instead of a lock.
    trouble: Option<String>,
}

impl Field {
    pub(super) fn new(names: &[LockName]) -> Self {
        let register = |name: &LockName| (name.clone(), Fence::new(name.as_str(), 0));
        Self {
            start: since_boot(),
            state: Mutex::new(State {
                records: Vec::new(),
                registers: names.iter().map(register).collect(),
                ahead: HashMap::new(),
                grants: 0,
                refused: 0,
                trouble: None,
            }),
        }
    }

    /// Since the start.
    pub(super) fn now(&self) -> Duration {
        since_boot().saturating_sub(self.start)
    }

    /// Writes down what happens now.
    pub(super) fn record(&self, actor: usize, name: Option<&LockName>, event: Event) {
        let mut state = self.state();
        let at = self.now();
        state.records.push(Record::new(at, actor, name.cloned(), event));
    }

    /// Hears a line that a client has said, and gives the answer that it waits for, if any.
    ///
    /// # Errors
    ///
    /// With what is wrong with the line.
    pub(super) fn hear(&self, client: usize, line: &str) -> Result<Option<bool>, String> {
        match line.split_once(' ') {
            Some(("write", rest)) => {
                let mut words = rest.splitn(3, ' ');
                let mut word = || words.next().ok_or("a write with too few words");
                let actor = word()?.parse().map_err(|_| "a write of no actor")?;
                let token: FencingToken = word()?.parse().map_err(|_| "a write without a token")?;
                let name = LockName::new(word()?).map_err(|error| error.to_string())?;
                self.write(actor, name, token).map(Some)
            }
            Some(("wall", reading)) => {
                let reading: Reading = reading.parse().map_err(|()| "a wall clock without a time")?;
                self.compare(client, reading);
                Ok(None)
            }
            Some(("trouble", what)) => {
                self.state().trouble = Some(what.to_owned());
                Ok(None)
            }
            _ => {
                let value = serde_json::from_str(line).map_err(|error| error.to_string())?;
                let mut record = Record::from_json(&value).map_err(|damaged| damaged.to_string())?;
                record.at = record.at.saturating_sub(self.start);
                let mut state = self.state();
                state.grants += usize::from(matches!(record.event, Event::Ok(_)));
                state.records.push(record);
                Ok(None)
            }
        }
    }

    fn write(&self, actor: usize, name: LockName, token: FencingToken) -> Result<bool, String> {
        let mut state = self.state();
        let register = state.registers.get(&name).ok_or("a write to nothing")?;
        let accepted = register.write(token, |writes| *writes += 1).is_ok();
        state.refused += usize::from(!accepted);
        let at = self.now();
        let event = Event::Write { token, accepted };
        state.records.push(Record::new(at, actor, name, event));
        Ok(accepted)
    }

    /// Compares the wall clock of a client with the one here.
    fn compare(&self, client: usize, reading: Reading) {
        let ahead_ns = reading.offset.saturating_sub(Reading::now().offset);
        let mut state = self.state();
        let before = state.ahead.insert(client, ahead_ns).unwrap_or(0);
        // Each process tells its first reading too.
        if ahead_ns.abs_diff(before) > STEP {
            let at = reading.at.saturating_sub(self.start);
            let event = Event::Clock { ahead_ns };
            state.records.push(Record::new(at, client, None, event));
        }
    }

    /// How far ahead the wall clock of a client is, in nanoseconds, by what it has told last.
    pub(super) fn ahead(&self, actor: usize) -> i64 {
        self.state().ahead.get(&actor).copied().unwrap_or(0)
    }

    /// What a client was told, if none was ever granted anything.
    pub(super) fn idle(&self) -> Option<String> {
        let state = self.state();
        let why = || state.trouble.clone().unwrap_or_else(|| "nothing".to_owned());
        (state.grants == 0).then(why)
    }

    pub(super) fn progress(&self, faults: usize, now: Vec<String>) -> Progress {
        let state = self.state();
        Progress {
            time: self.now(),
            grants: state.grants,
            faults,
            refused: state.refused,
            now,
        }
    }

    pub(super) fn history(&self) -> History {
        History::new(self.state().records.clone())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

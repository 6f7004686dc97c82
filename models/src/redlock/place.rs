//! A node of the model with what the model has no clock for: when its lease, its places in the queue and its restart delay end.

use std::collections::BTreeMap;

use super::node::{Born, Node};
use super::trace::Run;
use crate::redis_queue::server::{Entry, Push};

/// A proposal that is older (microseconds) is not drawn: redlock.lua says why.
const FRESH: u64 = 500_000;

/// A node while a trace is replayed. Times are in milliseconds, except `since`.
#[derive(Clone)]
pub(super) struct Place<'a> {
    pub(super) node: Node<&'a str, u64>,
    /// When the lease ends.
    pub(super) end: u64,
    /// Whether no client has let the node grant before the restart delay is over.
    pub(super) is_new: bool,
    /// When the node was asked first.
    since: Option<u64>,
    waiters: BTreeMap<&'a str, Entry<&'a str>>,
    /// When the server forgets all waiters.
    queue_end: u64,
}

impl<'a> Place<'a> {
    /// A node without data.
    pub(super) fn new() -> Self {
        Self {
            node: Node::emptied(),
            end: 0,
            is_new: true,
            since: None,
            waiters: BTreeMap::new(),
            queue_end: 0,
        }
    }

    /// The node begins anew, with what it has.
    pub(super) fn restarted(&mut self) {
        self.node.born = Born::Absent;
        self.is_new = true;
        self.since = None;
    }

    /// The node was asked something that makes it look whether it has data.
    pub(super) fn touch(&mut self, at: u64) {
        self.since.get_or_insert(at);
    }

    pub(super) fn since(&self, at: u64) -> u64 {
        self.since.unwrap_or(at)
    }

    pub(super) fn delay_over(&self, at: u64, max_ttl: u64) -> bool {
        at - self.since(at) >= max_ttl * 1000
    }

    /// Whether the lease and the queue end in this millisecond.
    pub(super) fn ends(&self, now: u64) -> [bool; 2] {
        [
            self.node.lock.is_some() && self.end == now,
            !self.waiters.is_empty() && self.queue_end == now,
        ]
    }

    /// Ends the lease and the queue if they end before these moments. Returns the owner of the lease.
    pub(super) fn expire(&mut self, [lease, queue]: [u64; 2]) -> Option<&'a str> {
        if queue > self.queue_end {
            self.node.queue.clear();
            self.waiters.clear();
        }
        let ended = self.node.lock.filter(|_| lease > self.end)?;
        self.node.expire();
        Some(ended.owner)
    }

    pub(super) fn waits(&self, owner: &str) -> bool {
        self.waiters.contains_key(owner)
    }

    /// The waiters that are not there any more.
    pub(super) fn gone(&self, now: u64) -> Vec<&'a str> {
        let gone = self.waiters.values().filter(|entry| !entry.is_live(now));
        gone.map(|entry| entry.owner).collect()
    }

    /// What the node draws next, unless its counter is above that.
    pub(super) fn draws(&self, run: &Run) -> u64 {
        let behind = run.at.checked_sub(run.proposal);
        let usable = self.node.counter.is_some() && behind.is_some_and(|behind| behind < FRESH);
        if usable { run.proposal } else { run.at }
    }

    /// The place in the queue of an acquisition that is not in it, or `yields` and goes back.
    pub(super) fn stamp(&self, run: &Run, yields: bool) -> u64 {
        match run.place {
            0 => self.node.place(run.at),
            place if yields => place,
            place => self.node.place(place),
        }
    }

    /// The queue is kept until then at least.
    pub(super) fn keep_queue(&mut self, end: u64) {
        self.queue_end = self.queue_end.max(end);
    }

    /// The acquisition waits. `is_first` says whether there was no queue before.
    pub(super) fn enqueued(&mut self, entry: Entry<&'a str>, is_first: bool) {
        if is_first {
            self.queue_end = 0;
        }
        self.keep_queue(entry.stop);
        self.waiters.insert(entry.owner, entry);
    }

    /// The waiter was granted the name.
    pub(super) fn pushed(&mut self, owner: &'a str, token: u64, now: u64) -> Push<String> {
        // The queue of the node and the entries have the same waiters.
        let entry = self.waiters.remove(owner);
        let (stop, sent, life) = entry.map_or((now, 0, 0), |entry| (entry.stop, entry.sent, entry.life));
        self.end = now + (stop - now).min(life);
        Push {
            owner: owner.to_owned(),
            token,
            sent,
            life,
        }
    }

    /// Takes the waiters out of the queue that left it in this run.
    pub(super) fn leave(&mut self, run: &'a Run) -> Result<(), String> {
        let now = run.at / 1000;
        for owner in &run.swept {
            match self.waiters.get(&**owner) {
                Some(entry) if entry.stop <= now => self.node.forget(owner),
                _ => return Err(format!("{owner} was removed before its time was over")),
            }
        }
        // Those that were to be told only that they are the first.
        for owner in &run.unheard {
            if self.node.queue.first().is_some_and(|first| first.owner == owner) {
                self.node.queue.remove(0);
            }
        }
        let queue = &self.node.queue;
        self.waiters
            .retain(|owner, _| queue.iter().any(|waiter| waiter.owner == *owner));
        match run.unheard.iter().find(|owner| self.waits(owner)) {
            Some(owner) => Err(format!("{owner} was removed, and is not the first of the queue")),
            None => Ok(()),
        }
    }
}

/// How long an acquisition may live that asks now. None if it asks too late.
pub(super) fn life(now: u64, ttl: u64, stop: u64) -> Option<u64> {
    let life = ttl.min(stop.checked_sub(now)?);
    (life * 2 >= ttl).then_some(life)
}

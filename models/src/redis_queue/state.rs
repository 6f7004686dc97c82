//! A state of the whole: the server, and what each client knows of its claim.

use super::server::Server;

/// How many ticks a lease lasts.
pub const TTL: u64 = 3;

/// A state of the whole.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct State<const A: usize> {
    pub(super) now: u64,
    pub(super) server: Server<u8>,
    pub(super) claims: [Claim; A],
    pub(super) closes: u8,
    /// The highest token that a claim has believed in.
    pub(super) given: u64,
    /// What went wrong.
    pub(super) wrong: Wrong,
}

/// What went wrong so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Wrong {
    pub(super) fell: bool,
    pub(super) overtaken: bool,
    pub(super) granted_to_closed: bool,
    pub(super) left_after_release: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Claim {
    pub(super) phase: Phase,
    /// When the requests were sent that have not arrived.
    pub(super) acquires: [Option<u64>; 2],
    pub(super) renewal: Option<u64>,
    pub(super) release: bool,
    pub(super) requests: u8,
    pub(super) renewals: u8,
    /// When the last ACQUIRE was sent.
    pub(super) sent: u64,
    /// When the last ACQUIRE was sent that was answered "busy".
    pub(super) busy: u64,
    /// When everything of the claim must have ended on the server.
    pub(super) end: u64,
    /// Since when the claim has been in the queue without interruption, as its turn.
    pub(super) turn: Option<u8>,
    pub(super) closed: bool,
    pub(super) pushed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Phase {
    Idle,
    Waiting,
    Holding { deadline: u64 },
    Gone,
}

impl Claim {
    pub(super) const IDLE: Self = Self {
        phase: Phase::Idle,
        acquires: [None; 2],
        renewal: None,
        release: false,
        requests: 0,
        renewals: 0,
        sent: 0,
        busy: 0,
        end: 0,
        turn: None,
        closed: false,
        pushed: false,
    };

    pub(super) fn send(&mut self, now: u64) {
        self.requests += 1;
        (self.sent, self.end) = (now, self.end.max(now + TTL));
        if let Some(free) = self.acquires.iter_mut().find(|slot| slot.is_none()) {
            *free = Some(now);
        }
        self.acquires.sort_unstable();
    }

    pub(super) fn end(&mut self) {
        // Nothing depends any more on what the client knew.
        (self.phase, self.sent, self.busy) = (Phase::Gone, 0, 0);
        self.pushed = false;
    }
}

impl<const A: usize> State<A> {
    pub(super) fn holds(&mut self, claim: usize, token: u64, deadline: u64, pushed: bool) {
        if deadline <= self.now {
            return;
        }
        if self.claims[claim].phase == Phase::Waiting {
            self.wrong.fell |= token <= self.given;
            self.given = self.given.max(token);
            self.claims[claim].phase = Phase::Holding { deadline };
            self.claims[claim].pushed = pushed;
        }
    }

    /// The claims that believe in the lock.
    pub(super) fn holders(&self) -> impl Iterator<Item = usize> {
        (0..A).filter(|claim| matches!(self.claims[*claim].phase, Phase::Holding { .. }))
    }

    pub(super) fn holds_on_the_server(&self, claim: usize) -> bool {
        self.server
            .held(self.now)
            .is_some_and(|lock| usize::from(lock.owner) == claim)
    }

    pub(super) fn outlives(&self) -> bool {
        let lock = self.server.held(self.now).map(|lock| (lock.owner, lock.end));
        let queued = self.server.queue.iter().map(|entry| (entry.owner, entry.stop));
        lock.into_iter()
            .chain(queued)
            .any(|(owner, end)| end > self.claims[usize::from(owner)].end)
    }
}

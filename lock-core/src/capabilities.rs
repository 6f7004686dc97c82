//! What a backend can do.

use std::time::Duration;

/// What a backend can do, and within which bounds. The core checks requests against it, and the conformance suite chooses its cases by it.
#[must_use]
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// The shortest ttl that is accepted.
    pub min_ttl: Duration,
    /// The longest ttl that is accepted.
    pub max_ttl: Duration,
    /// The unit to which ttls are rounded up.
    pub ttl_granularity: Duration,
    /// How long one request may take before it counts as failed.
    pub op_timeout: Duration,
    /// Whether waiters of different processes are served in the order in which they came.
    pub fair: bool,
    /// How long a process pauses after it has kept a contended lock to itself for a while. Zero for backends that are fair or that wake a waiter
    /// of another process.
    pub give_way: Duration,
    /// Among which clients a lock excludes.
    pub scope: Scope,
    /// Whether one lease keeps many locks.
    pub shares_leases: bool,
    /// Whether `holder` answers.
    pub holder: bool,
    /// Whether `list` answers.
    pub list: bool,
    /// Whether `force_release` answers.
    pub force_release: bool,
    /// Whether `reserve` works, and `release` with a time to keep the name.
    pub reservations: bool,
    /// Whether claims in the mode [`Shared`](crate::Mode::Shared) are granted.
    pub shared: bool,
    /// Whether claims in the mode [`Permit`](crate::Mode::Permit) are granted.
    pub permits: bool,
}

/// Among which clients a lock excludes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Scope {
    /// Clients of the same store in one process.
    Process,
    /// The processes of one machine.
    Machine,
    /// All clients of the server.
    Server,
}

impl Capabilities {
    /// What a backend with only the required methods can do: ttls from 100 ms to a day, in milliseconds; requests of at most 5 s; waiters in
    /// no order; nothing to inspect.
    pub fn new(scope: Scope) -> Self {
        Self {
            min_ttl: Duration::from_millis(100),
            max_ttl: Duration::from_secs(24 * 60 * 60),
            ttl_granularity: Duration::from_millis(1),
            op_timeout: Duration::from_secs(5),
            fair: false,
            give_way: Duration::from_millis(20),
            scope,
            shares_leases: false,
            holder: false,
            list: false,
            force_release: false,
            reservations: false,
            shared: false,
            permits: false,
        }
    }

    /// Sets the bounds of a ttl.
    pub fn with_ttl_range(mut self, min: Duration, max: Duration) -> Self {
        (self.min_ttl, self.max_ttl) = (min, max);
        self
    }

    /// Sets the unit to which ttls are rounded up.
    pub fn with_ttl_granularity(mut self, granularity: Duration) -> Self {
        self.ttl_granularity = granularity;
        self
    }

    /// Sets how long one request may take.
    pub fn with_op_timeout(mut self, timeout: Duration) -> Self {
        self.op_timeout = timeout;
        self
    }

    /// Says that waiters of different processes are served in order.
    pub fn with_fairness(mut self) -> Self {
        self.fair = true;
        self.give_way = Duration::ZERO;
        self
    }

    /// Sets how long a process pauses after it has kept a contended lock to itself.
    pub fn with_give_way(mut self, pause: Duration) -> Self {
        self.give_way = pause;
        self
    }

    /// Says that one lease keeps many locks.
    pub fn with_shared_leases(mut self) -> Self {
        self.shares_leases = true;
        self
    }

    /// Says that `holder`, `list` and `force_release` all answer.
    pub fn with_inspection(mut self) -> Self {
        (self.holder, self.list, self.force_release) = (true, true, true);
        self
    }

    /// Says that `reserve` works, and `release` with a time to keep the name.
    pub fn with_reservations(mut self) -> Self {
        self.reservations = true;
        self
    }

    /// Says that several claims can share a name.
    pub fn with_shared(mut self) -> Self {
        self.shared = true;
        self
    }

    /// Says that a name can have a number of permits.
    pub fn with_permits(mut self) -> Self {
        self.permits = true;
        self
    }
}

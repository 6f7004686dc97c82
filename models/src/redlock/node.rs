//! One node: its state for one name, and what each request does to it.

/// The state of a node for one name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Node {
    /// Who holds the name on this node.
    pub lock: Option<Lock>,
    /// The highest token that this node has drawn or confirmed. None after loss of data.
    pub counter: Option<u8>,
    /// Whether the node may grant.
    pub born: Born,
}

/// The lock as a node stores it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lock {
    /// The acquisition that holds it.
    pub owner: u8,
    /// The last of its attempts that asked for it.
    pub attempt: u8,
    /// The token that was drawn for this grant, or confirmed since.
    pub token: u8,
}

/// How far a node is after a start, or after a loss of its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Born {
    /// The node was started or has lost its data, and has not been asked since.
    Absent,
    /// The node was asked, and does not grant before the restart delay is over.
    New,
    /// The node grants.
    Open,
}

/// A request to a node.
#[expect(
    missing_docs,
    reason = "`owner` is an acquisition, by number, and `attempt` one of its attempts"
)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Take the name.
    Acquire {
        owner: u8,
        attempt: u8,
        /// A token that the client proposes: its clock.
        proposal: u8,
    },
    /// Raise the counter to the token of the acquisition.
    Confirm {
        owner: u8,
        /// What this node answered to the acquisition.
        presented: u8,
        /// The highest answer of all nodes.
        token: u8,
    },
    /// Free the name if this attempt, or one before it, was granted it last.
    Release { owner: u8, attempt: u8 },
}

/// What decides about a request besides the state that is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Circumstances {
    /// The node's clock.
    pub clock: u8,
    /// Whether the restart delay is over.
    pub delay_over: bool,
}

/// What a node answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The acquisition holds the name on this node, with this token.
    Granted(u8),
    /// Another acquisition holds the name.
    Busy,
    /// The restart delay is not over.
    Young,
    /// The counter is at the confirmed token or above.
    Confirmed,
    /// The name was freed.
    Released,
    /// The acquisition does not hold the name on this node.
    Lost,
}

/// What a node compares before it does what it is asked. [`Rules::default`] is the protocol; all else is a planted bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// What CONFIRM compares.
    pub confirm: Compare,
    /// Whether RELEASE compares the attempt.
    pub release_compares: bool,
    /// Whether a node without data waits for the restart delay before it grants.
    pub restart_delay: bool,
}

/// What a request compares with the stored lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compare {
    /// The owner, and the token that the node granted.
    OwnerAndToken,
    /// The owner alone.
    Owner,
    /// Nothing.
    Nothing,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            confirm: Compare::OwnerAndToken,
            release_compares: true,
            restart_delay: true,
        }
    }
}

impl Node {
    /// A node with data.
    #[must_use]
    pub fn open(counter: Option<u8>) -> Self {
        Self {
            lock: None,
            counter,
            born: Born::Open,
        }
    }

    /// A node without data.
    #[must_use]
    pub fn emptied() -> Self {
        Self {
            lock: None,
            counter: None,
            born: Born::Absent,
        }
    }

    /// Whether the acquisition holds the name on this node.
    #[must_use]
    pub fn is_held_by(&self, owner: u8) -> bool {
        self.lock.is_some_and(|lock| lock.owner == owner)
    }

    /// The lease has ended.
    pub fn expire(&mut self) {
        self.lock = None;
    }

    /// Carries out a request.
    pub fn handle(&mut self, rules: &Rules, request: Request, circumstances: Circumstances) -> Answer {
        match request {
            Request::Acquire {
                owner,
                attempt,
                proposal,
            } => self.acquire(rules, (owner, attempt), proposal, circumstances),
            Request::Confirm {
                owner,
                presented,
                token,
            } => {
                if !self.agrees(rules.confirm, owner, &[presented, token]) {
                    return Answer::Lost;
                }
                self.counter = Some(self.counter.map_or(token, |counter| counter.max(token)));
                if let Some(lock) = &mut self.lock
                    && lock.owner == owner
                {
                    lock.token = token;
                }
                Answer::Confirmed
            }
            Request::Release { owner, attempt } => {
                let is_later = |lock: &Lock| rules.release_compares && lock.attempt > attempt;
                match self.lock {
                    Some(lock) if lock.owner == owner && !is_later(&lock) => {
                        self.lock = None;
                        Answer::Released
                    }
                    _ => Answer::Lost,
                }
            }
        }
    }

    fn acquire(
        &mut self,
        rules: &Rules,
        (owner, attempt): (u8, u8),
        proposal: u8,
        circumstances: Circumstances,
    ) -> Answer {
        if rules.restart_delay && self.is_young(circumstances.delay_over) {
            return Answer::Young;
        }
        match &mut self.lock {
            Some(lock) if lock.owner == owner => {
                lock.attempt = lock.attempt.max(attempt);
                Answer::Granted(lock.token)
            }
            Some(_) => Answer::Busy,
            None => {
                let token = self.draw(proposal.min(circumstances.clock), circumstances.clock);
                self.lock = Some(Lock { owner, attempt, token });
                Answer::Granted(token)
            }
        }
    }

    /// Whether the node grants nothing, because it has lost its data. From the first question on it waits for the restart delay.
    fn is_young(&mut self, delay_over: bool) -> bool {
        self.born = match self.born {
            Born::Absent => Born::New,
            Born::New if delay_over => Born::Open,
            born => born,
        };
        self.born != Born::Open
    }

    /// **Invariant.** A token is above the counter, so above all that this node has drawn or confirmed and still knows of.
    fn draw(&mut self, at_least: u8, clock: u8) -> u8 {
        let token = match self.counter {
            Some(counter) => at_least.max(counter + 1),
            None => clock,
        };
        self.counter = Some(token);
        token
    }

    fn agrees(&self, compare: Compare, owner: u8, tokens: &[u8]) -> bool {
        match compare {
            Compare::OwnerAndToken => self
                .lock
                .is_some_and(|lock| lock.owner == owner && tokens.contains(&lock.token)),
            Compare::Owner => self.is_held_by(owner),
            Compare::Nothing => true,
        }
    }
}

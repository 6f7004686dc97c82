//! The queue of keys in etcd: the claim whose key was created first holds the name, and its token is the base plus that revision.
//!
//! Each claim is one of another client. A transaction arrives at any time after it was sent, or never, and its answer is lost or is there at
//! once. Waiters are told late that the key before theirs has gone. The lease of a waiter, or of a claim that is over, ends at any time;
//! that of a holder does not: its client knows before the server (`lease` in lock-core). The cluster may be restored from an older copy, which ends
//! all connections; the clock is above all tokens then.

use stateright::{Model, Property};

/// What is planted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// A waiter verifies that its own key is there, and not that no other is older.
    OnlyTheOwnKeyIsChecked,
    /// A waiter holds once the key before its own has gone.
    PredecessorsDeletionIsBelieved,
    /// A connection begins without a look at the base.
    BaseIsNotRaised,
    /// A connection sets the base to the clock, also if it was higher.
    BaseIsLowered,
    /// A put does not compare whether its claim was released meanwhile.
    LeaseIsNotCompared,
}

/// The model of A claims, and how far the search goes.
#[derive(Clone, Debug)]
pub struct EtcdQueue<const A: usize> {
    /// How often each claim sends a put.
    pub puts: u8,
    /// How often the cluster is restored from an older copy.
    pub restores: u8,
    /// What is planted.
    pub bug: Option<Bug>,
}

/// What the cluster stores.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Cluster {
    revision: u8,
    base: u8,
    /// In the order of their revisions.
    keys: Vec<Key>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    owner: u8,
    created: u8,
    token: u8,
}

/// A state of the whole.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct State<const A: usize> {
    cluster: Cluster,
    copy: Option<Cluster>,
    restores: u8,
    claims: [Claim; A],
    /// The highest token given, and drawn.
    given: u8,
    drawn: u8,
    fell: bool,
    fell_later: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Claim {
    phase: Phase,
    /// The highest token given before the claim began.
    before: u8,
    puts: u8,
    /// Whether a put is under way, and whether the lease was marked since it was sent.
    put: Option<bool>,
    release: bool,
    connected: bool,
    /// Whether it was granted after a restore.
    after_restore: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Phase {
    Idle,
    /// The claim has no key that it knows of.
    Joining,
    /// The key that was created then is behind the one that was created before.
    Waiting {
        created: u8,
        behind: u8,
    },
    Holding,
    Over,
}

/// A step.
#[expect(missing_docs, reason = "`claim` is a claim by number")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// A client connects, if it is not, and sends a put.
    Put { claim: usize, clock_is_ahead: bool },
    /// A put arrives.
    PutArrives { claim: usize, heard: bool },
    /// A waiter has been told that its key or the one before has gone, and looks.
    Verify { claim: usize },
    /// A waiter gives up, or a holder ends: the release is sent.
    End { claim: usize },
    /// The release arrives.
    Release { claim: usize },
    /// The lease of the claim ends.
    Expire { claim: usize },
    /// The cluster is copied.
    Copy,
    /// The copy takes the place of the cluster.
    Restore,
}

/// No two claims believe in the lock.
pub const EXCLUSION: &str = "no two valid holders";
/// Tokens rise in the order in which they are given.
pub const RISE: &str = "tokens rise in the order in which they are given";
/// Tokens rise in real time.
pub const RISE_LATER: &str = "a token is above all that were given before its claim began";
/// A release is final.
pub const NOTHING_LEFT: &str = "a claim that was released leaves no key";
/// A waiter in the middle goes.
pub const MIDDLE: &str = "a key goes between the holder's and a waiter's that was behind it";
/// A waiter is granted the lock.
pub const SUCCESSOR: &str = "a token is given after another one";
/// The own key is gone.
pub const GONE: &str = "a waiter's own key has gone, and the one before it too";
/// A token is given after a restore.
pub const RESTORED: &str = "a token is given after a restore";

impl<const A: usize> State<A> {
    fn key(&self, claim: usize) -> Option<Key> {
        self.cluster
            .keys
            .iter()
            .find(|key| usize::from(key.owner) == claim)
            .copied()
    }

    fn delete(&mut self, claim: usize) {
        self.cluster.keys.retain(|key| usize::from(key.owner) != claim);
    }

    fn exists(&self, created: u8) -> bool {
        self.cluster.keys.iter().any(|key| key.created == created)
    }

    /// The youngest key that is older.
    fn before(&self, created: u8) -> Option<u8> {
        let older = self.cluster.keys.iter().filter(|key| key.created < created);
        older.map(|key| key.created).max()
    }

    fn holders(&self) -> impl Iterator<Item = usize> {
        (0..A).filter(|claim| self.claims[*claim].phase == Phase::Holding)
    }

    fn give(&mut self, claim: usize, token: u8) {
        let claim = &mut self.claims[claim];
        claim.phase = Phase::Holding;
        claim.after_restore = self.restores > 0;
        self.fell |= token <= self.given;
        self.fell_later |= token <= claim.before;
        self.given = self.given.max(token);
    }

    /// What the client knows after a look: its key, which may be the first one.
    fn stands(&mut self, claim: usize, key: Key) {
        match self.before(key.created) {
            None => self.give(claim, key.token),
            Some(behind) => {
                self.claims[claim].phase = Phase::Waiting {
                    created: key.created,
                    behind,
                };
            }
        }
    }
}

impl<const A: usize> EtcdQueue<A> {
    fn connect(&self, state: &mut State<A>, clock_is_ahead: bool) {
        let clock = if clock_is_ahead { state.drawn + 3 } else { 0 };
        let cluster = &mut state.cluster;
        let least = clock.saturating_sub(cluster.revision);
        match self.bug {
            Some(Bug::BaseIsNotRaised) => {}
            Some(Bug::BaseIsLowered) => cluster.base = least,
            _ => cluster.base = cluster.base.max(least),
        }
    }

    fn put(&self, state: &mut State<A>, claim: usize, heard: bool) {
        let Some(is_marked) = state.claims[claim].put.take() else {
            return;
        };
        if is_marked && self.bug != Some(Bug::LeaseIsNotCompared) {
            return;
        }
        if state.key(claim).is_none() {
            let cluster = &mut state.cluster;
            cluster.revision += 1;
            cluster.keys.push(Key {
                owner: claim as u8,
                created: cluster.revision,
                token: cluster.base + cluster.revision,
            });
            state.drawn = state.drawn.max(cluster.base + cluster.revision);
        }
        if let (Some(key), true, Phase::Joining) = (state.key(claim), heard, state.claims[claim].phase) {
            state.stands(claim, key);
        }
    }

    fn verify(&self, state: &mut State<A>, claim: usize) {
        let Phase::Waiting { created, .. } = state.claims[claim].phase else {
            return;
        };
        let key = state.key(claim).filter(|key| key.created == created);
        match (key, self.bug) {
            (None, Some(Bug::PredecessorsDeletionIsBelieved)) => state.give(claim, state.cluster.base + created),
            (Some(key), Some(Bug::PredecessorsDeletionIsBelieved | Bug::OnlyTheOwnKeyIsChecked)) => {
                state.give(claim, key.token);
            }
            (Some(key), _) => state.stands(claim, key),
            (None, _) => state.claims[claim].phase = Phase::Joining,
        }
    }
}

impl<const A: usize> Model for EtcdQueue<A> {
    type State = State<A>;
    type Action = Action;

    fn init_states(&self) -> Vec<Self::State> {
        vec![State {
            cluster: Cluster {
                revision: 0,
                base: 0,
                keys: Vec::new(),
            },
            copy: None,
            restores: 0,
            claims: [Claim {
                phase: Phase::Idle,
                before: 0,
                puts: 0,
                put: None,
                release: false,
                connected: false,
                after_restore: false,
            }; A],
            given: 0,
            drawn: 0,
            fell: false,
            fell_later: false,
        }]
    }

    fn actions(&self, state: &Self::State, actions: &mut Vec<Self::Action>) {
        let idle = state.claims.iter().position(|claim| claim.phase == Phase::Idle);
        for (claim, of) in state.claims.iter().enumerate() {
            // Claims are interchangeable until they begin.
            let begins = idle == Some(claim) || of.phase == Phase::Joining;
            if begins && of.put.is_none() && of.puts < self.puts {
                // After a loss of state, the clock is what tokens rest on. It counts only for a new connection.
                if state.restores == 0 || of.connected {
                    actions.push(Action::Put {
                        claim,
                        clock_is_ahead: false,
                    });
                }
                if !of.connected {
                    actions.push(Action::Put {
                        claim,
                        clock_is_ahead: true,
                    });
                }
            }
            if of.put.is_some() {
                actions.push(Action::PutArrives { claim, heard: true });
                actions.push(Action::PutArrives { claim, heard: false });
            }
            if let Phase::Waiting { created, behind } = of.phase
                && !(state.exists(created) && state.exists(behind))
            {
                actions.push(Action::Verify { claim });
            }
            if !matches!(of.phase, Phase::Idle | Phase::Over) {
                actions.push(Action::End { claim });
            }
            if of.release {
                actions.push(Action::Release { claim });
            }
            if of.phase != Phase::Holding && state.key(claim).is_some() {
                actions.push(Action::Expire { claim });
            }
        }
        if state.restores < self.restores {
            if state.copy.is_none() {
                actions.push(Action::Copy);
            } else {
                actions.push(Action::Restore);
            }
        }
    }

    fn next_state(&self, state: &Self::State, action: Self::Action) -> Option<Self::State> {
        let mut next = state.clone();
        match action {
            Action::Put { claim, clock_is_ahead } => {
                if next.claims[claim].phase == Phase::Idle {
                    next.claims[claim].before = next.given;
                }
                if !next.claims[claim].connected {
                    self.connect(&mut next, clock_is_ahead);
                }
                let of = &mut next.claims[claim];
                of.phase = Phase::Joining;
                of.connected = true;
                of.puts += 1;
                of.put = Some(false);
            }
            Action::PutArrives { claim, heard } => self.put(&mut next, claim, heard),
            Action::Verify { claim } => self.verify(&mut next, claim),
            Action::End { claim } => {
                let of = &mut next.claims[claim];
                (of.phase, of.before, of.after_restore) = (Phase::Over, 0, false);
                of.release = true;
            }
            Action::Release { claim } => {
                next.delete(claim);
                let of = &mut next.claims[claim];
                of.release = false;
                of.put = of.put.map(|_| true);
            }
            Action::Expire { claim } => next.delete(claim),
            Action::Copy => next.copy = Some(next.cluster.clone()),
            Action::Restore => {
                next.restores += 1;
                next.cluster = next.copy.take()?;
                for of in &mut next.claims {
                    (of.connected, of.put) = (false, None);
                }
            }
        }
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let intact = [
            Property::always(EXCLUSION, |_, state: &Self::State| state.holders().count() <= 1),
            Property::always(RISE, |_, state: &Self::State| !state.fell),
            Property::always(NOTHING_LEFT, |_, state: &Self::State| {
                let ended = |claim: usize| state.claims[claim].phase == Phase::Over && !state.claims[claim].release;
                !(0..A).any(|claim| ended(claim) && state.key(claim).is_some())
            }),
        ];
        let any = [
            Property::always(RISE_LATER, |_, state: &Self::State| !state.fell_later),
            Property::sometimes(SUCCESSOR, |_, state: &Self::State| {
                state.holders().any(|claim| state.claims[claim].before > 0)
            }),
            Property::sometimes(MIDDLE, |_, state: &Self::State| {
                state.claims.iter().any(|claim| match claim.phase {
                    Phase::Waiting { created, behind } => !state.exists(behind) && state.before(created).is_some(),
                    _ => false,
                })
            }),
            Property::sometimes(GONE, |_, state: &Self::State| {
                state.claims.iter().any(|claim| match claim.phase {
                    Phase::Waiting { created, behind } => !state.exists(behind) && !state.exists(created),
                    _ => false,
                })
            }),
        ];
        let restored = Property::sometimes(RESTORED, |_, state: &Self::State| {
            state
                .holders()
                .any(|claim| state.claims[claim].after_restore && state.given > 0)
        });
        let intact = intact.into_iter().filter(|_| self.restores == 0);
        let restored = [restored].into_iter().filter(|_| self.restores > 0);
        intact.chain(any).chain(restored).collect()
    }
}

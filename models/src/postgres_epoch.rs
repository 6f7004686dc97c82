//! Tokens on Postgres: a sequence without a log, and a durable ceiling.
//!
//! Sessions open, put the counter right, take the lock, draw a token and release. The server crashes, which resets the sequence and ends all
//! sessions, or is started anew with its data, or with an older copy of it. The clock is anything, but after the return of an older copy it
//! is above all tokens.

use stateright::{Model, Property};

/// How far the ceiling is raised above what it is raised for.
const CHUNK: u8 = 2;

/// How far the clock must be ahead of an intact sequence for the sequence to be set: more than others draw meanwhile.
const AHEAD: u8 = 5;

/// What is planted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// A session draws without a look at the counter.
    NoRaise,
    /// A session puts the counter right by what it saw before its turn.
    RaiseWithoutRecheck,
    /// A sequence that was reset goes on from the clock, also if that is behind the ceiling.
    RaiseToTheClockAlone,
    /// An intact sequence is set to the clock, however little that is ahead.
    SetBesideDraws,
    /// Only the start of the server is compared, and not the row that a crash removes.
    StartOfTheServerAlone,
    /// Sessions go on after a crash, as behind a pooler.
    SessionsSurviveACrash,
    /// A token above the ceiling is given.
    CeilingIgnored,
    /// A token is given after its ceiling was raised, without a look whether its session has lived through that.
    NoBeatAfterTheRaise,
}

/// The model of A sessions, and how far the search goes.
#[derive(Clone, Debug)]
pub struct PostgresEpoch<const A: usize> {
    /// How often each session takes the lock.
    pub locks: u8,
    /// How often the server crashes or is started anew.
    pub ends: u8,
    /// How often an older copy takes the place of the data.
    pub restores: u8,
    /// Whether the sequence has a log: a crash resets it to an older number, and not to its start.
    pub logged: bool,
    /// What is planted.
    pub bug: Option<Bug>,
}

/// What is on the server's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Data {
    /// The last token drawn. A crash resets it.
    sequence: u8,
    /// The run of the server in which the sequence is known to be intact. A crash removes it.
    era_row: Option<u8>,
    /// Durable: the run of the server in which the counter was put right.
    era: Option<u8>,
    /// Durable: where the sequence began in that run.
    start: u8,
    /// Durable: no token above it is given.
    ceiling: u8,
}

/// A state of the whole.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct State<const A: usize> {
    data: Data,
    copy: Option<Data>,
    /// The run of the server.
    run: u8,
    ends: u8,
    restores: u8,
    /// The clock must be above all tokens until the counter was put right.
    rests_on_the_clock: bool,
    /// Which session has the lock, and which one has the turn to put the counter right.
    lock: Option<u8>,
    turn: Option<u8>,
    sessions: [Session; A],
    given: u8,
    /// The highest token given when sessions ended last.
    given_before: u8,
    drawn: u8,
    fell: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Session {
    phase: Phase,
    /// The server has not ended it.
    alive: bool,
    /// The ceiling that it knows.
    ceiling: u8,
    locks: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Phase {
    Closed,
    /// The counter is not in order, as the session saw it.
    Looked(Data),
    /// Where the sequence is to begin is durable.
    Raised,
    /// The session has read the sequence, and sets it next if it is too low.
    Setting {
        sets: bool,
    },
    Ready,
    /// The session has the lock, and has drawn a token above the ceiling.
    Above {
        token: u8,
        is_raised: bool,
    },
    Holding,
}

/// The server's clock, beside the tokens drawn so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clock {
    /// It is behind all of them.
    Behind,
    /// It is ahead by less than what others draw meanwhile.
    JustAhead,
    /// It is far ahead.
    FarAhead,
}

/// A step.
#[expect(missing_docs, reason = "`session` is a session by number")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// A session opens, and looks at the counter.
    Open { session: usize, clock: Clock },
    /// The session makes durable where the sequence is to begin.
    Raise { session: usize, clock: Clock },
    /// The session reads where the sequence is.
    Read { session: usize },
    /// The session sets the sequence, and gives the turn back.
    Set { session: usize },
    /// The session takes the lock and draws a token.
    Take { session: usize },
    /// Another session makes a higher ceiling durable.
    RaiseCeiling { session: usize },
    /// The session is asked whether it lives.
    Beat { session: usize },
    /// The session releases the lock.
    Release { session: usize },
    /// The client notices that its session has ended.
    Close { session: usize },
    /// The server or one of its processes crashes.
    Crash { starts_anew: bool },
    /// The server is started anew with its data.
    Restart,
    /// The data is copied while the server is down.
    Copy,
    /// The server is started with the copy.
    Restore,
}

/// Tokens rise.
pub const RISE: &str = "tokens rise in the order in which they are given";
/// No token is above the ceiling.
pub const DURABLE: &str = "no token is given that is above the durable ceiling";
/// A token after a crash, a restart, or the return of an older copy.
pub const AFTER_AN_END: &str =
    "a token is given after a crash, a restart or the return of an older copy, and another one before it";
/// Tokens after a restore.
pub const AFTER_A_RESTORE: &str = "a token is given after the return of an older copy";
/// The ceiling is reached.
pub const ABOVE: &str = "a token is drawn that is above the ceiling";
/// The sequence is set while others draw.
pub const BESIDE: &str = "another session holds a lock while the sequence is set";

impl Data {
    fn is_intact(&self, run: u8, bug: Option<Bug>) -> bool {
        let row = self.era_row == Some(run) || bug == Some(Bug::StartOfTheServerAlone);
        self.era == Some(run) && row && self.sequence >= self.start
    }
}

impl<const A: usize> State<A> {
    fn now(&self, clock: Clock) -> u8 {
        let highest = self.drawn.max(self.data.sequence);
        match clock {
            Clock::Behind => 0,
            Clock::JustAhead => highest + 1,
            Clock::FarAhead => highest + AHEAD,
        }
    }

    fn give(&mut self, session: usize, token: u8) {
        self.fell |= token <= self.given;
        self.given = self.given.max(token);
        self.sessions[session].phase = Phase::Holding;
    }

    /// All sessions end, and with them what they have.
    fn end_sessions(&mut self, bug: Option<Bug>) {
        (self.lock, self.turn) = (None, None);
        self.given_before = self.given;
        for session in &mut self.sessions {
            if bug == Some(Bug::SessionsSurviveACrash) && session.phase == Phase::Ready {
                continue;
            }
            session.alive = false;
            // Only what the client has drawn can matter to it any more.
            if !matches!(session.phase, Phase::Above { .. }) {
                session.phase = Phase::Closed;
            }
        }
    }
}

impl<const A: usize> PostgresEpoch<A> {
    fn open(&self, state: &mut State<A>, session: usize, clock: Clock) {
        let (data, now) = (state.data, state.now(clock));
        let far_ahead = now >= data.sequence + self.ahead();
        let settled = data.is_intact(state.run, self.bug) && !far_ahead && data.sequence < data.ceiling;
        let of = &mut state.sessions[session];
        of.alive = true;
        of.ceiling = data.ceiling;
        of.phase = if settled || self.bug == Some(Bug::NoRaise) {
            Phase::Ready
        } else {
            Phase::Looked(data)
        };
    }

    fn ahead(&self) -> u8 {
        if self.bug == Some(Bug::SetBesideDraws) {
            1
        } else {
            AHEAD
        }
    }

    fn raise(&self, state: &mut State<A>, session: usize, clock: Clock) {
        let now = state.now(clock);
        let seen = match (self.bug, state.sessions[session].phase) {
            (Some(Bug::RaiseWithoutRecheck), Phase::Looked(seen)) => seen,
            _ => state.data,
        };
        let intact = seen.is_intact(state.run, self.bug);
        let start = match intact {
            true if now >= seen.sequence + self.ahead() => now,
            true => seen.sequence,
            false if self.bug == Some(Bug::RaiseToTheClockAlone) => now.max(seen.sequence),
            false => now.max(seen.ceiling).max(seen.sequence),
        };
        let data = &mut state.data;
        if !(intact && start == seen.sequence) {
            data.start = start;
        }
        if start + CHUNK / 2 >= data.ceiling || !intact {
            data.ceiling = data.ceiling.max(start + CHUNK);
        }
        data.era = Some(state.run);
        state.rests_on_the_clock = false;
        state.turn = Some(session as u8);
        state.sessions[session].phase = Phase::Raised;
    }

    fn set(&self, state: &mut State<A>, session: usize, sets: bool) {
        if sets {
            state.data.sequence = state.data.start;
        }
        state.data.era_row = Some(state.run);
        state.turn = None;
        let of = &mut state.sessions[session];
        of.phase = Phase::Ready;
        of.ceiling = state.data.ceiling;
    }

    fn take(&self, state: &mut State<A>, session: usize) {
        state.lock = Some(session as u8);
        state.data.sequence += 1;
        let token = state.data.sequence;
        state.drawn = state.drawn.max(token);
        let of = &mut state.sessions[session];
        of.locks += 1;
        if token <= of.ceiling || self.bug == Some(Bug::CeilingIgnored) {
            state.give(session, token);
        } else {
            of.phase = Phase::Above {
                token,
                is_raised: false,
            };
        }
    }

    fn session_actions(&self, state: &State<A>, session: usize, actions: &mut Vec<Action>) {
        let of = &state.sessions[session];
        let clocks: &[Clock] = match state.rests_on_the_clock {
            true => &[Clock::JustAhead, Clock::FarAhead],
            false => &[Clock::Behind, Clock::JustAhead, Clock::FarAhead],
        };
        match of.phase {
            Phase::Closed if of.locks < self.locks => {
                actions.extend(clocks.iter().map(|clock| Action::Open { session, clock: *clock }))
            }
            Phase::Closed => {}
            Phase::Looked(_) if state.turn.is_none() => {
                actions.extend(clocks.iter().map(|clock| Action::Raise { session, clock: *clock }))
            }
            Phase::Looked(_) => {}
            Phase::Raised => actions.push(Action::Read { session }),
            Phase::Setting { .. } => actions.push(Action::Set { session }),
            Phase::Ready if state.lock.is_none() && of.locks < self.locks => actions.push(Action::Take { session }),
            Phase::Ready => {}
            Phase::Above { is_raised: false, .. } => actions.push(Action::RaiseCeiling { session }),
            Phase::Above { is_raised: true, .. } => actions.push(Action::Beat { session }),
            Phase::Holding => actions.push(Action::Release { session }),
        }
        if matches!(of.phase, Phase::Above { .. }) {
            actions.push(Action::Close { session });
        }
    }
}

impl<const A: usize> Model for PostgresEpoch<A> {
    type State = State<A>;
    type Action = Action;

    fn init_states(&self) -> Vec<Self::State> {
        let data = Data {
            sequence: 0,
            era_row: None,
            era: None,
            start: 0,
            ceiling: 0,
        };
        vec![State {
            data,
            copy: None,
            run: 0,
            ends: 0,
            restores: 0,
            rests_on_the_clock: false,
            lock: None,
            turn: None,
            sessions: [Session {
                phase: Phase::Closed,
                alive: false,
                ceiling: 0,
                locks: 0,
            }; A],
            given: 0,
            given_before: 0,
            drawn: 0,
            fell: false,
        }]
    }

    fn actions(&self, state: &Self::State, actions: &mut Vec<Self::Action>) {
        for session in 0..A {
            self.session_actions(state, session, actions);
        }
        if state.ends < self.ends {
            actions.extend([
                Action::Crash { starts_anew: false },
                Action::Crash { starts_anew: true },
                Action::Restart,
            ]);
        }
        if state.restores < self.restores {
            actions.push(match state.copy {
                None => Action::Copy,
                Some(_) => Action::Restore,
            });
        }
    }

    fn next_state(&self, state: &Self::State, action: Self::Action) -> Option<Self::State> {
        let mut next = state.clone();
        match action {
            Action::Open { session, clock } => self.open(&mut next, session, clock),
            Action::Raise { session, clock } => self.raise(&mut next, session, clock),
            Action::Read { session } => {
                let lower = next.data.sequence < next.data.start;
                let sets = lower || self.bug == Some(Bug::RaiseWithoutRecheck);
                next.sessions[session].phase = Phase::Setting { sets };
            }
            Action::Set { session } => {
                if let Phase::Setting { sets } = state.sessions[session].phase {
                    self.set(&mut next, session, sets);
                }
            }
            Action::Take { session } => self.take(&mut next, session),
            Action::RaiseCeiling { session } => {
                if let Phase::Above { token, is_raised } = &mut next.sessions[session].phase {
                    next.data.ceiling = next.data.ceiling.max(*token + CHUNK);
                    *is_raised = true;
                }
            }
            Action::Beat { session } => {
                let of = &mut next.sessions[session];
                of.ceiling = next.data.ceiling;
                match of.phase {
                    Phase::Above { token, .. } if of.alive || self.bug == Some(Bug::NoBeatAfterTheRaise) => {
                        next.give(session, token);
                    }
                    _ => of.phase = Phase::Closed,
                }
            }
            Action::Release { session } => {
                next.sessions[session].phase = if next.sessions[session].alive {
                    Phase::Ready
                } else {
                    Phase::Closed
                };
                next.lock = next.lock.filter(|holder| usize::from(*holder) != session);
            }
            Action::Close { session } => {
                let of = &mut next.sessions[session];
                (of.phase, of.alive) = (Phase::Closed, false);
                next.lock = next.lock.filter(|holder| usize::from(*holder) != session);
            }
            Action::Crash { starts_anew } => {
                next.ends += 1;
                next.run += u8::from(starts_anew);
                next.data.sequence = if self.logged { next.data.start } else { 0 };
                next.data.era_row = None;
                next.end_sessions(self.bug);
            }
            Action::Restart => {
                next.ends += 1;
                next.run += 1;
                next.end_sessions(None);
            }
            Action::Copy => next.copy = Some(next.data),
            Action::Restore => {
                next.restores += 1;
                next.run += 1;
                next.data = next.copy.take()?;
                next.rests_on_the_clock = true;
                next.end_sessions(None);
            }
        }
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let always = [
            Property::always(RISE, |_, state: &Self::State| !state.fell),
            Property::always(DURABLE, |_, state: &Self::State| {
                state.restores > 0 || state.given <= state.data.ceiling
            }),
        ];
        let sometimes = [
            Property::sometimes(ABOVE, |_, state: &Self::State| {
                state.sessions.iter().any(|of| matches!(of.phase, Phase::Above { .. }))
            }),
            Property::sometimes(BESIDE, |_, state: &Self::State| {
                let sets = |of: &Session| matches!(of.phase, Phase::Setting { sets: true });
                let holds = |of: &Session| of.phase == Phase::Holding;
                state.sessions.iter().any(sets) && state.sessions.iter().any(holds)
            }),
            Property::sometimes(AFTER_AN_END, |_, state: &Self::State| {
                let holds = state.sessions.iter().any(|of| of.phase == Phase::Holding);
                holds && state.given_before > 0 && state.given > state.given_before
            }),
        ];
        let restored = Property::sometimes(AFTER_A_RESTORE, |_, state: &Self::State| {
            state.restores > 0
                && !state.rests_on_the_clock
                && state.sessions.iter().any(|of| of.phase == Phase::Holding)
        });
        let restored = [restored].into_iter().filter(|_| self.restores > 0);
        always.into_iter().chain(sometimes).chain(restored).collect()
    }
}

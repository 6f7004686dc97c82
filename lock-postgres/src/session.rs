//! A session that the server ends when nothing is heard of it for a ttl, and all its locks with it.
//!
//! **Invariant.** A session only ever sends single messages of the simple protocol; never `BEGIN`, and never the extended
//! protocol. So between two messages it is idle, outside of a transaction, and `idle_session_timeout` runs: whenever the
//! client falls silent, and after whichever byte, the server ends the session one ttl after the last message that arrived
//! as a whole.
//!
//! **Invariant.** A session that holds locks sends nothing whose commit waits for a standby, and nothing whose commit waits for the disk
//! but the reservation of a lock that it has to itself. On a server without a connection left, the end of one may go through any session.

use std::fmt;
use std::num::NonZeroU32;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lock_core::{Busy, Clock, ServerInfo, Stamp};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::commands;
use crate::counter::Start;
use crate::failure::Failure;
use crate::keys::shown;
use crate::notifications::Subscription;
use crate::proof::{Proof, elsewhere};
use crate::record::found_reserved;
use crate::rows::Rows;
use crate::schema::Schema;
use crate::wire::Wire;

/// How many statements are on their way at once. A heartbeat waits for no more than these, each of which the server gives
/// up soon enough: a lock on our tables loses no lease.
const FLIGHTS: usize = 8;

/// No value of a sequence: some key may be reserved, so each attempt looks for that in the same message.
const SOME_RESERVED: i64 = 0;

/// How many tokens one grant has at most. The sequence counts for all names at once. It starts at the clock in microseconds, and must be
/// behind it when data is lost: so it is unless there are more than 62 500 grants per second that have as many.
const BLOCK: NonZeroU32 = NonZeroU32::new(16).unwrap();

/// What a session is from its beginning on.
pub(crate) struct Opened {
    pub(crate) wire: Wire,
    pub(crate) id: Arc<str>,
    pub(crate) clock: Clock,
    pub(crate) pid: i32,
    pub(crate) proof: Proof,
    pub(crate) version: ServerInfo,
    pub(crate) start: Start,
    pub(crate) schema: Schema,
    /// When its backend was started, in microseconds since 1970 by the server's clock.
    pub(crate) started: i64,
    /// The sequence of that name, as the server numbers it.
    pub(crate) reserved_until: u32,
    /// Whether the role may read the reservations: one that only looks at locks need not.
    pub(crate) sees_reservations: bool,
    pub(crate) application_name: String,
    pub(crate) op_timeout: Duration,
}

/// One session on the server.
pub(crate) struct Session {
    opened: Opened,
    /// Where the sequence `reserved_until` was when it was seen to be in the past, or [`SOME_RESERVED`].
    known_past: AtomicI64,
    ceiling: AtomicU64,
    ttl: Mutex<Duration>,
    pub(crate) usage: Usage,
    /// The label that it shows, if that is known.
    label: Mutex<Option<String>>,
    /// Whether it has no token to give any more. What it carries stays.
    dry: AtomicBool,
    flights: Semaphore,
}

/// What a session was opened with is its own.
impl Deref for Session {
    type Target = Opened;

    fn deref(&self) -> &Opened {
        &self.opened
    }
}

/// What depends on a session.
#[derive(Debug)]
pub(crate) struct Usage {
    /// Locks that it carries, and attempts.
    pub(crate) carried: AtomicUsize,
    /// Whether what it carries has the session to itself.
    pub(crate) alone: AtomicBool,
    /// Whether a claim holds its lock here that is not to be renewed: nothing may be sent then.
    pub(crate) silent: AtomicBool,
    /// How many waits it shows to others.
    pub(crate) waits: AtomicUsize,
    /// Whether marks of waits are left that could not be taken back.
    pub(crate) stale: AtomicBool,
    /// How many locks the lease keeps that they share now, and how many leases there have been.
    pub(crate) sharing: Mutex<(usize, u64)>,
    pub(crate) used: Mutex<Stamp>,
}

/// Tokens that were drawn by a message sent then, before they are known to be good ones.
pub(crate) struct Draw {
    pub(crate) first: u64,
    pub(crate) last: u64,
    pub(crate) sent: Stamp,
    /// The highest ceiling that was known by then.
    pub(crate) ceiling: u64,
}

impl Draw {
    /// The last `count` tokens up to `last`, which was the highest of `count` that were drawn one after the other.
    ///
    /// **Invariant.** All of them are higher than every token of that name before, and lower than every later one. The first is at least
    /// the first that was drawn, since each draw raises the sequence. The lock was there before the first draw and stays until after the
    /// last, so no other grant of that name comes in between. What others draw in between is for other names: a token may be one of
    /// theirs, too, but tokens are only compared under one name.
    fn of(last: u64, count: NonZeroU32, sent: Stamp, ceiling: u64) -> Self {
        Self {
            first: last.saturating_sub(u64::from(count.get()) - 1),
            last,
            sent,
            ceiling,
        }
    }
}

impl Session {
    /// `known_past`: where the sequence `reserved_until` is, if that is in the past.
    pub(crate) fn new(opened: Opened, ttl: Duration, known_past: Option<i64>) -> Arc<Self> {
        Arc::new(Self {
            known_past: AtomicI64::new(known_past.unwrap_or(SOME_RESERVED)),
            ceiling: AtomicU64::new(opened.start.ceiling),
            ttl: Mutex::new(ttl),
            usage: Usage {
                carried: AtomicUsize::new(0),
                alone: AtomicBool::new(false),
                silent: AtomicBool::new(false),
                waits: AtomicUsize::new(0),
                stale: AtomicBool::new(false),
                sharing: Mutex::default(),
                used: Mutex::new(opened.clock.now()),
            },
            label: Mutex::new(Some(String::new())),
            dry: AtomicBool::new(false),
            flights: Semaphore::new(FLIGHTS),
            opened,
        })
    }

    pub(crate) fn ttl(&self) -> Duration {
        *lock(&self.ttl)
    }

    /// Whether nothing can be done with it any more. A session whose lease is over is ended: the server may have done it.
    pub(crate) fn is_over(&self) -> bool {
        let expired = self.wire.lease().is_some_and(|lease| !lease.is_valid(self.clock.now()));
        if expired {
            self.wire.end();
        }
        expired || self.wire.is_ended()
    }

    /// Whether it can take locks. The sequence that it knows may have been dropped, and made anew.
    pub(crate) fn is_useful(&self) -> bool {
        !self.is_over() && !self.dry.load(Ordering::Acquire)
    }

    /// From now on it takes no locks. It goes on with those that it carries, and ends after that.
    pub(crate) fn take_no_more(&self) {
        self.dry.store(true, Ordering::Release);
    }

    /// One message, and what it was answered with.
    pub(crate) async fn ask(&self, sql: &str) -> Result<Rows, Failure> {
        let _flight = self.flights.acquire().await.map_err(|_| Failure::Ended)?;
        self.ask_now(sql).await
    }

    /// The same, beside others that are on their way.
    async fn ask_now(&self, sql: &str) -> Result<Rows, Failure> {
        let sent = self.clock.now();
        // A session with a lease ends with it at the latest; what else it is asked has no more time than one operation.
        let limit = if self.wire.lease().is_some() {
            self.ttl()
        } else {
            self.op_timeout
        };
        let Ok(answer) = timeout(limit, self.wire.ask(sql)).await else {
            self.wire.end();
            return Err(Failure::Ended);
        };
        if !self.wire.is_ended() {
            self.heard(sent);
        }
        answer
    }

    /// Keeps the session for another ttl, and makes sure that it is still the same.
    pub(crate) async fn beat(&self) -> Result<(), Failure> {
        let sent = self.clock.now();
        self.prove().await?;
        self.heard(sent);
        Ok(())
    }

    /// The same, without taking note of it: the core does that, if it hears of it in time.
    pub(crate) async fn prove(&self) -> Result<(), Failure> {
        let rows = self.wire.ask(&format!("SELECT {}", self.proof)).await?;
        if Proof::is_met(rows.one()?, 0) {
            return Ok(());
        }
        Err(self.is_elsewhere())
    }

    /// A statement reached another session. Whatever this one has cannot be reached any more.
    pub(crate) fn is_elsewhere(&self) -> Failure {
        self.wire.end();
        tracing::error!(target: "fencelock", "a statement reached another session of Postgres: a pooler shares sessions");
        elsewhere().into()
    }

    /// The server answered what was sent then, if only with an error: it began to count anew later than that. A lease that
    /// is shared goes by its renewals alone, which the core takes note of.
    fn heard(&self, sent: Stamp) {
        if let Some(lease) = self.wire.lease().filter(|lease| lease.claim().is_some()) {
            lease.refreshed(sent, self.clock.now());
        }
    }

    /// Has the server keep the session for that ttl after the last sign of life. Only while it carries no lock.
    pub(crate) async fn set_ttl(&self, ttl: Duration) -> Result<(), Failure> {
        let rows = self.ask(&commands::limits(&self.proof, ttl, self.op_timeout)).await?;
        if rows.last().is_none() {
            return Err(self.is_elsewhere());
        }
        *lock(&self.ttl) = ttl;
        Ok(())
    }

    /// Takes the lock if it is free and not reserved.
    ///
    /// The tokens come from the sequence itself, after the lock: a table would be read as it was before.
    pub(crate) async fn try_lock(
        &self,
        key: i64,
        label: Option<&str>,
        wanted: NonZeroU32,
    ) -> Result<Result<Draw, Busy>, Failure> {
        let (show, count) = (self.relabel(label), wanted.min(BLOCK));
        let (ceiling, sent) = (self.ceiling(), self.clock.now());
        match self.take(key, &show, count).await {
            Ok(taken) => Ok(taken.map(|last| Draw::of(last, count, sent, ceiling))),
            Err(failure) => Err(self.undo(key, failure).await),
        }
    }

    /// The only way to a lock that the session does not have.
    ///
    /// **Invariant.** A lock that was taken is kept only after a look for a reservation that began once the lock was there. While no
    /// key is reserved, one at the sequence `reserved_until` will do, in the same statement.
    async fn take(&self, key: i64, show: &str, count: NonZeroU32) -> Result<Result<u64, Busy>, Failure> {
        let (proof, schema, reserved_until) = (&self.proof, &self.schema, self.reserved_until);
        let tokens = commands::tokens(self.start.sequence, count);
        let sql = match self.known_past.load(Ordering::Acquire) {
            SOME_RESERVED => commands::try_lock_unless_reserved(proof, key, &tokens, schema, reserved_until, show),
            known_past => {
                let none_reserved = commands::none_reserved(reserved_until, known_past);
                let attempt = commands::try_lock(proof, key, &tokens, &none_reserved) + show;
                match self.ask(&attempt).await?.one()?.get(0)? {
                    None => return Ok(Err(Busy::default())),
                    Some("0") => return Err(self.is_elsewhere()),
                    Some("-1") => commands::draw_unless_reserved(proof, key, &tokens, schema, reserved_until, "true"),
                    Some(last) => return last.parse().map(Ok).map_err(|_| Failure::Nonsense),
                }
            }
        };
        let rows = self.ask(&sql).await?;
        let row = rows.one()?;
        let past = row.get(4)?.map(|_| row.number(4)).transpose()?;
        self.known_past.store(past.unwrap_or(SOME_RESERVED), Ordering::Release);
        match row.get(0)? {
            Some("0") => Err(self.is_elsewhere()),
            Some(last) => last.parse().map(Ok).map_err(|_| Failure::Nonsense),
            None => Ok(Err(found_reserved(key, row)?)),
        }
    }

    /// Draws a token.
    pub(crate) async fn draw(&self) -> Result<Draw, Failure> {
        let (ceiling, sent) = (self.ceiling(), self.clock.now());
        let sql = commands::draw(&self.proof, self.start.sequence);
        match self.ask(&sql).await?.one()?.get(0)? {
            Some(last) => {
                let last = last.parse().map_err(|_| Failure::Nonsense)?;
                Ok(Draw::of(last, NonZeroU32::MIN, sent, ceiling))
            }
            None => Err(self.is_elsewhere()),
        }
    }

    /// Tokens up to here may be handed out, if they are drawn by a message that is sent after this was asked.
    pub(crate) fn ceiling(&self) -> u64 {
        self.ceiling.load(Ordering::Acquire)
    }

    /// A higher ceiling was made durable, by a message that was sent while the session was open.
    pub(crate) fn may_draw_up_to(&self, ceiling: u64) {
        self.ceiling.fetch_max(ceiling, Ordering::AcqRel);
    }

    /// Lets go of the lock, and wakes one of those who wait for it elsewhere.
    pub(crate) async fn release(&self, key: i64) -> Result<Unlocked, Failure> {
        let answer = self.ask(&commands::release(&self.proof, key)).await;
        let failure = match answer {
            Ok(rows) => {
                let row = rows.one()?;
                return match row.get(0)? {
                    Some(held) => Ok(Unlocked {
                        was_held: held == "t",
                        woke: row.get(1)?.is_some(),
                    }),
                    None => Err(self.is_elsewhere()),
                };
            }
            Err(failure) => failure,
        };
        // What is let go of stays let go of when the notification fails.
        if self.is_over() || failure.code().is_none() {
            return Err(failure);
        }
        self.unlock_all(key).await?;
        Ok(Unlocked {
            was_held: true,
            woke: false,
        })
    }

    /// Lets go of the lock however often the session has it.
    async fn unlock_all(&self, key: i64) -> Result<(), Failure> {
        loop {
            let rows = self.ask(&commands::unlock(&self.proof, key)).await?;
            match rows.one()?.get(0)? {
                Some("t") => {}
                Some(_) => return Ok(()),
                None => return Err(self.is_elsewhere()),
            }
        }
    }

    /// Makes sure that a failed attempt left no lock; or else ends the session. An error after the lock was taken keeps it.
    pub(crate) async fn undo(&self, key: i64, failure: Failure) -> Failure {
        if failure.is_about_what_is_gone() {
            self.take_no_more();
        }
        self.forget_label();
        if self.unlock_all(key).await.is_err() {
            self.wire.end();
        }
        failure
    }

    /// Shows others that this client waits for the lock, and subscribes to what wakes it. One of two messages: the second one
    /// is the attempt, which must see whatever was released before the subscription began.
    pub(crate) async fn begin_wait(&self, key: i64, slot: u32) -> Result<Subscription, Failure> {
        let subscription = self.wire.subscribe(commands::channel(key, slot));
        self.ask(&commands::begin_wait(&self.proof, key, slot)).await?;
        Ok(subscription)
    }

    /// Takes that back, in the order of the messages.
    pub(crate) async fn end_wait(&self, key: i64, slot: u32) {
        let sql = commands::end_wait(&self.proof, key, slot);
        for _ in 0..2 {
            match self.ask_now(&sql).await {
                Err(failure) if !self.is_over() => {
                    tracing::debug!(target: "fencelock", ?failure, key = %shown(key), "what shows a wait could not be taken back");
                }
                _ => return,
            }
        }
        self.make_stale();
    }

    /// Wakes another of those who wait for the lock, if it is free. Only while the client does not hold it: it is taken for that.
    pub(crate) async fn pass_on(&self, key: i64) {
        if let Err(failure) = self.ask(&commands::pass_on(&self.proof, key)).await {
            let failure = self.undo(key, failure).await;
            tracing::debug!(target: "fencelock", ?failure, key = %shown(key), "a wake-up could not be passed on");
        }
    }

    /// What shows the label of the only lock that the session carries, and no label if there are several.
    fn relabel(&self, label: Option<&str>) -> String {
        let alone = self.carries() <= 1;
        let wanted = label.filter(|_| alone).unwrap_or_default();
        let mut shown = lock(&self.label);
        if shown.as_deref() == Some(wanted) {
            return String::new();
        }
        *shown = Some(wanted.to_owned());
        commands::show(&self.proof, format!("{} {wanted}", self.application_name).trim_end())
    }

    /// A statement that fails takes its label back.
    fn forget_label(&self) {
        *lock(&self.label) = None;
    }
}

/// What came of a release.
pub(crate) struct Unlocked {
    pub(crate) was_held: bool,
    /// Whether somebody elsewhere waits for it.
    pub(crate) woke: bool,
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing here panics while holding a mutex.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("id", &self.id)
            .field("pid", &self.pid)
            .field("wire", &self.wire)
            .finish_non_exhaustive()
    }
}

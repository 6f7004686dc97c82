//! How a session begins.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use lock_core::{LockError, OwnerId};
use tokio::runtime::Handle;
use tokio::time::{sleep, timeout};
use tokio_postgres::error::SqlState;

use crate::carried::Carried;
use crate::commands::{self, millis};
use crate::counter::{self, NOW, Start};
use crate::failure::Failure;
use crate::proof::{Proof, elsewhere};
use crate::safety::{self, Server};
use crate::schema::{Schema, check_planted};
use crate::session::{Opened, Session};
use crate::sessions::Sessions;
use crate::tokens::locked;
use crate::wire::Wire;

/// How long the first pause is of a session that waits for its turn to put the counter right; the next ones are longer.
const FIRST_PAUSE: Duration = Duration::from_millis(25);

/// How long they are at most.
const LONGEST_PAUSE: Duration = Duration::from_millis(200);

/// How often a session is opened anew that begins with the answers of another client.
const REOPENINGS: usize = 5;

impl Sessions {
    /// A new session, for one claim to begin with.
    pub(crate) async fn open(self: &Arc<Self>, ttl: Duration) -> Result<Carried, Failure> {
        // All that uses sessions runs where the executor starts tasks.
        let runtime = Handle::current();
        let limit = self.settings.config.op_timeout;
        let opening = timeout(limit, self.open_now(ttl)).await;
        let session = match opening.unwrap_or_else(|_| Err(LockError::no_answer("connecting", limit).into())) {
            Ok(session) => session,
            Err(failure) => {
                if failure.is_about_room() {
                    self.pool.end_free(0);
                }
                return Err(match self.found_primary.load(Ordering::Acquire) {
                    true => failure.during_failover(),
                    false => failure,
                });
            }
        };
        session.look_after(&runtime);
        let carried = session.carry_alone();
        self.pool.add(&session);
        // It may have been closed meanwhile.
        if self.is_closed() {
            session.wire.end();
            return Err(LockError::closed().into());
        }
        self.listen(&session, &runtime).await;
        Ok(carried)
    }

    async fn open_now(self: &Arc<Self>, ttl: Duration) -> Result<Arc<Session>, Failure> {
        // PgBouncer hands on a session with the end of another client's answers in it, once in some hundred starts. That client may have had
        // several. The first message finds that, before anything is set or taken, and the connection is closed.
        for _ in 0..REOPENINGS {
            let opened = self.open_once(ttl).await;
            if !matches!(opened, Err(Failure::Nonsense)) {
                return opened;
            }
        }
        self.open_once(ttl).await
    }

    async fn open_once(self: &Arc<Self>, ttl: Duration) -> Result<Arc<Session>, Failure> {
        let settings = &self.settings;
        let limit = settings.config.op_timeout;
        let wire = Wire::open(settings, &Handle::current()).await?;
        let Ok(server) = timeout(limit * 4 / 5, Server::look(&wire)).await else {
            return Err(unanswered(limit).into());
        };
        let server = server?;
        server.check(settings.config.allow_unsafe)?;
        self.found_primary.store(true, Ordering::Release);
        let pooled = wire.named_process().await != Some(server.pid);
        if pooled {
            safety::pooled(&server, settings.config.session_pooler, settings.config.allow_unsafe)?;
        }
        let mark = pooled.then(|| OwnerId::random().to_string());
        let proof = Proof::new(server.pid, mark);
        // In a message of their own, so that nothing else depends on what they were before.
        let set = commands::settings(&proof, limit, server.has_transaction_timeout());
        if wire.ask(&set).await?.last().is_none() {
            return Err(elsewhere().into());
        }
        let check = commands::check_connection(&proof, ttl);
        let (checking, sequences) = tokio::join!(wire.ask(&check), self.sequences(&wire, &server));
        match checking {
            Err(Failure::Postgres(error)) if error.code() == Some(&SqlState::INVALID_PARAMETER_VALUE) => {}
            other => drop(other?),
        }
        let sequences = sequences?;
        let start = self.begin(&wire, &proof, sequences.token).await?;
        if wire.ask(&commands::limits(&proof, ttl, limit)).await?.last().is_none() {
            return Err(elsewhere().into());
        }
        // What is drawn from now on must be above that.
        self.saw(start.last);
        let opened = Opened {
            wire,
            id: OwnerId::random().to_string().into(),
            clock: self.clock.clone(),
            pid: server.pid,
            proof,
            version: server.named(),
            start,
            schema: settings.schema.clone(),
            started: server.started,
            reserved_until: sequences.reserved_until,
            sees_reservations: sequences.sees_reservations,
            application_name: settings.application_name(),
            op_timeout: limit,
        };
        Ok(Session::new(opened, ttl, sequences.known_past))
    }

    /// Where the counter is, once it is right. This session holds no lock so far, so it may wait for the disk.
    async fn begin(&self, wire: &Wire, proof: &Proof, sequence: u32) -> Result<Start, Failure> {
        if self.settings.config.read_only {
            // It draws no token.
            return Ok(Start {
                last: 0,
                ceiling: 0,
                sequence,
            });
        }
        let (schema, seen) = (&self.settings.schema, self.seen.load(Ordering::Acquire));
        let limit = self.settings.config.op_timeout / 4;
        let until = self.clock.now() + limit;
        let demand = proof.demand();
        let take_turn = demand.clone() + &counter::take_turn();
        let mut pause = FIRST_PAUSE;
        loop {
            let look = wire.ask(&counter::look(schema, sequence, seen)).await?;
            let look = counter::looked(&look, sequence)?;
            if look.is_settled {
                return Ok(look.start);
            }
            if wire.ask(&take_turn).await?.one()?.truth(0)? {
                break;
            }
            // Another session has the turn. What it has put right is right for this one, too.
            if self.clock.now() >= until {
                return match look.is_usable {
                    true => Ok(look.start),
                    false => Err(locked(limit).into()),
                };
            }
            sleep(pause.mul_f64(0.5 + fastrand::f64())).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
        let raise = counter::raise(schema, sequence, seen);
        let raise = format!("{demand}SET LOCAL lock_timeout = {}; {raise}", millis(limit));
        // If it fails, the session ends, and with it its turn.
        let raised = wire.ask(&raise).await;
        raised.map_err(|failure| match failure.is_limit() {
            true => locked(limit).into(),
            false => failure,
        })?;
        let settle = demand.clone() + &counter::settle(schema, sequence);
        let done = demand + &counter::done();
        // In order: the next session finds all of it.
        let (settled, done) = tokio::join!(wire.ask(&settle), wire.ask(&done));
        done?;
        counter::started(settled?.last(), sequence)
    }

    /// The sequences, which are made with their schema if it is missing.
    async fn sequences(&self, wire: &Wire, server: &Server) -> Result<Sequences, Failure> {
        let schema = &self.settings.schema;
        let read_only = self.settings.config.read_only;
        let look = look_for_sequences(schema);
        let mut rows = wire.ask(&look).await?;
        if rows.last().is_none() && read_only {
            // Without a schema nothing is held, so the numbers are of no use to anybody.
            return Ok(Sequences::default());
        }
        if rows.last().is_none() {
            let made = self.make_schema(wire, server).await;
            // If another session has made it anew since the first look, this role need not be able to.
            match wire.ask(&look).await {
                Ok(again) if again.last().is_some() => rows = again,
                looked => {
                    made?;
                    rows = looked?;
                }
            }
        }
        let row = rows.one()?;
        safety::sequence(row.number(1)?, row.truth(2)?, self.settings.config.allow_unsafe)?;
        check_planted(row.get(3)?, self.settings.config.allow_unsafe)?;
        let sees_reservations = row.truth(5)?;
        if !sees_reservations && !read_only {
            return Err(LockError::configuration(
                "the Postgres role may not read which names are reserved, so its locks would not respect that; grant what \
                 `fencelock schema postgres --role ROLE` prints",
            )
            .into());
        }
        Ok(Sequences {
            token: row.number(0)?,
            reserved_until: row.number(4)?,
            sees_reservations,
            known_past: row.get(6)?.map(|_| row.number(6)).transpose()?,
        })
    }

    async fn make_schema(&self, wire: &Wire, server: &Server) -> Result<(), Failure> {
        let schema = &self.settings.schema;
        let unlogged = server.has_unlogged_sequences();
        match wire.ask(&schema.create_alone(unlogged)).await {
            Ok(_) => Ok(()),
            Err(failure) if failure.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE) => {
                let user = self.settings.config.server.get_user().unwrap_or("ROLE");
                let sql = schema.create(unlogged) + &schema.grant(user);
                // Without the server's words, which would stand behind what is to be copied.
                Err(LockError::configuration(format!(
                    "the schema of fencelock is missing in this database, and the role may not make it; have this run \
                     by somebody who may:\n{sql}"
                ))
                .into())
            }
            Err(failure) => Err(failure),
        }
    }
}

/// The sequences of the schema, as the server numbers them.
#[derive(Default)]
struct Sequences {
    token: u32,
    reserved_until: u32,
    sees_reservations: bool,
    /// Where `reserved_until` is, if that is in the past.
    known_past: Option<i64>,
}

/// The sequence of tokens, its settings, what is planted on the tables, the sequence `reserved_until`, whether the role may see reservations,
/// and where that sequence is, if that is in the past.
fn look_for_sequences(schema: &Schema) -> String {
    let (token, planted) = (schema.literal_of("token"), schema.planted());
    let (reservation, reserved_until) = (schema.literal_of("reservation"), schema.literal_of("reserved_until"));
    format!(
        "SELECT t.seqrelid::oid::bigint, t.seqcache, t.seqcycle, {planted}, r.seqrelid::oid::bigint, \
         pg_catalog.has_sequence_privilege(r.seqrelid, 'SELECT') \
         AND pg_catalog.has_table_privilege(pg_catalog.to_regclass({reservation}), 'SELECT'), \
         CASE WHEN pg_catalog.has_sequence_privilege(r.seqrelid, 'SELECT') THEN ( \
         SELECT CASE WHEN v.last <= {NOW} THEN v.last END \
         FROM (SELECT pg_catalog.pg_sequence_last_value(r.seqrelid) OFFSET 0) AS v (last)) END \
         FROM pg_catalog.pg_sequence t, pg_catalog.pg_sequence r WHERE t.seqrelid = pg_catalog.to_regclass({token}) \
         AND r.seqrelid = pg_catalog.to_regclass({reserved_until}) AND pg_catalog.to_regclass({reservation}) IS NOT NULL"
    )
}

/// The connection is there, and nothing answers on it.
fn unanswered(limit: Duration) -> LockError {
    LockError::unavailable(
        "connecting",
        format!(
            "the connection was made, and the first statement got no answer within {:?}; if a pooler is between, it may have \
             no session left: each client needs one for each ttl that it uses, so raise default_pool_size",
            limit * 4 / 5
        ),
    )
}

//! Where fencing tokens come from.
//!
//! **Invariant.** Every token ever handed out is at most a ceiling that was on the disk *before* it was handed out.
//!
//! Tokens are drawn from a sequence that no log is written for, so a crash resets it. The ceiling is in a row that a
//! crash does not take back. A session that finds the sequence reset, or the server started anew, starts above the ceiling,
//! so above everything that was ever handed out, whatever the clock says. It also starts no lower than the clock in
//! microseconds: tokens go on rising when the data is that of an older copy, or when the locks move to another backend.
//!
//! Every session does that before it draws its first token, and whatever resets the sequence ends all sessions. So
//! nobody draws from a sequence that was reset. While it is intact it is only ever brought up to the clock, and only if
//! that is far above what others draw meanwhile.

use lock_core::{FencingToken, LockError};

use crate::failure::Failure;
use crate::rows::{Row, Rows};
use crate::schema::{FORMAT, Schema, literal};

/// How far the ceiling is raised above the sequence, for one wait for the disk. Less than what the clock gains in the time
/// that a restart takes, or the counter would run ahead of the clock, and the clock could not tell an older copy.
pub(crate) const CHUNK: u64 = 1 << 16;

/// How far the clock must be ahead of a sequence that is intact for the sequence to be brought up to it.
const AHEAD: u64 = 1 << 24;

/// If the clock is behind the ceiling, what tokens are counted from is the clock plus the smallest multiple of this that is
/// not behind: some 19 hours in microseconds. It goes on with the clock, so an older copy is told from what came after it,
/// and each time that the clock is set back takes one of these, however often the server is started then.
const LEAP: u64 = 1 << 36;

/// How near to the ceiling only sessions that can raise it draw.
const NEAR: u64 = 1 << 10;

/// What a session knows of the counter from its start on.
#[derive(Debug)]
pub(crate) struct Start {
    /// Every token drawn from now on is higher.
    pub(crate) last: u64,
    /// Tokens up to here may be handed out.
    pub(crate) ceiling: u64,
    /// The sequence, as the server numbers it.
    pub(crate) sequence: u32,
}

/// What tells one run of the server from another, and one sequence from another that took its place.
///
/// It is not what makes tokens safe across a crash: the server goes on with the same start time then.
fn era(sequence: &str) -> String {
    format!(
        "concat_ws('/', (extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint, \
         (SELECT oid FROM pg_database WHERE datname = current_database()), {sequence})"
    )
}

/// Microseconds since 1970, by the server's clock. A clock beyond all tokens says nothing.
pub(crate) const NOW: &str = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint";

/// The last token, whether or not one has been drawn.
const LAST: &str = "CASE WHEN t.is_called THEN t.last_value ELSE t.last_value - 1 END";

/// Whether the sequence `t` is what tokens were drawn from since the era `c` began.
fn intact(schema: &str, era: &str, seen: u64) -> String {
    format!(
        "c.era = {era} AND t.last_value >= greatest(c.start, {seen}) AND EXISTS (SELECT FROM {schema}.era e WHERE e.era = {era})"
    )
}

/// Whether that is so, with enough to spare for the time that it takes to put it right.
fn settled(intact: &str) -> String {
    format!("{intact} AND {NOW} < t.last_value + {AHEAD} / 2 AND t.last_value + {CHUNK} / 2 < c.ceiling")
}

/// Says where the counter is. Locks nothing and writes nothing.
pub(crate) fn look(schema: &Schema, sequence: u32, seen: u64) -> String {
    let (schema, era) = (schema.quoted(), era(&sequence.to_string()));
    let intact = intact(&schema, &era, seen);
    let settled = settled(&intact);
    // Without its rights a session goes on to what fails without them, and says so.
    let may = format!(
        "has_table_privilege({counter}, 'UPDATE') AND has_table_privilege({era_table}, 'INSERT') \
         AND has_table_privilege({era_table}, 'UPDATE') AND has_sequence_privilege({sequence}, 'USAGE') \
         AND has_sequence_privilege({sequence}, 'UPDATE')",
        counter = literal(&format!("{schema}.counter")),
        era_table = literal(&format!("{schema}.era")),
    );
    format!(
        "SELECT {LAST}, c.ceiling, c.format, {settled} AND {may}, {intact} AND t.last_value + {NEAR} < c.ceiling AND {may} \
         FROM {schema}.counter c, {schema}.token t"
    )
}

/// What a look at the counter has found.
pub(crate) struct Look {
    pub(crate) start: Start,
    /// Whether nothing is to be put right.
    pub(crate) is_settled: bool,
    /// Whether tokens can be drawn as it is, if what is to be put right has to wait.
    pub(crate) is_usable: bool,
}

/// What was answered to [`look`].
pub(crate) fn looked(rows: &Rows, sequence: u32) -> Result<Look, Failure> {
    let (start, row) = (started(rows.last(), sequence)?, rows.one()?);
    Ok(Look {
        start,
        is_settled: row.truth(3)?,
        is_usable: row.truth(4)?,
    })
}

/// Taken while the counter is put right, which takes two transactions. A number like any other.
pub(crate) const RAISING: i64 = 0x6665_6e63_656c_6f64;

/// Takes the turn to put the counter right, if it is free. It is not waited for: a statement that gives up waiting is an error in
/// the server's log, and of a crowd that starts at once each would leave one.
pub(crate) fn take_turn() -> String {
    format!("SELECT pg_try_advisory_lock({RAISING})")
}

/// Puts the counter right, in [turn](take_turn): the first of two messages, each of which is a transaction that cannot stay open.
/// The second one is [`settle`], once this one is known to be durable, and then [`done`].
///
/// Everybody who has something to put right takes turns. Where all is right, with enough to spare for the time that this
/// takes, nothing is locked and nothing is written: a session could not be opened without a wait for the disk otherwise.
/// `seen` is the highest token that this client has seen: a sequence below it has gone back.
pub(crate) fn raise(schema: &Schema, sequence: u32, seen: u64) -> String {
    let (schema, era, max) = (schema.quoted(), era(&sequence.to_string()), FencingToken::MAX);
    let intact = intact(&schema, &era, seen);
    let settled = settled(&intact);
    format!(
        "SELECT FROM {schema}.counter c WHERE NOT (
    SELECT {settled} FROM {schema}.token t
) FOR UPDATE;
WITH seen AS MATERIALIZED (
    SELECT t.last_value AS last, c.start, c.ceiling, {era} AS era,
        CASE WHEN {NOW} BETWEEN 0 AND {max} THEN {NOW} ELSE 0 END AS now,
        {intact} AS intact
    FROM {schema}.token t, {schema}.counter c
), aim AS MATERIALIZED (
    SELECT *, least({max}, CASE
        WHEN intact AND now < last + {AHEAD} THEN last
        WHEN intact THEN now
        WHEN now + {CHUNK} >= ceiling THEN greatest(now, ceiling, last, {seen})
        ELSE greatest(now + (ceiling - now + {LEAP} - 1) / {LEAP} * {LEAP}, last, {seen})
    END) AS start_at FROM seen
)
UPDATE {schema}.counter SET
    start = CASE WHEN intact AND start_at = last THEN counter.start ELSE start_at END,
    ceiling = greatest(counter.ceiling, least({max}, start_at + {CHUNK})),
    era = aim.era
FROM aim WHERE NOT intact OR start_at > last OR start_at + {CHUNK} / 2 > counter.ceiling;"
    )
}

/// Brings the sequence up to where the counter begins, and says where it is. A sequence is set at once, whatever becomes of the
/// transaction: so not before what it is set to is durable.
pub(crate) fn settle(schema: &Schema, sequence: u32) -> String {
    let schema = schema.quoted();
    format!(
        "SELECT setval({sequence}, c.start) FROM {schema}.counter c, {schema}.token t WHERE t.last_value < c.start;
INSERT INTO {schema}.era AS e (era) SELECT c.era FROM {schema}.counter c
    WHERE NOT EXISTS (SELECT FROM {schema}.era o WHERE o.era = c.era)
    ON CONFLICT (only_row) DO UPDATE SET era = excluded.era WHERE e.era <> excluded.era;
SELECT {LAST}, c.ceiling, c.format FROM {schema}.counter c, {schema}.token t"
    )
}

/// Lets the next one put the counter right.
pub(crate) fn done() -> String {
    format!("SELECT pg_advisory_unlock({RAISING})")
}

/// What was answered to [`look`] or [`settle`].
pub(crate) fn started(row: Option<&Row>, sequence: u32) -> Result<Start, Failure> {
    let row = row.ok_or_else(|| {
        LockError::configuration(
            "the table \"counter\" of fencelock's schema is empty; run the SQL that `fencelock schema postgres` prints",
        )
    })?;
    if row.text(2)? != FORMAT {
        return Err(LockError::configuration(format!(
            "the schema has format {}, and this version of fencelock knows format {FORMAT}; update this program, or use \
             another schema",
            row.text(2)?
        ))
        .into());
    }
    let start = Start {
        last: row.number(0)?,
        ceiling: row.number(1)?,
        sequence,
    };
    if start.last >= FencingToken::MAX.get() {
        return Err(exhausted().into());
    }
    Ok(start)
}

/// Makes a ceiling above `token` durable, and says which one it is.
pub(crate) fn raise_ceiling(schema: &Schema, token: u64) -> String {
    let (schema, max) = (schema.quoted(), FencingToken::MAX);
    format!(
        "SET LOCAL synchronous_commit = local;
UPDATE {schema}.counter SET ceiling = least({max}, {token} + {CHUNK}) WHERE ceiling < {token} + {CHUNK} / 2;
SELECT ceiling FROM {schema}.counter"
    )
}

/// Draws a token in a session that has not put the counter right itself, if somebody else has. Null if not.
pub(crate) fn draw_elsewhere(schema: &Schema) -> String {
    let schema = schema.quoted();
    let sequence = literal(&format!("{schema}.token"));
    let era = era(&format!("{sequence}::regclass::oid"));
    format!(
        "SELECT CASE WHEN token <= ceiling THEN token END FROM (
    SELECT CASE
        WHEN e.era = {era} AND c.era = e.era AND t.last_value >= c.start AND t.last_value + {NEAR} < c.ceiling
        THEN nextval({sequence}::regclass)
    END AS token, c.ceiling
    FROM {schema}.counter c, {schema}.era e, {schema}.token t OFFSET 0
) AS drawn
UNION ALL SELECT NULL WHERE NOT EXISTS (SELECT FROM {schema}.era)"
    )
}

pub(crate) fn exhausted() -> LockError {
    LockError::configuration(
        "the counter of fencing tokens has reached its end, 2^53; use a new schema, and reset the marks that the resources \
         keep",
    )
}

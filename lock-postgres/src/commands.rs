//! The statements of a session, each of which proves that it reached the session.

use std::num::NonZeroU32;
use std::time::Duration;

use lock_core::OwnerId;

use crate::counter::NOW;
use crate::proof::Proof;
use crate::schema::{Schema, literal};

/// How many of those who wait for a lock are told apart. A release wakes those of one of them.
pub(crate) const SLOTS: u32 = 32;

/// Taken, for a moment, by a session that raises the sequence `reserved_until`. A number like any other.
pub(crate) const RESERVING: i64 = 0x6665_6e63_656c_6f65;

/// How many reservations that are over are deleted with each new one, at most.
const SWEPT: u32 = 4;

/// How long a statement has at least, on a machine that is busy.
const SHORTEST_STATEMENT: Duration = Duration::from_millis(100);

/// The expression that draws so many tokens, one after the other, and yields the highest.
pub(crate) fn tokens(sequence: u32, count: NonZeroU32) -> String {
    let next = format!("nextval({sequence})");
    match count.get() {
        1 => next,
        count => format!("greatest({})", vec![&*next; count as usize].join(", ")),
    }
}

/// Takes the lock if it is free, and draws [its tokens](tokens) after that. Null: it is not free. Zero: this is another session. Negative: it is
/// taken, and [`draw_unless_reserved`] has to say whether it may be kept.
pub(crate) fn try_lock(proof: &Proof, key: i64, tokens: &str, none_reserved: &str) -> String {
    format!(
        "SELECT CASE WHEN ({proof}) IS NOT TRUE THEN 0 WHEN pg_try_advisory_lock({key}) THEN \
         CASE WHEN {none_reserved} THEN {tokens} ELSE -1 END END"
    )
}

/// Whether no key is reserved: the sequence is where it was when it was in the past. Read at the moment of its evaluation, and not as
/// of a snapshot: so after the lock, if it comes after that in a `CASE`.
pub(crate) fn none_reserved(reserved_until: u32, known_past: i64) -> String {
    format!("pg_sequence_last_value({reserved_until}) = {known_past}")
}

/// Whether some key may be reserved, for a session that knows the sequence by its name only, and may have no right to read it.
pub(crate) fn some_reserved(schema: &Schema) -> String {
    let sequence = format!("to_regclass({})", schema.literal_of("reserved_until"));
    format!(
        "CASE WHEN has_sequence_privilege({sequence}, 'SELECT') \
         THEN coalesce(pg_sequence_last_value({sequence}) > {NOW}, true) ELSE true END"
    )
}

/// Draws the tokens for a lock that an earlier statement has taken, or unlocks it if its key is reserved: the snapshot of this
/// statement is of a time after the lock. `taken` says whether the lock was taken.
///
/// The columns: the highest token, null without one, zero in another session; whether the lock was taken; how many microseconds are left of the
/// reservation, and its holder, null without one; where the sequence `reserved_until` is, if that is in the past.
pub(crate) fn draw_unless_reserved(
    proof: &Proof,
    key: i64,
    tokens: &str,
    schema: &Schema,
    reserved_until: u32,
    taken: &str,
) -> String {
    format!(
        "SELECT CASE WHEN ({proof}) IS NOT TRUE THEN 0 WHEN NOT {taken} THEN NULL WHEN r.key IS NULL THEN {tokens} \
         WHEN pg_advisory_unlock({key}) THEN NULL END, {taken}, r.until - t.now, r.holder, CASE WHEN t.last <= t.now THEN t.last END \
         FROM (SELECT {NOW}, pg_sequence_last_value({reserved_until}) OFFSET 0) AS t (now, last) \
         LEFT JOIN {}.reservation r ON r.key = {key} AND r.until > t.now",
        schema.quoted()
    )
}

/// Both in one message: takes the lock if it is free, and keeps it if it is not reserved. As [`draw_unless_reserved`].
pub(crate) fn try_lock_unless_reserved(
    proof: &Proof,
    key: i64,
    tokens: &str,
    schema: &Schema,
    reserved_until: u32,
    show: &str,
) -> String {
    let taken = "current_setting('fencelock.taken')::boolean";
    let draw = draw_unless_reserved(proof, key, tokens, schema, reserved_until, taken);
    format!(
        "SELECT set_config('fencelock.taken', \
         (CASE WHEN ({proof}) IS TRUE THEN pg_try_advisory_lock({key}) ELSE false END)::text, true){show}; {draw}"
    )
}

/// What commits of the table of reservations wait for: the disk of this server, and no standby.
const DURABLE: &str = "SET LOCAL synchronous_commit = local";

/// A reservation as the table has it.
pub(crate) struct Row<'a> {
    pub(crate) key: i64,
    pub(crate) owner: OwnerId,
    pub(crate) namespace: &'a str,
    /// Text for people.
    pub(crate) holder: &'a str,
}

/// Makes the reservation, of so many microseconds from the arrival of the message, on the session that holds the lock.
///
/// Before the row, the sequence `reserved_until` is raised to the end of the reservation, and by one at least: it may be above that although
/// others know it to be in the past, if the clock was set back. One session at a time does that, or a lower value could replace a higher one;
/// it lets the next one do it before it waits for the disk. A session on which this fails may still have that turn.
pub(crate) fn reserve(proof: &Proof, schema: &Schema, reserved_until: u32, row: &Row<'_>, length: i64) -> String {
    let (schema, demand) = (schema.quoted(), proof.demand());
    let (key, owner, namespace, holder) = (row.key, row.owner, literal(row.namespace), literal(row.holder));
    let until = format!("(extract(epoch FROM now()) * 1000000)::bigint + {length}");
    format!(
        "{DURABLE}; {demand}SELECT pg_advisory_lock({RESERVING}); \
         SELECT setval({reserved_until}, greatest(pg_sequence_last_value({reserved_until}) + 1, {until})); \
         SELECT pg_advisory_unlock({RESERVING}); \
         INSERT INTO {schema}.reservation (key, owner, until, namespace, holder) VALUES ({key}, '{owner}', {until}, {namespace}, {holder}) \
         ON CONFLICT (key) DO UPDATE SET owner = excluded.owner, until = excluded.until, namespace = excluded.namespace, \
         holder = excluded.holder; \
         DELETE FROM {schema}.reservation WHERE key IN (SELECT key FROM {schema}.reservation \
         WHERE until < (extract(epoch FROM now()) * 1000000)::bigint ORDER BY until LIMIT {SWEPT} FOR UPDATE SKIP LOCKED)"
    )
}

/// Deletes the reservation of that owner.
pub(crate) fn withdraw(proof: &Proof, schema: &Schema, key: i64, owner: &str) -> String {
    let (schema, owner, demand) = (schema.quoted(), literal(owner), proof.demand());
    format!("{DURABLE}; {demand}DELETE FROM {schema}.reservation WHERE key = {key} AND owner = {owner}")
}

/// Ends the session of that backend, if it is still the same, and waits for that as long as `limit`. A row that is false: it has not ended
/// by then.
pub(crate) fn end_backend(pid: i32, started: i64, limit: Duration) -> String {
    format!(
        "SELECT pg_terminate_backend(pid, {}) FROM pg_stat_activity \
         WHERE pid = {pid} AND (extract(epoch FROM backend_start) * 1000000)::bigint = {started}",
        millis(limit)
    )
}

/// Whether the key `$1` is reserved.
pub(crate) fn is_reserved(schema: &Schema) -> String {
    let schema = schema.quoted();
    format!("SELECT EXISTS (SELECT FROM {schema}.reservation WHERE key = $1 AND until > {NOW})")
}

/// The reservations that are not over: key, owner, microseconds that are left, and holder.
pub(crate) fn reservations(schema: &Schema, condition: &str) -> String {
    let schema = schema.quoted();
    format!(
        "SELECT key, owner, until - {NOW}, holder FROM {schema}.reservation \
         WHERE until > {NOW} AND {condition}"
    )
}

/// Draws a token. Null: this is another session.
pub(crate) fn draw(proof: &Proof, sequence: u32) -> String {
    format!("SELECT CASE WHEN {proof} THEN nextval({sequence}) END")
}

/// Whether it was held; null: this is another session.
pub(crate) fn unlock(proof: &Proof, key: i64) -> String {
    format!("SELECT CASE WHEN {proof} THEN pg_advisory_unlock({key}) END")
}

/// The same, and wakes one of those who wait elsewhere, if there are any: then the second column is not null.
///
/// **Invariant.** Who waits first shows it, by shared locks in the other space of keys, and then tries to take the lock. A
/// release first unlocks, and then looks whether somebody shows that. So one of them sees the other. What is only looked at
/// is let go of at once, and what this very session shows is not in its own way.
///
/// Who waits has one of several slots beside that, so that not all of them are woken to find that one was faster.
pub(crate) fn release(proof: &Proof, key: i64) -> String {
    let (high, low) = halves(key);
    let first = fastrand::u32(..SLOTS);
    let last = SLOTS - 1;
    let slot = format!("({low} # (1 + (({first} + slot) & {last})))");
    let hexadecimal = crate::keys::shown(key);
    format!(
        "SELECT CASE WHEN {proof} THEN pg_advisory_unlock({key}) END, \
         CASE WHEN ({proof}) IS NOT TRUE THEN NULL \
         WHEN pg_try_advisory_lock({high}, {low}) THEN CASE WHEN pg_advisory_unlock({high}, {low}) THEN NULL END \
         ELSE concat((SELECT pg_notify('fencelock ' || '{hexadecimal} ' || (({first} + slot) & {last}), '') \
         FROM generate_series(0, {last}) slot \
         WHERE CASE WHEN pg_try_advisory_lock({high}, {slot}) THEN NOT pg_advisory_unlock({high}, {slot}) ELSE true END \
         LIMIT 1), 'woke') END"
    )
}

/// The channel on which those in that slot are woken. Anybody may notify it: who is woken only looks again.
pub(crate) fn channel(key: i64, slot: u32) -> String {
    format!("fencelock {} {slot}", crate::keys::shown(key))
}

pub(crate) fn begin_wait(proof: &Proof, key: i64, slot: u32) -> String {
    let (high, low) = halves(key);
    let (demand, channel) = (proof.demand(), channel(key, slot));
    let slot = format!("'{}'::integer", of_slot(key, slot));
    format!(
        "{demand}LISTEN \"{channel}\"; \
         SELECT pg_advisory_lock_shared({high}, {low}), pg_advisory_lock_shared({high}, {slot})"
    )
}

pub(crate) fn end_wait(proof: &Proof, key: i64, slot: u32) -> String {
    let (high, low) = halves(key);
    let (demand, channel) = (proof.demand(), channel(key, slot));
    let slot = format!("'{}'::integer", of_slot(key, slot));
    format!(
        "{demand}UNLISTEN \"{channel}\"; \
         SELECT pg_advisory_unlock_shared({high}, {low}), pg_advisory_unlock_shared({high}, {slot})"
    )
}

/// Passes on a wake-up that is of no use any more, if the lock is still free: taken and released, it wakes another.
pub(crate) fn pass_on(proof: &Proof, key: i64) -> String {
    format!(
        "SELECT CASE WHEN ({proof}) IS TRUE AND pg_try_advisory_lock({key}) THEN (SELECT concat(r.*) FROM ({}) r) END",
        release(proof, key)
    )
}

/// Shows that as the name of the session, which is ASCII: an encoding that lacks a letter of it would fail the statement.
pub(crate) fn show(proof: &Proof, name: &str) -> String {
    let name = literal(&name.replace(|letter: char| !letter.is_ascii(), "?"));
    format!(", CASE WHEN {proof} THEN set_config('application_name', {name}, false) END")
}

/// What the session sets for itself, whatever the role or the database would have it be: in a transaction of its own, which
/// depends on none of that. While it is opened it has more patience than later: nobody depends on it so far, and others may
/// be putting the counter right. A client that stops meanwhile must not keep them from it, so the server ends a session that
/// is silent for as long as an operation may take. No row: this is another session.
pub(crate) fn settings(proof: &Proof, op_timeout: Duration, has_transaction_timeout: bool) -> String {
    let (patience, silence) = (millis(op_timeout / 2).to_string(), millis(op_timeout).to_string());
    let mut settings = vec![
        ("search_path", "pg_catalog"),
        // What the server makes of expressions is compared.
        ("quote_all_identifiers", "off"),
        ("default_transaction_isolation", "read committed"),
        ("default_transaction_read_only", "off"),
        ("default_transaction_deferrable", "off"),
        ("synchronous_commit", "local"),
        ("tcp_keepalives_idle", "15"),
        ("tcp_keepalives_interval", "5"),
        ("tcp_keepalives_count", "3"),
        ("idle_in_transaction_session_timeout", "0"),
        ("idle_session_timeout", &silence),
        ("statement_timeout", &patience),
        ("lock_timeout", &patience),
    ];
    if has_transaction_timeout {
        settings.push(("transaction_timeout", "0"));
    }
    let sets = settings.iter().map(|(name, value)| set(name, value));
    format!(
        "{FREE_OF_DEFAULTS}; SELECT {}{} WHERE {}",
        sets.collect::<Vec<_>>().join(", "),
        proof.marking(),
        proof.unmarked()
    )
}

/// What comes first in a message, so that it waits for no transaction of others. A standby takes it, too.
pub(crate) const FREE_OF_DEFAULTS: &str = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED, NOT DEFERRABLE";

/// Not every system that Postgres runs on can do that, so it is asked for by itself.
pub(crate) fn check_connection(proof: &Proof, ttl: Duration) -> String {
    let interval = millis((ttl / 4).min(Duration::from_secs(1))).to_string();
    format!(
        "SELECT {} WHERE {proof}",
        set("client_connection_check_interval", &interval)
    )
}

/// What holds from the moment on at which the session may carry locks: the limits that follow from the ttl, and commits that
/// wait for nothing. A commit waits if its transaction has a number, which a notification and a logged sequence give it, and has
/// written anything to the log, which even reading may do. No row: this is another session.
pub(crate) fn limits(proof: &Proof, ttl: Duration, op_timeout: Duration) -> String {
    let statement = millis((ttl / 4).max(SHORTEST_STATEMENT).min(op_timeout / 2));
    format!(
        "SELECT {}, {}, {}, {} WHERE {proof}",
        set("synchronous_commit", "off"),
        set("idle_session_timeout", &millis(ttl).to_string()),
        set("statement_timeout", &statement.to_string()),
        set("lock_timeout", &millis(ttl / 40).to_string())
    )
}

fn set(name: &str, value: &str) -> String {
    format!("pg_catalog.set_config('{name}', '{value}', false)")
}

/// The two numbers of 32 bits that a key is in the other space of keys. The smallest one is no literal of its own.
fn halves(key: i64) -> (String, String) {
    let literal = |half: i32| format!("'{half}'::integer");
    (literal((key >> 32) as i32), literal(key as i32))
}

/// The second number of a slot.
fn of_slot(key: i64, slot: u32) -> i32 {
    key as i32 ^ (1 + (slot & (SLOTS - 1))) as i32
}

/// Whole microseconds, never less than what was asked for.
pub(crate) fn micros(time: Duration) -> i64 {
    i64::try_from(time.as_nanos().div_ceil(1000))
        .unwrap_or(i64::MAX / 4)
        .min(i64::MAX / 4)
}

/// The server counts in milliseconds; never less than what was asked for.
pub(crate) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

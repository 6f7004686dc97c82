//! The statements of a session, each of which proves that it reached the session.

use std::time::Duration;

use crate::proof::Proof;
use crate::schema::literal;

/// How many of those who wait for a lock are told apart. A release wakes those of one of them.
pub(crate) const SLOTS: u32 = 32;

/// How long a statement has at least, on a machine that is busy.
const SHORTEST_STATEMENT: Duration = Duration::from_millis(100);

/// How many connections are left for those who are not superusers: of a hundred, or else of all if there are fewer.
pub(crate) const ROOM: &str = "(pg_catalog.current_setting('max_connections')::bigint \
    - pg_catalog.current_setting('superuser_reserved_connections')::bigint \
    - coalesce(pg_catalog.current_setting('reserved_connections', true), '0')::bigint \
    - (SELECT pg_catalog.count(*) FROM pg_catalog.pg_stat_get_activity(NULL) WHERE datid IS NOT NULL)) \
    * 100 / least(100, pg_catalog.current_setting('max_connections')::bigint)";

/// Takes the lock if it is free, and draws the token after that. Null: it is not free. Negative: this is another session.
pub(crate) fn try_lock(proof: &Proof, key: i64, sequence: u32) -> String {
    format!(
        "SELECT CASE WHEN ({proof}) IS NOT TRUE THEN -1 WHEN pg_try_advisory_lock({key}) THEN nextval({sequence}) END"
    )
}

/// Null: this is another session.
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
        ("synchronous_commit", "on"),
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

/// The server counts in milliseconds; never less than what was asked for.
pub(crate) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

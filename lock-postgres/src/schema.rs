//! What the database holds: six small things in a schema of their own.

use lock_core::LockError;

/// The format of what is below. A schema with another one is refused.
pub(crate) const FORMAT: &str = "1";

/// Taken while the schema is made: two that make it at once would hit each other's names. A number like any other.
pub(crate) const MAKING: i64 = 0x6665_6e63_656c_6f63;

/// The name of a schema, and the statements that are about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Schema(String);

impl Schema {
    /// # Errors
    ///
    /// If Postgres would not take the name as it is.
    pub(crate) fn new(name: &str) -> Result<Self, LockError> {
        // What is longer is cut by the server, and what is quoted may hold anything else.
        if name.is_empty() || name.len() > 63 || name.chars().any(char::is_control) {
            return Err(LockError::configuration(
                "the name of a schema has 1 to 63 bytes and no control character; choose another",
            ));
        }
        Ok(Self(name.to_owned()))
    }

    /// The schema as SQL names it.
    pub(crate) fn quoted(&self) -> String {
        quoted(&self.0)
    }

    /// One of the things in the schema, as a literal of SQL.
    pub(crate) fn literal_of(&self, thing: &str) -> String {
        literal(&format!("{}.{thing}", self.quoted()))
    }

    /// Makes what is missing. To be run by whoever may create a schema in the database.
    ///
    /// `counter` says below what tokens may be drawn; it is what survives a crash. `token` is where they are drawn from, and
    /// `era` what knows whether `token` is still what it was: both are lost in a crash, which costs nothing to write. `channel`
    /// is where clients are asked what they hold: who may read its name may ask. `reservation` has a row for each reserved key. The last value
    /// of `reserved_until` is no less than the end of each of them, in microseconds since 1970; it is never null, so null means that the role
    /// may not read it.
    pub(crate) fn create(&self, unlogged_sequences: bool) -> String {
        let (schema, reserved_until) = (self.quoted(), self.literal_of("reserved_until"));
        let unlogged = if unlogged_sequences { "UNLOGGED " } else { "" };
        format!(
            "CREATE SCHEMA IF NOT EXISTS {schema};
CREATE TABLE IF NOT EXISTS {schema}.counter (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    format integer NOT NULL DEFAULT {FORMAT},
    start bigint NOT NULL DEFAULT 0,
    ceiling bigint NOT NULL DEFAULT 0,
    era text NOT NULL DEFAULT ''
);
INSERT INTO {schema}.counter DEFAULT VALUES ON CONFLICT DO NOTHING;
CREATE TABLE IF NOT EXISTS {schema}.channel (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    name text NOT NULL
);
INSERT INTO {schema}.channel (name) VALUES ('fencelock_' || gen_random_uuid()) ON CONFLICT DO NOTHING;
CREATE UNLOGGED TABLE IF NOT EXISTS {schema}.era (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    era text NOT NULL
);
CREATE {unlogged}SEQUENCE IF NOT EXISTS {schema}.token MAXVALUE 9007199254740991 CACHE 1 NO CYCLE;
CREATE TABLE IF NOT EXISTS {schema}.reservation (
    key bigint PRIMARY KEY,
    owner text NOT NULL,
    until bigint NOT NULL,
    namespace text NOT NULL,
    holder text NOT NULL
);
CREATE INDEX IF NOT EXISTS reservation_until ON {schema}.reservation (until);
CREATE SEQUENCE IF NOT EXISTS {schema}.reserved_until CACHE 1 NO CYCLE;
SELECT setval({reserved_until}, 1) WHERE pg_sequence_last_value({reserved_until}) IS NULL;
"
        )
    }

    /// The same, for two that do it at once.
    pub(crate) fn create_alone(&self, unlogged_sequences: bool) -> String {
        format!(
            "SELECT pg_advisory_xact_lock({MAKING});\n{}",
            self.create(unlogged_sequences)
        )
    }

    /// An expression that names what is in the way of the tables and is not ours, or is null.
    ///
    /// Triggers, rules, policies, and expressions of columns, constraints and indexes run with the rights of each role that uses
    /// a table. Whoever made the schema first could have them run by all roles that lock.
    pub(crate) fn planted(&self) -> String {
        let tables = ["counter", "era", "channel", "reservation"].map(|table| self.literal_of(table));
        let tables = format!(
            "IN ({})",
            tables.map(|table| format!("to_regclass({table})")).join(", ")
        );
        format!(
            "(SELECT string_agg(what, ', ') FROM (
    SELECT format('trigger %I', tgname) FROM pg_trigger WHERE tgrelid {tables} AND NOT tgisinternal
    UNION ALL SELECT format('rule %I', rulename) FROM pg_rewrite WHERE ev_class {tables}
    UNION ALL SELECT format('policy %I', polname) FROM pg_policy WHERE polrelid {tables}
    UNION ALL SELECT format('relation %I', relname) FROM pg_class
        WHERE oid {tables} AND (relkind <> 'r' OR relhassubclass OR relispartition)
    UNION ALL SELECT format('column %I', attname) FROM pg_attribute WHERE attrelid {tables} AND attnum > 0 AND NOT attisdropped
        AND (attgenerated <> '' OR atttypid NOT IN ('boolean'::regtype, 'integer'::regtype, 'bigint'::regtype, 'text'::regtype))
    UNION ALL SELECT format('default %s', pg_get_expr(adbin, adrelid)) FROM pg_attrdef WHERE adrelid {tables}
        AND pg_get_expr(adbin, adrelid) !~ '^(true|[0-9]+|''''::text)$'
    UNION ALL SELECT format('constraint %I', conname) FROM pg_constraint WHERE conrelid {tables}
        AND contype NOT IN ('p', 'n') AND (contype <> 'c' OR pg_get_expr(conbin, conrelid) <> 'only_row')
    UNION ALL SELECT format('index %s', indexrelid::regclass) FROM pg_index WHERE indrelid {tables}
        AND (indexprs IS NOT NULL OR indpred IS NOT NULL)
) AS planted (what))"
        )
    }

    /// The least that `role` needs to lock.
    pub(crate) fn grant(&self, role: &str) -> String {
        let (schema, role) = (self.quoted(), quoted(role));
        format!(
            "GRANT USAGE ON SCHEMA {schema} TO {role};
GRANT SELECT, UPDATE ON {schema}.counter TO {role};
GRANT SELECT, INSERT, UPDATE ON {schema}.era TO {role};
GRANT SELECT ON {schema}.channel TO {role};
GRANT SELECT, USAGE, UPDATE ON SEQUENCE {schema}.token TO {role};
GRANT SELECT, INSERT, UPDATE, DELETE ON {schema}.reservation TO {role};
GRANT SELECT, UPDATE ON SEQUENCE {schema}.reserved_until TO {role};
"
        )
    }
}

/// A name as SQL wants it, whatever is in it.
pub(crate) fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// A text as SQL wants it, whatever is in it. Valid whatever `standard_conforming_strings` and `backslash_quote` say.
pub(crate) fn literal(text: &str) -> String {
    format!("E'{}'", text.replace('\\', "\\\\").replace('\'', "''"))
}

/// Refuses tables that would run code of others.
pub(crate) fn check_planted(planted: Option<&str>, allow_unsafe: bool) -> Result<(), LockError> {
    let Some(planted) = planted else { return Ok(()) };
    crate::safety::refuse(
        allow_unsafe,
        &format!(
            "the tables of fencelock's schema have something on them that runs with the rights of each role that locks \
             ({planted}); find out who made it, then drop the schema and have it made by a role that all of them trust"
        ),
    )
}

/// The SQL that makes the schema, for whoever may; to be run once in the database. With a role also the least rights
/// that it needs to lock.
///
/// ```
/// let sql = lock_postgres::schema_sql("fencelock", Some("shop"))?;
/// assert!(sql.starts_with("CREATE SCHEMA IF NOT EXISTS \"fencelock\""));
/// assert!(sql.contains("GRANT USAGE ON SCHEMA \"fencelock\" TO \"shop\""));
/// # Ok::<(), lock_core::LockError>(())
/// ```
///
/// It is for Postgres 15 and later. In version 14 sequences cannot be unlogged: leave the word out there.
///
/// # Errors
///
/// [`LockError::Configuration`] if the schema cannot have that name.
pub fn schema_sql(schema: &str, role: Option<&str>) -> Result<String, LockError> {
    let schema = Schema::new(schema)?;
    let grants = role.map(|role| schema.grant(role)).unwrap_or_default();
    Ok(schema.create(true) + &grants)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_texts_are_quoted_whatever_is_in_them() {
        assert_eq!(quoted(r#"a"b"#), r#""a""b""#);
        assert_eq!(literal(r"a'b\c"), r"E'a''b\\c'");
        assert!(Schema::new("").is_err());
        assert!(Schema::new(&"x".repeat(64)).is_err());
        assert!(Schema::new("a\nb").is_err());
    }
}

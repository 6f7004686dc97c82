//! How statements prove that they reach their own session.
//!
//! **Invariant.** No statement of a session takes, keeps or frees a lock, draws a token or changes a setting unless it is
//! worked by the backend that the session began with. Each says so itself: a look beforehand would say nothing about what
//! a pooler does with the next message.

use std::fmt;

use lock_core::LockError;

use crate::rows::Row;
use crate::schema::literal;

/// What a session behind a pooler is marked with. A session that has a mark when a connection begins was handed on as
/// another client left it.
pub(crate) const MARK: &str = "fencelock.session";

/// A condition of SQL that is true in one session alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Proof {
    pid: i32,
    /// The mark, if a pooler is between: it may hand the backend to others.
    mark: Option<String>,
}

impl Proof {
    pub(crate) fn new(pid: i32, mark: Option<String>) -> Self {
        Self { pid, mark }
    }

    /// The condition for the statement that sets the mark.
    pub(crate) fn unmarked(&self) -> String {
        let pid = self.pid;
        match self.mark {
            Some(_) => format!(
                "pg_catalog.pg_backend_pid() = {pid} AND coalesce(pg_catalog.current_setting('{MARK}', true), '') = ''"
            ),
            None => format!("pg_catalog.pg_backend_pid() = {pid}"),
        }
    }

    /// What sets the mark, as one more column.
    pub(crate) fn marking(&self) -> String {
        let mark = self.mark.as_deref().map(literal);
        mark.map_or_else(String::new, |mark| {
            format!(", pg_catalog.set_config('{MARK}', {mark}, false)")
        })
    }

    /// A statement that fails in another session, so that those after it in its message do nothing.
    pub(crate) fn demand(&self) -> String {
        match self.mark {
            Some(_) => format!("SELECT 1 / CASE WHEN {self} THEN 1 ELSE 0 END; "),
            None => String::new(),
        }
    }

    /// Whether the column that asked for the condition says that it was met.
    pub(crate) fn is_met(row: &Row, column: usize) -> bool {
        row.truth(column).is_ok_and(|met| met)
    }
}

/// As SQL writes it.
impl fmt::Display for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pg_backend_pid() = {}", self.pid)?;
        match &self.mark {
            Some(mark) => write!(f, " AND current_setting('{MARK}', true) = {}", literal(mark)),
            None => Ok(()),
        }
    }
}

/// A statement reached another session.
pub(crate) fn elsewhere() -> LockError {
    LockError::unsafe_configuration(
        "statements of one connection reach different sessions of Postgres, so a pooler between them shares \
                  sessions; connect to the server itself, or set the pooler to pool_mode = session"
            .to_owned(),
    )
}

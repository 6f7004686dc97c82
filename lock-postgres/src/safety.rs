//! Which servers locks are safe on.

use lock_core::{LockError, ServerInfo};

use crate::commands::FREE_OF_DEFAULTS;
use crate::failure::Failure;
use crate::proof::MARK;
use crate::wire::Wire;

/// What is asked before anything is set: through a pooler it would be set for others too.
fn look() -> String {
    format!(
        "{FREE_OF_DEFAULTS}; SELECT pg_catalog.pg_backend_pid(), pg_catalog.current_setting('server_version_num'), \
         pg_catalog.pg_is_in_recovery(), pg_catalog.current_setting('fsync'), \
         pg_catalog.current_setting('server_version'), coalesce(pg_catalog.current_setting('{MARK}', true), ''), \
         (SELECT (extract(epoch FROM backend_start) * 1000000)::bigint FROM pg_catalog.pg_stat_get_activity(pg_catalog.pg_backend_pid()))"
    )
}

/// What a new connection tells of its server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Server {
    pub(crate) pid: i32,
    version: u32,
    recovering: bool,
    fsync: bool,
    /// The version as it tells it itself, and what may follow: `17.4 (Debian 17.4-1)`.
    full_version: String,
    /// Whether another client has left its mark on the session.
    marked: bool,
    /// When the backend was started, in microseconds since 1970.
    pub(crate) started: i64,
}

impl Server {
    pub(crate) async fn look(wire: &Wire) -> Result<Self, Failure> {
        let rows = wire.ask(&look()).await?;
        let row = rows.one()?;
        Ok(Self {
            pid: row.number(0)?,
            version: row.number(1)?,
            recovering: row.truth(2)?,
            fsync: row.text(3)? != "off",
            full_version: row.text(4)?.to_owned(),
            marked: !row.text(5)?.is_empty(),
            started: row.number(6)?,
        })
    }

    pub(crate) fn named(&self) -> ServerInfo {
        let version = self.full_version.split_whitespace().next();
        ServerInfo::new("PostgreSQL", version.unwrap_or_default())
    }

    /// Whether sequences can go without a log.
    pub(crate) fn has_unlogged_sequences(&self) -> bool {
        self.version >= 150_000
    }

    /// Whether transactions have a limit of their own.
    pub(crate) fn has_transaction_timeout(&self) -> bool {
        self.version >= 170_000
    }

    /// Refuses what locks are not safe on, or warns if that is wanted.
    pub(crate) fn check(&self, allow_unsafe: bool) -> Result<(), Failure> {
        if self.version < 140_000 {
            return Err(LockError::unsafe_configuration(format!(
                "this Postgres has version {}, and locks need 14 or later, which can end silent sessions; update the \
                     server",
                self.version / 10_000
            ))
            .into());
        }
        if self.recovering {
            return Err(Failure::Standby);
        }
        if !self.fsync {
            refuse(
                allow_unsafe,
                "this Postgres runs with fsync = off, so a crash of its machine may take back what tokens depend on; set \
                 fsync = on",
            )?;
        }
        Ok(())
    }
}

/// Refuses a pooler, unless it is said to give each client a session of its own, and has not handed on one that another
/// client has used.
///
/// Nothing that a client can look at tells one kind of pooler from the other: sessions may change with each statement, or
/// only when others are busy. So it has to be said.
pub(crate) fn pooled(server: &Server, session_pooler: bool, allow_unsafe: bool) -> Result<(), LockError> {
    if !session_pooler {
        refuse(
            allow_unsafe,
            "there is a pooler before this Postgres, and one that shares sessions among clients would let two hold the same \
             lock; connect to the server itself, or, if the pooler gives each client a session of its own (PgBouncer: \
             pool_mode = session), add pool_mode=session to the address",
        )?;
    }
    if server.marked {
        refuse(
            allow_unsafe,
            "the pooler before this Postgres handed on a session as another client of locks has left it, with its locks; let \
             it clean up sessions (PgBouncer: server_reset_query = DISCARD ALL) and set pool_mode = session",
        )?;
    }
    Ok(())
}

/// Refuses a sequence that repeats numbers, or hands them out ahead.
pub(crate) fn sequence(cache: u64, cycle: bool, allow_unsafe: bool) -> Result<(), LockError> {
    if cache == 1 && !cycle {
        return Ok(());
    }
    refuse(
        allow_unsafe,
        "the sequence \"token\" of fencelock's schema was altered so that tokens do not rise; run ALTER SEQUENCE ... CACHE \
         1 NO CYCLE on it",
    )
}

pub(crate) fn refuse(allow_unsafe: bool, message: &str) -> Result<(), LockError> {
    if !allow_unsafe {
        return Err(LockError::unsafe_configuration(format!(
            "{message}; allow_unsafe_configuration turns this refusal into a warning"
        )));
    }
    tracing::warn!(target: "fencelock", "unsafe configuration of Postgres: {message}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usual() -> Server {
        Server {
            pid: 1,
            version: 170_002,
            recovering: false,
            fsync: true,
            full_version: "17.2 (Debian 17.2-1)".to_owned(),
            marked: false,
            started: 0,
        }
    }

    fn refusal(server: &Server, allow_unsafe: bool) -> Option<String> {
        server.check(allow_unsafe).err().map(|failure| {
            let error = failure.explain("connecting");
            assert!(matches!(error, LockError::UnsafeConfiguration { .. }), "{error:?}");
            error.to_string()
        })
    }

    #[test]
    fn a_usual_server_is_accepted_and_named() {
        assert_eq!(usual().named().to_string(), "PostgreSQL 17.2");
        assert_eq!(refusal(&usual(), false), None);
        let fourteen = Server {
            version: 140_000,
            ..usual()
        };
        assert_eq!(refusal(&fourteen, false), None);
        assert!(!fourteen.has_unlogged_sequences() && usual().has_unlogged_sequences());
        assert!(sequence(1, false, false).is_ok());
    }

    #[test]
    fn what_is_unsafe_is_refused_with_what_to_change_unless_it_is_allowed() {
        let careless = Server {
            fsync: false,
            ..usual()
        };
        assert!(refusal(&careless, false).unwrap().contains("fsync = on"));
        assert_eq!(refusal(&careless, true), None);
        for (cache, cycle) in [(2, false), (1, true)] {
            assert!(
                sequence(cache, cycle, false)
                    .unwrap_err()
                    .to_string()
                    .contains("CACHE 1")
            );
            assert!(sequence(cache, cycle, true).is_ok());
        }
    }

    #[test]
    fn a_pooler_is_refused_unless_it_is_said_to_share_nothing_and_does_not() {
        assert!(pooled(&usual(), true, false).is_ok());
        let said = pooled(&usual(), false, false).unwrap_err().to_string();
        assert!(said.contains("pool_mode=session"), "{said}");
        let inherited = Server {
            marked: true,
            ..usual()
        };
        let said = pooled(&inherited, true, false).unwrap_err().to_string();
        assert!(said.contains("server_reset_query"), "{said}");
        assert!(pooled(&inherited, false, true).is_ok());
    }

    #[test]
    fn what_cannot_keep_locks_is_refused_in_any_case() {
        let old = Server {
            version: 130_020,
            ..usual()
        };
        assert!(refusal(&old, true).unwrap().contains("14"));
        let follower = Server {
            recovering: true,
            ..usual()
        };
        assert!(refusal(&follower, true).unwrap().contains("primary"));
    }
}

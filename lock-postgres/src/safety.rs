//! Which servers locks are safe on.

use lock_core::{BackendVersion, LockError};

use crate::failure::Failure;
use crate::wire::{Wire, standby};

/// What is asked before anything is set: through a pooler it would be set for others too.
const LOOK: &str = "SELECT pg_backend_pid(), current_setting('server_version_num'), pg_is_in_recovery(), \
                    current_setting('fsync'), current_setting('server_version')";

const PID: &str = "SELECT pg_backend_pid()";

/// What a new connection tells of its server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Server {
    pub(crate) pid: i32,
    version: u32,
    recovering: bool,
    fsync: bool,
    /// The version as it tells it itself, and what may follow: `17.4 (Debian 17.4-1)`.
    full_version: String,
}

impl Server {
    pub(crate) async fn look(wire: &Wire) -> Result<Self, Failure> {
        let rows = wire.ask(LOOK).await?;
        let row = rows.one()?;
        Ok(Self {
            pid: row.number(0)?,
            version: row.number(1)?,
            recovering: row.truth(2)?,
            fsync: row.text(3)? != "off",
            full_version: row.text(4)?.to_owned(),
        })
    }

    pub(crate) fn named(&self) -> BackendVersion {
        let version = self.full_version.split_whitespace().next();
        BackendVersion::new("PostgreSQL", version.unwrap_or_default())
    }

    /// Whether sequences can go without a log.
    pub(crate) fn has_unlogged_sequences(&self) -> bool {
        self.version >= 150_000
    }

    /// Refuses what locks are not safe on, or warns if that is wanted.
    pub(crate) fn check(&self, allow_unsafe: bool) -> Result<(), LockError> {
        if self.version < 140_000 {
            return Err(LockError::UnsafeConfiguration {
                message: format!(
                    "this Postgres has version {}, and locks need 14 or later, which can end silent sessions; update the \
                     server",
                    self.version / 10_000
                ),
            });
        }
        if self.recovering {
            return Err(standby());
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

/// Refuses a server of which another connection, that is idle as well, reaches the same session.
///
/// One client alone may never see its session change behind a pooler, so two are compared.
pub(crate) async fn not_pooled(server: &Server, other: &Wire, allow_unsafe: bool) -> Result<(), Failure> {
    let theirs: i32 = other.ask(PID).await?.one()?.number(0)?;
    Ok(own_session(theirs != server.pid, allow_unsafe)?)
}

/// Refuses a connection whose statements do not all reach the same session, or not that alone.
pub(crate) fn own_session(is_own: bool, allow_unsafe: bool) -> Result<(), LockError> {
    if is_own {
        return Ok(());
    }
    refuse(
        allow_unsafe,
        "statements of one connection reach different sessions of Postgres, so a pooler between them shares sessions; \
         connect to the server itself, or set the pooler to pool_mode = session",
    )
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

fn refuse(allow_unsafe: bool, message: &str) -> Result<(), LockError> {
    if !allow_unsafe {
        return Err(LockError::UnsafeConfiguration {
            message: format!("{message}; allow_unsafe_configuration turns this refusal into a warning"),
        });
    }
    tracing::warn!("unsafe configuration of Postgres: {message}");
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
        }
    }

    fn refusal(server: &Server, allow_unsafe: bool) -> Option<String> {
        server.check(allow_unsafe).err().map(|error| {
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

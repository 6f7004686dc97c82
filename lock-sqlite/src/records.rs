//! What the database says of the locks that are held.

use std::time::{Duration, UNIX_EPOCH};

use lock_core::{FencingToken, Holder, LockName, ParseOwnerIdError};
use rusqlite::types::Type;
use rusqlite::{Connection, OptionalExtension, Row};

use crate::boot::{Boot, until};
use crate::failure::Failure;

/// Asks who holds a name.
pub(crate) const HOLDER: &str = "SELECT name, owner, token, expires, label, host, pid, acquired_at, client = '' FROM lock \
                                 WHERE name = ?1 AND boot = ?2 AND expires > ?3";

const COLUMNS: &str = "name, owner, token, expires, label, host, pid, acquired_at, client = ''";

/// What is held, as a connection of any kind reads it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Records<'a> {
    conn: &'a Connection,
    boot: &'a Boot,
}

impl<'a> Records<'a> {
    pub(crate) fn new(conn: &'a Connection, boot: &'a Boot) -> Self {
        Self { conn, boot }
    }

    /// Who holds the name.
    pub(crate) fn holder(&self, name: &LockName) -> Result<Option<Holder>, Failure> {
        read_holder(self.conn, self.boot, self.boot.now(), name)
    }

    /// What is held under names that start with `prefix`, by name.
    pub(crate) fn list(&self, prefix: &str) -> Result<Vec<Holder>, Failure> {
        let now = self.boot.now();
        let mut statement = self.conn.prepare_cached(&format!(
            "SELECT {COLUMNS} FROM lock WHERE name >= ?1 AND boot = ?2 AND expires > ?3 ORDER BY name"
        ))?;
        let mut rows = statement.query((prefix, self.boot.id(), now))?;
        let mut held = Vec::new();
        // Text is compared byte for byte, so all that start with the prefix stand together.
        while let Some(row) = rows.next()? {
            if !row.get_ref(0)?.as_str().is_ok_and(|name| name.starts_with(prefix)) {
                break;
            }
            match holder_from(row, now) {
                Ok(holder) => held.push(holder),
                Err(error) => {
                    let name = row
                        .get_ref(0)?
                        .as_bytes()
                        .map(String::from_utf8_lossy)
                        .unwrap_or_default();
                    tracing::warn!(target: "fencelock", error = format_args!("{error:#}"), %name, "a damaged entry is left out of the list");
                }
            }
        }
        Ok(held)
    }
}

/// Who holds the name at `now`.
pub(crate) fn read_holder(
    conn: &Connection,
    boot: &Boot,
    now: i64,
    name: &LockName,
) -> Result<Option<Holder>, Failure> {
    let mut statement = conn.prepare_cached(HOLDER)?;
    let held = statement
        .query_row((name.as_str(), boot.id(), now), |row| Ok(holder_from(row, now)))
        .optional()?;
    held.transpose().map_err(|error| {
        tracing::warn!(target: "fencelock", error = format_args!("{error:#}"), %name, "a damaged entry");
        Failure::Row(name.as_str().to_owned())
    })
}

fn holder_from(row: &Row<'_>, now: i64) -> rusqlite::Result<Holder> {
    let broken = |column, e| rusqlite::Error::FromSqlConversionFailure(column, Type::Null, e);
    let mut holder = Holder::new();
    holder.name = Some(LockName::new(row.get_ref(0)?.as_str()?).map_err(|e| broken(0, e.into()))?);
    holder.owner = Some(
        row.get_ref(1)?
            .as_str()?
            .parse()
            .map_err(|e: ParseOwnerIdError| broken(1, e.into()))?,
    );
    holder.token = Some(FencingToken::try_from(row.get::<_, i64>(2)?).map_err(|e| broken(2, e.into()))?);
    holder.remaining = Some(until(now, row.get(3)?));
    holder.label = row.get(4)?;
    holder.host = row.get(5)?;
    holder.pid = row.get(6)?;
    let acquired = u64::try_from(row.get::<_, i64>(7)?).unwrap_or(0);
    holder.acquired_at = UNIX_EPOCH.checked_add(Duration::from_micros(acquired));
    holder.is_reserved = row.get(8)?;
    Ok(holder)
}

//! The files that a client that only reads finds, and whether they have changed while it read.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use lock_core::LockError;
use rustix::fs::{Access, AtFlags, CWD, accessat};
use rustix::io::Errno;

use crate::failure::Failure;
use crate::place::{Identity, Use, examine, nothing_there, resolve, unreadable_here, with_suffix};

/// The files of a database that a reader looks at, as they are at one moment.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Files {
    /// Where links lead to; SQLite puts the log beside it.
    real: PathBuf,
    identity: Identity,
    length: u64,
    /// Seconds and nanoseconds: when the content and the entry were changed last.
    changed: [(i64, i64); 2],
    log: Option<Identity>,
    log_is_empty: bool,
    index: Option<Identity>,
    journal: Option<Identity>,
}

impl Files {
    /// Looks at the path, and makes nothing.
    pub(crate) fn look(path: &Path, allow_unsafe: bool) -> Result<Self, Failure> {
        let missing = || {
            LockError::configuration(format!(
                "there is no file {}; check the path. The file is made with the first lock that is taken there",
                path.display()
            ))
        };
        if fs::metadata(path).is_err_and(|e| nothing_there(&e)) {
            return Err(missing().into());
        }
        let (real, file) = resolve(path)?;
        let file = file.ok_or_else(missing)?;
        examine(path, &real, Some(&file), allow_unsafe, Use::Reading)?;
        let beside = |suffix| {
            let beside = with_suffix(&real, suffix);
            let Some(file) = Identity::at(&beside)? else {
                return Ok(None);
            };
            match accessat(CWD, &beside, Access::READ_OK, AtFlags::EACCESS) {
                Err(Errno::ACCESS) => Err(Failure::Refused(unreadable_here(&beside))),
                _ => Ok(Some(file)),
            }
        };
        let log = beside("-wal")?;
        let length = log.and_then(|_| fs::metadata(with_suffix(&real, "-wal")).ok());
        Ok(Self {
            identity: Identity::of(&file),
            length: file.len(),
            changed: [(file.mtime(), file.mtime_nsec()), (file.ctime(), file.ctime_nsec())],
            log,
            log_is_empty: length.is_none_or(|log| log.len() == 0),
            index: beside("-shm")?,
            journal: beside("-journal")?,
            real,
        })
    }

    /// The path to open.
    pub(crate) fn real(&self) -> &Path {
        &self.real
    }

    /// Whether this process may write to the database, as far as can be told.
    pub(crate) fn may_be_written(&self) -> bool {
        !matches!(
            accessat(CWD, &self.real, Access::WRITE_OK, AtFlags::EACCESS),
            Err(Errno::ACCESS | Errno::ROFS)
        )
    }

    /// The number of the file.
    pub(crate) fn number(&self) -> u64 {
        self.identity.inode
    }

    /// Whether nothing was ever written to the file.
    pub(crate) fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Whether a client has a log beside the database, or has left one there.
    pub(crate) fn has_log(&self) -> bool {
        self.log.is_some() && !self.has_bare_log()
    }

    /// Whether there is a log with nothing in it, and no client that has opened it to the end.
    pub(crate) fn has_bare_log(&self) -> bool {
        self.log.is_some() && self.log_is_empty && self.index.is_none()
    }

    /// The file that only a client that may write can put right; it may be about to.
    pub(crate) fn unfinished(&self) -> Option<PathBuf> {
        let suffix = if self.journal.is_some() {
            "-journal"
        } else if self.has_log() && self.index.is_none() {
            "-wal"
        } else {
            return None;
        };
        Some(with_suffix(&self.real, suffix))
    }

    /// Whether they are still the same files as `before`; their content may have changed.
    pub(crate) fn are_those(&self, before: &Self) -> bool {
        (&self.real, self.identity, self.log, self.index, self.journal)
            == (&before.real, before.identity, before.log, before.index, before.journal)
    }

    /// Whether the content was changed so shortly before `now` that another change may leave the same time behind.
    pub(crate) fn are_fresh(&self, now: SystemTime) -> bool {
        // The coarsest clock of a kernel ticks a hundred times a second.
        const TICKS: Duration = Duration::from_millis(20);
        let [(seconds, nanos), _] = self.changed;
        let written = u64::try_from(seconds).ok().zip(u32::try_from(nanos).ok());
        let written = written.and_then(|(seconds, nanos)| UNIX_EPOCH.checked_add(Duration::new(seconds, nanos)));
        // None: the clock was set back since.
        let age = written.and_then(|written| now.duration_since(written).ok());
        age.is_some_and(|age| age < TICKS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_fresh_for_a_while_after_it_was_written_to() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.db");
        fs::write(&path, "").unwrap();
        let files = Files::look(&path, false).unwrap();
        let written = fs::metadata(&path).unwrap().modified().unwrap();
        let ms = Duration::from_millis;
        for (now, fresh) in [
            (written, true),
            (written + ms(19), true),
            (written + ms(20), false),
            (written - ms(1), false),
        ] {
            assert_eq!(files.are_fresh(now), fresh, "{now:?}");
        }
    }
}

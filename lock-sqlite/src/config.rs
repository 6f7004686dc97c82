//! How a client is set up.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{self, Path, PathBuf};
use std::time::Duration;

use lock_core::LockError;
use percent_encoding::percent_decode_str;

/// The file that holds the locks, and how to work it.
///
/// ```
/// use std::time::Duration;
/// use lock_sqlite::SqliteConfig;
///
/// let config = SqliteConfig::new("/var/lib/shop/locks.db").op_timeout(Duration::from_secs(2));
/// assert_eq!(config, SqliteConfig::from_url("sqlite:/var/lib/shop/locks.db?op_timeout=2s")?);
/// # Ok::<(), lock_core::LockError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SqliteConfig {
    pub(crate) path: PathBuf,
    pub(crate) op_timeout: Duration,
    pub(crate) allow_unsafe: bool,
    pub(crate) read_only: bool,
}

impl SqliteConfig {
    /// Locks in the file at `path`, which is made if it is missing; its directory is not. A relative path counts from the
    /// current directory at the time of [`connect`](Self::connect).
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            op_timeout: Duration::from_secs(5),
            allow_unsafe: false,
            read_only: false,
        }
    }

    /// Reads an address:
    ///
    /// | address | file |
    /// |---|---|
    /// | `sqlite:locks.db`, `sqlite://locks.db` | `locks.db` in the current directory |
    /// | `sqlite:/var/lib/locks.db`, `sqlite:///var/lib/locks.db` | `/var/lib/locks.db` |
    /// | `sqlite:a%20b.db` | `a b.db`: what is special in addresses (`?`, `#`, `%`) is written as `%` and two digits |
    ///
    /// | parameter | meaning | default |
    /// |---|---|---|
    /// | `op_timeout` | see [`op_timeout`](Self::op_timeout); `500ms`, `5s`, `1m` | `5s` |
    /// | `mode` | `ro`: see [`read_only`](Self::read_only) | locks can be taken |
    /// | `allow_unsafe_configuration` | see [there](Self::allow_unsafe_configuration); `true` or `false` | `false` |
    ///
    /// # Errors
    ///
    /// [`LockError::Configuration`] if the address is not one of these, or a parameter is unknown, repeated or wrong.
    pub fn from_url(url: &str) -> Result<Self, LockError> {
        let wrong = |why: String| LockError::configuration(format!("the address of the SQLite file {why}"));
        let config = parse(url).map_err(wrong)?;
        config.absolute()?;
        Ok(config)
    }

    /// How long one request may take before it counts as failed. 5 s if not set. A process that is stopped inside a
    /// transaction makes requests of all others take that long. More than a day counts as a day; zero is refused when
    /// connecting.
    #[must_use]
    pub fn op_timeout(mut self, limit: Duration) -> Self {
        self.op_timeout = limit;
        self
    }

    /// Turns what would be refused, because locks might not exclude, into a warning: a network or FUSE file system, a
    /// file with several hard links or mounted on its own, a boot id or boot clock of the container's own.
    #[must_use]
    pub fn allow_unsafe_configuration(mut self, allow: bool) -> Self {
        self.allow_unsafe = allow;
        self
    }

    /// Only looks at locks: [`holders`](lock_core::DistributedLock::holders), [`list`](lock_core::DistributedLock::list) and
    /// [`server_info`](lock_core::DistributedLock::server_info) work. Everything that would take, renew or release a lock fails with
    /// [`LockError::Configuration`].
    ///
    /// The client makes no file, and changes none. It needs the right to read the file and those beside it, and none to write.
    /// A file that does not exist is a [`LockError::Configuration`]; one that is empty holds no locks. Each request opens the
    /// file that is there then, and closes it.
    #[must_use]
    pub fn read_only(mut self, read_only: bool) -> Self {
        self.read_only = read_only;
        self
    }

    /// The path as it was given.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The path from the root. SQLite would give a meaning of its own to some relative ones, such as `:memory:`.
    pub(crate) fn absolute(&self) -> Result<PathBuf, LockError> {
        let (text, shown) = (self.path.as_os_str().as_bytes(), self.path.display());
        let wrong = if text.is_empty() || text == b":memory:" {
            "a SQLite database in memory excludes no other process; give the path of a file".to_owned()
        } else if text.contains(&0) {
            let shown = shown.to_string();
            format!(
                "{} holds a nul byte, which no path can; remove it",
                shown.escape_debug()
            )
        } else if matches!(text.rsplit(|&b| b == b'/').next(), Some(b"" | b"." | b"..")) {
            // The system drops a last slash at times and at times does not, so it would not be the same file to every process.
            format!("{shown} is the path of a directory; give the path of a file")
        } else {
            let wrong = |e| LockError::configuration(format!("{shown} cannot be made absolute")).with_source(e);
            return path::absolute(&self.path).map_err(wrong);
        };
        Err(LockError::configuration(wrong))
    }
}

/// What is wrong with the address is said without its beginning.
fn parse(url: &str) -> Result<SqliteConfig, String> {
    const NO_SQLITE: &str = "must start with sqlite:, as in sqlite:locks.db or sqlite:///var/lib/locks.db";
    const PARAMETERS: &str = "op_timeout (such as 5s), mode (ro) and allow_unsafe_configuration (true or false)";

    let rest = url.strip_prefix("sqlite:").ok_or(NO_SQLITE)?;
    let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
    let host = path.strip_prefix("//").filter(|path| !path.starts_with('/'));
    let path = path.strip_prefix("//").unwrap_or(path);
    let is_odd = url.trim() != url || url.chars().any(char::is_control);
    let wrong = match () {
        () if rest.contains('#') => "holds a #; write it as %23",
        () if is_odd => "ends with white space, or holds a control character such as a line break; remove it",
        // Errors show the path.
        () if host.is_some_and(|host| host.contains('@')) => {
            "names a user or a host, and a file has none; write an @ in a path as %40"
        }
        () if path.is_empty() => "names no file, as in sqlite:locks.db or sqlite:///var/lib/locks.db",
        () => "",
    };
    if !wrong.is_empty() {
        return Err(wrong.to_owned());
    }
    let mut config = SqliteConfig::new(OsString::from_vec(percent_decode_str(path).collect()));
    let mut given = Vec::new();
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let value = percent_decode_str(value).decode_utf8_lossy();
        if given.contains(&name) {
            return Err(format!("gives {name} twice; give it once"));
        }
        given.push(name);
        config = match name {
            "op_timeout" => {
                let limit = humantime::parse_duration(&value).ok().filter(|limit| !limit.is_zero());
                config.op_timeout(limit.ok_or("has a wrong op_timeout; give a time above zero, such as 5s or 500ms")?)
            }
            "mode" if value == "ro" => config.read_only(true),
            "mode" => return Err("has a wrong mode; give ro to look at locks only, or leave it out".to_owned()),
            "allow_unsafe_configuration" => {
                let allow = value
                    .parse()
                    .map_err(|_| format!("has a wrong {name}; give true or false"));
                config.allow_unsafe_configuration(allow?)
            }
            _ => return Err(format!("has an unknown parameter; known are {PARAMETERS}")),
        };
    }
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_names_a_file_and_parameters() {
        for (url, path) in [
            ("sqlite:a/b.db", &b"a/b.db"[..]),
            ("sqlite://a/b.db", b"a/b.db"),
            ("sqlite:///a/b%20c.db", b"/a/b c.db"),
            ("sqlite:100%25%3F.db?", b"100%?.db"),
            ("sqlite:%FF.db", b"\xFF.db"),
        ] {
            let wanted = SqliteConfig::new(OsString::from_vec(path.to_vec()));
            assert_eq!(SqliteConfig::from_url(url).unwrap(), wanted, "{url}");
        }
        let all = "sqlite:a.db?op_timeout=500ms&mode=ro&allow_unsafe_configuration=true";
        let wanted = SqliteConfig::new("a.db").op_timeout(Duration::from_millis(500));
        let wanted = wanted.read_only(true).allow_unsafe_configuration(true);
        assert_eq!(SqliteConfig::from_url(all).unwrap(), wanted);
    }

    #[test]
    fn a_wrong_address_is_refused_with_what_is_known() {
        for (url, told) in [
            ("redis://a", "sqlite:locks.db"),
            ("sqlite:a.db?timeout=1s", "known are op_timeout"),
            ("sqlite:a.db?op_timeout=0s", "such as 5s"),
            ("sqlite:a.db?op_timeout=soon", "such as 5s"),
            ("sqlite:a.db?mode=rwc", "give ro"),
            ("sqlite:a.db?op_timeout=1s&op_timeout=1s", "twice"),
            ("sqlite:a.db?allow_unsafe_configuration", "true or false"),
            ("sqlite:a#b.db", "%23"),
            ("sqlite:a.db\n", "white space"),
            ("sqlite:a%00b.db", "nul byte"),
            ("sqlite://joe:x@host/a.db", "%40"),
            ("sqlite:/tmp/a.db/", "give the path of a file"),
            ("sqlite:a/..", "give the path of a file"),
            ("sqlite:?op_timeout=1s", "names no file"),
            ("sqlite::memory:", "in memory"),
        ] {
            let refused = SqliteConfig::from_url(url).unwrap_err().to_string();
            assert!(refused.contains(told), "{url:?}: {refused}");
        }
    }
}

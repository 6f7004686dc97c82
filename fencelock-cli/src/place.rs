//! Where the locks are kept.

use std::env;
use std::ffi::OsString;
use std::fmt;
#[cfg(feature = "sqlite")]
use std::io::ErrorKind;
#[cfg(feature = "sqlite")]
use std::path::PathBuf;
use std::time::Duration;

use fencelock::{ENV, LockError, Locks, Options, Scope};

use crate::exit::Failure;

/// How long a request to a file may take if nobody waits, and at most.
const USUAL_PATIENCE: Duration = Duration::from_secs(5);
const LONGEST_PATIENCE: Duration = Duration::from_secs(30);

/// Where the locks are kept: an address that was given, or a file of the user's own.
#[derive(Debug)]
pub(crate) enum Place {
    Address(String),
    #[cfg(feature = "sqlite")]
    File(PathBuf),
}

impl Place {
    /// The address given, or that in the environment, or else the file in the user's state directory.
    pub(crate) fn find(given: Option<String>) -> Result<Self, Failure> {
        if let Some(url) = given {
            return Ok(Self::Address(url));
        }
        match env::var_os(ENV)
            .filter(|url| !url.is_empty())
            .map(OsString::into_string)
        {
            Some(Ok(url)) => Ok(Self::Address(url)),
            Some(Err(_)) => Err(Failure::usage(format!("the address in {ENV} is not UTF-8"))),
            None => Self::of_user(),
        }
    }

    #[cfg(feature = "sqlite")]
    fn of_user() -> Result<Self, Failure> {
        let set = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        // The convention ignores a relative XDG_STATE_HOME.
        let state = set("XDG_STATE_HOME").filter(|dir| dir.is_absolute());
        let state = state.or_else(|| set("HOME").map(|home| home.join(".local/state")));
        match state {
            Some(dir) => Ok(Self::File(dir.join("fencelock/locks.db"))),
            None => Err(Failure::usage(format!(
                "there is no place to keep the locks, as HOME is not set; give --url, or set {ENV} or XDG_STATE_HOME"
            ))),
        }
    }

    #[cfg(not(feature = "sqlite"))]
    fn of_user() -> Result<Self, Failure> {
        Err(Failure::usage(format!(
            "no address was given; give --url, or set {ENV}"
        )))
    }

    /// A client that connects with its first request.
    pub(crate) fn client(&self) -> Result<Locks, Failure> {
        self.client_with(Options::new())
    }

    /// A client that only looks. None if nothing can be held: the user's own file is made with the first lock.
    pub(crate) fn inspector(&self) -> Result<Option<Locks>, Failure> {
        match self {
            #[cfg(feature = "sqlite")]
            Self::File(path) if path.try_exists().is_ok_and(|exists| !exists) => Ok(None),
            _ => self.client_with(Options::new().read_only(true)).map(Some),
        }
    }

    /// As `client`, for somebody who has that much time. Hundreds of processes that come to one file at once keep each
    /// other waiting for longer than a request may take otherwise. A server has no such queue in front of it.
    pub(crate) fn patient_client(&self, patience: Duration) -> Result<Locks, Failure> {
        let is_file = match self {
            Self::Address(url) => url.starts_with("sqlite:") && !url.contains("op_timeout="),
            #[cfg(feature = "sqlite")]
            Self::File(_) => true,
        };
        self.client_with(if is_file {
            Options::new().op_timeout(patience.clamp(USUAL_PATIENCE, LONGEST_PATIENCE))
        } else {
            Options::new()
        })
    }

    fn client_with(&self, options: Options) -> Result<Locks, Failure> {
        let locks = match self {
            Self::Address(url) => fencelock::connect_lazy_with(url, options).map_err(|error| match error {
                // Locks in memory are refused below, so they are no advice.
                LockError::Configuration { .. } => Failure::usage(format!("{error:#}").replace(" memory:,", "")),
                error => error.into(),
            })?,
            #[cfg(feature = "sqlite")]
            Self::File(path) => {
                if let Some(dir) = path.parent().filter(|_| !options.is_read_only()) {
                    make_private(dir)?;
                }
                let mut config = fencelock::sqlite::SqliteConfig::new(path).read_only(options.is_read_only());
                if let Some(limit) = options.get_op_timeout() {
                    config = config.op_timeout(limit);
                }
                Locks::with_options(config.connect_lazy()?, options)
            }
        };
        if locks.capabilities().scope == Scope::Process {
            return Err(Failure::usage(
                "locks of that address exist within one process only, so they would exclude nobody; choose another",
            ));
        }
        // Not before: of what could not be read as an address nothing is known to be fit to be shown.
        tracing::info!(target: "fencelock", "the locks are kept in {self}");
        Ok(locks)
    }
}

#[cfg(feature = "sqlite")]
fn make_private(dir: &std::path::Path) -> Result<(), Failure> {
    use std::os::unix::fs::DirBuilderExt;

    use crate::exit::CONFIGURATION;

    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir);
    made.map_err(|e| {
        let dir = dir.display();
        match e.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => Failure::unavailable(format!(
                "the directory {dir} cannot be made: {e}; free some space, or give --url"
            )),
            _ => Failure::new(
                CONFIGURATION,
                format!("the directory {dir} cannot be made: {e}; make it writable, or give --url"),
            ),
        }
    })
}

/// As people may see it: an address without anything secret, or the path of the file.
impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(url) => f.write_str(&address_without_secrets(url)),
            #[cfg(feature = "sqlite")]
            Self::File(path) => path.display().fmt(f),
        }
    }
}

/// Takes users, passwords and parameters out of every address in `text`.
pub(crate) fn without_secrets(text: &str) -> String {
    let is_end = |c: char| c.is_whitespace() || "'\"`<>".contains(c);
    text.split_inclusive(is_end)
        .map(|word| {
            let end = word.strip_suffix(is_end).map_or(word.len(), str::len);
            let (address, end) = word.split_at(end);
            address_without_secrets(address) + end
        })
        .collect()
}

/// Takes the same out of what is an address as a whole, or was meant to be one.
fn address_without_secrets(address: &str) -> String {
    let scheme_ends = address.find([':', '=']);
    let Some((scheme, rest)) = address
        .split_once(':')
        .filter(|(scheme, _)| Some(scheme.len()) == scheme_ends)
    else {
        // As libpq has it, if it is not read from an address.
        return match address.split_once('=') {
            Some((name, _)) if name.to_ascii_lowercase().contains("password") => format!("{name}=..."),
            _ => address.to_owned(),
        };
    };
    let slashes = if rest.starts_with("//") { "//" } else { "" };
    let (rest, query) = match rest.split_once('?') {
        // A password with a ? in it.
        Some((rest, query)) if !slashes.is_empty() && query.contains('@') && !rest.contains('@') => {
            return format!("{scheme}:{slashes}...");
        }
        Some((rest, _)) => (rest, "?..."),
        None => (rest, ""),
    };
    match rest.rsplit_once('@') {
        // A path may hold an @.
        Some((_, host)) if scheme != "sqlite" || !slashes.is_empty() => {
            format!("{scheme}:{slashes}...@{host}{query}")
        }
        _ => format!("{scheme}:{rest}{query}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_shown_without_users_passwords_and_parameters() {
        for (text, clean) in [
            ("redis://joe:hunter2@host:6379/0", "redis://...@host:6379/0"),
            ("postgres://host/shop?password=hunter2&x=1", "postgres://host/shop?..."),
            (
                "unexpected argument 'etcd://a:hun@ter2@h?k=v' found",
                "unexpected argument 'etcd://...@h?...' found",
            ),
            ("two a://x:y@b c://d:e@f", "two a://...@b c://...@f"),
            ("sqlite:///var/lib/locks.db", "sqlite:///var/lib/locks.db"),
            (
                "argument 'redis+unix:/run/r.sock?user=joe&password=hunter2' found",
                "argument 'redis+unix:/run/r.sock?...' found",
            ),
            ("joe:hunter2@host is no command", "joe:...@host is no command"),
            ("nothing here: or here", "nothing here: or here"),
            ("'postgres://joe:hunter2?x@host/shop'", "'postgres://...'"),
            ("'host=h password=hunter2 dbname=d'", "'host=h password=... dbname=d'"),
        ] {
            assert_eq!(without_secrets(text), clean);
        }
    }

    #[test]
    fn a_whole_address_keeps_nothing_secret_however_it_is_written() {
        for (url, clean) in [
            ("redis+unix:/run/r.sock?password=hunter2", "redis+unix:/run/r.sock?..."),
            (
                "redis+sentinel://joe:hunter2@a,b/s?sentinel_password=hunter2",
                "redis+sentinel://...@a,b/s?...",
            ),
            ("redis://joe:hun ter2@host", "redis://...@host"),
            ("redis:joe:hunter2@host/0", "redis:...@host/0"),
            ("joe:hunter2@host", "joe:...@host"),
            ("sqlite:/home/joe@work/locks.db", "sqlite:/home/joe@work/locks.db"),
            ("sqlite:/srv/two words.db", "sqlite:/srv/two words.db"),
        ] {
            assert_eq!(address_without_secrets(url), clean);
        }
    }
}

//! Where the locks are kept.

use std::env;
use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use fencelock::{ENV, LockError, Locks, Options, Scope};

use crate::exit::Failure;

/// How long a request to a file may take if nobody waits, and at most.
const USUAL_PATIENCE: Duration = Duration::from_secs(5);
const LONGEST_PATIENCE: Duration = Duration::from_secs(30);

/// For how long what is under way on the server is taken back at most: it ends by itself.
pub(crate) const LEAVING: Duration = Duration::from_secs(2);

/// Where the locks are kept: an address that was given, or that of a file of the user's own.
#[derive(Debug)]
pub(crate) struct Place {
    url: String,
    own_file: Option<PathBuf>,
}

impl Place {
    /// The address given, or that in the environment, or else the file in the user's state directory.
    pub(crate) fn find(given: Option<String>) -> Result<Self, Failure> {
        let set = env::var_os(ENV).filter(|url| !url.is_empty());
        let set = set.map(OsString::into_string).transpose();
        match given.map_or(set, |url| Ok(Some(url))) {
            Ok(Some(url)) => Ok(Self { url, own_file: None }),
            Ok(None) => Self::of_user(),
            Err(_) => Err(Failure::usage(format!("the address in {ENV} is not UTF-8"))),
        }
    }

    #[cfg(feature = "sqlite")]
    fn of_user() -> Result<Self, Failure> {
        use std::os::unix::ffi::OsStrExt;

        // The convention ignores what is relative, and another folder would be another place.
        let dir = |name| env::var_os(name).map(PathBuf::from).filter(|dir| dir.is_absolute());
        let state = dir("XDG_STATE_HOME").or_else(|| dir("HOME").map(|home| home.join(".local/state")));
        let path = state.map(|dir| dir.join("fencelock/locks.db")).ok_or_else(|| {
            Failure::usage(format!(
                "there is no place to keep the locks, as HOME is not set to an absolute path; give --url, or set {ENV} or XDG_STATE_HOME"
            ))
        })?;
        let encoded = percent_encoding::percent_encode(path.as_os_str().as_bytes(), percent_encoding::NON_ALPHANUMERIC);
        Ok(Self {
            url: format!("sqlite:{encoded}"),
            own_file: Some(path),
        })
    }

    #[cfg(not(feature = "sqlite"))]
    fn of_user() -> Result<Self, Failure> {
        Err(Failure::usage(format!(
            "no address was given; give --url, or set {ENV}"
        )))
    }

    /// The address. It may be secret.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// A client that connects with its first request.
    pub(crate) fn client(&self) -> Result<Locks, Failure> {
        self.client_with(Options::new())
    }

    /// A client that only looks. None if nothing can be held: the user's own file is made with the first lock.
    pub(crate) fn inspector(&self) -> Result<Option<Locks>, Failure> {
        match &self.own_file {
            Some(path) if path.try_exists().is_ok_and(|exists| !exists) => Ok(None),
            _ => self.client_with(Options::new().read_only(true)).map(Some),
        }
    }

    /// As `client`, for somebody who has that much time. Hundreds of processes that come to one file at once keep each
    /// other waiting for longer than a request may take otherwise. A server has no such queue in front of it.
    pub(crate) fn patient_client(&self, patience: Duration) -> Result<Locks, Failure> {
        let is_file = self.url.starts_with("sqlite:") && !self.url.contains("op_timeout=");
        self.client_with(if is_file {
            Options::new().op_timeout(patience.clamp(USUAL_PATIENCE, LONGEST_PATIENCE))
        } else {
            Options::new()
        })
    }

    fn client_with(&self, options: Options) -> Result<Locks, Failure> {
        if let Some(dir) = self.own_file.as_ref().and_then(|path| path.parent())
            && !options.is_read_only()
        {
            make_private(dir)?;
        }
        let locks = fencelock::connect_lazy_with(&self.url, options).map_err(|error| match error {
            // Locks in memory are refused below, so they are no advice.
            LockError::Configuration { .. } if self.own_file.is_none() => {
                Failure::usage(format!("{error:#}").replace(" memory:,", ""))
            }
            error => error.into(),
        })?;
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

/// Takes back what is under way on the server.
pub(crate) async fn leave(locks: &Locks) {
    let _ = tokio::time::timeout(LEAVING, locks.shutdown()).await;
}

fn make_private(dir: &std::path::Path) -> Result<(), Failure> {
    use std::io::ErrorKind;
    use std::os::unix::fs::DirBuilderExt;

    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir);
    made.map_err(|error| {
        let (refused, advice): (fn(String) -> Failure, _) = match error.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => (Failure::unavailable, "free some space"),
            _ => (Failure::configuration, "make it writable"),
        };
        let dir = dir.display();
        refused(format!(
            "the directory {dir} cannot be made: {error}; {advice}, or give --url"
        ))
    })
}

/// As people may see it: an address without anything secret, or the path of the file.
impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.own_file {
            Some(path) => path.display().fmt(f),
            None => f.write_str(&address_without_secrets(&self.url)),
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
    let Some(scheme_ends) = address.find([':', '=']) else {
        return address.to_owned();
    };
    let (scheme, rest) = (&address[..scheme_ends], &address[scheme_ends + 1..]);
    if address[scheme_ends..].starts_with('=') {
        // As libpq has it, if it is not read from an address.
        return match scheme.to_ascii_lowercase().contains("password") {
            true => format!("{scheme}=..."),
            false => address.to_owned(),
        };
    }
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
    fn addresses_are_shown_without_users_passwords_and_parameters_however_they_are_written() {
        for (text, clean) in [
            ("redis://joe:hunter2@host:6379/0", "redis://...@host:6379/0"),
            ("postgres://host/shop?password=hunter2&x=1", "postgres://host/shop?..."),
            (
                "argument 'etcd://a:hun@ter2@h?k=v' found",
                "argument 'etcd://...@h?...' found",
            ),
            ("two a://x:y@b c://d:e@f", "two a://...@b c://...@f"),
            ("sqlite:///var/lib/locks.db", "sqlite:///var/lib/locks.db"),
            ("redis+unix:/run/r.sock?password=hunter2", "redis+unix:/run/r.sock?..."),
            (
                "redis+sentinel://joe:hunter2@a,b/s?x=hunter2",
                "redis+sentinel://...@a,b/s?...",
            ),
            ("redis:joe:hunter2@host/0", "redis:...@host/0"),
            ("joe:hunter2@host is no command", "joe:...@host is no command"),
            ("sqlite:/home/joe@work/locks.db", "sqlite:/home/joe@work/locks.db"),
            ("nothing here: or here", "nothing here: or here"),
            ("'postgres://joe:hunter2?x@host/shop'", "'postgres://...'"),
            ("'host=h password=hunter2 dbname=d'", "'host=h password=... dbname=d'"),
        ] {
            assert_eq!(without_secrets(text), clean);
        }
        // Only an address as a whole may hold blanks.
        assert_eq!(address_without_secrets("redis://joe:hun ter2@host"), "redis://...@host");
        assert_eq!(
            address_without_secrets("sqlite:/srv/two words.db"),
            "sqlite:/srv/two words.db"
        );
    }
}

//! The wall clocks of clients: libfaketime lets them step, and each client tells what it sees of that.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs;
use std::future::pending;
use std::io;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::str::FromStr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tempfile::TempDir;
use tokio::time::sleep;

use super::clock::since_boot;

/// What is no drift any more, in nanoseconds. Less than any step that is made.
pub(super) const STEP: u64 = 1_000_000_000;

/// Between two looks of a client at its wall clock.
const LOOK: Duration = Duration::from_millis(20);

/// A clock that takes longer to read was not read at one moment.
const MOMENT: Duration = Duration::from_millis(100);

/// The environment variable that names the file with which libfaketime is set.
const FILE: &str = "FAKETIME_TIMESTAMP_FILE";
/// The one with the names of what libfaketime shares with children.
const SHARED: &str = "FAKETIME_SHARED";
/// The one that names what is loaded before a program.
const PRELOAD: &str = "LD_PRELOAD";

/// Why a fault cannot be injected on this machine, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Missing(String);

/// What a program has to load for its wall clock to be set by a file.
pub(super) fn library() -> Result<OsString, Missing> {
    if cfg!(target_feature = "crt-static") {
        let why = "this program is linked statically, so libfaketime, which lets wall clocks step, has no effect on it";
        return Err(Missing(why.to_owned()));
    }
    // It knows where its own is. It cannot start the clients itself: they would not get our signals.
    let asked = Command::new("faketime")
        .args(["-m", "-f", "+0", "printenv", PRELOAD])
        .env_remove(PRELOAD)
        .stdin(Stdio::null())
        .output();
    let why = match asked {
        Ok(answer) if answer.status.success() => match String::from_utf8(answer.stdout) {
            Ok(library) if !library.trim_end().is_empty() => return Ok(library.trim_end().into()),
            _ => "the program faketime names no library".to_owned(),
        },
        Ok(answer) => format!("the program faketime fails ({})", answer.status),
        Err(error) => format!("the program faketime cannot be run ({error})"),
    };
    Err(Missing(format!(
        "wall clocks step by libfaketime, and {why}; install it (Debian, Ubuntu: apt-get install faketime)"
    )))
}

/// The wall clocks of all clients.
pub(crate) struct WallClocks {
    library: OsString,
    folder: TempDir,
}

impl WallClocks {
    pub(crate) fn new() -> Result<Self, super::Failure> {
        let library = library()?;
        let folder = tempfile::tempdir()?;
        Ok(Self { library, folder })
    }

    /// That of one client. Right at first.
    pub(crate) fn of_client(&self, number: usize) -> io::Result<WallClock> {
        let clock = WallClock {
            library: self.library.clone(),
            file: self.folder.path().join(number.to_string()),
        };
        clock.set(0)?;
        Ok(clock)
    }
}

/// The wall clock of one client, in all its lives.
pub(crate) struct WallClock {
    library: OsString,
    file: PathBuf,
}

impl WallClock {
    /// Lets the processes of this command have this clock.
    pub(crate) fn govern(&self, command: &mut Command) {
        let mut libraries = self.library.clone();
        if let Some(others) = env::var_os(PRELOAD) {
            libraries.push(OsStr::new(":"));
            libraries.push(others);
        }
        command
            .env(PRELOAD, libraries)
            .env(FILE, &self.file)
            // A step is seen at the next look.
            .env("FAKETIME_NO_CACHE", "1")
            // Only the wall clock can step on a real machine.
            .env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
            // These would come before the file.
            .env_remove("FAKETIME")
            .env_remove(SHARED);
    }

    /// Sets it ahead of the true time by that many seconds, or behind.
    pub(crate) fn set(&self, ahead: i32) -> io::Result<()> {
        // At once, so that nobody reads half of it.
        let next = self.file.with_extension("next");
        fs::write(&next, format!("{ahead:+}\n"))?;
        fs::rename(next, &self.file)
    }
}

/// Removes the names of the shared memory that libfaketime makes for each process whose clock we set: it does so itself only at
/// an orderly end, and a later process with the same number would not start. What has the memory open keeps it.
pub(super) fn leave_nothing_behind() {
    if env::var_os(FILE).is_none() {
        return;
    }
    let shared = env::var(SHARED).unwrap_or_default();
    if let Some((semaphore, memory)) = shared.split_once(' ') {
        // Where semaphores have a place of their own, there is nothing of that name.
        let _ = rustix::shm::unlink(format!("/sem.{}", semaphore.trim_start_matches('/')));
        let _ = rustix::shm::unlink(memory);
    }
}

/// Tells the wall clock whenever it has stepped, and at first; never if it is one that nobody sets.
pub(super) async fn watch(tell: impl Fn(Reading)) {
    if env::var_os(FILE).is_none() {
        return pending().await;
    }
    let mut told: Option<Reading> = None;
    loop {
        let now = Reading::now();
        // Less than what counts, so that drift and a step together do not go unnoticed.
        if told.is_none_or(|told| told.offset.abs_diff(now.offset) > STEP / 4) {
            tell(now);
            told = Some(now);
        }
        sleep(LOOK).await;
    }
}

/// A wall clock at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reading {
    /// The moment, by the clock that all processes of this machine share.
    pub(super) at: Duration,
    /// How far the wall clock is ahead of that clock, in nanoseconds.
    pub(super) offset: i64,
}

impl Reading {
    pub(super) fn now() -> Self {
        loop {
            let at = since_boot();
            let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            if since_boot().saturating_sub(at) < MOMENT {
                let nanos = |time: Duration| i64::try_from(time.as_nanos()).unwrap_or(i64::MAX);
                let offset = nanos(wall) - nanos(at);
                return Self { at, offset };
            }
        }
    }
}

impl fmt::Display for Reading {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.at.as_nanos(), self.offset)
    }
}

impl FromStr for Reading {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (at, offset) = text.split_once(' ').ok_or(())?;
        Ok(Self {
            at: Duration::from_nanos(at.parse().map_err(drop)?),
            offset: offset.parse().map_err(drop)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reading_is_heard_as_it_was_told() {
        let reading = Reading {
            at: Duration::from_nanos(7),
            offset: -3_600_000_000_000,
        };
        assert_eq!(reading.to_string().parse(), Ok(reading));
        for damaged in ["", "7", "7 ", "7 x", "-7 1"] {
            assert_eq!(damaged.parse::<Reading>(), Err(()), "{damaged:?}");
        }
    }

    #[test]
    fn a_process_sees_its_wall_clock_step() {
        let clocks = WallClocks::new().unwrap();
        let clock = clocks.of_client(0).unwrap();
        let seen = || {
            let mut command = Command::new("date");
            clock.govern(command.arg("+%s"));
            let said = String::from_utf8(command.output().unwrap().stdout).unwrap();
            let wall = Duration::from_secs(said.trim_end().parse().unwrap());
            wall.as_secs() as i64 - SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() as i64
        };
        for ahead in [0, 3_600, -2, 0] {
            clock.set(ahead).unwrap();
            assert!((seen() - i64::from(ahead)).abs() <= 1, "{ahead}");
        }
    }
}

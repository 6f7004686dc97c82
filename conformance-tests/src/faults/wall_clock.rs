//! The wall clock of other processes, by libfaketime.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::process::{Command, Stdio};

use tempfile::TempDir;

/// The environment variable that names the file with which libfaketime is set.
const FILE: &str = "FAKETIME_TIMESTAMP_FILE";
/// The one with the names of what libfaketime shares with children.
const SHARED: &str = "FAKETIME_SHARED";
/// The one that names what is loaded before a program.
const PRELOAD: &str = "LD_PRELOAD";

/// The wall clock of the processes of some commands, which steps while they run. Their other clocks stay right.
#[derive(Debug)]
pub struct WallClock {
    library: OsString,
    folder: TempDir,
}

impl WallClock {
    /// A clock that is right at first.
    ///
    /// # Errors
    ///
    /// If the program `faketime` is missing, or no file can be written.
    pub fn new() -> io::Result<Self> {
        // It knows where its library is. It cannot start the processes itself: they would not get our signals.
        let asked = Command::new("faketime")
            .args(["-m", "-f", "+0", "printenv", PRELOAD])
            .env_remove(PRELOAD)
            .stdin(Stdio::null())
            .output();
        let library = asked.map(|answer| String::from_utf8_lossy(&answer.stdout).trim_end().to_owned());
        let library = library.ok().filter(|library| !library.is_empty()).ok_or_else(|| {
            let why = "wall clocks step by libfaketime, which is missing; install it (Debian, Ubuntu: apt-get install faketime)";
            io::Error::new(io::ErrorKind::NotFound, why)
        })?;
        let (library, folder) = (library.into(), tempfile::tempdir()?);
        let clock = Self { library, folder };
        clock.set(0)?;
        Ok(clock)
    }

    /// Gives this clock to the processes of a command.
    pub fn govern(&self, command: &mut Command) {
        let mut libraries = self.library.clone();
        if let Some(others) = env::var_os(PRELOAD) {
            libraries.push(":");
            libraries.push(others);
        }
        command
            .env(PRELOAD, libraries)
            .env(FILE, self.folder.path().join("clock"))
            // A step is seen at the next look.
            .env("FAKETIME_NO_CACHE", "1")
            // Only the wall clock can step on a real machine.
            .env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
            // These would come before the file.
            .env_remove("FAKETIME")
            .env_remove(SHARED);
    }

    /// Sets it ahead of the true time by that many seconds, or behind if negative.
    ///
    /// # Errors
    ///
    /// If the file cannot be written.
    pub fn set(&self, ahead: i32) -> io::Result<()> {
        // At once, so that no process reads half of it.
        let (next, file) = (self.folder.path().join("next"), self.folder.path().join("clock"));
        fs::write(&next, format!("{ahead:+}\n"))?;
        fs::rename(next, file)
    }

    /// Removes the names of the shared memory that libfaketime makes for this process, if it has such a clock. libfaketime does so only at
    /// an orderly end: after a kill a later process with the same number would not start. What has the memory open keeps it.
    pub fn leave_nothing_behind() {
        let shared = env::var(SHARED).unwrap_or_default();
        if let (Some(_), Some((semaphore, memory))) = (env::var_os(FILE), shared.split_once(' ')) {
            // Where semaphores have a place of their own, there is nothing of that name.
            let _ = rustix::shm::unlink(format!("/sem.{}", semaphore.trim_start_matches('/')));
            let _ = rustix::shm::unlink(memory);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{SystemTime, UNIX_EPOCH};

    use super::*;

    #[test]
    fn a_process_sees_its_wall_clock_step() {
        let clock = WallClock::new().unwrap();
        let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() as i64;
        for ahead in [0, 3_600, -2, 0] {
            clock.set(ahead).unwrap();
            let mut command = Command::new("date");
            clock.govern(command.arg("+%s"));
            let said = String::from_utf8(command.output().unwrap().stdout).unwrap();
            let seen = said.trim_end().parse::<i64>().unwrap() - now();
            assert!((seen - i64::from(ahead)).abs() <= 1, "{ahead}: {seen}");
        }
    }
}

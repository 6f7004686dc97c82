//! A server whose wall clock can be set.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The file that sets the clock, and what the server loads for that.
pub(super) struct WallClock {
    file: PathBuf,
    library: PathBuf,
}

impl WallClock {
    /// A clock that is right at first, with its files in that folder.
    pub(super) fn new(folder: &Path) -> Self {
        let (source, library) = (folder.join("clock.c"), folder.join("clock.so"));
        std::fs::write(&source, include_str!("clock.c")).unwrap();
        let compiled = Command::new("cc")
            .args(["-shared", "-fPIC", "-O1", "-o"])
            .args([&library, &source])
            .output()
            .expect("there is no C compiler; install it: apt-get install gcc libc6-dev");
        assert!(compiled.status.success(), "{compiled:?}");
        let clock = Self {
            file: folder.join("clock"),
            library,
        };
        clock.set(0);
        clock
    }

    /// Lets the process of this command have this clock.
    pub(super) fn govern(&self, command: &mut Command) {
        command
            .env("LD_PRELOAD", &self.library)
            .env("WALL_CLOCK_FILE", &self.file);
    }

    /// Sets it ahead of this machine's by that many seconds, or behind.
    pub(super) fn set(&self, ahead: i32) {
        // At once, so that nobody reads half of it.
        let next = self.file.with_extension("next");
        std::fs::write(&next, ahead.to_string()).unwrap();
        std::fs::rename(next, &self.file).unwrap();
    }
}

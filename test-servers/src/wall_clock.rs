//! The wall clock of a server that is a process of this machine, in a file of its folder.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

/// Makes a clock that is right at first, and returns what lets a process have it.
pub(crate) fn environment(folder: &Path) -> Result<Vec<(&'static str, String)>> {
    let (source, library) = (folder.join("clock.c"), folder.join("clock.so"));
    fs::write(&source, include_str!("wall_clock.c"))?;
    let compiled = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-o"])
        .args([&library, &source])
        .output()
        .context("there is no C compiler; install it: apt-get install gcc libc6-dev")?;
    ensure!(compiled.status.success(), "{compiled:?}");
    set(folder, 0)?;
    let text = |path: &Path| path.to_string_lossy().into_owned();
    Ok(vec![
        ("LD_PRELOAD", text(&library)),
        ("WALL_CLOCK_FILE", text(&folder.join("clock"))),
    ])
}

/// Sets it ahead of this machine's by that many seconds, or behind.
pub(crate) fn set(folder: &Path, ahead: i32) -> Result<()> {
    // At once, so that no process reads half of it.
    let next = folder.join("clock.next");
    fs::write(&next, ahead.to_string())?;
    Ok(fs::rename(next, folder.join("clock"))?)
}

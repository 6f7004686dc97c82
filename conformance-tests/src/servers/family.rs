//! Processes that belong together: some servers have several, in groups of their own.

use std::collections::HashMap;

use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};

use super::error::ServerError;

/// The process and all that it started. Where the system does not tell, the process alone.
pub(super) fn family(first: u32) -> Vec<u32> {
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        if let Ok(process) = entry.file_name().to_string_lossy().parse()
            && let Some(parent) = field(process, 1).and_then(|parent| parent.parse().ok())
        {
            children.entry(parent).or_default().push(process);
        }
    }
    let mut family = vec![first];
    let mut next = 0;
    while let Some(parent) = family.get(next) {
        family.extend(children.remove(parent).unwrap_or_default());
        next += 1;
    }
    family
}

/// Whether it runs or is stopped: one that has ended and was not waited for holds nothing any more. False where the
/// system does not tell.
pub(super) fn is_alive(process: u32) -> bool {
    field(process, 0).is_some_and(|state| state != "Z" && state != "X")
}

/// Sends a signal, if the process is still there.
pub(super) fn send(process: u32, signal: Signal) -> Result<(), ServerError> {
    let Some(pid) = pid(process) else { return Ok(()) };
    match kill_process(pid, signal) {
        Ok(()) | Err(Errno::SRCH) => Ok(()),
        Err(error) => Err(ServerError::system("sending a signal to a server")(error.into())),
    }
}

pub(super) fn pid(process: u32) -> Option<Pid> {
    i32::try_from(process).ok().and_then(Pid::from_raw)
}

/// A field of what the system tells of a process, counted from its state.
pub(super) fn field(process: u32, number: usize) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name of the program comes before and may contain anything.
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(number).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_belongs_to_the_family_of_its_parent_until_it_has_ended() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let family = family(std::process::id());
        // Elsewhere the system may not tell.
        if std::path::Path::new("/proc/self/stat").exists() {
            assert!(family.contains(&child.id()));
            assert!(is_alive(child.id()));
        }
        send(child.id(), Signal::KILL).unwrap();
        child.wait().unwrap();
        assert!(!is_alive(child.id()));
        send(child.id(), Signal::KILL).unwrap();
    }
}

//! Processes, and which of those that started a container have ended.

use std::collections::HashMap;
use std::fs;

use anyhow::{Context as _, Result};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process, test_kill_process};

/// The process and all that it started, also those in groups of their own. Where the system does not tell, the process alone.
pub(crate) fn family(first: u32) -> Vec<u32> {
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
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

/// Whether it runs or is stopped: one that has ended and was not waited for holds nothing any more.
pub(crate) fn is_alive(process: u32) -> bool {
    field(process, 0).is_some_and(|state| state != "Z" && state != "X")
}

/// Sends a signal, if the process is still there.
pub(crate) fn send(process: u32, signal: Signal) -> Result<()> {
    let Some(pid) = pid(process) else { return Ok(()) };
    match kill_process(pid, signal) {
        Ok(()) | Err(Errno::SRCH) => Ok(()),
        error => error.context("sending a signal to a server"),
    }
}

pub(crate) fn pid(process: u32) -> Option<Pid> {
    i32::try_from(process).ok().and_then(Pid::from_raw)
}

/// A field of what the system tells of a process, counted from its state.
fn field(process: u32, number: usize) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name of the program comes before and may contain anything.
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(number).map(str::to_owned)
}

/// Identifier of this process, as the label of what it starts: where its pid is that of a process, the pid, and the time of its
/// start, since pids come again.
pub(crate) fn label() -> String {
    let process = std::process::id();
    format!("{}/{process}/{}", place(), started(process))
}

/// Whether the process with that label has ended. `None` if nothing is known of processes there.
pub(crate) fn is_over(label: &str) -> Option<bool> {
    let mut parts = label.rsplitn(3, '/');
    let (start, process, there) = (parts.next()?, parts.next()?.parse::<u32>().ok()?, parts.next()?);
    let is_there = pid(process).is_some_and(|pid| test_kill_process(pid) != Err(Errno::SRCH));
    (there == place()).then(|| !is_there || started(process) != start)
}

fn started(process: u32) -> String {
    field(process, 19).unwrap_or_default()
}

/// The boot of the machine, and the namespace of pids: several may use one container engine.
fn place() -> String {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    format!("{}/{}", boot.trim(), namespace.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[test]
    fn a_label_tells_whether_its_process_has_ended() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let (here, process) = (place(), child.id());
        let label = format!("{here}/{process}/{}", started(process));
        assert!(family(std::process::id()).contains(&process) && is_alive(process));
        assert_eq!(is_over(&label), Some(false));
        // The pid came again; another machine; another program's label.
        assert_eq!(is_over(&format!("{here}/{process}/1")), Some(true));
        assert_eq!(is_over(&format!("elsewhere/{process}/1")), None);
        assert_eq!(is_over("x"), None);
        send(process, Signal::KILL).unwrap();
        child.wait().unwrap();
        assert!(!is_alive(process) && is_over(&label) == Some(true));
    }
}

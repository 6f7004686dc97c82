//! This run of the tests, and those before it that left something.

use rustix::process::test_kill_process;

use super::family::{field, pid};

/// Which process a container belongs to: by host, pid namespace, pid and the time at which it was started, since pids come
/// again. Several namespaces of a host may use one container engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Run {
    host: String,
    namespace: String,
    pid: u32,
    started: String,
}

impl Run {
    pub(super) fn this() -> Self {
        let pid = std::process::id();
        Self {
            host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            namespace: namespace(),
            pid,
            started: started(pid),
        }
    }

    /// As the value of a label.
    pub(super) fn label(&self) -> String {
        format!("{}/{}/{}/{}", self.host, self.namespace, self.pid, self.started)
    }

    pub(super) fn of_label(label: &str) -> Option<Self> {
        let mut parts = label.split('/');
        let (host, namespace, pid, started) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        Some(Self {
            host: host.to_owned(),
            namespace: namespace.to_owned(),
            pid: pid.parse().ok()?,
            started: started.to_owned(),
        })
    }

    /// Whether that process has ended. One on another host or in another namespace, of which nothing is known, has not.
    pub(super) fn is_over(&self) -> bool {
        let alive = pid(self.pid).is_some_and(|pid| test_kill_process(pid) != Err(rustix::io::Errno::SRCH));
        self.is_from_here() && !(alive && started(self.pid) == self.started)
    }

    /// Whether it can be known whether that process has ended.
    pub(super) fn is_from_here(&self) -> bool {
        let this = Self::this();
        self.host == this.host && self.namespace == this.namespace
    }
}

/// The time at which the process was started, where the system tells it.
fn started(process: u32) -> String {
    field(process, 19).unwrap_or_default()
}

/// What this process's pids are numbers of, where the system tells it.
fn namespace() -> String {
    let link = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    link.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_run_is_not_over_and_finds_itself_in_its_label() {
        let this = Run::this();
        assert!(!this.is_over());
        assert_eq!(Run::of_label(&this.label()), Some(this));
    }

    #[test]
    fn a_run_is_over_when_its_process_has_ended_or_its_pid_belongs_to_another() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let ended = Run {
            pid: child.id(),
            ..Run::this()
        };
        child.wait().unwrap();
        assert!(ended.is_over());
        let earlier = Run {
            started: "1".to_owned(),
            ..Run::this()
        };
        assert!(earlier.is_over());
    }

    #[test]
    fn nothing_is_known_of_runs_on_other_hosts_and_in_other_namespaces() {
        let ended = || Run {
            started: "1".to_owned(),
            ..Run::this()
        };
        assert!(ended().is_over());
        let elsewhere = Run {
            host: "elsewhere".to_owned(),
            ..ended()
        };
        let inside = Run {
            namespace: "pid:[1]".to_owned(),
            ..ended()
        };
        for unknown in [elsewhere, inside] {
            assert!(!unknown.is_over());
            assert_eq!(Run::of_label(&unknown.label()), Some(unknown));
        }
        assert_eq!(Run::of_label("somebody else's"), None);
    }
}

//! What is left of a client after a `fork`, on every backend: real forks of programs that have nothing but the threads of their
//! scenario.
//!
//! Each test starts this program once more, which plays one scenario and tells each step on its standard error.

#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test may fail")]

#[cfg(target_os = "linux")]
#[path = "fork/scenarios/mod.rs"]
mod fork_scenarios;

#[cfg(not(target_os = "linux"))]
fn main() {}

#[cfg(target_os = "linux")]
fn main() -> std::process::ExitCode {
    linux::main()
}

#[cfg(target_os = "linux")]
mod linux {
    use std::fmt::Write as _;
    use std::io::{BufRead, BufReader};
    use std::os::unix::process::CommandExt;
    use std::process::{Command, ExitCode, Stdio};
    use std::sync::mpsc::{self, RecvTimeoutError};
    use std::sync::{Arc, Mutex, PoisonError};
    use std::time::Duration;
    use std::{fs, thread};

    use conformance_tests::servers::{Kind, Server};
    use libtest_mimic::{Arguments, Failed, Trial};
    use tokio::runtime::{Builder, Runtime};

    use crate::fork_scenarios::Scenario;

    /// Which scenario a process plays, and at which address.
    const SCENARIO: &str = "FENCELOCK_FORK_SCENARIO";
    const URL: &str = "FENCELOCK_FORK_URL";

    /// The longest that one step may take. All of them set shorter limits for what they wait for.
    const LONGEST_STEP: Duration = Duration::from_secs(40);

    pub(super) fn main() -> ExitCode {
        if let (Ok(scenario), Ok(url)) = (std::env::var(SCENARIO), std::env::var(URL)) {
            return Scenario::named(&scenario).expect("a scenario of that name").play(&url);
        }
        let mut arguments = Arguments::from_args();
        arguments.test_threads.get_or_insert(8);
        let servers = Arc::new(Servers::new());
        let mut trials = Vec::new();
        for backend in ["memory", "sqlite", "redis", "postgres", "etcd"] {
            for scenario in Scenario::ALL.iter().filter(|scenario| scenario.is_for(backend)) {
                let servers = Arc::clone(&servers);
                trials.push(Trial::test(format!("{backend}::{}", scenario.name()), move || {
                    let folder = tempfile::tempdir()?;
                    let url = match backend {
                        "memory" => "memory:fork".to_owned(),
                        "sqlite" => format!("sqlite:{}", folder.path().join("locks.db").display()),
                        server => servers.url(server)?,
                    };
                    play(scenario, &url)
                }));
            }
        }
        let code = libtest_mimic::run(&arguments, trials).exit_code();
        servers.end();
        code
    }

    /// Those that were needed so far, which all tests share.
    struct Servers {
        runtime: Runtime,
        started: Mutex<Vec<(&'static str, Server)>>,
    }

    impl Servers {
        fn new() -> Self {
            Self {
                runtime: Builder::new_multi_thread()
                    .worker_threads(1)
                    .enable_all()
                    .build()
                    .expect("a runtime"),
                started: Mutex::default(),
            }
        }

        fn url(&self, backend: &'static str) -> Result<String, Failed> {
            let kind = match backend {
                "redis" => &Kind::REDIS,
                "postgres" => &Kind::POSTGRES,
                _ => &Kind::ETCD,
            };
            let mut started = self.started.lock().unwrap_or_else(PoisonError::into_inner);
            if !started.iter().any(|(name, _)| *name == backend) {
                started.push((backend, self.runtime.block_on(Server::start(kind))?));
            }
            let server = started.iter().find(|(name, _)| *name == backend);
            let url = server.map(|(_, server)| server.url()).unwrap_or_default();
            Ok(url.replacen("http:", "etcd:", 1))
        }

        fn end(&self) {
            let _runtime = self.runtime.enter();
            self.started.lock().unwrap_or_else(PoisonError::into_inner).clear();
        }
    }

    /// Plays the scenario in a process group of its own, of which nothing is left afterwards.
    fn play(scenario: &Scenario, url: &str) -> Result<(), Failed> {
        let mut program = Command::new(std::env::current_exe()?)
            .env(SCENARIO, scenario.name())
            .env(URL, url)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()?;
        let group = rustix::process::Pid::from_child(&program);
        let output = BufReader::new(program.stderr.take().ok_or("no pipe")?);
        let (tell, told) = mpsc::channel();
        let reading = thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                let _ = tell.send(line);
            }
        });
        let mut said = String::new();
        let stuck = loop {
            match told.recv_timeout(LONGEST_STEP) {
                Ok(line) => {
                    let _ = writeln!(said, "  {line}");
                }
                Err(RecvTimeoutError::Disconnected) => break None,
                Err(RecvTimeoutError::Timeout) => break Some(what_waits(group)),
            }
        };
        // Also what a scenario left behind when it failed.
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        let status = program.wait()?;
        reading.join().map_err(|_| "the reader panicked")?;
        match stuck {
            Some(waits) => Err(format!("hangs for {LONGEST_STEP:?} in the last of these steps:\n{said}{waits}").into()),
            None if !status.success() => Err(format!("{status} after these steps:\n{said}").into()),
            None => Ok(()),
        }
    }

    /// Where each thread of the process group is in the kernel.
    fn what_waits(group: rustix::process::Pid) -> String {
        let mut waits = String::new();
        let group = group.as_raw_nonzero().to_string();
        for process in fs::read_dir("/proc").into_iter().flatten().flatten() {
            let stat = fs::read_to_string(process.path().join("stat")).unwrap_or_default();
            // Behind the command: the state, the parent, the process group.
            let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
            if fields.split_whitespace().nth(2) != Some(&group) {
                continue;
            }
            // With it, `nm` tells the name of a static that a thread waits for.
            let maps = fs::read_to_string(process.path().join("maps")).unwrap_or_default();
            for task in fs::read_dir(process.path().join("task"))
                .into_iter()
                .flatten()
                .flatten()
            {
                let read = |file| fs::read_to_string(task.path().join(file)).unwrap_or_default();
                let _ = writeln!(
                    waits,
                    "  process {} thread {:?} ({}): waits in {} {}, system call {}; the program is at {}",
                    process.file_name().to_string_lossy(),
                    task.file_name(),
                    read("comm").trim(),
                    read("wchan").trim(),
                    read("stack").lines().next().unwrap_or_default(),
                    read("syscall").trim(),
                    maps.split_whitespace().next().unwrap_or_default(),
                );
            }
        }
        waits
    }
}

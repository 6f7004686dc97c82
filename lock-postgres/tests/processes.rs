//! Holders that are processes of their own: stopped, or killed.
//!
//! The processes are this same binary, started with the address of the server.

#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test may fail")]

mod server;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Failed, Trial};
use lock_core::{DistributedLock, FencingToken, Locks};
use lock_postgres::{PostgresLock, schema_sql};
use rustix::process::Signal;
use server::{PATIENCE, Server, claim, signal_process};

/// The variable that makes a process a holder at that address.
const HOLD: &str = "FENCELOCK_TEST_HOLD";

const TTL: Duration = Duration::from_secs(2);

/// What the server may take beyond the ttl.
const SLACK: Duration = Duration::from_millis(500);

fn main() -> ExitCode {
    if let Ok(url) = std::env::var(HOLD) {
        run(hold(&url)).unwrap();
        return ExitCode::SUCCESS;
    }
    let trials = vec![
        Trial::test(
            "a_stopped_holder_is_freed_within_its_ttl_and_can_do_nothing_guarded_when_it_wakes",
            || run(stopped()),
        ),
        Trial::test("a_killed_holder_is_freed_at_once", || run(killed())),
        Trial::test(
            "a_password_is_found_in_the_environment_or_in_a_file_that_nobody_else_can_read",
            || run(passwords()),
        ),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

fn run(test: impl Future<Output = ()>) -> Result<(), Failed> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(test);
    Ok(())
}

/// Locks `a`, and tells its token; then what came of something guarded, each time it is asked.
async fn hold(url: &str) {
    let lock = match PostgresLock::connect(url).await {
        Ok(lock) => lock,
        Err(error) => return println!("{error}"),
    };
    let locks = Locks::new(lock);
    let guard = locks.lock("a").ttl(TTL).await.unwrap();
    println!("{}", guard.token());
    let mut words = String::new();
    while std::io::stdin().read_line(&mut words).unwrap() > 0 {
        let mut written = false;
        let outcome = guard.run(async { written = true }).await;
        println!("{} {}", outcome.is_ok(), written);
    }
}

/// A process that holds `a`.
struct Holder {
    process: Child,
    output: BufReader<std::process::ChildStdout>,
    token: FencingToken,
}

impl Holder {
    fn start(server: &Server) -> Self {
        Self::start_as("postgres", server, &[]).unwrap()
    }

    /// As that user, with these variables; or what it said instead of a token.
    fn start_as(user: &str, server: &Server, environment: &[(&str, &str)]) -> Result<Self, String> {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .env_remove("PGPASSWORD")
            .env("PGPASSFILE", "/nowhere")
            .env(HOLD, format!("postgres://{user}@127.0.0.1:{}/postgres", server.port()))
            .envs(environment.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut output = BufReader::new(process.stdout.take().unwrap());
        let said = line(&mut output);
        let token = said.parse().ok().and_then(|token| FencingToken::new(token).ok());
        let mut holder = Self {
            process,
            output,
            token: FencingToken::MAX,
        };
        holder.token = token.ok_or(said)?;
        Ok(holder)
    }

    fn signal(&self, signal: Signal) {
        signal_process(self.process.id(), signal);
    }

    /// Whether something guarded was done, and any of it begun.
    fn write(&mut self) -> String {
        writeln!(self.process.stdin.as_mut().unwrap(), "write").unwrap();
        line(&mut self.output)
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn line(output: &mut impl BufRead) -> String {
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    line.trim_end().to_owned()
}

/// The next holder's token, and how long after `since` it was granted.
async fn next(lock: &PostgresLock, since: Instant) -> (FencingToken, Duration) {
    let claim = claim("a", Duration::from_secs(20));
    loop {
        if let Some(grant) = lock.try_acquire(&claim).await.unwrap().granted() {
            return (grant.token, since.elapsed());
        }
        assert!(since.elapsed() < PATIENCE, "the lock is not freed");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

async fn stopped() {
    let server = Server::start();
    let other = server.client().await;
    let mut holder = Holder::start(&server);
    assert_eq!(holder.write(), "true true");
    holder.signal(Signal::STOP);
    let (token, took) = next(&other, Instant::now()).await;
    println!("a stopped holder with a ttl of {TTL:?} was freed after {took:?}");
    assert!(took < TTL + SLACK, "{took:?}");
    assert!(token > holder.token);
    holder.signal(Signal::CONT);
    assert_eq!(holder.write(), "false false");
}

async fn killed() {
    let server = Server::start();
    let other = server.client().await;
    let holder = Holder::start(&server);
    holder.signal(Signal::KILL);
    let (token, took) = next(&other, Instant::now()).await;
    println!("a killed holder with a ttl of {TTL:?} was freed after {took:?}");
    // Its next renewal would be due later than that.
    assert!(took < SLACK, "{took:?}");
    assert!(token > holder.token);
}

async fn passwords() {
    let server = Server::start();
    drop(server.client().await);
    let rights = schema_sql("fencelock", Some("joe")).unwrap();
    server
        .run_sql(&format!("CREATE ROLE joe LOGIN PASSWORD 'ri:ght'; {rights}"))
        .await;
    server.wants_password_of("joe").await;
    let start = |environment: &[(&str, &str)]| Holder::start_as("joe", &server, environment);
    let refused = start(&[]).err().unwrap();
    assert!(refused.contains("password"), "{refused}");
    start(&[("PGPASSWORD", "ri:ght")]).unwrap();
    let file = server.folder().join("passwords");
    let line = format!("127.0.0.1:{}:*:joe:ri\\:ght\n", server.port());
    std::fs::write(&file, line).unwrap();
    let in_file = [("PGPASSFILE", file.to_str().unwrap())];
    for (mode, usable) in [(0o644, false), (0o600, true)] {
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
        assert_eq!(start(&in_file).is_ok(), usable, "{mode:o}");
    }
}

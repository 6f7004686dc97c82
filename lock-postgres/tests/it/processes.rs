//! Holders that are processes of their own: this same program, started with the address of the server.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use lock_core::{DistributedLock, FencingToken, Locks};
use lock_postgres::{PostgresLock, schema_sql};
use rustix::process::Signal;

use crate::server::{Database, HANG_LIMIT, Server, claim, signal_process};

/// The variables that make a process a holder at that address, with a ttl of so many milliseconds.
const HOLD: &str = "FENCELOCK_TEST_HOLD";
const HOLD_TTL: &str = "FENCELOCK_TEST_HOLD_TTL";

/// What the lines of a holder begin with; the test harness writes lines of its own.
const SAYS: &str = "> holder: ";

/// Longer than any test takes.
const LONG: Duration = Duration::from_secs(600);

#[test]
#[ignore = "started by other tests, as a process of its own"]
fn holder() {
    if let Ok(url) = std::env::var(HOLD) {
        let ttl = std::env::var(HOLD_TTL).unwrap().parse().unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.unwrap().block_on(hold(&url, Duration::from_millis(ttl)));
        std::process::exit(0);
    }
}

/// Locks `a`, and tells its token; then what came of something guarded, each time it is asked.
async fn hold(url: &str, ttl: Duration) {
    let lock = match PostgresLock::connect(url).await {
        Ok(lock) => lock,
        Err(error) => return println!("{SAYS}{error}"),
    };
    let locks = Locks::new(lock);
    let guard = locks.lock("a").ttl(ttl).await.unwrap();
    println!("{SAYS}{}", guard.token());
    let mut words = String::new();
    while std::io::stdin().read_line(&mut words).unwrap() > 0 {
        let mut written = false;
        let outcome = guard.run(async { written = true }).await;
        println!("{SAYS}{} {}", outcome.is_ok(), written);
    }
}

/// A process that holds `a`.
pub(crate) struct Holder {
    process: Child,
    output: BufReader<ChildStdout>,
    pub(crate) token: FencingToken,
}

impl Holder {
    pub(crate) fn start(server: &Database, ttl: Duration) -> Self {
        Self::start_as("postgres", server, ttl, &[]).unwrap()
    }

    /// As that user, with these variables; or what it said instead of a token.
    fn start_as(user: &str, server: &Database, ttl: Duration, environment: &[(&str, &str)]) -> Result<Self, String> {
        let url = format!("postgres://{user}@127.0.0.1:{}/{}", server.port(), server.name());
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "processes::holder", "--ignored", "--nocapture", "--quiet"])
            .env_remove("PGPASSWORD")
            .env("PGPASSFILE", "/nowhere")
            .env(HOLD, url)
            .env(HOLD_TTL, ttl.as_millis().to_string())
            .envs(environment.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(process.stdout.take().unwrap());
        let mut holder = Self {
            process,
            output,
            token: FencingToken::MAX,
        };
        let said = holder.line();
        let token = said.parse().ok().and_then(|token| FencingToken::new(token).ok());
        holder.token = token.ok_or(said)?;
        Ok(holder)
    }

    pub(crate) fn signal(&self, signal: Signal) {
        signal_process(self.process.id(), signal);
    }

    /// Whether something guarded was done, and any of it begun.
    pub(crate) fn write(&mut self) -> String {
        writeln!(self.process.stdin.as_mut().unwrap(), "write").unwrap();
        self.line()
    }

    /// The next line that the holder itself writes.
    fn line(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "the holder has ended");
            if let Some((_, said)) = line.split_once(SAYS) {
                return said.trim_end().to_owned();
            }
        }
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The next holder's token, and how long it took until it was granted.
pub(crate) async fn next(lock: &PostgresLock) -> (FencingToken, Duration) {
    let claim = claim("a", LONG);
    let start = Instant::now();
    loop {
        if let Some(grant) = lock.try_acquire(&claim).await.unwrap().granted() {
            return (grant.token, start.elapsed());
        }
        assert!(start.elapsed() < HANG_LIMIT, "the lock is not freed");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test]
async fn a_killed_holder_is_freed_without_its_ttl() {
    let server = Database::new().await;
    let other = server.client().await;
    let holder = Holder::start(&server, LONG);
    holder.signal(Signal::KILL);
    let (token, took) = next(&other).await;
    println!("a killed holder with a ttl of {LONG:?} was freed after {took:?}");
    assert!(token > holder.token);
}

#[tokio::test]
async fn a_password_is_found_in_the_environment_or_in_a_file_that_nobody_else_can_read() {
    let server = Server::start();
    drop(server.client().await);
    let rights = schema_sql("fencelock", Some("joe")).unwrap();
    server
        .run_sql(&format!("CREATE ROLE joe LOGIN PASSWORD 'ri:ght'; {rights}"))
        .await;
    server.wants_password_of("joe").await;
    let start = |environment: &[(&str, &str)]| Holder::start_as("joe", &server, LONG, environment);
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

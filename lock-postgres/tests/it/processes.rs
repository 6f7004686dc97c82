//! Holders that are processes of their own: this same program, started with the address of the server.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use lock_core::{FencingToken, Locks};
use lock_postgres::{PostgresLock, schema_sql};

use crate::server::{Database, HANG_LIMIT, Server};

/// The variable that makes a process a holder at that address.
const HOLD: &str = "FENCELOCK_TEST_HOLD";

/// What the lines of a holder begin with; the test harness writes lines of its own.
const SAYS: &str = "> holder: ";

/// Longer than any test takes.
const LONG: Duration = Duration::from_secs(600);

#[test]
#[ignore = "started by other tests, as a process of its own"]
fn holder() {
    if let Ok(url) = std::env::var(HOLD) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.unwrap().block_on(hold(&url));
        std::process::exit(0);
    }
}

/// Locks `a`, and tells its token.
async fn hold(url: &str) {
    let lock = match PostgresLock::connect(url).await {
        Ok(lock) => lock,
        Err(error) => return println!("{SAYS}{error}"),
    };
    let locks = Locks::new(lock);
    let guard = locks.lock("a").ttl(LONG).wait_for(HANG_LIMIT).await.unwrap();
    println!("{SAYS}{}", guard.token());
    std::future::pending().await
}

/// A process that holds `a`.
struct Holder {
    process: Child,
    token: FencingToken,
}

impl Holder {
    /// As that user, with these variables; or what it said instead of a token.
    fn start(user: &str, server: &Database, environment: &[(&str, &str)]) -> Result<Self, String> {
        let url = format!("postgres://{user}@127.0.0.1:{}/{}", server.port(), server.name());
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "processes::holder", "--ignored", "--nocapture", "--quiet"])
            .env_remove("PGPASSWORD")
            .env("PGPASSFILE", "/nowhere")
            .env(HOLD, url)
            .envs(environment.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let mut holder = Self {
            process,
            token: FencingToken::MAX,
        };
        let said = lines.map(Result::unwrap).find_map(|line| {
            let (_, said) = line.split_once(SAYS)?;
            Some(said.trim_end().to_owned())
        });
        let said = said.expect("the holder has ended");
        let token = said.parse().ok().and_then(|token| FencingToken::new(token).ok());
        holder.token = token.ok_or(said)?;
        Ok(holder)
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[tokio::test]
async fn a_password_is_found_in_the_environment_or_in_a_private_file_and_a_killed_holder_is_freed_without_its_ttl() {
    let server = Server::start();
    drop(server.client().await);
    let rights = schema_sql("fencelock", Some("joe")).unwrap();
    server
        .run_sql(&format!("CREATE ROLE joe LOGIN PASSWORD 'ri:ght'; {rights}"))
        .await;
    server.wants_password_of("joe").await;
    let start = |environment: &[(&str, &str)]| Holder::start("joe", &server, environment);
    let refused = start(&[]).err().unwrap();
    assert!(refused.contains("password"), "{refused}");
    let mut last = start(&[("PGPASSWORD", "ri:ght")]).unwrap().token;
    let file = server.data().with_file_name("passwords");
    let line = format!("127.0.0.1:{}:*:joe:ri\\:ght\n", server.port());
    std::fs::write(&file, line).unwrap();
    let in_file = [("PGPASSFILE", file.to_str().unwrap())];
    for (mode, usable) in [(0o644, false), (0o600, true)] {
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
        match start(&in_file) {
            // The process before it was killed, with a ttl that is longer than this test.
            Ok(next) => assert!(usable && next.token > std::mem::replace(&mut last, next.token)),
            Err(refused) => assert!(!usable && refused.contains("password"), "{mode:o}: {refused}"),
        }
    }
}

//! The examples of `fencelock` that end by themselves, on every backend. They judge what they see, and fail if it is not as it should be.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::LazyLock;

use test_servers::{Kind, Server};

/// A stock sold by several processes, a late write to the resource of each backend, leaders that take over.
const EXAMPLES: [&str; 3] = ["stock", "fences", "leader"];

#[test]
fn the_examples_end_as_they_should_on_sqlite() {
    let folder = tempfile::tempdir().unwrap();
    run_at(&format!("sqlite:{}", folder.path().join("locks.db").display()));
}

#[tokio::test]
async fn the_examples_end_as_they_should_on_redis() {
    run_on(&Kind::REDIS).await;
}

#[tokio::test]
async fn the_examples_end_as_they_should_on_postgres() {
    run_on(&Kind::POSTGRES).await;
}

#[tokio::test]
async fn the_examples_end_as_they_should_on_etcd() {
    run_on(&Kind::ETCD).await;
}

async fn run_on(kind: &'static Kind) {
    let server = Server::start(kind).await.unwrap();
    run_at(&server.url().replacen("http:", "etcd:", 1));
}

fn run_at(url: &str) {
    for example in EXAMPLES {
        let run = Command::new(FOLDER.join(example)).arg(url).output().unwrap();
        let said = [run.stdout, run.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        assert!(run.status.success(), "{example}: {}", said.concat());
    }
}

/// The folder of the examples, which cargo builds for tests only if it is asked to. They have been compiled with these features already: those
/// that the default members, which are what cargo takes in their folder, have together.
static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
    // What cargo tells a test of its package would have build scripts run again.
    let own = |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
    for (name, _) in std::env::vars_os() {
        if own(&name.to_string_lossy()) {
            cargo.env_remove(name);
        }
    }
    let built = cargo
        .args(["build", "--offline", "--all-features"])
        .args(EXAMPLES.map(|example| format!("--example={example}")))
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(".."))
        .stdin(Stdio::null())
        .status()
        .unwrap();
    assert!(built.success(), "the examples do not compile");
    // Beside the folder of this program.
    std::env::current_exe().unwrap().with_file_name("").join("../examples")
});

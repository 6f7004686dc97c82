//! The examples of `fencelock` that are programs of several processes, on every backend. They judge by themselves what they see.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::LazyLock;

use conformance_tests::servers::{Kind, Server};

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
    for program in [&*STOCK, &*HTTP_SHOP] {
        let run = Command::new(program).args(["--url", url]).output().unwrap();
        let said = [run.stdout, run.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        assert!(run.status.success(), "{program}: {}", said.concat());
    }
}

static STOCK: LazyLock<String> = LazyLock::new(|| program("stock"));
static HTTP_SHOP: LazyLock<String> = LazyLock::new(|| program("http_shop"));

/// Path of the example, which cargo builds for tests only if it is asked to. It has been compiled with these features already: those
/// that the default members, which are what cargo takes in their folder, have together.
fn program(example: &str) -> String {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
    // What cargo tells a test of its package would have build scripts run again.
    let own = |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
    for (name, _) in std::env::vars_os() {
        if own(&name.to_string_lossy()) {
            cargo.env_remove(name);
        }
    }
    let built = cargo
        .args(["build", "--offline", "--all-features", "--example", example])
        .args(["--message-format", "json-render-diagnostics"])
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(".."))
        .stderr(Stdio::inherit())
        .output()
        .unwrap();
    assert!(built.status.success(), "the example does not compile");
    let messages = String::from_utf8(built.stdout).unwrap();
    let program = messages.lines().find_map(|line| {
        let message: serde_json::Value = serde_json::from_str(line).ok()?;
        let named = message["target"]["name"] == example;
        message["executable"].as_str().filter(|_| named).map(str::to_owned)
    });
    program.expect("cargo says where the program is")
}

//! Runs an example of `fencelock` that is a program of several processes, on every backend.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use conformance_tests::servers::{Kind, Server};
use fencelock::etcd::etcd_client::{Client, GetOptions};
use fencelock::postgres::tokio_postgres::{self, NoTls};
use fencelock::redis::redis;
use tokio::runtime::Handle;
use tokio::task::block_in_place;

/// What is left in the store of the example.
type Left<'a> = &'a dyn Fn() -> Vec<String>;

/// Each of these calls `run` with an address of that backend.
pub(crate) fn on_sqlite(run: impl FnOnce(&str, Left<'_>)) {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}", folder.path().join("locks.db").display());
    run(&url, &|| {
        let files = fs::read_dir(folder.path()).unwrap();
        let files = files.map(|file| file.unwrap().file_name().into_string().unwrap());
        files.filter(|file| file.contains("stock")).collect()
    });
}

pub(crate) async fn on_redis(run: impl FnOnce(&str, Left<'_>)) {
    let server = Server::start(&Kind::REDIS).await.unwrap();
    run(server.url(), &|| keys(server.url(), "{stock:*"));
}

/// On a runtime with several threads, as the next one.
pub(crate) async fn on_etcd(run: impl FnOnce(&str, Left<'_>)) {
    let server = Server::start(&Kind::ETCD).await.unwrap();
    let client = Client::connect([server.authority()], None).await.unwrap();
    run(&server.url().replacen("http:", "etcd:", 1), &|| {
        block_in_place(|| Handle::current().block_on(etcd_keys(&client, "stock:")))
    });
}

pub(crate) async fn on_postgres(run: impl FnOnce(&str, Left<'_>)) {
    let server = Server::start(&Kind::POSTGRES).await.unwrap();
    let (client, connection) = tokio_postgres::connect(server.url(), NoTls).await.unwrap();
    tokio::spawn(connection);
    run(server.url(), &|| {
        let schemas = "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'stock%'";
        let found = block_in_place(|| Handle::current().block_on(client.query(schemas, &[])));
        found.unwrap().iter().map(|row| row.get(0)).collect()
    });
}

pub(crate) fn keys(url: &str, pattern: &str) -> Vec<String> {
    redis::cmd("KEYS").arg(pattern).query(&mut connection(url)).unwrap()
}

pub(crate) async fn etcd_keys(client: &Client, prefix: &str) -> Vec<String> {
    let all = GetOptions::new().with_prefix().with_keys_only();
    let found = client.kv_client().get(prefix, Some(all)).await.unwrap();
    found.kvs().iter().map(|kv| kv.key_str().unwrap().to_owned()).collect()
}

pub(crate) fn connection(url: &str) -> redis::Connection {
    redis::Client::open(url).unwrap().get_connection().unwrap()
}

pub(crate) fn said(output: &Output) -> String {
    [&output.stdout[..], &output.stderr]
        .map(String::from_utf8_lossy)
        .concat()
}

/// Path of the example, which cargo builds for tests only if it is asked to. It has been compiled with these features already: those
/// that the default members, which are what cargo takes in their folder, have together.
pub(crate) fn program(example: &str) -> String {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
    // What cargo tells a test of its package would have build scripts run again.
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if ["CARGO_PKG_", "CARGO_MANIFEST_"]
            .iter()
            .any(|start| name.starts_with(start))
        {
            cargo.env_remove(&*name);
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

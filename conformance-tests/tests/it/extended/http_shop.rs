//! The example `http_shop`, on every backend.

use std::fs;
use std::process::Command;
use std::sync::LazyLock;

use super::example::{on_etcd, on_postgres, on_redis, on_sqlite, program, said};

#[test]
fn the_lock_keeps_sales_exact_although_an_instance_is_killed_on_sqlite() {
    on_sqlite(sale_at);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_lock_keeps_sales_exact_although_an_instance_is_killed_on_redis() {
    on_redis(sale_at).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_lock_keeps_sales_exact_although_an_instance_is_killed_on_etcd() {
    on_etcd(sale_at).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_lock_keeps_sales_exact_although_an_instance_is_killed_on_postgres() {
    on_postgres(sale_at).await;
}

#[test]
fn without_an_address_nothing_is_left_in_the_temporary_folder() {
    let folder = tempfile::tempdir().unwrap();
    let sale = http_shop(&[]).env("TMPDIR", folder.path()).output().unwrap();
    assert!(sale.status.success(), "{}", said(&sale));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn an_address_that_cannot_be_used_is_refused_before_the_first_act() {
    for (url, words) in [
        ("memory:", "within one process"),
        ("nothing", "does not start with a scheme"),
        ("sqlite:/no/such/folder/locks.db", "does not exist"),
        ("redis://127.0.0.1:1", "cannot be reached"),
    ] {
        let refused = http_shop(&["--url", url]).output().unwrap();
        assert!(!refused.status.success(), "{url}");
        assert!(said(&refused).contains(words), "{url}: {}", said(&refused));
        assert!(!said(&refused).contains("1. "), "{url}: it had begun");
    }
}

/// A whole run at that address, of which nothing may be left.
fn sale_at(url: &str, left: &dyn Fn() -> Vec<String>) {
    let run = http_shop(&["--url", url]).output().unwrap();
    let text = said(&run);
    assert!(run.status.success(), "{text}");
    let (_, acts) = text.split_once("1. without the lock").expect("the first act");
    let (without_lock, with_lock) = acts.split_once("2. with the lock").expect("the second act");

    let sold = number(without_lock, "sold");
    assert!(sold > 100, "{text}");
    assert!(
        without_lock.contains(&format!(" oversold by {}\n", sold - 100)),
        "{text}"
    );

    assert_eq!(number(with_lock, "sold"), 100, "{text}");
    assert!(with_lock.contains(" exactly sold out, "), "{text}");
    let cut_off = number(with_lock, "cut off");
    // The request in whose payment the instance was killed, and at most all that it had.
    assert!((1..=30).contains(&cut_off), "{text}");
    let [sold_out, busy, failed] =
        ["409", "423", "503"].map(|status| number(with_lock, &format!("refused with {status}")));
    assert_eq!(failed, 0, "{text}");
    // A request that was cut off may have bought.
    let refused = sold_out + busy;
    assert!((200 - cut_off..=200).contains(&refused), "{text}");
    assert_eq!(left(), Vec::<String>::new());
}

/// The number in the row that begins with `what`.
fn number(act: &str, what: &str) -> u32 {
    let rest = act.lines().find_map(|line| line.trim_start().strip_prefix(what));
    let number = rest.and_then(|rest| rest.split_whitespace().next());
    number.and_then(|number| number.parse().ok()).expect(what)
}

fn http_shop(arguments: &[&str]) -> Command {
    let mut command = Command::new(&*HTTP_SHOP);
    command.args(arguments).env_remove(fencelock::ENV);
    command
}

static HTTP_SHOP: LazyLock<String> = LazyLock::new(|| program("http_shop"));

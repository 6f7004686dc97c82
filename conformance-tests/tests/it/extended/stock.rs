//! The sale of the example `stock`, on every backend.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::example::{connection, etcd_keys, keys, on_etcd, on_postgres, on_redis, on_sqlite, program, said};
use conformance_tests::servers::{Data, Kind, Server};
use fencelock::etcd::etcd_client::Client;
use fencelock::postgres::tokio_postgres::{self, NoTls};
use fencelock::redis::redis;
use fencelock::sqlite::rusqlite::Connection;

/// The end of patience, not a measure of speed.
const LONG: Duration = Duration::from_secs(180);

#[test]
fn all_acts_end_as_they_should_on_sqlite() {
    on_sqlite(sale_at);
}

#[tokio::test(flavor = "multi_thread")]
async fn all_acts_end_as_they_should_on_redis() {
    on_redis(sale_at).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn all_acts_end_as_they_should_on_etcd() {
    on_etcd(sale_at).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn all_acts_end_as_they_should_on_postgres() {
    on_postgres(sale_at).await;
}

#[test]
fn without_an_address_the_sale_leaves_nothing_in_the_temporary_folder() {
    let folder = tempfile::tempdir().unwrap();
    let sale = stock(&["--stock", "1", "--buyers", "2", "--processes", "2"])
        .env("TMPDIR", folder.path())
        .output()
        .unwrap();
    assert!(sale.status.success(), "{}", said(&sale));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn bad_input_is_refused_with_what_to_change() {
    for (arguments, words) in [
        (&["--stock", "0"][..], "0 is not in 1..="),
        (&["--stock", "-5"], "-5 is not in 1..="),
        (&["--stock", "many"], "invalid digit"),
        (&["--buyers", "-1"], "-1 is not in 2..="),
        (&["--stock", "100", "--buyers", "100"], "give more --buyers"),
        (&["--processes", "1"], "1 is not in 2..="),
        (&["--processes", "201"], "give fewer --processes"),
        (&["--url", "memory:"], "within one process"),
        (&["--url", "nothing"], "does not start with a scheme"),
        (&["--url", "sqlite:/no/such/folder/locks.db"], "does not exist"),
        (&["--url", "redis://127.0.0.1:1"], "cannot be reached"),
    ] {
        let refused = stock(arguments).output().unwrap();
        assert!(!refused.status.success(), "{arguments:?}");
        assert!(said(&refused).contains(words), "{arguments:?}: {}", said(&refused));
        assert!(!said(&refused).contains("1. no lock"), "{arguments:?}: it had begun");
    }
}

#[test]
fn more_processes_than_the_machine_can_start_are_refused_and_none_is_left() {
    let folder = tempfile::tempdir().unwrap();
    let memory = stock(&["--processes", "20000", "--buyers", "20000"]).output().unwrap();
    assert!(!memory.status.success());
    assert!(said(&memory).contains("give fewer --processes"), "{}", said(&memory));
    // Each takes two of its files.
    let files = Command::new("sh")
        .args(["-c", "ulimit -n 40; exec \"$0\" --processes 60"])
        .arg(&*STOCK)
        .env("TMPDIR", folder.path())
        .output()
        .unwrap();
    assert!(!files.status.success());
    assert!(
        said(&files).contains("of 60 processes could be started"),
        "{}",
        said(&files)
    );
    assert!(said(&files).contains("give fewer --processes"), "{}", said(&files));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redis_that_goes_away_mid_sale_is_told_and_its_books_are_right() {
    let server = Server::start_own(&Kind::REDIS, &[]).await.unwrap();
    let url = server.url();
    goes_away_mid_sale(&mut &server, url, async || {
        let keys = keys(url, "{stock:*:5}:books");
        let books = keys.first()?;
        let [left, fields] = [("HGET", Some("left")), ("HLEN", None)].map(|(command, field)| {
            let mut ask = redis::cmd(command);
            ask.arg(books).arg(field);
            ask.query::<u32>(&mut connection(url)).unwrap()
        });
        Some([left, fields - 1])
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_postgres_that_goes_away_mid_sale_is_told_and_its_books_are_right() {
    let server = Server::start_own(&Kind::POSTGRES, &[]).await.unwrap();
    goes_away_mid_sale(&mut &server, server.url(), async || {
        let (client, connection) = tokio_postgres::connect(server.url(), NoTls).await.unwrap();
        tokio::spawn(connection);
        let schemas = "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'stock%'";
        let schema: String = client.query_opt(schemas, &[]).await.unwrap()?.get(0);
        let books = format!(
            "SELECT \"left\", (SELECT count(*) FROM {schema}.sale WHERE act = 5) FROM {schema}.stock WHERE act = 5"
        );
        let books = client.query_opt(&books, &[]).await.unwrap()?;
        Some([0, 1].map(|column| u32::try_from(books.get::<_, i64>(column)).unwrap()))
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_etcd_that_goes_away_mid_sale_is_told_and_its_books_are_right() {
    let server = Server::start_own(&Kind::ETCD, &[]).await.unwrap();
    let url = server.url().replacen("http:", "etcd:", 1);
    goes_away_mid_sale(&mut &server, &url, async || {
        let client = Client::connect([server.authority()], None).await.unwrap();
        let keys = etcd_keys(&client, "stock:").await;
        let left = keys.iter().find(|key| key.ends_with(":5:left"))?;
        let left = client.kv_client().get(&**left, None).await.unwrap();
        let left = left.kvs()[0].value_str().unwrap().parse().unwrap();
        // Another sale may have been noted since.
        let noted = keys.iter().filter(|key| key.contains(":5:sale:")).count();
        Some([left, u32::try_from(noted).unwrap()])
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_goes_away_mid_sale_is_told_and_its_books_are_right() {
    let parent = tempfile::tempdir().unwrap();
    let [folder, elsewhere] = ["here", "elsewhere"].map(|name| parent.path().join(name));
    fs::create_dir(&folder).unwrap();
    let url = format!("sqlite:{}", folder.join("locks.db").display());
    let mut folder = Folder { folder, elsewhere };
    let store = folder.folder.clone();
    goes_away_mid_sale(&mut folder, &url, async || {
        let mut files = fs::read_dir(&store).unwrap().map(|file| file.unwrap().path());
        let file = files.find(|file| {
            let name = file.file_name().unwrap().to_str().unwrap();
            name.starts_with("locks.db-stock-") && !name.ends_with("-wal") && !name.ends_with("-shm")
        })?;
        let store = Connection::open(file).unwrap();
        let books = "SELECT left, (SELECT count(*) FROM sale WHERE act = 'act 5') FROM stock WHERE act = 'act 5'";
        // The tables may not be there yet.
        store.query_row(books, (), |row| Ok([row.get(0)?, row.get(1)?])).ok()
    })
    .await;
}

/// What can go away, with all that it keeps, and come back.
trait Goes {
    async fn go(&mut self);
    async fn come_back(&mut self);
}

impl Goes for &Server {
    async fn go(&mut self) {
        self.kill().await.unwrap();
    }

    async fn come_back(&mut self) {
        self.restart(Data::Kept).await.unwrap();
    }
}

/// As a disk that is no longer mounted.
struct Folder {
    folder: PathBuf,
    elsewhere: PathBuf,
}

impl Goes for Folder {
    async fn go(&mut self) {
        fs::rename(&self.folder, &self.elsewhere).unwrap();
    }

    async fn come_back(&mut self) {
        // Whoever still looked for it may have made another one.
        let _ = fs::remove_dir_all(&self.folder);
        fs::rename(&self.elsewhere, &self.folder).unwrap();
    }
}

/// `books` tells what is left and how many sales are noted in the first act that is exact.
async fn goes_away_mid_sale(store: &mut impl Goes, url: &str, books: impl AsyncFn() -> Option<[u32; 2]>) {
    // Enough for seconds of selling, as this program may not be run for a good part of a second on a busy machine.
    const STOCK: u32 = 2000;
    let [articles, buyers] = [STOCK, STOCK + 20].map(|number| number.to_string());
    let mut sale = stock(&["--url", url, "--stock", &articles, "--buyers", &buyers])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let start = Instant::now();
    loop {
        assert!(
            start.elapsed() < LONG && sale.try_wait().unwrap().is_none(),
            "the sale was not seen under way"
        );
        if books().await.is_some_and(|[left, _]| (2..STOCK - 50).contains(&left)) {
            break;
        }
        // Whoever looks without a pause is in the way of the sale.
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    store.go().await;
    let stopped = sale.wait_with_output().unwrap();
    assert!(!stopped.status.success());
    assert!(said(&stopped).contains(" failed: "), "{}", said(&stopped));
    assert!(!said(&stopped).contains("6. "), "{}", said(&stopped));
    store.come_back().await;
    let [left, noted] = books().await.unwrap();
    assert!(left > 0, "it was over");
    assert_eq!(left + noted, STOCK, "an article is lost, or was sold twice");
}

/// A whole sale at that address, of which nothing may be left.
fn sale_at(url: &str, left: &dyn Fn() -> Vec<String>) {
    let mut sale = stock(&["--url", url]).stdout(Stdio::piped()).spawn().unwrap();
    let act = AtomicUsize::new(0);
    let (text, stops) = thread::scope(|scope| {
        let lines = BufReader::new(sale.stdout.take().unwrap()).lines();
        let watch = scope.spawn(|| stops(&sale, &act));
        let mut text = String::new();
        for line in lines.map(Result::unwrap) {
            // Acts are announced at the start of a line, as in "4. no owner check".
            if let Some((number, _)) = line.split_once(". ")
                && let Ok(number) = number.parse()
            {
                act.store(number, Ordering::SeqCst);
            }
            text.push_str(&line);
            text.push('\n');
        }
        act.store(usize::MAX, Ordering::SeqCst);
        (text, watch.join().unwrap())
    });
    assert!(sale.wait().unwrap().success(), "{text}");
    let rows: Vec<[u32; 3]> = text.lines().filter_map(row).collect();
    let [first, second, third, fourth, rest @ ..] = &rows[..] else {
        panic!("there is no table:\n{text}");
    };
    for [sold, oversold, refused] in [first, second, fourth] {
        assert!(*sold > 100 && *oversold == sold - 100 && *refused == 0, "{text}");
    }
    assert_eq!(*third, [0, 0, 0], "{text}");
    assert_eq!(rest, [[100, 0, 0], [101, 1, 0], [100, 0, 1], [100, 0, 0]], "{text}");
    assert_eq!(
        stops,
        BTreeSet::from([4, 6, 7]),
        "a holder was really stopped in these acts"
    );
    assert_eq!(left(), Vec::<String>::new());
}

/// Sold, oversold and refused, if that is a row of the table, as in "    7. a stop, and the fence  100  0  1   2.1".
fn row(line: &str) -> Option<[u32; 3]> {
    let (_, cells) = line.strip_prefix("    ")?.split_once(". ")?;
    let mut cells: Vec<_> = cells.split_whitespace().rev().take(4).collect();
    cells.reverse();
    let [sold, oversold, refused, _] = cells[..] else {
        return None;
    };
    Some([sold.parse().ok()?, oversold.parse().ok()?, refused.parse().ok()?])
}

/// The acts in which a process of the sale was seen to be stopped.
fn stops(sale: &Child, act: &AtomicUsize) -> BTreeSet<usize> {
    let mut seen = BTreeSet::new();
    let mut now = 0;
    while now != usize::MAX {
        if children(sale.id()).iter().any(|&child| is_stopped(child)) {
            // The number is that of an act only if no other began meanwhile.
            let after = act.load(Ordering::SeqCst);
            if after == now {
                seen.insert(now);
            }
        }
        thread::sleep(Duration::from_millis(10));
        now = act.load(Ordering::SeqCst);
    }
    seen
}

fn children(of: u32) -> Vec<u32> {
    let tasks = fs::read_dir(format!("/proc/{of}/task")).into_iter().flatten().flatten();
    let lists = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    lists
        .flat_map(|list| list.split_whitespace().flat_map(str::parse).collect::<Vec<_>>())
        .collect()
}

fn is_stopped(process: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    stat.rsplit_once(") ")
        .is_some_and(|(_, fields)| fields.starts_with('T'))
}

fn stock(arguments: &[&str]) -> Command {
    let mut command = Command::new(&*STOCK);
    command.args(arguments).env_remove(fencelock::ENV);
    command
}

static STOCK: LazyLock<String> = LazyLock::new(|| program("stock"));

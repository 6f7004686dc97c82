//! Several processes on one file: killed, stopped, cut short of disk space.
//!
//! The processes are this same binary, started with the name of a role.

#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test may fail")]

mod file;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use file::{File, LONG, SHORT, claim, granted};
use libtest_mimic::{Arguments, Failed, Trial};
use lock_core::{Attempt, DistributedLock, FencingToken, LockError, Released, Renewal};
use lock_sqlite::SqliteLock;
use rustix::process::{Pid, Signal, kill_process};

fn main() -> ExitCode {
    if let Ok(role) = std::env::var(ROLE) {
        let path = std::env::args_os().nth(1).expect("the path of the database");
        return match run(play(&role, path.into())) {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        };
    }
    let trial = |name: &str, test: fn() -> Result<(), Failed>| Trial::test(name, test);
    let mut trials = vec![
        trial(
            "twenty_processes_that_increment_under_the_lock_lose_no_update_five_times_in_a_row",
            || run(increments()),
        ),
        trial(
            "a_process_short_of_file_descriptors_may_try_again_and_frees_nothing",
            || run(few_descriptors()),
        ),
        trial("tokens_rise_across_processes_killed_at_any_moment", || run(killed())),
        trial("a_killed_holder_is_followed_within_its_ttl", || run(killed_holder())),
        trial("a_stopped_holder_is_followed_and_sees_the_loss_when_it_wakes", || {
            run(stopped_holder())
        }),
        trial(
            "a_process_stopped_inside_a_transaction_is_waited_for_and_recovered_from",
            || run(stopped_inside()),
        ),
        trial("locks_go_on_where_the_log_cannot_grow_and_a_full_disk_is_told", || {
            run(full_disk())
        }),
    ];
    trials.push(match small_disk() {
        Ok(()) => trial("a_lock_is_kept_and_let_go_on_a_disk_that_is_really_full", || {
            run(really_full())
        }),
        Err(why) => trial(&format!("a_disk_that_is_really_full ({why})"), || Ok(())).with_ignored_flag(true),
    });
    trials.push(match time_namespace() {
        Ok(()) => trial("a_process_with_a_boot_clock_of_its_own_agrees_on_expiry", || {
            run(other_clock())
        }),
        Err(why) => {
            trial(&format!("a_process_with_a_boot_clock_of_its_own ({why})"), || Ok(())).with_ignored_flag(true)
        }
    });
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

const ROLE: &str = "FENCELOCK_TEST_ROLE";

/// What a started process does.
async fn play(role: &str, path: PathBuf) {
    match role {
        "increment" => increment(&path).await,
        "take turns" => take_turns(&path).await,
        "hold" => hold(&path).await,
        "stop inside" => stop_inside(&path),
        "fill" => fill(&path).await,
        "fill disk" => fill_disk(&path).await,
        "few descriptors" => with_few_descriptors(&path).await,
        other => panic!("no role {other}"),
    }
}

async fn increments() {
    const PROCESSES: usize = 20;
    for round in 1..=5 {
        let file = File::new();
        let counter = file.beside("counter");
        fs::write(&counter, "0").unwrap();
        let started: Vec<_> = (0..PROCESSES).map(|_| Player::start("increment", &file)).collect();
        for player in started {
            player.finish();
        }
        assert_eq!(
            fs::read_to_string(counter).unwrap(),
            (PROCESSES * INCREMENTS).to_string(),
            "round {round}"
        );
    }
}

const INCREMENTS: usize = 50;

async fn increment(path: &Path) {
    let lock = SqliteLock::open(path).await.unwrap();
    let counter = path.with_file_name("counter");
    for _ in 0..INCREMENTS {
        let claim = claim("counter", LONG);
        lock.acquire(&claim, None).await.unwrap().granted().unwrap();
        let value: u64 = fs::read_to_string(&counter).unwrap().parse().unwrap();
        std::thread::yield_now();
        fs::write(&counter, (value + 1).to_string()).unwrap();
        assert_eq!(lock.release(&claim).await.unwrap(), Released::Released);
    }
}

async fn few_descriptors() {
    let file = File::new();
    granted(&file.client().await, &claim("held", LONG)).await;
    Player::start("few descriptors", &file).finish();
}

/// Opens the file with as many descriptors as suffice, and before with each number that does not.
async fn with_few_descriptors(path: &Path) {
    use rustix::process::{Resource, getrlimit, setrlimit};

    let mut limit = getrlimit(Resource::Nofile);
    let mut failures = 0;
    for descriptors in 0.. {
        let lock = lock_sqlite::SqliteConfig::new(path).connect_lazy().unwrap();
        // The limit is on the numbers, and some are taken already.
        let free = |number: &u64| fs::symlink_metadata(format!("/proc/self/fd/{number}")).is_err();
        limit.current = (0..).filter(free).nth(descriptors);
        setrlimit(Resource::Nofile, limit).unwrap();
        let attempt = lock.try_acquire(&claim("held", LONG)).await;
        limit.current = limit.maximum.map(|most| most.min(1024));
        setrlimit(Resource::Nofile, limit).unwrap();
        match attempt {
            Ok(attempt) => {
                assert!(attempt.granted().is_none(), "granted with {descriptors} descriptors");
                break;
            }
            Err(error) => assert!(error.is_retryable(), "with {descriptors} descriptors: {error}"),
        }
        failures += 1;
        assert!(failures < 50, "no number of descriptors suffices");
        // The same client goes on once there are enough.
        assert!(
            lock.try_acquire(&claim("held", LONG))
                .await
                .unwrap()
                .granted()
                .is_none()
        );
        lock.close().await.unwrap();
    }
    assert!(failures >= 2, "only {failures} failures");
}

async fn killed() {
    let file = File::new();
    let lock = file.client().await;
    let mut seen = granted(&lock, &claim("own", LONG)).await.token;
    let mut heard = 0;
    for round in 0..25 {
        let players: Vec<_> = (0..2).map(|_| Player::start("take turns", &file)).collect();
        let mut outputs = Vec::new();
        for mut player in players {
            // From its first token on, so that the kill meets it at work.
            let mut first = String::new();
            player.output.read_line(&mut first).unwrap();
            std::thread::sleep(Duration::from_micros(fastrand::u64(0..3_000)));
            player.signal(Signal::KILL);
            outputs.push(first + &player.rest());
        }
        // Everything that they told of was granted before this is asked for.
        let claim = claim("own", LONG);
        lock.force_release(claim.name()).await.unwrap();
        let next = granted(&lock, &claim).await.token;
        for output in outputs {
            // The last line may be cut off.
            let tokens: Vec<FencingToken> = output
                .split_inclusive('\n')
                .filter_map(|line| line.strip_suffix('\n')?.parse().ok())
                .collect();
            heard += tokens.len();
            assert!(tokens.is_sorted_by(|a, b| a < b), "round {round}: {tokens:?}");
            assert!(
                tokens.iter().all(|token| *token > seen),
                "round {round}: {tokens:?} after {seen}"
            );
            assert!(
                tokens.iter().all(|token| *token < next),
                "round {round}: {tokens:?} before {next}"
            );
        }
        seen = next;
    }
    assert!(heard >= 50, "only {heard} tokens were heard of");
    assert_eq!(
        file.number("SELECT count(*) FROM pragma_integrity_check WHERE integrity_check <> 'ok'"),
        0
    );
}

/// Takes and releases without end, telling each token.
async fn take_turns(path: &Path) {
    let lock = SqliteLock::open(path).await.unwrap();
    loop {
        let claim = claim(&format!("turn/{}", fastrand::u8(0..3)), SHORT);
        if let Attempt::Granted(grant) = lock.try_acquire(&claim).await.unwrap() {
            println!("{}", grant.token);
            lock.release(&claim).await.unwrap();
        }
    }
}

async fn killed_holder() {
    let file = File::new();
    let ttl = Duration::from_millis(500);
    let lock = file.client().await;
    let mut holder = Player::start("hold", &file);
    let token = holder.take(ttl);
    holder.signal(Signal::KILL);
    let killed = Instant::now();
    let next = lock
        .acquire(&claim("held", LONG), None)
        .await
        .unwrap()
        .granted()
        .unwrap();
    assert!(
        killed.elapsed() < ttl + Duration::from_secs(1),
        "{:?}",
        killed.elapsed()
    );
    assert!(next.token > token);
    holder.rest();
}

async fn stopped_holder() {
    let file = File::new();
    let ttl = Duration::from_millis(500);
    let lock = file.client().await;
    let mut holder = Player::start("hold", &file);
    let token = holder.take(ttl);
    holder.signal(Signal::STOP);
    let stopped = Instant::now();
    let next = lock
        .acquire(&claim("held", LONG), None)
        .await
        .unwrap()
        .granted()
        .unwrap();
    assert!(
        stopped.elapsed() < ttl + Duration::from_secs(1),
        "{:?}",
        stopped.elapsed()
    );
    assert!(next.token > token);
    holder.signal(Signal::CONT);
    assert_eq!(holder.ask("renew"), "NotHeld");
    assert_eq!(holder.ask("valid"), "false");
    assert!(lock.holder(next.claim.name()).await.unwrap().is_some());
    holder.finish();
}

/// Takes a lock when told to, and renews it when told to.
async fn hold(path: &Path) {
    let lock = SqliteLock::open(path).await.unwrap();
    let mut grant = None;
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        match line.split_once(' ').unwrap_or((&line, "")) {
            ("take", millis) => {
                let claim = claim("held", Duration::from_millis(millis.parse().unwrap()));
                let granted = granted(&lock, &claim).await;
                println!("{}", granted.token);
                grant = Some(granted);
            }
            ("renew", _) => println!("{:?}", lock.renew(&grant.as_ref().unwrap().lease).await.unwrap()),
            ("valid", _) => println!("{}", grant.as_ref().unwrap().lease.is_valid(lock.clock().now())),
            ("busy", _) => println!(
                "{}",
                lock.try_acquire(&claim("held", LONG))
                    .await
                    .unwrap()
                    .granted()
                    .is_none()
            ),
            (other, _) => panic!("do not know how to {other}"),
        }
    }
}

async fn stopped_inside() {
    let file = File::new();
    let limit = Duration::from_millis(300);
    let lock = lock_sqlite::SqliteConfig::new(file.path())
        .op_timeout(limit)
        .connect()
        .await
        .unwrap();
    let grant = granted(&lock, &claim("held", LONG)).await;
    for end in [Signal::CONT, Signal::KILL] {
        let mut stopped = Player::start("stop inside", &file);
        assert_eq!(stopped.line(), "inside");
        stopped.signal(Signal::STOP);
        let started = Instant::now();
        let failed = lock.try_acquire(&claim("other", LONG)).await.unwrap_err();
        assert!(matches!(failed, LockError::Unavailable { .. }), "{failed}");
        assert!(
            started.elapsed() < limit + Duration::from_secs(2),
            "{:?}",
            started.elapsed()
        );
        stopped.signal(end);
        if end == Signal::CONT {
            assert_eq!(stopped.ask("commit"), "committed");
        }
        stopped.rest();
        let other = claim("other", LONG);
        granted(&lock, &other).await;
        lock.release(&other).await.unwrap();
        assert_eq!(lock.renew(&grant.lease).await.unwrap(), Renewal::Renewed);
    }
    assert_eq!(file.rows(), 1);
}

fn stop_inside(path: &Path) {
    let conn = rusqlite::Connection::open(path).unwrap();
    conn.execute_batch("BEGIN IMMEDIATE; UPDATE counter SET token = token")
        .unwrap();
    println!("inside");
    std::io::stdin().read_line(&mut String::new()).unwrap();
    conn.execute_batch("COMMIT").unwrap();
    println!("committed");
}

async fn full_disk() {
    let file = File::new();
    // For it files end at 160 KiB, which SQLite meets as a full disk. Without the trap the signal would end it.
    let limited = "trap '' XFSZ; ulimit -f 320; exec \"$0\" \"$1\"";
    let mut command = Player::with_role(Command::new("sh"), "fill");
    command
        .arg("-c")
        .arg(limited)
        .arg(std::env::current_exe().unwrap())
        .arg(file.path());
    Player::spawn(command).finish();
    assert_eq!(
        file.number("SELECT count(*) FROM pragma_integrity_check WHERE integrity_check <> 'ok'"),
        0
    );
    // There is room again, and everything is as it was left.
    let lock = file.client().await;
    let held = lock.list("").await.unwrap();
    assert!(held.len() > 10, "only {} locks", held.len());
    for (i, holder) in held.iter().enumerate() {
        assert_eq!(
            lock.force_release(holder.name.as_ref().unwrap())
                .await
                .unwrap()
                .unwrap()
                .owner,
            holder.owner,
            "{i}"
        );
    }
    granted(&lock, &claim("n", LONG)).await;
}

/// Works where the log cannot grow, and then takes locks until there is no room at all.
async fn fill(path: &Path) {
    let lock = SqliteLock::open(path).await.unwrap();
    let held = claim("held", LONG);
    let grant = granted(&lock, &held).await;
    // Far more than the log has room for.
    for _ in 0..300 {
        let claim = claim("n", LONG);
        granted(&lock, &claim).await;
        assert_eq!(lock.renew(&grant.lease).await.unwrap(), Renewal::Renewed);
        assert_eq!(lock.release(&claim).await.unwrap(), Released::Released);
    }
    let label = "x".repeat(4_000);
    let mut taken = 1;
    let refused = loop {
        let claim = claim(&format!("n{taken}"), LONG).with_label(label.as_str());
        match lock.try_acquire(&claim).await {
            Ok(attempt) => drop(attempt.granted().unwrap()),
            Err(error) => break error,
        }
        taken += 1;
        assert!(taken < 10_000, "the disk never became full");
    };
    assert!(matches!(refused, LockError::Unavailable { .. }), "{refused}");
    assert!(refused.to_string().contains("free some space"), "{refused}");
    assert_eq!(lock.list("").await.unwrap().len(), taken);
}

/// Whether a disk of a few hundred KiB can be mounted here, seen by one process only.
fn small_disk() -> Result<(), &'static str> {
    let made = Command::new("unshare")
        .args(["-rm", "sh", "-c", "mount -t tmpfs -o size=600k none /tmp"])
        .stderr(Stdio::null())
        .status();
    match made {
        Err(_) => Err("needs the program unshare"),
        Ok(status) if status.success() => Ok(()),
        Ok(_) => Err("needs the right to mount"),
    }
}

async fn really_full() {
    let file = File::new();
    let disk = file.beside("disk");
    fs::create_dir(&disk).unwrap();
    let mount = "mount -t tmpfs -o size=600k none \"$1\" && exec \"$0\" \"$1/locks.db\"";
    let mut command = Player::with_role(Command::new("unshare"), "fill disk");
    command
        .args(["-rm", "sh", "-c", mount])
        .arg(std::env::current_exe().unwrap())
        .arg(&disk);
    Player::spawn(command).finish();
}

/// Keeps a lock while somebody else uses up all space, and lets go of it.
async fn fill_disk(path: &Path) {
    let lock = SqliteLock::open(path).await.unwrap();
    let held = claim("held", LONG);
    let grant = granted(&lock, &held).await;
    let mut filler = fs::File::create(path.with_file_name("filler")).unwrap();
    let full = std::iter::repeat_with(|| filler.write_all(&[1; 512])).find_map(Result::err);
    assert_eq!(full.unwrap().kind(), std::io::ErrorKind::StorageFull);
    for _ in 0..300 {
        assert_eq!(lock.renew(&grant.lease).await.unwrap(), Renewal::Renewed);
    }
    assert_eq!(lock.release(&held).await.unwrap(), Released::Released);
    assert!(lock.holder(held.name()).await.unwrap().is_none());
}

/// Whether a time namespace can be made here.
fn time_namespace() -> Result<(), &'static str> {
    let made = Command::new("unshare")
        .args(["--time", "--boottime", "1000", "true"])
        .stderr(Stdio::null())
        .status();
    match made {
        Err(_) => Err("needs the program unshare"),
        Ok(status) if status.success() => Ok(()),
        Ok(_) => Err("needs the right to make time namespaces"),
    }
}

async fn other_clock() {
    let file = File::new();
    let lock = file.client().await;
    granted(&lock, &claim("held", LONG)).await;
    let program = std::env::current_exe().unwrap();
    for ahead in ["1000000", "-60"] {
        let mut command = Player::with_role(Command::new("unshare"), "hold");
        command
            .args(["--time", "--boottime", ahead])
            .arg(&program)
            .arg(file.path());
        let mut other = Player::spawn(command);
        assert_eq!(other.ask("busy"), "true", "with a clock {ahead} s ahead");
        lock.force_release(&file::name("held")).await.unwrap();
        other.take(LONG);
        let held = lock.holder(&file::name("held")).await.unwrap().unwrap();
        assert!(held.remaining.unwrap() > LONG / 2 && held.remaining.unwrap() <= LONG);
        other.finish();
    }
}

/// A started process that plays a role.
struct Player {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Player {
    fn start(role: &str, file: &File) -> Self {
        Self::spawn(Self::command(role, file))
    }

    fn command(role: &str, file: &File) -> Command {
        let mut command = Self::with_role(Command::new(std::env::current_exe().unwrap()), role);
        command.arg(file.path());
        command
    }

    fn with_role(mut command: Command, role: &str) -> Command {
        command.env(ROLE, role).stdin(Stdio::piped()).stdout(Stdio::piped());
        command
    }

    fn spawn(mut command: Command) -> Self {
        let mut child = command.spawn().unwrap();
        Self {
            input: child.stdin.take(),
            output: BufReader::new(child.stdout.take().unwrap()),
            child,
        }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    fn ask(&mut self, what: &str) -> String {
        writeln!(self.input.as_mut().unwrap(), "{what}").unwrap();
        self.line()
    }

    fn take(&mut self, ttl: Duration) -> FencingToken {
        self.ask(&format!("take {}", ttl.as_millis())).parse().unwrap()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Waits for its end, and for the rest of what it said.
    fn rest(mut self) -> String {
        self.input = None;
        let mut rest = String::new();
        self.output.read_to_string(&mut rest).unwrap();
        self.child.wait().unwrap();
        rest
    }

    /// Waits for its good end.
    fn finish(mut self) {
        self.input = None;
        let status = self.child.wait().unwrap();
        assert!(status.success(), "{status}");
    }
}

impl Drop for Player {
    fn drop(&mut self) {
        // A test that failed leaves no process behind.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn run(test: impl Future<Output = ()>) -> Result<(), Failed> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(test);
    Ok(())
}

//! Holders and waiters that say no more: killed, or stopped.

use std::time::{Duration, SystemTime};

use lock_core::{DistributedLock, Grant, LockError, Locks, OwnerId, Renewal};
use lock_redis::{RedisConfig, RedisLock};
use rustix::process::Signal;
use tokio::task::JoinHandle;

use crate::player::Player;
use crate::server::{LONG, Server, claim, granted, name, soon, until, until_queued};

const TTL: Duration = Duration::from_secs(2);

/// What may come on top of a bound on a machine that is busy.
const SLACK: Duration = Duration::from_millis(100);

/// Locks `n`, and tells its token; then whether it holds it, each time it is asked.
pub(crate) async fn lock(port: u16) {
    let lock = RedisConfig::new("127.0.0.1", port).connect().await.unwrap();
    let locks = Locks::new(lock);
    println!("ready");
    let mut words = String::new();
    std::io::stdin().read_line(&mut words).unwrap();
    let guard = locks.lock("n").ttl(TTL).await.unwrap();
    println!("{}", guard.token());
    while std::io::stdin().read_line(&mut words).unwrap() > 0 {
        println!("{}", guard.is_held());
    }
}

/// Starts a server of its own, and tells where it listens and where its files are.
pub(crate) fn keep_a_server() {
    let server = Server::start();
    println!("ready");
    println!("{} {}", server.port(), server.path("").display());
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

/// A server, a holder, and behind it in the queue a process and then a client.
struct Line {
    server: Server,
    holder: RedisLock,
    held: Grant,
    process: Player,
    next: JoinHandle<(Grant, RedisLock)>,
}

impl Line {
    async fn form() -> Self {
        let server = Server::start();
        let holder = server.client().await;
        let held = granted(&holder, &claim("n", LONG)).await;
        let mut process = Player::start("lock", &server);
        process.say("lock");
        until_queued(&server, "n", 1).await;
        let next = wait(&server, TTL).await;
        until_queued(&server, "n", 2).await;
        Self {
            server,
            holder,
            held,
            process,
            next,
        }
    }

    async fn release(&self) -> SystemTime {
        let began = SystemTime::now();
        self.holder.release(&self.held.claim).await.unwrap();
        began
    }
}

async fn wait(server: &Server, ttl: Duration) -> JoinHandle<(Grant, RedisLock)> {
    let lock = server.client().await;
    let wanted = claim("n", ttl);
    tokio::spawn(async move {
        let grant = lock.acquire(&wanted, soon()).await.unwrap().granted().unwrap();
        (grant, lock)
    })
}

/// Renews the lock until that fails.
async fn until_lost(lock: &RedisLock, grant: &Grant) -> Result<Renewal, LockError> {
    loop {
        match lock.renew(&grant.lease).await {
            Ok(Renewal::Renewed) => tokio::time::sleep(TTL / 4).await,
            lost => return lost,
        }
    }
}

/// Who holds `n`, and when that was granted, by the server's clock, which is that of this machine.
async fn holder(server: &Server) -> (OwnerId, SystemTime) {
    let held = server.client().await.holder(&name("n")).await.unwrap().unwrap();
    (held.owner.unwrap(), held.acquired_at.unwrap())
}

/// Waits until the server has seen the process end: its channel has nobody left.
async fn until_gone(server: &Server, left: usize) {
    while server.command::<Vec<String>>("PUBSUB CHANNELS *").await.len() > left {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

pub(crate) async fn killed_waiter() {
    let line = Line::form().await;
    line.process.signal(Signal::KILL);
    until_gone(&line.server, 2).await;
    line.release().await;
    // Granted by the release itself: asked right after it, the server names the next one.
    let (owner, _) = holder(&line.server).await;
    let (grant, _lock) = line.next.await.unwrap();
    assert_eq!(grant.claim.owner(), owner);
    assert!(grant.token > line.held.token);
}

pub(crate) async fn stopped_waiter() {
    let mut line = Line::form().await;
    line.process.signal(Signal::STOP);
    let released = line.release().await;
    let (stopped, _) = holder(&line.server).await;
    let (grant, _lock) = line.next.await.unwrap();
    assert_ne!(
        grant.claim.owner(),
        stopped,
        "the stopped one was granted the lock first"
    );
    let delay = holder(&line.server).await.1.duration_since(released).unwrap();
    println!("a stopped waiter delays the next by {delay:?}, with a ttl of {TTL:?}");
    assert!(delay <= TTL + SLACK, "{delay:?}");
    // It wakes to a grant that is over, and asks again.
    line.process.signal(Signal::CONT);
    tokio::select! {
        () = until_queued(&line.server, "n", 1) => {}
        lost = until_lost(&_lock, &grant) => panic!("{lost:?}"),
    }
    let token = grant.token;
    _lock.release(&grant.claim).await.unwrap();
    assert!(line.process.line().parse::<u64>().unwrap() > token.get());
    assert_eq!(line.process.ask("held"), "true");
    line.process.finish();
}

pub(crate) async fn long_stopped_waiter() {
    let line = Line::form().await;
    line.process.signal(Signal::STOP);
    // Until its place has less than a third of its ttl to go.
    tokio::time::sleep(TTL * 7 / 10).await;
    line.release().await;
    let (owner, _) = holder(&line.server).await;
    let (grant, _lock) = line.next.await.unwrap();
    assert_eq!(grant.claim.owner(), owner, "granted within the release");
}

pub(crate) async fn killed_holder() {
    let server = Server::start();
    let mut process = Player::start("lock", &server);
    let token = process.ask("lock").parse::<u64>().unwrap();
    let next = wait(&server, LONG).await;
    until_queued(&server, "n", 1).await;
    // Past the first renewal.
    tokio::time::sleep(TTL / 2).await;
    process.signal(Signal::KILL);
    followed(&server, next, token).await;
}

pub(crate) async fn killed_waiter_and_holder() {
    let server = Server::start();
    let mut process = Player::start("lock", &server);
    let token = process.ask("lock").parse::<u64>().unwrap();
    let mut first = Player::start("lock", &server);
    first.say("lock");
    until_queued(&server, "n", 1).await;
    // It refreshes once while the lease lasts, and next when that is long over.
    let next = wait(&server, TTL * 2).await;
    until_queued(&server, "n", 2).await;
    first.signal(Signal::KILL);
    until_gone(&server, 2).await;
    process.signal(Signal::KILL);
    followed(&server, next, token).await;
}

/// The holder of `n` has just been killed: the next one has it when the lease has run out.
async fn followed(server: &Server, next: JoinHandle<(Grant, RedisLock)>, token: u64) {
    let killed = SystemTime::now();
    let lease = Duration::from_millis(server.command("PTTL {fencelock:n}:lock").await);
    let (grant, _lock) = next.await.unwrap();
    let delay = holder(server).await.1.duration_since(killed).unwrap();
    println!("a killed holder is followed after {delay:?}, its lease had {lease:?} to go");
    assert!(lease <= TTL && delay <= lease + SLACK, "{delay:?}");
    assert!(grant.token.get() > token);
}

pub(crate) async fn killed_test() {
    let server = Server::start();
    let mut test = Player::start("keep a server", &server);
    let line = test.line();
    let (port, folder) = line.split_once(' ').unwrap();
    let port: u16 = port.parse().unwrap();
    let is_up = async || tokio::net::TcpStream::connect(("127.0.0.1", port)).await.is_ok();
    assert!(is_up().await && std::path::Path::new(folder).exists());
    test.signal(Signal::KILL);
    until("its server ends", async || !is_up().await).await;
    until("the files of its server are removed", async || {
        !std::path::Path::new(folder).exists()
    })
    .await;
}

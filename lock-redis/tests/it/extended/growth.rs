//! What a script costs does not depend on how many wait, have waited, or have vanished.

use std::time::{Duration, Instant};

use conformance_tests::faults::Then;
use lock_core::{DistributedLock, Released};
use lock_redis::RedisLock;
use lock_redis::redis::aio::MultiplexedConnection;
use lock_redis::redis::{self, Cmd, Value};

use crate::scripts::stage::{Scripts, now};
use crate::server::{LONG, Proxy, Server, by_proxy, claim, granted, name, scripts, until, waiting};

/// Waiters of each test. `FENCELOCK_TEST_WAITERS` sets another number, such as 1000000.
fn waiters() -> usize {
    let number = std::env::var("FENCELOCK_TEST_WAITERS").ok();
    number.map_or(20_000, |number| number.parse().unwrap())
}

/// How much more a script may cost where many wait: a machine that is busy with other tests makes any of them slow.
const MORE: f64 = 10.0;

/// A server that knows the scripts, and requests of clients that are only names.
struct Crowd {
    server: Server,
    con: MultiplexedConnection,
    acquire: String,
    release: String,
    /// Receives what the living clients are told, and does nothing with it.
    _living: MultiplexedConnection,
}

const LIVING: &str = "living";
const GONE: &str = "gone";

impl Crowd {
    async fn gather() -> Self {
        let server = Server::start();
        let url = format!("redis://127.0.0.1:{}/?protocol=resp3", server.port());
        let client = redis::Client::open(url).unwrap();
        // Many requests at once take their time on a machine that is busy.
        let patient = redis::AsyncConnectionConfig::new().set_response_timeout(None);
        let mut con = client
            .get_multiplexed_async_connection_with_config(&patient)
            .await
            .unwrap();
        let scripts = Scripts::real();
        let mut load = async |text: &str| -> String {
            let load = redis::cmd("SCRIPT").arg("LOAD").arg(text).clone();
            load.query_async(&mut con).await.unwrap()
        };
        let (acquire, release) = (load(&scripts.acquire).await, load(&scripts.release).await);
        let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
        let config = redis::AsyncConnectionConfig::new().set_push_sender(tell);
        let mut living = client
            .get_multiplexed_async_connection_with_config(&config)
            .await
            .unwrap();
        living.subscribe(format!("fencelock:client:{LIVING}")).await.unwrap();
        tokio::spawn(async move { while told.recv().await.is_some() {} });
        Self {
            server,
            con,
            acquire,
            release,
            _living: living,
        }
    }

    fn call(&self, script: &str, name: &str, owner: &str, arguments: &[&str]) -> Cmd {
        let mut call = redis::cmd("EVALSHA");
        call.arg(script).arg(6);
        for kind in ["lock", "fence", "order", "waiters", "holders", "records"] {
            call.arg(format!("{{fencelock:{name}}}:{kind}"));
        }
        call.arg("fencelock:client:").arg(600_000).arg(owner).arg(arguments);
        call
    }

    /// Asks for the lock, and waits for it.
    fn wait(&self, name: &str, owner: &str, client: &str, ttl: Duration) -> Cmd {
        self.ask(name, owner, client, ttl, ["1", "x"])
    }

    /// Asks for the lock; whether it waits, and the mode, are in the words of the script.
    fn ask(&self, name: &str, owner: &str, client: &str, ttl: Duration, [waits, mode]: [&str; 2]) -> Cmd {
        let ttl = ttl.as_millis() as u64;
        // However long it takes until the request is sent, it is not too late.
        let stop = now() + ttl + LONG.as_millis() as u64;
        let (life, stop) = (ttl.to_string(), stop.to_string());
        self.call(
            &self.acquire,
            name,
            owner,
            &[&life, &stop, "7", client, "7 host", waits, "1", mode],
        )
    }

    fn leave(&self, name: &str, owner: &str) -> Cmd {
        self.call(&self.release, name, owner, &["0", "0"])
    }

    /// Sends them, many at a time, and returns the mean time that the server took for each, in microseconds.
    async fn run(&mut self, calls: impl Iterator<Item = Cmd>) -> f64 {
        let mut calls = calls.peekable();
        let reset = redis::cmd("CONFIG").arg("RESETSTAT").clone();
        reset.exec_async(&mut self.con).await.unwrap();
        while calls.peek().is_some() {
            let mut some = redis::pipe();
            calls.by_ref().take(500).for_each(|call| {
                some.add_command(call);
            });
            let answers: Vec<Vec<Value>> = some.query_async(&mut self.con).await.unwrap();
            let late = Value::BulkString(b"late".to_vec());
            assert!(answers.iter().all(|answer| answer[0] != late), "{answers:?}");
        }
        let stats: String = self.server.command("INFO commandstats").await;
        let line = stats.lines().find(|line| line.starts_with("cmdstat_evalsha:")).unwrap();
        let mean = line.split_once("usec_per_call=").unwrap().1;
        mean.split(',').next().unwrap().parse().unwrap()
    }

    /// The mean of those fifty in a row that took the least: whatever else the machine does hits others.
    async fn least(&mut self, calls: Vec<Cmd>) -> f64 {
        let mut least = f64::MAX;
        for some in calls.chunks(50) {
            least = least.min(self.run(some.iter().cloned()).await);
        }
        least
    }

    async fn one(&mut self, call: Cmd) -> f64 {
        self.run(std::iter::once(call)).await
    }

    async fn in_queue(&self, name: &str) -> usize {
        self.server.command(&format!("ZCARD {{fencelock:{name}}}:order")).await
    }

    /// How many scripts the server has run since the last `run`.
    async fn scripts(&self) -> u64 {
        scripts(&self.server).await
    }
}

/// The names of that many owners.
fn owners(kind: &str, number: usize) -> impl Iterator<Item = String> + Clone {
    let kind = kind.to_owned();
    (0..number).map(move |i| format!("{kind}{i}"))
}

#[tokio::test]
async fn no_script_costs_more_the_more_wait() {
    const FEW: usize = 500;
    let mut crowd = Crowd::gather().await;
    let calls = |crowd: &Crowd, name: &str, owners: Vec<String>| -> Vec<Cmd> {
        let wait = |owner: &String| crowd.wait(name, owner, LIVING, LONG);
        owners.iter().map(wait).collect()
    };
    let mut costs = Vec::new();
    for (name, number) in [("few", FEW), ("many", waiters())] {
        crowd.one(crowd.wait(name, "holder", LIVING, LONG)).await;
        let before = calls(&crowd, name, owners("o", number - FEW).collect());
        if !before.is_empty() {
            crowd.run(before.into_iter()).await;
        }
        let last: Vec<_> = owners("p", FEW).collect();
        let enqueue = crowd.least(calls(&crowd, name, last.clone())).await;
        let refresh = crowd.least(calls(&crowd, name, last.clone())).await;
        assert_eq!(crowd.in_queue(name).await, number);
        let leaving: Vec<_> = last
            .iter()
            .skip(FEW / 2)
            .map(|owner| crowd.leave(name, owner))
            .collect();
        let leave = crowd.least(leaving).await;
        let kind = if number > FEW { "o" } else { "p" };
        let passing = ["holder".to_owned()].into_iter().chain(owners(kind, FEW / 4));
        let passing: Vec<_> = passing.map(|owner| crowd.leave(name, &owner)).collect();
        let pass_on = crowd.least(passing).await;
        costs.push([enqueue, refresh, leave, pass_on]);
    }
    println!(
        "enqueue, refresh, leave, pass on, in us: {costs:?}, with {FEW} and {} waiters",
        waiters()
    );
    for (few, many) in costs[0].iter().zip(costs[1]) {
        assert!(many < few * MORE, "{costs:?}");
    }
}

#[tokio::test]
async fn no_script_costs_more_the_more_share_the_name() {
    const FEW: usize = 500;
    let mut crowd = Crowd::gather().await;
    let mut costs = Vec::new();
    for (name, number) in [("few", FEW), ("many", waiters())] {
        let all = |crowd: &Crowd, owners: &[String], mode| -> Vec<Cmd> {
            let ask = |owner: &String| crowd.ask(name, owner, LIVING, LONG, ["0", mode]);
            owners.iter().map(ask).collect()
        };
        let before: Vec<_> = owners("o", number - FEW).collect();
        if !before.is_empty() {
            crowd.run(all(&crowd, &before, "s").into_iter()).await;
        }
        let last: Vec<_> = owners("p", FEW).collect();
        let join = crowd.least(all(&crowd, &last, "s")).await;
        let again = crowd.least(all(&crowd, &last, "s")).await;
        let refuse = crowd.least(all(&crowd, &last[..FEW / 2], "x")).await;
        let writers: Vec<_> = owners("w", FEW / 2).collect();
        let exclude = crowd.least(all(&crowd, &writers, "x")).await;
        let leaving: Vec<_> = last[FEW / 2..].iter().map(|owner| crowd.leave(name, owner)).collect();
        let leave = crowd.least(leaving).await;
        let left: usize = crowd
            .server
            .command(&format!("ZCARD {{fencelock:{name}}}:holders"))
            .await;
        assert_eq!(left, number - FEW / 2);
        costs.push([join, again, refuse, exclude, leave]);
    }
    println!(
        "join, ask again, ask for more, exclude, leave, in us: {costs:?}, with {FEW} and {} holders",
        waiters()
    );
    for (few, many) in costs[0].iter().zip(costs[1]) {
        assert!(many < few * MORE, "{costs:?}");
    }
}

#[tokio::test]
async fn waiters_that_vanished_are_passed_over_a_few_at_a_time() {
    let mut crowd = Crowd::gather().await;
    let lock = crowd.server.client().await;
    // A release passes over them for as long as half of what is left of its time.
    let holder = crowd.server.config().op_timeout(LONG).connect().await.unwrap();
    let held = claim("n", LONG);
    granted(&holder, &held).await;
    crowd.vanished("n", waiters()).await;
    let before = crowd.in_queue("n").await;
    let wait = waiting(&lock, &claim("n", LONG));
    until("the last one waits", async || crowd.in_queue("n").await > before).await;
    crowd.run(std::iter::once(crowd.leave("other", "o"))).await;
    let began = Instant::now();
    holder.release(&held, None).await.unwrap();
    // By the release: a refresh would come after the deadline.
    wait.await.unwrap();
    let scripts = crowd.scripts().await;
    println!("{before} vanished waiters: {:?}, {scripts} scripts", began.elapsed());
    assert!(
        scripts > before as u64 / 200,
        "{scripts} scripts passed over {before} waiters"
    );
    assert_eq!(crowd.in_queue("n").await, 0);
}

impl Crowd {
    /// A client that knows the server's scripts, and the way that its requests go.
    async fn client_by_proxy(&self) -> (RedisLock, Proxy) {
        let (lock, proxy) = by_proxy(&self.server, LONG).await;
        // The scripts are known then, so that one request is all that each takes.
        let warm = claim("warm", LONG);
        granted(&lock, &warm).await;
        assert!(lock.force_release(warm.name()).await.unwrap().pop().is_some());
        assert_eq!(lock.release(&warm, None).await.unwrap(), Released::NotHeld);
        (lock, proxy)
    }

    /// Lets that many wait for the name who are not there.
    async fn vanished(&mut self, name: &str, number: usize) {
        let calls: Vec<_> = owners("o", number)
            .map(|owner| self.wait(name, &owner, GONE, LONG))
            .collect();
        self.run(calls.into_iter()).await;
    }
}

#[tokio::test]
async fn a_release_that_was_carried_out_is_told_whatever_becomes_of_the_scripts_that_follow() {
    const VANISHED: usize = 400;
    /// The owner in the request that only serves the next waiter.
    const SERVE: &[u8] = b"\r\n$1\r\n-\r\n";
    let mut crowd = Crowd::gather().await;
    let (lock, proxy) = crowd.client_by_proxy().await;
    let held = claim("n", LONG);
    granted(&lock, &held).await;
    crowd.vanished("n", VANISHED).await;
    let cut = proxy.swallow_reply(SERVE, Then::Cut);
    assert_eq!(lock.release(&held, None).await.unwrap(), Released::Released);
    assert!(cut.has_sprung());
    let left = crowd.in_queue("n").await;
    assert!(0 < left && left < VANISHED, "{left}");

    let (lock, proxy) = crowd.client_by_proxy().await;
    let held = claim("m", LONG);
    granted(&lock, &held).await;
    crowd.vanished("m", VANISHED).await;
    let cut = proxy.swallow_reply(SERVE, Then::Cut);
    let holder = lock.force_release(&name("m")).await.unwrap().pop().unwrap();
    assert_eq!(holder.owner, Some(held.owner()));
    assert!(cut.has_sprung());
    let left = crowd.in_queue("m").await;
    assert!(0 < left && left < VANISHED, "{left}");
}

#[tokio::test]
async fn entries_whose_time_is_over_do_not_pile_up_behind_a_patient_waiter() {
    const BATCH: usize = 500;
    let life = Duration::from_millis(50);
    let mut crowd = Crowd::gather().await;
    for owner in ["holder", "patient"] {
        crowd.one(crowd.wait("n", owner, LIVING, LONG)).await;
    }
    for batch in 0..20 {
        let calls: Vec<_> = owners(&format!("o{batch}-"), BATCH)
            .map(|owner| crowd.wait("n", &owner, GONE, life))
            .collect();
        crowd.run(calls.into_iter()).await;
        tokio::time::sleep(life).await;
    }
    let left = crowd.in_queue("n").await;
    println!("{left} of {} entries are left", 20 * BATCH);
    assert!(left <= 4 * BATCH, "{left}");
    // The patient one is still the first.
    crowd.one(crowd.leave("n", "holder")).await;
    let value: String = crowd.server.command("GET {fencelock:n}:lock").await;
    assert_eq!(value.split(' ').nth(1), Some("patient"));
}

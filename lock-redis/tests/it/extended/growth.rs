//! What a script costs does not depend on how many wait, share the name, have waited, or have vanished.

use std::time::Duration;

use conformance_tests::faults::Then;
use lock_core::{DistributedLock, Released};
use lock_redis::redis::aio::MultiplexedConnection;
use lock_redis::redis::{self, Cmd, Value};

use crate::scripts::{now, script};
use crate::server::{Ask, LONG, Server, by_proxy, claim, granted, name, start, until, waiting};

/// Waiters of each test. `FENCELOCK_TEST_WAITERS` sets another number, such as 1000000.
fn waiters() -> usize {
    let number = std::env::var("FENCELOCK_TEST_WAITERS").ok();
    number.map_or(20_000, |number| number.parse().unwrap())
}

/// How many are few.
const FEW: usize = 500;

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
        let server = start().await;
        let mut con = server.plain().await;
        let mut load = async |name: &str| -> String {
            let load = redis::cmd("SCRIPT").arg("LOAD").arg(script(name, None)).clone();
            load.query_async(&mut con).await.unwrap()
        };
        let (acquire, release) = (load("acquire.lua").await, load("release.lua").await);
        let client = redis::Client::open(format!("{}/?protocol=resp3", server.url())).unwrap();
        let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
        let config = redis::AsyncConnectionConfig::new()
            .set_response_timeout(None)
            .set_push_sender(tell);
        let living = client.get_multiplexed_async_connection_with_config(&config);
        let mut living = living.await.unwrap();
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
        let (life, stop) = (ttl.to_string(), (now() + ttl + LONG.as_millis() as u64).to_string());
        let arguments = [&*life, &stop, "7", client, "7 host", waits, "1", mode];
        self.call(&self.acquire, name, owner, &arguments)
    }

    fn leave(&self, name: &str, owner: &str) -> Cmd {
        self.call(&self.release, name, owner, &["0", "0"])
    }

    /// Sends them, many at a time, and returns the mean time that the server took for each, in microseconds.
    async fn run(&mut self, calls: &[Cmd]) -> f64 {
        let _: () = self.server.command("CONFIG RESETSTAT").await;
        for calls in calls.chunks(500) {
            let mut some = redis::pipe();
            for call in calls {
                some.add_command(call.clone());
            }
            let answers: Vec<Vec<Value>> = some.query_async(&mut self.con).await.unwrap();
            let late = Value::BulkString(b"late".to_vec());
            assert!(answers.iter().all(|answer| answer[0] != late), "{answers:?}");
        }
        let stats: String = self.server.command("INFO commandstats").await;
        let line = stats.lines().find(|line| line.starts_with("cmdstat_evalsha:"));
        let mean = line.and_then(|line| line.split_once("usec_per_call=")?.1.split(',').next());
        mean.map_or(0.0, |mean| mean.parse().unwrap())
    }

    /// The mean of those fifty in a row that took the least: whatever else the machine does hits others.
    async fn least(&mut self, calls: Vec<Cmd>) -> f64 {
        let mut least = f64::MAX;
        for some in calls.chunks(50) {
            least = least.min(self.run(some).await);
        }
        least
    }

    /// How many there are of that kind: in the queue, or holding.
    async fn count(&self, name: &str, kind: &str) -> usize {
        self.server.command(&format!("ZCARD {{fencelock:{name}}}:{kind}")).await
    }

    /// A client that knows the server's scripts, and the way that its requests go.
    async fn client_by_proxy(&self) -> (lock_redis::RedisLock, crate::server::Proxy) {
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
        let owners = owners("o", number);
        let calls: Vec<_> = owners.iter().map(|owner| self.wait(name, owner, GONE, LONG)).collect();
        self.run(&calls).await;
    }
}

/// The names of that many owners.
fn owners(kind: &str, number: usize) -> Vec<String> {
    (0..number).map(|i| format!("{kind}{i}")).collect()
}

/// Compares what each step costs with few and with many.
fn compare(steps: &str, costs: &[Vec<f64>]) {
    println!("{steps}, in us: {costs:?}, with {FEW} and {}", waiters());
    for (few, many) in costs[0].iter().zip(&costs[1]) {
        assert!(*many < few * MORE, "{costs:?}");
    }
}

#[tokio::test]
async fn no_script_costs_more_the_more_wait() {
    let mut crowd = Crowd::gather().await;
    let mut costs = Vec::new();
    for (name, number) in [("few", FEW), ("many", waiters())] {
        let calls = |crowd: &Crowd, owners: &[String]| -> Vec<Cmd> {
            let wait = |owner: &String| crowd.wait(name, owner, LIVING, LONG);
            owners.iter().map(wait).collect()
        };
        let leave = |crowd: &Crowd, owners: &[String]| -> Vec<Cmd> {
            owners.iter().map(|owner| crowd.leave(name, owner)).collect()
        };
        let (before, last) = (owners("o", number - FEW), owners("p", FEW));
        crowd.run(&calls(&crowd, &["holder".to_owned()])).await;
        crowd.run(&calls(&crowd, &before)).await;
        let enqueue = crowd.least(calls(&crowd, &last)).await;
        let refresh = crowd.least(calls(&crowd, &last)).await;
        assert_eq!(crowd.count(name, "order").await, number);
        let leaves = crowd.least(leave(&crowd, &last[FEW / 2..])).await;
        let passing = [
            vec!["holder".to_owned()],
            owners(if number > FEW { "o" } else { "p" }, FEW / 4),
        ];
        let pass_on = crowd.least(leave(&crowd, &passing.concat())).await;
        costs.push(vec![enqueue, refresh, leaves, pass_on]);
    }
    compare("enqueue, refresh, leave, pass on", &costs);
}

#[tokio::test]
async fn no_script_costs_more_the_more_share_the_name() {
    let mut crowd = Crowd::gather().await;
    let mut costs = Vec::new();
    for (name, number) in [("few", FEW), ("many", waiters())] {
        let all = |crowd: &Crowd, owners: &[String], mode| -> Vec<Cmd> {
            let ask = |owner: &String| crowd.ask(name, owner, LIVING, LONG, ["0", mode]);
            owners.iter().map(ask).collect()
        };
        let (last, writers) = (owners("p", FEW), owners("w", FEW / 2));
        crowd.run(&all(&crowd, &owners("o", number - FEW), "s")).await;
        let join = crowd.least(all(&crowd, &last, "s")).await;
        let again = crowd.least(all(&crowd, &last, "s")).await;
        let refuse = crowd.least(all(&crowd, &last[..FEW / 2], "x")).await;
        let exclude = crowd.least(all(&crowd, &writers, "x")).await;
        let leaving = last[FEW / 2..].iter().map(|owner| crowd.leave(name, owner));
        let leaves = crowd.least(leaving.collect()).await;
        assert_eq!(crowd.count(name, "holders").await, number - FEW / 2);
        costs.push(vec![join, again, refuse, exclude, leaves]);
    }
    compare("join, ask again, ask for more, exclude, leave", &costs);
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
    let before = crowd.count("n", "order").await;
    let wait = waiting(&lock, &claim("n", LONG));
    until("the last one waits", async || crowd.count("n", "order").await > before).await;
    let scripts = crowd.server.scripts().await;
    holder.release(&held, None).await.unwrap();
    // By the release: a refresh would come after the deadline.
    wait.await.unwrap();
    let scripts = crowd.server.scripts().await - scripts;
    assert!(
        scripts > before as u64 / 200,
        "{scripts} scripts passed over {before} waiters"
    );
    assert_eq!(crowd.count("n", "order").await, 0);
}

#[tokio::test]
async fn a_release_that_was_carried_out_is_told_whatever_becomes_of_the_scripts_that_follow() {
    const VANISHED: usize = 400;
    /// The owner in the request that only serves the next waiter.
    const SERVE: &[u8] = b"\r\n$1\r\n-\r\n";
    let mut crowd = Crowd::gather().await;
    for (text, is_forced) in [("n", false), ("m", true)] {
        let (lock, proxy) = crowd.client_by_proxy().await;
        let held = claim(text, LONG);
        granted(&lock, &held).await;
        crowd.vanished(text, VANISHED).await;
        let cut = proxy.swallow_reply(SERVE, Then::Cut);
        match is_forced {
            false => assert_eq!(lock.release(&held, None).await.unwrap(), Released::Released),
            true => {
                let holder = lock.force_release(&name(text)).await.unwrap().pop().unwrap();
                assert_eq!(holder.owner, Some(held.owner()));
            }
        }
        assert!(cut.has_sprung());
        let left = crowd.count(text, "order").await;
        assert!(0 < left && left < VANISHED, "{left}");
    }
}

#[tokio::test]
async fn entries_whose_time_is_over_do_not_pile_up_behind_a_patient_waiter() {
    const BATCH: usize = 500;
    let life = Duration::from_millis(50);
    let mut crowd = Crowd::gather().await;
    let first = ["holder", "patient"].map(|owner| crowd.wait("n", owner, LIVING, LONG));
    crowd.run(&first).await;
    for batch in 0..20 {
        let owners = owners(&format!("o{batch}-"), BATCH);
        let calls: Vec<_> = owners.iter().map(|owner| crowd.wait("n", owner, GONE, life)).collect();
        crowd.run(&calls).await;
        tokio::time::sleep(life).await;
    }
    let left = crowd.count("n", "order").await;
    assert!(left <= 4 * BATCH, "{left} of {} entries are left", 20 * BATCH);
    // The patient one is still the first.
    crowd.run(&[crowd.leave("n", "holder")]).await;
    let value: String = crowd.server.command("GET {fencelock:n}:lock").await;
    assert_eq!(value.split(' ').nth(1), Some("patient"));
}

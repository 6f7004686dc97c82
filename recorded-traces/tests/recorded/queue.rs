//! The queue of one server.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use conformance_tests::servers::Data;
use fastrand::Rng;
use lock_core::DistributedLock;
use lock_redis::RedisConfig;
use models::redis_queue::server::{Answer, Renewal};
use models::redis_queue::trace::{Script, Step};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::decisions::Decisions;
use crate::proxy::Faults;
use crate::torture::{Connect, Node, Torture, disturb_traffic, until_enough};
use crate::transcript::{Kind, Ran};

/// Records one server, and returns the trace of each name.
pub(crate) async fn record(names: &[&'static str], grants: usize, seed: u64) -> Vec<Vec<Step>> {
    let node = Node::start(seed).await;
    let url = node.url();
    let connect: Connect = Arc::new(move || {
        let url = url.clone();
        Box::pin(async move {
            let config = RedisConfig::from_url(&url)?.op_timeout(Duration::from_millis(1000));
            Ok(Box::new(config.connect().await?) as Box<dyn DistributedLock>)
        })
    });
    let decisions = Decisions::default();
    let (stop, stopped) = watch::channel(false);
    let mut clients = JoinSet::new();
    for (number, &name) in names.iter().enumerate() {
        let torture = Torture {
            name,
            connect: Arc::clone(&connect),
            decisions: decisions.clone(),
            lives: 300..2000,
            seed: seed + number as u64,
        };
        clients.spawn(Arc::new(torture).run(stopped.clone()));
    }
    let rounds = AtomicUsize::new(0);
    let enough = async {
        until_enough(&[decisions], grants, &rounds).await;
        stop.send_replace(true);
    };
    tokio::join!(enough, disturb(&node, seed, &rounds, &stopped));
    while let Some(client) = clients.join_next().await {
        client.unwrap();
    }
    let all = node.end().await;
    let of = |name: &&str| {
        let key = format!("{{fencelock:{name}}}:lock");
        all.iter().filter(|ran| ran.keys[0] == key).map(step).collect()
    };
    names.iter().map(of).collect()
}

/// Disturbs the server until `stopped`.
async fn disturb(node: &Node, seed: u64, rounds: &AtomicUsize, stopped: &watch::Receiver<bool>) {
    let mut random = Rng::with_seed(seed);
    while !*stopped.borrow() {
        let at = rounds.load(Ordering::Relaxed);
        disturb_traffic(&node.proxy, &mut random);
        sleep(Duration::from_millis(random.u64(200..600))).await;
        node.proxy.set(Faults::default());
        sleep(Duration::from_millis(random.u64(100..400))).await;
        let time = Duration::from_millis(random.u64(50..500));
        match at % 4 {
            0 => node.pause(time).await,
            2 => node.restart(Data::Kept, time / 5, || {}).await,
            _ => node.proxy.cut(),
        }
        rounds.fetch_add(1, Ordering::Relaxed);
    }
}

fn step(ran: &Ran) -> Step {
    let arguments = &ran.arguments;
    let number = |at: usize| arguments[at].parse().unwrap();
    let owner = arguments[2].clone();
    let released = ran.answer[0] == "released";
    let script = match ran.kind {
        Kind::Acquire => Script::Acquire {
            owner,
            ttl: number(3),
            stop: number(4),
            sent: number(5),
            waits: arguments[8] != "0",
            answer: answer(&ran.answer),
        },
        Kind::Renew => Script::Renew {
            owner,
            ttl: number(3),
            stop: number(4),
            answer: match &*ran.answer[0] {
                "renewed" => Renewal::Renewed,
                "late" => Renewal::Late,
                "lost" => Renewal::Lost,
                other => panic!("{other}"),
            },
        },
        Kind::Release => Script::Release { owner, released },
    };
    Step {
        at: ran.at,
        script,
        push: ran.push.clone(),
        unheard: ran.unheard.clone(),
        swept: ran.swept.clone(),
    }
}

fn answer(answer: &[String]) -> Answer {
    match &*answer[0] {
        "granted" => Answer::Granted {
            token: answer[2].parse().unwrap(),
            life: answer[3].parse().unwrap(),
        },
        "busy" => Answer::Busy,
        "late" => Answer::Late,
        other => panic!("{other}"),
    }
}

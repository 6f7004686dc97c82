//! What holding many locks costs.

use std::time::{Duration, Instant};

use lock_core::Locks;

use crate::server::{LONG, Server, scripts, until_queued};

#[tokio::test]
async fn who_waits_is_in_the_queue_with_its_first_request() {
    const ROUNDS: usize = 20;
    let server = Server::start();
    let clients = [Locks::new(server.client().await), Locks::new(server.client().await)];
    let mut guard = clients[0].lock("n").ttl(LONG).await.unwrap();
    let mut before = 0;
    // In the first two the server gets to know the scripts.
    for round in 1..=ROUNDS + 2 {
        let next = tokio::spawn(clients[round % 2].lock("n").ttl(LONG).into_future());
        until_queued(&server, "n", 1).await;
        guard.release().await.unwrap();
        guard = next.await.unwrap().unwrap();
        if round == 2 {
            before = scripts(&server).await;
        }
    }
    // One to acquire and one to release.
    assert_eq!(scripts(&server).await - before, 2 * ROUNDS as u64);
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn many_held_locks_are_renewed_without_disturbing_acquisitions() {
    const HELD: usize = 10_000;
    // Long enough for a machine that is busy with other tests.
    const TTL: Duration = Duration::from_secs(60);
    let server = Server::start();
    let memory = |info: &str| -> i64 {
        let line = info.lines().find_map(|line| line.strip_prefix("used_memory:")).unwrap();
        line.trim().parse().unwrap()
    };
    let before = memory(&server.command::<String>("INFO memory").await);
    let (holder, other) = (Locks::new(server.client().await), Locks::new(server.client().await));
    let mut alone = Vec::new();
    for _ in 0..500 {
        alone.push(acquisition(&other).await);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let began = Instant::now();
    let mut guards = Vec::new();
    for hundred in 0..HELD / 100 {
        let ask = |i: usize| holder.lock(format!("held/{}", hundred * 100 + i)).ttl(TTL);
        let asking: Vec<_> = (0..100).map(|i| tokio::spawn(ask(i).into_future())).collect();
        for asked in asking {
            guards.push(asked.await.unwrap().unwrap());
        }
    }
    println!("{HELD} locks taken in {:?}", began.elapsed());
    let each = (memory(&server.command::<String>("INFO memory").await) - before) / HELD as i64;
    println!("{each} bytes for each on the server, with its counter");
    let mut margin = TTL;
    let mut most = 0;
    let mut taken = Vec::new();
    let (before_scripts, cpu, client_cpu) = (scripts(&server).await, server_cpu(&server).await, client_cpu());
    let (began, renewed) = (Instant::now(), holder.stats().renewed);
    let mut second = (began, renewed);
    // Past the first renewal of each.
    while began.elapsed() < TTL / 2 {
        taken.push(acquisition(&other).await);
        if second.0.elapsed() >= TTL / 600 {
            margin = margin.min(guards.iter().map(|guard| guard.remaining()).min().unwrap());
            let renewed = holder.stats().renewed;
            most = most.max(renewed - second.1);
            second = (Instant::now(), renewed);
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let seconds = began.elapsed().as_secs_f64();
    let ran = self::scripts(&server).await - before_scripts;
    println!(
        "{:.0} scripts per second; the server works {:.0} % of the time, this process {}",
        ran as f64 / seconds,
        (server_cpu(&server).await - cpu) / seconds * 100.0,
        match (client_cpu, self::client_cpu()) {
            (Some(before), Some(after)) => format!("{:.0} %", (after - before) / seconds * 100.0),
            _ => "is not known here".to_owned(),
        }
    );
    println!(
        "{} renewals, at most {most} of them in {:?}; least remaining {margin:?} of {TTL:?}",
        holder.stats().renewed - renewed,
        TTL / 600
    );
    println!(
        "acquisitions before: {}; beside the renewals: {}",
        spread(alone),
        spread(taken)
    );
    assert!(guards.iter().all(|guard| guard.is_held()));
    assert!(margin > Duration::ZERO);
    assert_eq!(holder.stats().lost, 0);
    // A hundred at a time, so that the error of each would be seen.
    while !guards.is_empty() {
        let some = guards.drain(..guards.len().min(100));
        let releasing: Vec<_> = some.map(|guard| tokio::spawn(guard.release())).collect();
        for released in releasing {
            released.await.unwrap().unwrap();
        }
    }
    holder.shutdown().await.unwrap();
    other.shutdown().await.unwrap();
}

/// How long it takes to lock and let go of what nobody else wants.
async fn acquisition(locks: &Locks) -> Duration {
    let asked = Instant::now();
    locks.lock("n").await.unwrap().release().await.unwrap();
    asked.elapsed()
}

fn spread(mut times: Vec<Duration>) -> String {
    times.sort_unstable();
    let at = |percent: usize| times[(times.len() - 1) * percent / 100];
    format!("p50 {:?}, p99 {:?}, most {:?}", at(50), at(99), at(100))
}

/// Seconds that the server has worked.
async fn server_cpu(server: &Server) -> f64 {
    let cpu: String = server.command("INFO cpu").await;
    let fields = cpu.lines().filter_map(|line| line.trim().split_once(':'));
    let wanted = fields.filter(|(field, _)| matches!(*field, "used_cpu_sys" | "used_cpu_user"));
    wanted.map(|(_, seconds)| seconds.parse::<f64>().unwrap()).sum()
}

/// Seconds that this process has worked, where the system tells.
fn client_cpu() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // After the name: user and system time are the 12th and 13th, in hundredths of a second.
    let fields = stat.rsplit_once(") ")?.1.split(' ').skip(11).take(2);
    Some(fields.filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / 100.0)
}

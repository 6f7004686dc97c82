//! The page that people read: docs/performance.md.

use std::fmt::Write as _;
use std::path::Path;

use clap::ValueEnum as _;

use crate::backend::Backend;
use crate::contestant::Failure;
use crate::figures::Report;
use crate::instructions::Count;
use crate::table;

const INTRODUCTION: &str = "# What locks cost

Each table is of one run of `make bench` on one machine, on which the servers ran too, in containers if it is not said otherwise. Contestants took turns,
so that whatever else the machine did hit all of them: compare them with each other, not with figures from elsewhere. A section that was measured for a short time says so; compare
nothing there.

- The **floor** is the least that any lock on that server costs: two bare round trips by the same client library; on
  several servers, to all at once until a majority has answered. It is measured twice, since fencelock does its work on a thread of its own by default, and on the caller's runtime if it is told to.
- A **peer** is a library that one would use instead. None of those on Redis gives a fencing token. What is no lock, by the
  tables at the end of each section, takes no part where many want one name.
- A **bar** is what a figure should be.
- **p50** is the median; one in a hundred takes longer than **p99**.

`distributed-lock` 0.2 and `distributed-lock-postgres` 0.2 are not among the peers: they need sqlx 0.8, which links another
SQLite than this workspace does, and cargo resolves only one. `distributed-lock-redis` is the same library for Redis.

To measure on your machine: `make bench`, or for one backend
`cargo run --release -p lock-bench -- --backend redis` (`--quick` to see that it works). Figures and pictures are kept in `bench`
in cargo's target folder.
";

/// Why a backend misses bars in most runs, and how that is known.
fn reasons(backend: Backend) -> Option<&'static str> {
    match backend {
        Backend::Redis => Some(REDIS),
        Backend::Postgres => Some(POSTGRES),
        Backend::Etcd => Some(ETCD),
        Backend::RedisCluster | Backend::Redlock | Backend::Sqlite => None,
    }
}

const REDIS: &str = "### Bars that are missed in most runs, and why

- **B1 on the caller's runtime and beside the fastest peer, and B2.** A lock is a script here, and its release another: a token takes the server's clock and a
  counter that survives, who waits in the queue comes first, and only the owner may release. The peers set a key that ends by
  itself, and have neither token nor queue. The server runs one script after the other. Sent over one connection without a
  pause, a PING took it 1.3 µs, a script that returns at once 2.7 µs, and the mean of a lock and its release 11.9 µs
  (the least of 25 rounds of 2000 commands each; AMD EPYC, Redis 8.0.2). So where the server is the bound, two scripts that did nothing would come to half
  the rate of the floor. The columns of B2 tell what else a pair takes of the processors.
- **B3.** These figures are older than [local runs](architecture.md#local-runs), by which a section mostly takes no request.
";

const POSTGRES: &str = "### Bars that are missed in most runs, and why

- **B1 beside the fastest peer.** That is the floor itself, the two bare statements, sent by another client library, and takes less
  time than they do through ours. It has neither a token nor a lease that the server ends.
- **B2.** Two differences to the floor are known; how much either costs was not measured. The locks of a client share a session, on
  which at most eight statements are under way at a time, so that a heartbeat never waits for many; the floor has all 64. And the
  statement that locks draws the token, too.
";

const ETCD: &str = "### Bars that are missed in most runs, and why

- **B1 beside the fastest peer** is at the bar: 0.58 in one run and 0.60 in the next, with the thread of its own.
- **B2 on the caller's runtime.** A lock is a transaction that compares three things and not a put: what it takes of the processors
  beside a put is in the columns of B2.
- **B4, commands.** Three are the least: to enqueue, to verify and to release. Without the verification two could hold at once
  (docs/etcd.md), and with 2 and 10 processes it is little more. Who waits behind another one than in the three seconds before asks
  for a watch, ends another, and looks once more whether anything was written in between; each of a hundred processes keeps a lease
  alive besides. How much either adds was not measured.
";

/// All that was measured last.
pub(crate) fn page(results: &Path) -> Result<String, Failure> {
    let mut page = INTRODUCTION.to_owned();
    for backend in Backend::value_variants().iter().copied() {
        let kept = results.join(format!("{}.json", backend.key()));
        if kept.exists() {
            let report: Report = serde_json::from_slice(&std::fs::read(kept)?)?;
            let _ = write!(page, "\n{}", table::page(&report));
            // Who asks for one looks for the reason.
            if let Some(reasons) = reasons(backend).filter(|_| report.bars.iter().any(|bar| !bar.met)) {
                let _ = write!(page, "\n{reasons}");
            }
        }
    }
    let kept = results.join("instructions.json");
    if kept.exists() {
        let counts: Vec<Count> = serde_json::from_slice(&std::fs::read(kept)?)?;
        let _ = write!(page, "\n{}", instructions(&counts));
    }
    Ok(page)
}

/// The table of instructions.
pub(crate) fn instructions(counts: &[Count]) -> String {
    let mut page = "## Instructions of the client

Counted by callgrind on the backend in memory, everything on one thread and without a look at the clock: what the client itself
costs beside the round trips. Much the same in each run, so that a change shows: `make bench-instructions`.

| | instructions |
|---|--:|
"
    .to_owned();
    for count in counts {
        let _ = writeln!(page, "| {} | {} |", count.case, count.instructions);
    }
    page
}

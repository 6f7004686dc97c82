//! The page that people read: docs/performance.md.

use std::fmt::Write as _;
use std::path::Path;

use crate::backend::Backend;
use crate::contestant::Failure;
use crate::figures::Report;
use crate::instructions::Count;
use crate::table;

const INTRODUCTION: &str = "# What locks cost

Each table is of one run of `make bench` on one machine, on which the server ran too, in a container. Contestants took turns,
so that whatever else the machine did hit all of them: compare them with each other, not with figures from elsewhere.

- The **floor** is the least that any lock on that server costs: two bare round trips by the same client library. It is
  measured twice, since fencelock does its work on a thread of its own by default, and on the caller's runtime if it is told to.
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

/// All that was measured last.
pub(crate) fn page(results: &Path) -> Result<String, Failure> {
    let mut page = INTRODUCTION.to_owned();
    for backend in [Backend::Redis, Backend::Postgres, Backend::Etcd, Backend::Sqlite] {
        let kept = results.join(format!("{}.json", backend.key()));
        if kept.exists() {
            let report: Report = serde_json::from_slice(&std::fs::read(kept)?)?;
            let _ = write!(page, "\n{}", table::page(&report));
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

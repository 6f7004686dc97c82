//! What is measured, one file each.

pub(crate) mod check;
pub(crate) mod growth;
pub(crate) mod held;
pub(crate) mod killed;
pub(crate) mod many_names;
pub(crate) mod nodes_down;
pub(crate) mod one_name;
pub(crate) mod pair;
pub(crate) mod processes;
pub(crate) mod wait;

use std::sync::Arc;
use std::time::Duration;

use crate::backend::{Backend, OURS, OURS_HERE, Site};
use crate::contestant::{BackgroundFloor, Contestant, Failure, Floor};
use crate::figures::{Check, Kind};

/// How long a lock lives without a sign of its holder, where it does not matter.
pub(crate) const TTL: Duration = Duration::from_secs(30);

/// What all measures work on.
pub(crate) struct Arena {
    pub(crate) site: Site,
    pub(crate) quick: bool,
    pub(crate) checks: Vec<Check>,
}

/// Somebody who takes part.
pub(crate) struct Entry {
    pub(crate) who: String,
    pub(crate) kind: Kind,
    pub(crate) contestant: Arc<dyn Contestant>,
}

impl Arena {
    pub(crate) fn backend(&self) -> Backend {
        self.site.place.backend
    }

    /// One of two, as time allows.
    pub(crate) fn either<T>(&self, full: T, quick: T) -> T {
        if self.quick { quick } else { full }
    }

    /// fencelock, both ways, with a client each.
    pub(crate) async fn ours(&self) -> Result<Vec<Entry>, Failure> {
        let mut entries = Vec::new();
        for who in [OURS, OURS_HERE] {
            entries.push(self.entry(who, Kind::Ours, TTL).await?);
        }
        Ok(entries)
    }

    /// The bare trips, made where either of ours makes its own.
    pub(crate) async fn floors(&self) -> Result<Vec<Entry>, Failure> {
        let place = self.site.place.clone();
        // A connection is worked where it was made.
        let background = fencelock::backend::background()?;
        let there = background.spawn(async move { place.trips().await }).await??;
        let here = self.site.place.trips().await?;
        let entry = |who, contestant| Entry {
            who,
            kind: Kind::Floor,
            contestant,
        };
        Ok(vec![
            entry(self.backend().background_floor(), Arc::new(BackgroundFloor(there))),
            entry(self.backend().floor().to_owned(), Arc::new(Floor(here))),
        ])
    }

    /// All that can do a pair, with a client each.
    pub(crate) async fn entries(&self) -> Result<Vec<Entry>, Failure> {
        let mut entries = self.ours().await?;
        entries.extend(self.floors().await?);
        entries.extend(self.peers(|_| true).await?);
        Ok(entries)
    }

    /// Each peer that `fit` lets take part.
    pub(crate) async fn peers(&self, fit: impl Fn(&Check) -> bool) -> Result<Vec<Entry>, Failure> {
        let mut entries = Vec::new();
        for who in self.fit_peers(fit) {
            entries.push(self.entry(who, Kind::Peer, TTL).await?);
        }
        Ok(entries)
    }

    /// The names of those.
    pub(crate) fn fit_peers(&self, fit: impl Fn(&Check) -> bool) -> Vec<&'static str> {
        let is_fit = |name: &str| self.checks.iter().any(|check| check.who == name && fit(check));
        let peers = self.backend().peers().iter().map(|peer| peer.name);
        peers.filter(|name| is_fit(name)).collect()
    }

    pub(crate) async fn entry(&self, who: &str, kind: Kind, ttl: Duration) -> Result<Entry, Failure> {
        Ok(Entry {
            who: who.to_owned(),
            kind,
            contestant: self.site.place.connect(who, ttl).await?,
        })
    }
}

/// A name that no two contestants share, since some of them keep their locks at the same place.
pub(crate) fn name_for(who: &str, what: &str) -> String {
    let who: String = who.chars().filter(char::is_ascii_alphanumeric).collect();
    format!("{what}-{who}")
}

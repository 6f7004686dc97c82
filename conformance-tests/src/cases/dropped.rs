//! Futures that are dropped somewhere on their way leave nothing behind.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Duration;

use lock_core::{Claim, DistributedLock, LockError, Wait};

use crate::case::Case;
use crate::link::Link;
use crate::outcome::{Outcome, ensure};

/// When a future is dropped.
#[derive(Clone, Copy, Debug)]
enum Drops {
    /// Right after its k-th poll.
    After(usize),
    /// After its k-th poll, when it is woken again: what it waited for has happened, and nobody looks.
    WhenWoken(usize),
}

/// What became of a future that was to be dropped.
#[derive(Debug)]
enum Fate<T> {
    /// It ended before that.
    Ended(T),
    Dropped,
    /// It was not polled as often, for as long as one had patience.
    Asleep,
}

impl<T> Fate<Result<T, LockError>> {
    fn transpose(self) -> Result<Fate<T>, LockError> {
        Ok(match self {
            Self::Ended(output) => Fate::Ended(output?),
            Self::Dropped => Fate::Dropped,
            Self::Asleep => Fate::Asleep,
        })
    }
}

/// Polls a future until it is dropped.
async fn dropped<F: Future>(future: F, drops: Drops, patience: Duration) -> Fate<F::Output> {
    dropped_counting(future, drops, patience, &AtomicUsize::new(0)).await
}

/// The same, telling how often the future has been polled.
async fn dropped_counting<F: Future>(
    future: F,
    drops: Drops,
    patience: Duration,
    counter: &AtomicUsize,
) -> Fate<F::Output> {
    let mut future = Box::pin(future);
    let mut polls = 0;
    let polled = poll_fn(|context| {
        let (last, woken) = match drops {
            Drops::After(k) => (k, false),
            Drops::WhenWoken(k) => (k, true),
        };
        if polls == last {
            return Poll::Ready(Fate::Dropped);
        }
        polls += 1;
        counter.store(polls, Ordering::SeqCst);
        match future.as_mut().poll(context) {
            Poll::Ready(output) => Poll::Ready(Fate::Ended(output)),
            Poll::Pending if polls == last && !woken => Poll::Ready(Fate::Dropped),
            Poll::Pending => Poll::Pending,
        }
    });
    // What waits for somebody else is not always woken.
    tokio::time::timeout(patience, polled).await.unwrap_or(Fate::Asleep)
}

/// More polls than an operation that ends by itself takes.
const MOST_POLLS: usize = 100;

/// An answer that another thread got may be there before the first look for it. Only an operation that ends that often in
/// a row before it can be dropped takes no more polls.
const ENDS_IN_A_ROW: usize = 10;

/// Every moment at which an operation can be dropped, one attempt after the other.
#[derive(Debug, Default)]
struct EveryPoll {
    /// After how many polls the next attempt is dropped.
    k: usize,
    ends: usize,
    asleep: usize,
    when_woken: bool,
    /// How many polls the operation took at most.
    most: usize,
}

impl EveryPoll {
    /// When to drop the next attempt, unless all was seen.
    fn next(&mut self) -> Outcome<Option<Drops>> {
        ensure!(
            self.k < MOST_POLLS,
            "the backend",
            "an operation ends within {MOST_POLLS} polls"
        );
        if self.ends == ENDS_IN_A_ROW {
            self.most = self.most.max(self.k);
            if self.when_woken {
                return Ok(None);
            }
            *self = Self {
                when_woken: true,
                most: self.most,
                ..Self::default()
            };
        }
        let way = if self.when_woken {
            Drops::WhenWoken
        } else {
            Drops::After
        };
        Ok(Some(way(self.k)))
    }

    /// What became of the attempt.
    fn saw<T>(&mut self, fate: &Fate<T>) {
        match fate {
            Fate::Ended(_) => self.ends += 1,
            // It may be polled as often when the machine is less busy. What waits to be woken may wait for ever.
            Fate::Asleep if !self.when_woken && self.asleep < ENDS_IN_A_ROW => self.asleep += 1,
            Fate::Dropped | Fate::Asleep => (self.k, self.ends, self.asleep) = (self.k + 1, 0, 0),
        }
    }
}

pub(crate) async fn try_acquire_dropped_at_every_poll_leaves_nothing(case: Arc<Case>) -> Outcome {
    let (party, other) = (case.party().await?, case.client().await?);
    // The client lives, and keeps another lock of the same ttl alive: nothing may hide behind its end.
    let kept = party.locks.lock("kept").await?;
    let mut names = Vec::new();
    let mut every = EveryPoll::default();
    while let Some(drops) = every.next()? {
        let claim = Claim::new(case.name(&format!("{drops:?} {}", names.len())), case.steady_ttl());
        let fate = dropped(party.link.try_acquire(&claim), drops, case.hang_limit()).await;
        party.link.release(&claim, None).await?;
        names.push(claim.name().clone());
        every.saw(&fate.transpose()?);
    }
    let most = every.most;
    case.remark(format!("try_acquire was dropped at each of its polls, k_max {most}"));
    let floor = case.fewest_polls();
    ensure!(
        most >= floor,
        "the harness",
        "an acquisition takes at least {floor} polls; it took {most}"
    );
    case.only_leftovers(1).await?;
    for name in &names {
        case.is_free_within(&other, name, case.steady_ttl() + case.hang_limit())
            .await?;
    }
    ensure!(kept.is_held(), "the client", "its other lock is held all the while");
    kept.release().await?;
    Ok(())
}

pub(crate) async fn acquire_dropped_at_every_poll_of_a_wait_leaves_nothing(case: Arc<Case>) -> Outcome {
    const POLLS: usize = 8;
    let (party, other) = (case.party().await?, case.client().await?);
    let kept = party.locks.lock("kept").await?;
    let holder = Claim::new(case.name("n"), case.ttl_of(Duration::from_secs(120)));
    case.take(&other, &holder).await?;
    for way in [Drops::After, Drops::WhenWoken] {
        for k in 0..=POLLS {
            let claim = Claim::new(case.name("n"), holder.ttl());
            let fate = dropped(
                party.link.acquire(&claim, Wait::until(None)),
                way(k),
                Duration::from_millis(300),
            )
            .await;
            ensure!(
                !matches!(fate, Fate::Ended(_)),
                "the backend",
                "it waits for a held name for ever; this one: {fate:?}"
            );
            party.link.release(&claim, None).await?;
        }
    }
    case.only_leftovers(2).await?;
    other.release(&holder, None).await?;
    // An entry that stayed behind would be granted now.
    case.is_free_within(&other, holder.name(), case.hang_limit()).await?;
    kept.release().await?;
    Ok(())
}

pub(crate) async fn acquire_dropped_at_every_poll_of_a_grant_leaves_nothing(case: Arc<Case>) -> Outcome {
    let (party, other) = (case.party().await?, case.client().await?);
    let kept = party.locks.lock("kept").await?;
    let mut every = EveryPoll::default();
    while let Some(drops) = every.next()? {
        let holder = Claim::new(case.name("n"), case.steady_ttl());
        case.take_within(&other, &holder, case.steady_ttl() + case.hang_limit())
            .await?;
        let claim = Claim::new(case.name("n"), case.steady_ttl());
        let polls = Arc::new(AtomicUsize::new(0));
        // A task of its own, as whatever else this one awaited would count as polls.
        let releasing = tokio::spawn(released_once_awaited(
            Arc::clone(&case),
            Arc::clone(&other),
            holder,
            Arc::clone(&polls),
        ));
        let acquire = party.link.acquire(&claim, Wait::until(None));
        let fate = dropped_counting(acquire, drops, case.ttl() / 4, &polls).await;
        polls.store(usize::MAX, Ordering::SeqCst);
        releasing.await??;
        party.link.release(&claim, None).await?;
        every.saw(&fate.transpose()?);
    }
    let most = every.most;
    case.remark(format!(
        "a waiting acquire was dropped at each of its polls, k_max {most}"
    ));
    case.only_leftovers(1).await?;
    case.is_free_within(&other, &case.name("n"), case.steady_ttl() + case.hang_limit())
        .await?;
    ensure!(kept.is_held(), "the client", "its other lock is held all the while");
    kept.release().await?;
    Ok(())
}

/// Releases what is held as soon as somebody waits for it who was polled often enough to know that it is busy, or who has
/// given up.
async fn released_once_awaited(case: Arc<Case>, client: Arc<Link>, held: Claim, polls: Arc<AtomicUsize>) -> Outcome {
    let fewest = case.fewest_polls();
    let polled = || polls.load(Ordering::SeqCst) >= fewest;
    case.eventually("the waiter", "it is polled", polled).await?;
    let gave_up = || polls.load(Ordering::SeqCst) == usize::MAX;
    tokio::select! {
        seen = case.in_line("n", 1) => drop(seen?),
        gone = case.eventually("the waiter", "it gives up", gave_up) => drop(gone?),
    }
    client.release(&held, None).await?;
    Ok(())
}

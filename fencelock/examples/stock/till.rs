//! A till: one of the processes that sell. It does what it is told in lines.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fencelock::{LockGuard, Locks, Renew};
use tokio::sync::{Mutex, OwnedMutexGuard};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout_at};

use crate::Outcome;
use crate::acts::Way;
use crate::lines::{end_with_parent, listen, say, say_failed};
use crate::store::{self, Sale, Store, StoreError};

/// How long a buyer looks at the article before paying.
const LOOK: Duration = Duration::from_millis(1);
/// How long the door stays open when nothing is to happen to it.
const LONG: Duration = Duration::from_secs(60);
/// How long somebody waits at the door before the store counts as out of order.
const LIMIT: Duration = Duration::from_secs(45);

pub(crate) async fn work(run: &str, act: &str) -> ExitCode {
    end_with_parent();
    match serve(run, act).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say_failed(&error);
            ExitCode::FAILURE
        }
    }
}

async fn serve(run: &str, act: &str) -> Outcome<()> {
    let act: usize = act.parse()?;
    let url = std::env::var(fencelock::ENV)?;
    let till = Arc::new(Till {
        store: store::connect(&url, run, act).await.map_err(store_failed)?,
        locks: fencelock::connect(&url).await?,
        way: Way::of(act),
        name: format!("stock/{run}/{act}"),
        mutex: Arc::default(),
        sold_out: AtomicBool::new(false),
    });
    say(format_args!("ready"))?;
    let mut purchase: Option<Purchase> = None;
    loop {
        let order = listen()?;
        let words: Vec<_> = order.split(' ').collect();
        match (&words[..], &mut purchase) {
            (["enter", buyer, ttl, renew], None) => {
                let ttl = Duration::from_millis(ttl.parse()?);
                let renew = if *renew == "renewed" {
                    Renew::UntilReleased
                } else {
                    Renew::Never
                };
                let entered = till.enter(buyer.parse()?, ttl, renew).await?;
                let ttl = entered.guard().map_or(0, |guard| guard.ttl().as_millis());
                let token = entered.guard().map_or(0, |guard| guard.token().get());
                purchase = Some(entered);
                say(format_args!("entered {ttl} {token}"))?;
            }
            (["read"], Some(purchase)) => {
                till.read(purchase).await.map_err(broken)?;
                say(format_args!("read {}", purchase.left))?;
            }
            (["write"], Some(purchase)) => match till.write(purchase).await {
                Ok(true) => say(format_args!("write sold"))?,
                Ok(false) => say(format_args!("write nothing, none was left"))?,
                Err(StoreError::Stale(stale)) => say(format_args!("write refused: {stale}"))?,
                Err(error) => return Err(broken(error)),
            },
            (["leave"], purchase @ Some(_)) => {
                if let Some(purchase) = purchase.take() {
                    till.leave(purchase).await?;
                }
                say(format_args!("outside"))?;
            }
            (["sell", closing, buyers @ ..], None) => {
                let closing = Instant::now() + Duration::from_millis(closing.parse()?);
                let sold = till.sell_all(buyers, closing).await?;
                say(format_args!("done {} {} {}", sold.sold, sold.refused, sold.late))?;
            }
            _ => return Err(format!("\"{order}\" is no order that fits").into()),
        }
    }
}

struct Till {
    store: Arc<dyn Store>,
    locks: Locks,
    way: Way,
    name: String,
    mutex: Arc<Mutex<()>>,
    sold_out: AtomicBool,
}

/// A buyer at the counter, and what keeps others away meanwhile.
struct Purchase {
    buyer: u32,
    left: u32,
    turn: Turn,
}

enum Turn {
    /// Nothing does.
    Free,
    /// A mutex of this process.
    Process { _turn: OwnedMutexGuard<()> },
    /// The same, and a sign at the door for the other processes.
    Sign { _turn: OwnedMutexGuard<()> },
    /// A lock.
    Lock(LockGuard),
}

impl Purchase {
    fn guard(&self) -> Option<&LockGuard> {
        match &self.turn {
            Turn::Lock(guard) => Some(guard),
            _ => None,
        }
    }
}

/// What came of many purchases.
#[derive(Clone, Copy, Default)]
struct Sold {
    sold: u32,
    refused: u32,
    late: u32,
}

impl Till {
    /// Waits for this buyer's turn.
    async fn enter(&self, buyer: u32, ttl: Duration, renew: Renew) -> Outcome<Purchase> {
        let process = || Arc::clone(&self.mutex).lock_owned();
        let turn = match self.way {
            Way::Free => Turn::Free,
            Way::Mutex => Turn::Process { _turn: process().await },
            Way::Sign { expires } => {
                let turn = process().await;
                let ttl = expires.then_some(ttl);
                while !self.store.put_up_sign(ttl).await.map_err(store_failed)? {
                    sleep(Duration::from_millis(5)).await;
                }
                Turn::Sign { _turn: turn }
            }
            Way::Lock { .. } => {
                let ttl = ttl.max(self.locks.capabilities().min_ttl);
                let request = self.locks.lock(&self.name).ttl(ttl).renew(renew).wait_for(LIMIT);
                Turn::Lock(request.await?)
            }
        };
        Ok(Purchase { buyer, left: 0, turn })
    }

    async fn read(&self, purchase: &mut Purchase) -> Result<(), StoreError> {
        if let (Way::Lock { fenced: true }, Some(guard)) = (self.way, purchase.guard()) {
            // First, or an older holder could still write between this look and the write that follows from it.
            self.store.admit(guard.token()).await?;
        }
        purchase.left = self.store.left().await?;
        Ok(())
    }

    /// False if there was nothing to sell.
    async fn write(&self, purchase: &Purchase) -> Result<bool, StoreError> {
        let Some(left) = purchase.left.checked_sub(1) else {
            return Ok(false);
        };
        let sale = Sale {
            buyer: purchase.buyer,
            left,
            token: purchase.guard().map(LockGuard::token),
        };
        let fenced = matches!(self.way, Way::Lock { fenced: true });
        self.store.sell(&sale, fenced).await?;
        Ok(true)
    }

    async fn leave(&self, purchase: Purchase) -> Outcome<()> {
        match purchase.turn {
            Turn::Free | Turn::Process { .. } => {}
            Turn::Sign { .. } => self.store.take_down_sign().await.map_err(store_failed)?,
            Turn::Lock(guard) => {
                guard.release().await?;
            }
        }
        Ok(())
    }

    /// All these buyers come at once, and whoever is not served at closing time goes.
    async fn sell_all(self: &Arc<Self>, buyers: &[&str], closing: Instant) -> Outcome<Sold> {
        let mut tasks = JoinSet::new();
        for buyer in buyers {
            let (till, buyer) = (Arc::clone(self), buyer.parse()?);
            tasks.spawn(async move { till.sell(buyer, closing).await });
        }
        let mut all = Sold::default();
        while let Some(ended) = tasks.join_next().await {
            let one = ended??;
            all.sold += one.sold;
            all.refused += one.refused;
            all.late += one.late;
        }
        Ok(all)
    }

    async fn sell(&self, buyer: u32, closing: Instant) -> Outcome<Sold> {
        let mut sold = Sold::default();
        // Nobody stands in line for what is not there.
        while !self.sold_out.load(Ordering::Relaxed) {
            let Ok(entered) = timeout_at(closing, self.enter(buyer, LONG, Renew::UntilReleased)).await else {
                sold.late = 1;
                return Ok(sold);
            };
            let mut purchase = entered?;
            let outcome = match self.read(&mut purchase).await {
                Ok(()) => {
                    sleep(LOOK).await;
                    self.write(&purchase).await
                }
                Err(error) => Err(error),
            };
            self.leave(purchase).await?;
            match outcome {
                Ok(true) => {
                    sold.sold = 1;
                    return Ok(sold);
                }
                Ok(false) => self.sold_out.store(true, Ordering::Relaxed),
                // The lock was lost on the way: in line again.
                Err(StoreError::Stale(_)) => sold.refused += 1,
                Err(error) => return Err(broken(error)),
            }
        }
        Ok(sold)
    }
}

fn broken(error: StoreError) -> Box<dyn std::error::Error + Send + Sync> {
    match error {
        StoreError::Stale(stale) => stale.into(),
        StoreError::Broken(error) => store_failed(error),
    }
}

fn store_failed(error: Box<dyn std::error::Error + Send + Sync>) -> Box<dyn std::error::Error + Send + Sync> {
    format!("the store failed: {error}").into()
}

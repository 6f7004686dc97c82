//! The shop as a whole: the tills, and the line of buyers before them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::try_join_all;

use crate::Outcome;
use crate::arguments::Arguments;
use crate::crew::Worker;
use crate::store::{self, Books, Store};

/// One run of the sale, on a part of the backend that it has to itself.
pub(crate) struct Shop {
    arguments: Arguments,
    url: String,
    run: String,
}

impl Shop {
    /// Fails if the locks or the store cannot be reached.
    pub(crate) async fn found(arguments: Arguments, url: String) -> Outcome<Self> {
        fencelock::connect(&url).await?.shutdown().await?;
        let shop = Self {
            arguments,
            url,
            run: store::new_run(),
        };
        shop.store(0).await?.clear().await?;
        Ok(shop)
    }

    pub(crate) fn stock(&self) -> u32 {
        self.arguments.stock
    }

    pub(crate) fn announcement(&self) -> String {
        let Arguments {
            stock,
            buyers,
            processes,
            ..
        } = self.arguments;
        let (scheme, _) = self.url.split_once(':').unwrap_or_default();
        format!("fencelock: {processes} processes sell {stock} articles to {buyers} buyers, lock and store on {scheme}")
    }

    /// Opens the books of an act and starts its tills.
    pub(crate) async fn open(&self, act: usize) -> Outcome<Tills> {
        let store = self.store(act).await?;
        store.open(self.arguments.stock).await?;
        let mut tills = Vec::new();
        for number in 1..=self.arguments.processes {
            let till = Worker::start(&format!("till {number}"), |command| {
                command.args(["till", &self.run, &act.to_string()]);
                // Not as an argument: everybody could read a password there.
                command.env(fencelock::ENV, &self.url);
            });
            tills.push(till.map_err(|error| {
                format!(
                    "only {} of {} processes could be started: {error}; give fewer --processes",
                    number - 1,
                    self.arguments.processes
                )
            })?);
        }
        try_join_all(tills.iter_mut().map(|till| till.hear("ready"))).await?;
        Ok(Tills {
            tills,
            store,
            line: (0..self.arguments.buyers).collect(),
            inside: vec![None; self.arguments.processes as usize],
            sold: 0,
            refused: 0,
            late: 0,
        })
    }

    /// Removes what the acts wrote.
    pub(crate) async fn clear(&self, acts: impl Iterator<Item = usize>) -> Outcome<()> {
        for act in acts {
            self.store(act).await?.clear().await?;
        }
        Ok(())
    }

    async fn store(&self, act: usize) -> Outcome<Arc<dyn Store>> {
        let store = store::connect(&self.url, &self.run, act).await;
        store.map_err(|error| format!("the store cannot be opened: {error}").into())
    }
}

/// The tills of an act.
pub(crate) struct Tills {
    tills: Vec<Worker>,
    store: Arc<dyn Store>,
    // By number.
    line: VecDeque<u32>,
    inside: Vec<Option<u32>>,
    pub(crate) sold: u32,
    pub(crate) refused: u32,
    pub(crate) late: u32,
}

impl Tills {
    pub(crate) fn count(&self) -> usize {
        self.tills.len()
    }

    pub(crate) fn till(&mut self, till: usize) -> &mut Worker {
        &mut self.tills[till]
    }

    // One purchase, step by step.

    /// The next buyer's turn at that till. Says what ttl it was granted, if it has one.
    pub(crate) async fn enter(&mut self, till: usize, ttl: Duration) -> Outcome<Duration> {
        self.tell_enter(till, ttl).await?;
        self.hear_entered(till).await
    }

    pub(crate) async fn enter_without_renewal(&mut self, till: usize, ttl: Duration) -> Outcome<Duration> {
        self.ask_in(till, ttl, "left-alone").await?;
        self.hear_entered(till).await
    }

    pub(crate) async fn tell_enter(&mut self, till: usize, ttl: Duration) -> Outcome<()> {
        self.ask_in(till, ttl, "renewed").await
    }

    async fn ask_in(&mut self, till: usize, ttl: Duration, renew: &str) -> Outcome<()> {
        let buyer = self.line.pop_front().ok_or("nobody is in line")?;
        self.inside[till] = Some(buyer);
        let order = format!("enter {buyer} {} {renew}", ttl.as_millis());
        self.tills[till].tell(&order).await
    }

    pub(crate) async fn hear_entered(&mut self, till: usize) -> Outcome<Duration> {
        let entered = self.tills[till].hear("entered").await?;
        let (ttl, _) = entered.split_once(' ').ok_or("a till entered in another way")?;
        Ok(Duration::from_millis(ttl.parse()?))
    }

    pub(crate) async fn read(&mut self, till: usize) -> Outcome<()> {
        self.tills[till].tell("read").await?;
        self.tills[till].hear("read").await.map(drop)
    }

    pub(crate) async fn write(&mut self, till: usize) -> Outcome<()> {
        self.tell_write(till).await?;
        self.hear_written(till).await
    }

    pub(crate) async fn tell_write(&mut self, till: usize) -> Outcome<()> {
        self.tills[till].tell("write").await
    }

    pub(crate) async fn hear_written(&mut self, till: usize) -> Outcome<()> {
        let written = self.tills[till].hear("write").await?;
        if written == "sold" {
            self.sold += 1;
            self.inside[till] = None;
        } else if written.starts_with("refused") {
            self.refused += 1;
        }
        Ok(())
    }

    /// A buyer who got nothing stands in line again.
    pub(crate) async fn leave(&mut self, till: usize) -> Outcome<()> {
        self.tills[till].tell("leave").await?;
        self.tills[till].hear("outside").await?;
        self.line.extend(self.inside[till].take());
        Ok(())
    }

    /// The end of a till, and of whoever is in it.
    pub(crate) async fn kill(&mut self, till: usize) -> Outcome<()> {
        let mut killed = self.tills.remove(till);
        self.inside.remove(till);
        killed.kill().await
    }

    // All others.

    /// Everyone in line goes to one of the tills, and those who are not served at closing time go home.
    pub(crate) async fn sell_to_the_rest(&mut self, closing: Duration) -> Outcome<()> {
        let mut orders = vec![format!("sell {}", closing.as_millis()); self.tills.len()];
        for (place, buyer) in self.line.drain(..).enumerate() {
            let till = place % orders.len();
            orders[till].push_str(&format!(" {buyer}"));
        }
        for (till, order) in self.tills.iter_mut().zip(orders) {
            till.tell(&order).await?;
        }
        // Whichever fails first says best what is wrong.
        let done = try_join_all(self.tills.iter_mut().map(|till| till.hear("done"))).await?;
        for done in done {
            let counts: Vec<u32> = done.split(' ').map(str::parse).collect::<Result<_, _>>()?;
            let [sold, refused, late] = counts[..] else {
                return Err("a till counted in another way".into());
            };
            self.sold += sold;
            self.refused += refused;
            self.late += late;
        }
        Ok(())
    }

    /// Ends the tills, and returns the books.
    pub(crate) async fn close(&mut self) -> Outcome<Books> {
        self.tills.clear();
        self.store.books().await
    }
}

//! Being told when keys go, over one stream of a connection.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use etcd_client::{Client, EventType, WatchFilterType, WatchOptions, WatchRequestSender, WatchResponseStream};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

/// What has been seen of a watched key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seen {
    /// It is gone.
    Deleted,
    /// Whether it is there has to be looked up: the history is gone, or the connection.
    Unclear,
    /// It can have gone before the watch began; whatever comes later is told.
    Gap,
}

/// The watches of one connection. Clones are the same.
#[derive(Clone)]
pub(crate) struct Watches {
    link: u64,
    orders: mpsc::UnboundedSender<Order>,
}

enum Order {
    Watch {
        id: i64,
        key: String,
        begin: Begin,
        tell: Telling,
    },
    Forget {
        id: i64,
    },
}

/// Which revision a watch begins with.
enum Begin {
    At(i64),
    /// The next one; the sender tells which was the last before it.
    ///
    /// etcd serves such a watch at once. One that begins with a revision that there is already it serves when it next looks for those
    /// that lag, which it does every tenth of a second.
    Now(oneshot::Sender<i64>),
}

/// A key that is watched until this is dropped.
pub(crate) struct Watch {
    id: i64,
    link: u64,
    over: Arc<AtomicBool>,
    orders: mpsc::UnboundedSender<Order>,
}

impl Watches {
    /// For the link of that number; starts a stream when it is first needed. `broken` is told when it fails, and ends it. Must be called on the runtime
    /// that works the connection.
    pub(crate) fn start(link: u64, client: Client, broken: CancellationToken) -> Self {
        let (orders, taken) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            tokio::select! {
                () = work(client, taken) => broken.cancel(),
                () = broken.cancelled() => {}
            }
        });
        Self { link, orders }
    }

    /// Calls `tell` when the key is deleted at revision `from` or later, or when that cannot be told any more.
    pub(crate) fn watch(&self, key: String, from: i64, tell: impl FnOnce(Seen) + Send + 'static) -> Watch {
        self.order(key, Begin::At(from), tell)
    }

    /// Watches a key for somebody who waits for it to go.
    pub(crate) fn wait(&self, key: String) -> Waiting {
        let (begin, began) = oneshot::channel();
        let (tell, told) = oneshot::channel();
        let watch = self.order(key, Begin::Now(begin), move |seen| {
            // Nobody may wait for it any more.
            let _ = tell.send(seen);
        });
        Waiting {
            watch,
            began: Some(began),
            told,
        }
    }

    fn order(&self, key: String, begin: Begin, tell: impl FnOnce(Seen) + Send + 'static) -> Watch {
        static IDS: AtomicI64 = AtomicI64::new(1);
        let id = IDS.fetch_add(1, Ordering::Relaxed);
        let over = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&over);
        // If the stream has ended the order is dropped, and that tells.
        let tell = Telling(Some(Box::new(move |seen| {
            told.store(true, Ordering::Release);
            tell(seen);
        })));
        let _ = self.orders.send(Order::Watch { id, key, begin, tell });
        Watch {
            id,
            link: self.link,
            over,
            orders: self.orders.clone(),
        }
    }
}

impl Watch {
    /// Whether it is over that link that the key is watched, and still is.
    pub(crate) fn watches_on(&self, link: u64) -> bool {
        self.link == link && !self.over.load(Ordering::Acquire)
    }
}

/// A key that is waited for until this is dropped.
pub(crate) struct Waiting {
    watch: Watch,
    began: Option<oneshot::Receiver<i64>>,
    told: oneshot::Receiver<Seen>,
}

impl Waiting {
    /// What is seen first of the key, which was there at revision `looked`. After a [`Seen::Gap`], which comes once at most, it
    /// can be asked again. Dropping the future loses nothing.
    ///
    /// **Invariant.** Nothing is lost between the look and the watch: the watch tells of every revision after the one that it
    /// began with, and if that is not the one of the look, the key is to be looked up once more.
    pub(crate) async fn seen(&mut self, looked: i64) -> Seen {
        if let Some(began) = &mut self.began {
            // If it never begins, what became of it is told.
            let began = began.await;
            self.began = None;
            if began.is_ok_and(|began| began > looked) {
                return Seen::Gap;
            }
        }
        (&mut self.told).await.unwrap_or(Seen::Unclear)
    }

    /// Whether it is over that link that the key is watched.
    pub(crate) fn waits_on(&self, link: u64) -> bool {
        self.watch.watches_on(link)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _ = self.orders.send(Order::Forget { id: self.id });
    }
}

/// Tells once what was seen: that all is unclear, if it was never asked to say anything.
struct Telling(Option<Box<dyn FnOnce(Seen) + Send>>);

impl Telling {
    fn tell(mut self, seen: Seen) {
        if let Some(tell) = self.0.take() {
            tell(seen);
        }
    }

    /// Nobody wants to know any more.
    fn never(mut self) {
        self.0 = None;
    }
}

impl Drop for Telling {
    fn drop(&mut self) {
        if let Some(tell) = self.0.take() {
            tell(Seen::Unclear);
        }
    }
}

/// What is watched, by the numbers of the watches.
type Watched = Mutex<HashMap<i64, Known>>;

/// A watch that the server knows of.
struct Known {
    /// None once it has told.
    tell: Option<Telling>,
    /// Who wants to know when it begins, until it has begun.
    begin: Option<oneshot::Sender<i64>>,
}

/// Carries out orders and passes on what is seen, until the stream fails or nobody is left.
async fn work(client: Client, mut orders: mpsc::UnboundedReceiver<Order>) {
    let watched = Watched::default();
    let opened = loop {
        match orders.recv().await {
            None => return,
            Some(Order::Forget { .. }) => {}
            Some(Order::Watch { id, key, begin, tell }) => {
                let options = enter(&watched, id, begin, tell);
                break client.watch_client().watch(key, Some(options)).await;
            }
        }
    };
    let Ok(opened) = opened else { return };
    let (requests, responses) = opened.split();
    // Beside each other: a server whose answers nobody reads takes no more requests.
    tokio::select! {
        () = ask(orders, requests, &watched) => {}
        () = hear(responses, &watched) => {}
    }
}

async fn ask(mut orders: mpsc::UnboundedReceiver<Order>, mut requests: WatchRequestSender, watched: &Watched) {
    while let Some(order) = orders.recv().await {
        let sent = match order {
            Order::Watch { id, key, begin, tell } => {
                let options = enter(watched, id, begin, tell);
                requests.watch(key, Some(options)).await
            }
            Order::Forget { id } => {
                let known = lock(watched).remove(&id);
                match known {
                    // Also if it has told: the server would watch for as long as the connection lives.
                    Some(known) => {
                        if let Some(tell) = known.tell {
                            tell.never();
                        }
                        requests.cancel(id).await
                    }
                    None => Ok(()),
                }
            }
        };
        if sent.is_err() {
            return;
        }
    }
}

async fn hear(mut responses: WatchResponseStream, watched: &Watched) {
    while let Ok(Some(response)) = responses.message().await {
        let id = response.watch_id();
        if response.canceled() {
            let known = lock(watched).remove(&id);
            match known {
                // Compaction concerns one watch.
                // Dropped, that tells that all is unclear.
                Some(_) if response.compact_revision() != 0 => {}
                // Whatever else ends one that was not forgotten, such as a login that has expired, concerns all.
                Some(_) => return,
                None => {}
            }
            continue;
        }
        if response.created() {
            let begin = lock(watched).get_mut(&id).and_then(|known| known.begin.take());
            if let (Some(begin), Some(header)) = (begin, response.header()) {
                // Nobody may wait for it any more.
                let _ = begin.send(header.revision());
            }
            continue;
        }
        let mut events = response.events().iter();
        if events.any(|event| event.event_type() == EventType::Delete) {
            let tell = lock(watched).get_mut(&id).and_then(|known| known.tell.take());
            if let Some(tell) = tell {
                tell.tell(Seen::Deleted);
            }
        }
    }
}

/// Takes note of a watch that is about to be asked for.
fn enter(watched: &Watched, id: i64, begin: Begin, tell: Telling) -> WatchOptions {
    let options = WatchOptions::new()
        .with_watch_id(id)
        .with_filters([WatchFilterType::NoPut]);
    let (options, begin) = match begin {
        Begin::At(revision) => (options.with_start_revision(revision), None),
        Begin::Now(begin) => (options, Some(begin)),
    };
    let tell = Some(tell);
    lock(watched).insert(id, Known { tell, begin });
    options
}

fn lock(watched: &Watched) -> MutexGuard<'_, HashMap<i64, Known>> {
    // Nothing here panics while holding the mutex.
    watched.lock().unwrap_or_else(PoisonError::into_inner)
}

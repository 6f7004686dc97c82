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
        from: i64,
        tell: Telling,
    },
    Forget {
        id: i64,
    },
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
        static IDS: AtomicI64 = AtomicI64::new(1);
        let id = IDS.fetch_add(1, Ordering::Relaxed);
        let over = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&over);
        // If the stream has ended the order is dropped, and that tells.
        let tell = Telling(Some(Box::new(move |seen| {
            told.store(true, Ordering::Release);
            tell(seen);
        })));
        let _ = self.orders.send(Order::Watch { id, key, from, tell });
        Watch {
            id,
            link: self.link,
            over,
            orders: self.orders.clone(),
        }
    }

    /// The same, to be awaited.
    pub(crate) fn wait(&self, key: String, from: i64) -> (Watch, oneshot::Receiver<Seen>) {
        let (tell, told) = oneshot::channel();
        let watch = self.watch(key, from, move |seen| {
            // Nobody may wait for it any more.
            let _ = tell.send(seen);
        });
        (watch, told)
    }
}

impl Watch {
    /// Whether it is over that link that the key is watched, and still is.
    pub(crate) fn watches_on(&self, link: u64) -> bool {
        self.link == link && !self.over.load(Ordering::Acquire)
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
type Watched = Mutex<HashMap<i64, Telling>>;

/// Carries out orders and passes on what is seen, until the stream fails or nobody is left.
async fn work(client: Client, mut orders: mpsc::UnboundedReceiver<Order>) {
    let watched = Watched::default();
    let opened = loop {
        match orders.recv().await {
            None => return,
            Some(Order::Forget { .. }) => {}
            Some(Order::Watch { id, key, from, tell }) => {
                lock(&watched).insert(id, tell);
                break client.watch_client().watch(key, Some(options(id, from))).await;
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
            Order::Watch { id, key, from, tell } => {
                lock(watched).insert(id, tell);
                requests.watch(key, Some(options(id, from))).await
            }
            Order::Forget { id } => {
                let known = lock(watched).remove(&id);
                match known {
                    Some(tell) => {
                        tell.never();
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
                Some(tell) if response.compact_revision() != 0 => tell.tell(Seen::Unclear),
                // Whatever else ends one that was not forgotten, such as a login that has expired, concerns all.
                Some(_) => return,
                None => {}
            }
            continue;
        }
        let mut events = response.events().iter();
        if events.any(|event| event.event_type() == EventType::Delete) {
            let known = lock(watched).remove(&id);
            if let Some(tell) = known {
                tell.tell(Seen::Deleted);
            }
        }
    }
}

fn options(id: i64, from: i64) -> WatchOptions {
    WatchOptions::new()
        .with_watch_id(id)
        .with_start_revision(from)
        .with_filters([WatchFilterType::NoPut])
}

fn lock(watched: &Watched) -> MutexGuard<'_, HashMap<i64, Telling>> {
    // Nothing here panics while holding the mutex.
    watched.lock().unwrap_or_else(PoisonError::into_inner)
}

//! Being told when keys go, over one stream of a connection.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use etcd_client::{
    Client, EventType, WatchFilterType, WatchOptions, WatchRequestSender, WatchResponse, WatchResponseStream,
};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

/// How long a key stays watched that nobody waits for any more: who wants a name again and again waits behind the same ones.
const LINGER: Duration = Duration::from_secs(3);
/// How many such keys a connection watches at most.
const MOST_LINGERING: usize = 256;

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

/// The watches of one connection.
pub(crate) struct Watches {
    link: u64,
    orders: mpsc::UnboundedSender<Order>,
    waits: Arc<Waits>,
}

type Waits = Mutex<Awaited>;

/// The keys that are waited for, or were a moment ago.
#[derive(Default)]
struct Awaited {
    keys: HashMap<String, Wait>,
    /// How many of them nobody waits for.
    resting: usize,
}

struct Wait {
    id: i64,
    waiters: usize,
    /// When the last one went, if nobody waits.
    rests: Option<Instant>,
    sight: watch::Receiver<Sight>,
}

/// What the server has told of a key that is waited for.
#[derive(Clone, Copy, Default)]
struct Sight {
    /// The last revision before the watch, once it has begun.
    began: Option<i64>,
    /// When the key was deleted last, since then.
    changed: Option<i64>,
}

enum Order {
    Watch {
        id: i64,
        key: String,
        /// The revision to begin with; without one, the next.
        ///
        /// etcd serves a watch that begins with the next one at once. One that begins with a revision that there is already it
        /// serves when it next looks for those that lag, which it does every tenth of a second.
        from: Option<i64>,
        known: Known,
    },
    Forget {
        id: i64,
    },
    /// Nobody waits for the key since then.
    Rest {
        key: String,
        since: Instant,
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
    /// For the link of that number; starts a stream when it is needed. `broken` is told when it fails, and ends it. Must be
    /// called on the runtime that works the connection.
    pub(crate) fn start(link: u64, client: Client, broken: CancellationToken) -> Self {
        let (orders, taken) = mpsc::unbounded_channel();
        let waits = Arc::new(Waits::default());
        let waited = Arc::clone(&waits);
        tokio::spawn(async move {
            tokio::select! {
                () = work(client, taken, &waited) => broken.cancel(),
                () = broken.cancelled() => {}
            }
        });
        Self { link, orders, waits }
    }

    /// Calls `tell` when the key is deleted at revision `from` or later, or when that cannot be told any more.
    pub(crate) fn watch(&self, key: String, from: i64, tell: impl FnOnce(Seen) + Send + 'static) -> Watch {
        let id = next_id();
        let over = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&over);
        // If the stream has ended the order is dropped, and that tells.
        let tell = Telling(Some(Box::new(move |seen| {
            told.store(true, Ordering::Release);
            tell(seen);
        })));
        let _ = self.orders.send(Order::Watch {
            id,
            key,
            from: Some(from),
            known: Known::Once(Some(tell)),
        });
        Watch {
            id,
            link: self.link,
            over,
            orders: self.orders.clone(),
        }
    }

    /// Watches a key for somebody who waits for it to go. One that was waited for a moment ago is watched already.
    pub(crate) fn wait(&self, key: &str) -> Waiting {
        let mut waits = lock(&self.waits);
        let Awaited { keys, resting } = &mut *waits;
        let known = keys.get_mut(key);
        // It is waited for from here on, over this watch or another.
        if known.as_ref().is_some_and(|wait| wait.rests.is_some()) {
            *resting -= 1;
        }
        let (id, sight) = if let Some(wait) = known.filter(|wait| wait.sight.has_changed().is_ok()) {
            wait.waiters += 1;
            wait.rests = None;
            (wait.id, wait.sight.clone())
        } else {
            let id = next_id();
            let (tell, sight) = watch::channel(Sight::default());
            let wait = Wait {
                id,
                waiters: 1,
                rests: None,
                sight: sight.clone(),
            };
            keys.insert(key.to_owned(), wait);
            // If the stream has ended the order is dropped, and with it what would have told.
            let _ = self.orders.send(Order::Watch {
                id,
                key: key.to_owned(),
                from: None,
                known: Known::Lasting(tell),
            });
            (id, sight)
        };
        Waiting {
            id,
            key: key.to_owned(),
            sight,
            waits: Arc::clone(&self.waits),
            orders: self.orders.clone(),
        }
    }
}

fn next_id() -> i64 {
    static IDS: AtomicI64 = AtomicI64::new(1);
    IDS.fetch_add(1, Ordering::Relaxed)
}

impl Watch {
    /// Whether it is over that link that the key is watched, and still is.
    pub(crate) fn watches_on(&self, link: u64) -> bool {
        self.link == link && !self.over.load(Ordering::Acquire)
    }
}

/// A key that is waited for until this is dropped.
pub(crate) struct Waiting {
    id: i64,
    key: String,
    sight: watch::Receiver<Sight>,
    waits: Arc<Waits>,
    orders: mpsc::UnboundedSender<Order>,
}

impl Waiting {
    /// What is seen first of the key, which was there at revision `looked`. Dropping the future loses nothing.
    ///
    /// **Invariant.** Nothing is lost between the look and the watch: the watch tells of every revision after the one that it
    /// began with, and if that is later than the look, the key is to be looked up once more. What it tells of deletions that came
    /// before the look concerns what was under the key then.
    pub(crate) async fn seen(&mut self, looked: i64) -> Seen {
        loop {
            let sight = *self.sight.borrow_and_update();
            if sight.changed.is_some_and(|deleted| deleted > looked) {
                return Seen::Deleted;
            }
            if sight.began.is_some_and(|began| began > looked) {
                return Seen::Gap;
            }
            if self.sight.changed().await.is_err() {
                return Seen::Unclear;
            }
        }
    }
}

impl Waiting {}

impl Drop for Waiting {
    fn drop(&mut self) {
        let mut waits = lock(&self.waits);
        let Awaited { keys, resting } = &mut *waits;
        // Another watch may have taken the place of one that ended.
        let Some(wait) = keys.get_mut(&self.key).filter(|wait| wait.id == self.id) else {
            return;
        };
        wait.waiters -= 1;
        if wait.waiters == 0 {
            let since = Instant::now();
            wait.rests = Some(since);
            *resting += 1;
            let key = std::mem::take(&mut self.key);
            let _ = self.orders.send(Order::Rest { key, since });
        }
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
enum Known {
    /// None once it has told.
    Once(Option<Telling>),
    /// Dropped, it tells that all is unclear.
    Lasting(watch::Sender<Sight>),
}

/// The keys that nobody waits for any more, each since when.
type Resting = VecDeque<(Instant, String)>;

/// How a stream ended.
enum Ended {
    /// It failed, or nobody is left.
    Failed,
    /// The server took a watch no more, as when the login of the stream has expired. What else is asked on the connection may
    /// have a newer one.
    Refused,
}

/// Carries out orders and passes on what is seen, on as many streams as it takes, until one fails or nobody is left.
async fn work(client: Client, mut orders: mpsc::UnboundedReceiver<Order>, waits: &Waits) {
    let mut resting = Resting::new();
    // What was watched on a stream that has ended is dropped with its list. That tells waiters; held keys are watched again
    // from their next renewal on.
    while let Ended::Refused = stream(&client, &mut orders, waits, &mut resting).await {}
}

/// Works one stream, which the first watch opens.
async fn stream(
    client: &Client,
    orders: &mut mpsc::UnboundedReceiver<Order>,
    waits: &Waits,
    resting: &mut Resting,
) -> Ended {
    let watched = Watched::default();
    let opened = loop {
        match orders.recv().await {
            None => return Ended::Failed,
            Some(Order::Forget { .. }) => {}
            Some(Order::Rest { key, since }) => resting.push_back((since, key)),
            Some(Order::Watch { id, key, from, known }) => {
                let options = enter(&watched, id, from, known);
                break client.watch_client().watch(key, Some(options)).await;
            }
        }
    };
    let Ok(opened) = opened else { return Ended::Failed };
    let (requests, responses) = opened.split();
    // Beside each other: a server whose answers nobody reads takes no more requests.
    tokio::select! {
        () = ask(orders, requests, &watched, waits, resting) => Ended::Failed,
        ended = hear(responses, &watched) => ended,
    }
}

async fn ask(
    orders: &mut mpsc::UnboundedReceiver<Order>,
    mut requests: WatchRequestSender,
    watched: &Watched,
    waits: &Waits,
    resting: &mut Resting,
) {
    loop {
        let crowded = lock(waits).resting > MOST_LINGERING;
        let linger = if crowded { Duration::ZERO } else { LINGER };
        let over = resting.front().map(|(since, _)| *since + linger);
        let order = tokio::select! {
            order = orders.recv() => order,
            () = until(over) => {
                let forgotten = resting.pop_front().and_then(|(since, key)| end(waits, &key, since));
                match forgotten {
                    Some(id) => Some(Order::Forget { id }),
                    None => continue,
                }
            }
        };
        let sent = match order {
            None => return,
            Some(Order::Watch { id, key, from, known }) => {
                let options = enter(watched, id, from, known);
                requests.watch(key, Some(options)).await
            }
            Some(Order::Forget { id }) => {
                let known = lock(watched).remove(&id);
                match known {
                    // Also if it has told: the server would watch for as long as the connection lives.
                    Some(known) => {
                        if let Known::Once(Some(tell)) = known {
                            tell.never();
                        }
                        requests.cancel(id).await
                    }
                    None => Ok(()),
                }
            }
            Some(Order::Rest { key, since }) => {
                resting.push_back((since, key));
                Ok(())
            }
        };
        if sent.is_err() {
            return;
        }
    }
}

async fn until(instant: Option<Instant>) {
    match instant {
        Some(instant) => sleep_until(instant).await,
        None => std::future::pending().await,
    }
}

/// The watch of a key, if nobody has waited for it since then; whoever comes now has it watched anew.
fn end(waits: &Waits, key: &str, since: Instant) -> Option<i64> {
    let mut waits = lock(waits);
    waits.keys.get(key).filter(|wait| wait.rests == Some(since))?;
    waits.resting -= 1;
    waits.keys.remove(key).map(|wait| wait.id)
}

async fn hear(mut responses: WatchResponseStream, watched: &Watched) -> Ended {
    while let Ok(Some(response)) = responses.message().await {
        let id = response.watch_id();
        if response.canceled() {
            // Which watch is refused is not told.
            if response.created() {
                return Ended::Refused;
            }
            let known = lock(watched).remove(&id);
            match known {
                // Compaction concerns one watch.
                // Dropped, that tells that all is unclear.
                Some(_) if response.compact_revision() != 0 => {}
                // Whatever else ends one that was not forgotten concerns all.
                Some(_) => return Ended::Failed,
                None => {}
            }
            continue;
        }
        let changed = changed(&response);
        let mut watched = lock(watched);
        match watched.get_mut(&id) {
            Some(Known::Lasting(sight)) => {
                let began = response.header().filter(|_| response.created());
                let began = began.map(|header| header.revision());
                sight.send_if_modified(|sight| {
                    sight.began = began.or(sight.began);
                    sight.changed = changed.or(sight.changed);
                    began.is_some() || changed.is_some()
                });
            }
            Some(Known::Once(tell)) if changed.is_some() => {
                let tell = tell.take();
                drop(watched);
                if let Some(tell) = tell {
                    tell.tell(Seen::Deleted);
                }
            }
            _ => {}
        }
    }
    Ended::Failed
}

/// The revision of the last deletion that is told of.
fn changed(response: &WatchResponse) -> Option<i64> {
    let deletions = response
        .events()
        .iter()
        .filter(|event| event.event_type() == EventType::Delete);
    deletions.filter_map(|event| Some(event.kv()?.mod_revision())).max()
}

/// Takes note of a watch that is about to be asked for.
fn enter(watched: &Watched, id: i64, from: Option<i64>, known: Known) -> WatchOptions {
    let options = WatchOptions::new()
        .with_watch_id(id)
        .with_filters([WatchFilterType::NoPut]);
    lock(watched).insert(id, known);
    match from {
        Some(from) => options.with_start_revision(from),
        None => options,
    }
}

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing here panics while holding the mutex.
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

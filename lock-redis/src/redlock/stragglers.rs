//! Requests that are still under way to a minority when the outcome is known.

use std::collections::HashMap;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

use futures_util::StreamExt;
use lock_core::{Executor, OwnerId};
use tokio::sync::watch;
use tokio::time::timeout;

/// Work that is polled to its end in the background, or until it is taken back.
type Work = Box<dyn FnMut(&mut std::task::Context<'_>) -> Poll<()> + Send>;

/// Work that may be taken back.
type Slot = Arc<Mutex<Option<Work>>>;

/// How many rounds can be under way; with a node that is silent there are more and more.
const MOST: usize = 1000;

/// The requests of acquisitions, which whatever ends a claim of the same owner takes back, and how many rounds of any kind are under way.
#[derive(Clone)]
pub(super) struct Stragglers {
    acquiring: Arc<Mutex<HashMap<OwnerId, Slot>>>,
    under_way: watch::Sender<usize>,
    /// How long a node may take longer than the majority.
    longest: Duration,
}

impl Stragglers {
    pub(super) fn new(longest: Duration) -> Self {
        Self {
            acquiring: Arc::default(),
            under_way: watch::Sender::new(0),
            longest,
        }
    }

    /// Goes on with a round whose outcome is known, so that the nodes that have not answered yet get the request too.
    ///
    /// `owner` is the one for whom the round acquires, if it does.
    pub(super) fn go_on<T: Send + 'static>(
        &self,
        executor: &Executor,
        mut round: super::quorum::Round<T>,
        owner: Option<OwnerId>,
    ) {
        // What is dropped has been sent, except to nodes that have no connection.
        if round.is_empty() || *self.under_way.borrow() >= MOST {
            return;
        }
        let work: Work = Box::new(move |cx| {
            loop {
                match round.poll_next_unpin(cx) {
                    Poll::Ready(Some(_)) => {}
                    Poll::Ready(None) => return Poll::Ready(()),
                    Poll::Pending => return Poll::Pending,
                }
            }
        });
        let work = Arc::new(Mutex::new(Some(work)));
        if let Some(owner) = owner {
            lock(&self.acquiring).insert(owner, Arc::clone(&work));
        }
        let (stragglers, longest) = (self.clone(), self.longest);
        self.under_way.send_modify(|rounds| *rounds += 1);
        let ended = Ended(self.under_way.clone());
        let going_on = Box::pin(async move {
            let _ended = ended;
            // What takes longer is dropped, which finds out whether the connection still works.
            let _ = timeout(
                longest,
                poll_fn(|cx| {
                    let mut slot = lock(&work);
                    let done = slot.as_mut().is_none_or(|work| work(cx).is_ready());
                    match done {
                        true => {
                            *slot = None;
                            Poll::Ready(())
                        }
                        false => Poll::Pending,
                    }
                }),
            )
            .await;
            drop(lock(&work).take());
            if let Some(owner) = owner {
                let mut acquiring = lock(&stragglers.acquiring);
                if acquiring.get(&owner).is_some_and(|other| Arc::ptr_eq(other, &work)) {
                    acquiring.remove(&owner);
                }
            }
        });
        // Without a background thread the leases that are left end by themselves.
        let _ = executor.spawn(going_on);
    }

    /// Takes back what is under way to acquire something for the owner, whose claim is to end: of what was not sent, nothing will be.
    pub(super) fn take_back(&self, owner: OwnerId) {
        let acquiring = lock(&self.acquiring).remove(&owner);
        let work = acquiring.and_then(|work| lock(&work).take());
        drop(work);
    }

    /// Waits until nothing is under way any more.
    pub(super) async fn ended(&self) {
        // The sender is here.
        let _ = self.under_way.subscribe().wait_for(|rounds| *rounds == 0).await;
    }
}

impl std::fmt::Debug for Stragglers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stragglers")
            .field("under_way", &*self.under_way.borrow())
            .finish_non_exhaustive()
    }
}

/// Counts a round that has ended, or whose task was dropped.
struct Ended(watch::Sender<usize>);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.send_modify(|rounds| *rounds -= 1);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing here panics while holding a mutex.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

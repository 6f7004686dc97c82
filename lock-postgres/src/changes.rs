//! Changes of holders: who leads tells it by a notification, and clients that observe listen on one channel for all names.
//!
//! A client listens on one of its sessions, whatever it observes. Notifications are hints: any user of the database may send them, and those
//! that are sent while the session is being replaced are made up for by one change for each name.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use lock_core::{ChangeSender, Changes, LockName};
use tokio::runtime::Handle;
use tokio::sync::{Mutex as AsyncMutex, Notify};
use tokio::time::sleep;

use crate::commands::{CHANGES, notify_change};
use crate::failure::Failure;
use crate::notifications::Subscription;
use crate::session::Session;
use crate::sessions::Sessions;

/// The ttl of the session that is opened to listen, if there is none.
const TTL: Duration = Duration::from_secs(30);

/// Between the attempts to listen on another session.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LAST_PAUSE: Duration = Duration::from_secs(5);

/// Who observes which key.
#[derive(Debug, Default)]
pub(crate) struct Observers {
    by_key: Mutex<HashMap<i64, Vec<(u64, ChangeSender)>>>,
    /// Whether there is a task that listens. Changed only with the lock held, so that none is missing.
    listens: AsyncMutex<bool>,
    /// The last observer has left.
    deserted: Notify,
}

impl Observers {
    fn add(&self, key: i64, id: u64, sender: ChangeSender) {
        self.lock().entry(key).or_default().push((id, sender));
    }

    fn remove(&self, key: i64, id: u64) {
        let mut by_key = self.lock();
        if let Some(senders) = by_key.get_mut(&key) {
            senders.retain(|(other, _)| *other != id);
            if senders.is_empty() {
                by_key.remove(&key);
            }
        }
        if by_key.is_empty() {
            self.deserted.notify_one();
        }
    }

    fn tell(&self, key: i64) {
        for (_, sender) in self.lock().get(&key).into_iter().flatten() {
            sender.send();
        }
    }

    fn tell_all(&self) {
        for (_, sender) in self.lock().values().flatten() {
            sender.send();
        }
    }

    fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<i64, Vec<(u64, ChangeSender)>>> {
        // Nothing here panics while holding the mutex.
        self.by_key.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Sessions {
    pub(crate) async fn announce(self: &Arc<Self>, name: &LockName) -> Result<(), Failure> {
        let notify = notify_change(self.settings.keys.of(name));
        let session = self.at_hand().await?;
        let announced = session.ask(&notify).await;
        self.spare(session);
        announced.map(drop)
    }

    pub(crate) async fn changes(self: &Arc<Self>, name: &LockName) -> Result<Changes, Failure> {
        let key = self.settings.keys.of(name);
        let runtime = Handle::current();
        let mut listens = self.observers.listens.lock().await;
        if !*listens {
            let listener = Listener::open(self).await?;
            *listens = true;
            let listening = listen(Arc::downgrade(self), Arc::clone(&self.observers), listener);
            runtime.spawn(listening);
        }
        let (sender, changes) = Changes::channel();
        let id = fastrand::u64(..);
        self.observers.add(key, id, sender.clone());
        drop(listens);
        let (observers, closing) = (Arc::downgrade(&self.observers), self.closing());
        runtime.spawn(async move {
            tokio::select! {
                () = sender.closed() => {}
                () = closing.cancelled() => {}
            }
            drop(sender);
            if let Some(observers) = observers.upgrade() {
                observers.remove(key, id);
            }
        });
        Ok(changes)
    }
}

/// A session that listens.
struct Listener {
    session: Arc<Session>,
    subscription: Subscription,
}

impl Listener {
    async fn open(sessions: &Arc<Sessions>) -> Result<Self, Failure> {
        let session = sessions.ear(TTL).await?;
        session.add_wait();
        let subscription = session.wire().subscribe(CHANGES);
        match session
            .ask(&format!("{}LISTEN \"{CHANGES}\"", session.proof.demand()))
            .await
        {
            Ok(_) => Ok(Self { session, subscription }),
            Err(failure) => {
                // Whether it listens is not known.
                session.make_stale();
                session.remove_wait();
                Err(failure)
            }
        }
    }

    async fn close(self) {
        let Self { session, subscription } = self;
        // A message would keep the lock that a silent session carries.
        let done = session.is_over()
            || (!session.is_silent() && session.ask(&format!("UNLISTEN \"{CHANGES}\"")).await.is_ok());
        if !done {
            session.make_stale();
        }
        session.remove_wait();
        drop(subscription);
    }
}

/// Tells observers of changes until there is none, or until the client is closed.
async fn listen(sessions: Weak<Sessions>, observers: Arc<Observers>, mut listener: Listener) {
    loop {
        tokio::select! {
            notification = listener.subscription.next() => match notification {
                Some(notification) => {
                    if let Ok(key) = notification.payload().parse() {
                        observers.tell(key);
                    }
                }
                None => {
                    listener.close().await;
                    match listen_again(&sessions, &observers).await {
                        Some(again) => listener = again,
                        None => return,
                    }
                    observers.tell_all();
                }
            },
            () = observers.deserted.notified() => {
                let mut listens = observers.listens.lock().await;
                if observers.is_empty() {
                    *listens = false;
                    return listener.close().await;
                }
            }
        }
    }
}

/// Another session that listens. `None`: that is over.
async fn listen_again(sessions: &Weak<Sessions>, observers: &Observers) -> Option<Listener> {
    let mut pause = FIRST_PAUSE;
    loop {
        {
            let mut listens = observers.listens.lock().await;
            let open = sessions.upgrade().filter(|sessions| !sessions.is_closed());
            let Some(sessions) = open.filter(|_| !observers.is_empty()) else {
                *listens = false;
                return None;
            };
            match Listener::open(&sessions).await {
                Ok(listener) => return Some(listener),
                Err(failure) => tracing::debug!(target: "fencelock", ?failure, "changes of holders are not heard of"),
            }
        }
        sleep(pause.mul_f64(0.5 + fastrand::f64())).await;
        pause = (pause * 2).min(LAST_PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_change_is_told_to_those_who_observe_that_key() {
        let observers = Observers::default();
        let [(one, mut first), (two, mut second), (other, mut third)] = [(); 3].map(|()| Changes::channel());
        observers.add(1, 1, one);
        observers.add(1, 2, two);
        observers.add(2, 3, other);
        observers.tell(1);
        assert_eq!((first.next().await, second.next().await), (Some(()), Some(())));
        observers.remove(1, 1);
        assert_eq!(first.next().await, None, "its sender has gone");
        observers.tell_all();
        assert_eq!((second.next().await, third.next().await), (Some(()), Some(())));
        observers.remove(1, 2);
        observers.remove(2, 3);
        assert!(observers.is_empty());
    }
}

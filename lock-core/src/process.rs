//! What the clients of one process share.
//!
//! A child made by `fork` has a copy of its parent's memory and none of its threads but the one that forked: a mutex that another
//! thread held stays locked there, and the parent's background thread does not exist. So a client remembers its process, its
//! operations fail in any other one, and a child gets a [`Process`] of its own.
//!
//! A process is known by its identifier. A child in another pid namespace can have the same one as its parent, as when each is the first
//! of its namespace: it is then taken for the parent.

use std::fmt;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use arc_swap::ArcSwapOption;
use tokio::runtime::Handle;

/// What the clients of one process share. Only threads of that process lock its mutex.
#[derive(Debug)]
pub(crate) struct Process {
    id: u32,
    /// The runtime of the background thread, once it has been started.
    pub(crate) background: Mutex<Option<Handle>>,
    /// How many [`ExitDelay`](crate::ExitDelay)s there are.
    pub(crate) delays: AtomicUsize,
    /// Clients that have something to do at the end of the process.
    clients: Mutex<Vec<Weak<dyn AtExit>>>,
}

/// What a client does at the end of its process, on the background thread.
pub(crate) trait AtExit: Send + Sync {
    fn at_exit(&self);
}

impl fmt::Debug for dyn AtExit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AtExit")
    }
}

/// No lock: after a fork, the thread that held it might not be there.
static CURRENT: ArcSwapOption<Process> = ArcSwapOption::const_empty();

impl Process {
    /// This process.
    pub(crate) fn current() -> Arc<Self> {
        Self::with_id(&CURRENT, std::process::id())
    }

    fn with_id(current: &ArcSwapOption<Self>, id: u32) -> Arc<Self> {
        loop {
            let found = current.load();
            if let Some(process) = found.as_ref().filter(|process| process.id == id) {
                return Arc::clone(process);
            }
            let new = Self {
                id,
                background: Mutex::default(),
                delays: AtomicUsize::new(0),
                clients: Mutex::default(),
            };
            // If another thread is faster, its value is found next.
            current.compare_and_swap(&found, Some(Arc::new(new)));
        }
    }

    /// This process, if it has had a client. What a child inherits is its parent's.
    pub(crate) fn with_clients() -> Option<Arc<Self>> {
        CURRENT.load_full().filter(|process| process.is_current())
    }

    /// Has [`AtExit::at_exit`] called for that client.
    pub(crate) fn at_exit(&self, client: Weak<dyn AtExit>) {
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        clients.retain(|client| client.strong_count() > 0);
        clients.push(client);
    }

    /// The clients that have something to do at the end.
    pub(crate) fn clients_at_exit(&self) -> Vec<Arc<dyn AtExit>> {
        let clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        clients.iter().filter_map(Weak::upgrade).collect()
    }

    /// Whether this is that process. A system call.
    pub(crate) fn is_current(&self) -> bool {
        std::process::id() == self.id
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::thread;

    use super::*;

    #[test]
    fn a_child_gets_a_value_of_its_own_and_waits_for_no_mutex_of_its_parent() {
        let current = ArcSwapOption::empty();
        let parent = Process::with_id(&current, 7);
        assert!(Arc::ptr_eq(&parent, &Process::with_id(&current, 7)));
        let _held = parent.background.lock().unwrap();
        let child = Process::with_id(&current, 8);
        assert!(child.background.try_lock().is_ok());
        assert!(Arc::ptr_eq(&child, &Process::with_id(&current, 8)));
    }

    #[test]
    fn threads_that_come_together_get_one_value() {
        const THREADS: usize = 4;
        for round in 0..500 {
            let (current, together) = (ArcSwapOption::empty(), Barrier::new(THREADS));
            let got: Vec<_> = thread::scope(|scope| {
                let get = || {
                    together.wait();
                    Process::with_id(&current, 7)
                };
                let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(get)).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            assert!(got.iter().all(|one| Arc::ptr_eq(one, &got[0])), "round {round}");
        }
    }
}

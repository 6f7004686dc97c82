//! The servers of a row.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use conformance_tests::{Fault, Injection, Namespace};
use futures_util::future::try_join_all;
use lock_core::LockError;
use test_servers::{Data, Server, ServerError};
use tokio::sync::OnceCell;

type Place<T> = Arc<OnceCell<Arc<T>>>;
type Starting<T> = Pin<Box<dyn Future<Output = Result<T, LockError>> + Send>>;

/// Servers that namespaces share, and others for each namespace that wants its own. All are started when they are needed first.
pub(crate) struct Hosts<T> {
    start: Box<dyn Fn(bool) -> Starting<T> + Send + Sync>,
    shared: Place<T>,
    own: Mutex<HashMap<String, Place<T>>>,
}

impl<T: Send + Sync + 'static> Hosts<T> {
    /// `start` gets whether a namespace has the servers to itself.
    pub(crate) fn new<F>(start: impl Fn(bool) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Result<T, LockError>> + Send + 'static,
    {
        Self {
            start: Box::new(move |is_own| Box::pin(start(is_own))),
            shared: Place::default(),
            own: Mutex::default(),
        }
    }

    fn place(&self, namespace: &Namespace) -> Place<T> {
        if namespace.wants_own_server() {
            Arc::clone(locked(&self.own).entry(namespace.name().to_owned()).or_default())
        } else {
            Arc::clone(&self.shared)
        }
    }

    pub(crate) async fn of(&self, namespace: &Namespace) -> Result<Arc<T>, LockError> {
        let place = self.place(namespace);
        self.started(&place, namespace.wants_own_server()).await
    }

    pub(crate) async fn shared(&self) -> Result<Arc<T>, LockError> {
        self.started(&self.shared, false).await
    }

    async fn started(&self, place: &Place<T>, is_own: bool) -> Result<Arc<T>, LockError> {
        let host = place.get_or_try_init(async || (self.start)(is_own).await.map(Arc::new));
        host.await.cloned()
    }

    /// Those of the namespace, if they have been started.
    pub(crate) fn known(&self, namespace: &Namespace) -> Option<Arc<T>> {
        self.place(namespace).get().cloned()
    }

    /// Ends those that the namespace had to itself. Returns false if it shared them.
    pub(crate) async fn end(&self, namespace: &Namespace) -> bool {
        let own = locked(&self.own).remove(namespace.name());
        let had_own = own.is_some();
        // That takes as long as the engine takes.
        let _ = tokio::task::spawn_blocking(move || drop(own)).await;
        had_own
    }
}

/// Does to each of the servers what can be done to any server.
pub(crate) async fn inject_into(servers: &[Server], fault: &Fault) -> Result<Injection, LockError> {
    let done = match (fault, data_after(fault)) {
        (Fault::Freeze(time), _) => each(servers, |server| server.pause_for(*time)).await,
        (Fault::Copy, _) => each(servers, Server::copy).await,
        (_, Some(data)) => each(servers, |server| server.restart(data)).await,
        _ => return Ok(Injection::NotPossible),
    };
    done.map(|()| Injection::Done).map_err(no_server)
}

/// What servers know after the restart that the fault is.
pub(crate) fn data_after(fault: &Fault) -> Option<Data> {
    match fault {
        Fault::Restart => Some(Data::Kept),
        Fault::RestartWithoutData => Some(Data::Lost),
        Fault::Restore => Some(Data::Copied),
        _ => None,
    }
}

async fn each<'a, F>(servers: &'a [Server], work: impl Fn(&'a Server) -> F) -> Result<(), ServerError>
where
    F: Future<Output = Result<(), ServerError>> + 'a,
{
    try_join_all(servers.iter().map(work)).await.map(drop)
}

pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Its debug output is what people should read.
pub(crate) fn no_server(error: ServerError) -> LockError {
    LockError::unavailable("seeing to a server", format!("{error:?}"))
}

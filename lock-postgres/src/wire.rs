//! One connection, before it has become a session.

use std::fmt;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, PoisonError};

use lock_core::{Clock, Lease, LossReason};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::runtime::Handle;
use tokio_postgres::{AsyncMessage, Client, Connection, Socket};
use tokio_util::sync::CancellationToken;

use crate::backend_key;
use crate::failure::{self, Failure};
use crate::notifications::{Subscription, Subscriptions};
use crate::rows::Rows;

/// A connection that is worked in the background. Dropping it closes the socket.
pub(crate) struct Wire {
    client: Client,
    ended: CancellationToken,
    lease: KeptLease,
    subscriptions: Subscriptions,
}

/// The lease that ends with the connection.
#[derive(Clone, Default)]
pub(crate) struct KeptLease(Arc<Mutex<Option<Lease>>>);

impl KeptLease {
    pub(crate) fn get(&self) -> Option<Lease> {
        self.lock().clone()
    }

    pub(crate) fn set(&self, lease: Option<Lease>) {
        *self.lock() = lease;
    }

    fn revoke(&self) {
        // Not under the mutex, as it tells others.
        let lease = self.lock().take();
        // If it had run out by then, that is why it is over: the server ends a silent session later than its lease.
        if let Some(lease) = lease
            && lease.is_valid(Clock::system().now())
        {
            lease.revoker().revoke(LossReason::Revoked);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Lease>> {
        // Nothing here panics while holding the mutex.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The end of a connection, when dropped.
struct Closing {
    ended: CancellationToken,
    subscriptions: Subscriptions,
    lease: KeptLease,
}

impl Drop for Closing {
    fn drop(&mut self) {
        self.ended.cancel();
        self.subscriptions.end();
        self.lease.revoke();
    }
}

impl Wire {
    /// Works the connection on `runtime`.
    pub(crate) fn drive<T>(client: Client, mut connection: Connection<Socket, T>, runtime: &Handle) -> Self
    where
        T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let ended = CancellationToken::new();
        let lease = KeptLease::default();
        let subscriptions = Subscriptions::new();
        let wire = Self {
            client,
            ended: ended.clone(),
            lease: lease.clone(),
            subscriptions: subscriptions.clone(),
        };
        // Should the runtime end and drop this task, so does the session, and its locks are lost.
        let closing = Closing {
            ended: ended.clone(),
            subscriptions: subscriptions.clone(),
            lease,
        };
        runtime.spawn(async move {
            let _closing = closing;
            let working = async {
                while let Some(message) = poll_fn(|cx| connection.poll_message(cx)).await {
                    match message {
                        Ok(AsyncMessage::Notification(notification)) => subscriptions.deliver(&notification),
                        Ok(message) => tracing::trace!(target: "fencelock", ?message, "a message of Postgres"),
                        Err(error) => {
                            tracing::debug!(target: "fencelock", %error, "a session on Postgres ended");
                            break;
                        }
                    }
                }
            };
            tokio::select! {
                () = working => {}
                () = ended.cancelled() => {}
            }
        });
        wire
    }

    /// One message, and what it was answered with. Dropping the future does not take it back.
    pub(crate) async fn ask(&self, sql: &str) -> Result<Rows, Failure> {
        let answer = tokio::select! {
            biased;
            answer = self.client.simple_query(sql) => answer,
            () = self.ended.cancelled() => return Err(Failure::Ended),
        };
        answer.map(Rows::new).map_err(|error| self.failed(error))
    }

    /// What is notified on that channel from now on; the server has to be told separately, by `LISTEN`.
    pub(crate) fn subscribe(&self, channel: impl Into<String>) -> Subscription {
        self.subscriptions.subscribe(channel)
    }

    /// The same, with room for that many that are not read yet.
    pub(crate) fn subscribe_to(&self, channel: impl Into<String>, unread: usize) -> Subscription {
        self.subscriptions.subscribe_to(channel, unread)
    }

    /// The process that the other side named when the connection began. That of a pooler is its own invention.
    pub(crate) async fn named_process(&self) -> Option<i32> {
        backend_key::process_of(&self.client.cancel_token()).await
    }

    fn failed(&self, error: tokio_postgres::Error) -> Failure {
        if failure::is_final(&error) {
            self.end();
        }
        error.into()
    }

    /// The lease that is revoked as soon as the connection ends; at once if it has.
    pub(crate) fn keep(&self, lease: Option<Lease>) {
        self.lease.set(lease);
        if self.is_ended() {
            self.lease.revoke();
        }
    }

    pub(crate) fn lease(&self) -> Option<Lease> {
        self.lease.get()
    }

    /// Closes the socket. The server ends the session as soon as it notices, and frees its locks.
    pub(crate) fn end(&self) {
        self.ended.cancel();
    }

    pub(crate) fn is_ended(&self) -> bool {
        self.ended.is_cancelled() || self.client.is_closed()
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.end();
    }
}

impl fmt::Debug for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wire")
            .field("ended", &self.is_ended())
            .finish_non_exhaustive()
    }
}

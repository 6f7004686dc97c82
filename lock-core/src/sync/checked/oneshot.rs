//! tokio's oneshot channel with a scheduling point before each use.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::sync::oneshot;
use tokio::sync::oneshot::error::{RecvError, TryRecvError};

use super::scheduling_point;

/// `None` once it has sent.
#[derive(Debug)]
pub(crate) struct Sender<T>(Option<oneshot::Sender<T>>);

#[derive(Debug)]
pub(crate) struct Receiver<T>(oneshot::Receiver<T>);

pub(crate) fn channel<T>() -> (Sender<T>, Receiver<T>) {
    let (sender, receiver) = oneshot::channel();
    (Sender(Some(sender)), Receiver(receiver))
}

impl<T> Sender<T> {
    pub(crate) fn send(mut self, value: T) -> Result<(), T> {
        scheduling_point();
        match self.0.take() {
            Some(sender) => sender.send(value),
            None => Err(value),
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        scheduling_point();
        self.0.as_ref().is_none_or(oneshot::Sender::is_closed)
    }

    pub(crate) async fn closed(&mut self) {
        scheduling_point();
        if let Some(sender) = &mut self.0 {
            sender.closed().await;
        }
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        if self.0.is_some() {
            scheduling_point();
        }
    }
}

impl<T> Receiver<T> {
    pub(crate) fn try_recv(&mut self) -> Result<T, TryRecvError> {
        scheduling_point();
        self.0.try_recv()
    }
}

impl<T> Future for Receiver<T> {
    type Output = Result<T, RecvError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        scheduling_point();
        Pin::new(&mut self.0).poll(context)
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        scheduling_point();
    }
}

//! Work that goes on when nobody waits for it any more.

use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::runtime::Handle;

type Work<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Work that is done by whoever waits for it, and that goes on in a task of its own when its waiter goes away after it has
/// begun. Cheaper than a task from the start: that is a switch there and another one back.
///
/// To be used on the runtime that is to do the work.
pub(crate) struct ToItsEnd<T: Send + 'static> {
    // None once it has ended, or panicked.
    work: Option<Work<T>>,
    begun: bool,
    runtime: Handle,
}

impl<T: Send + 'static> ToItsEnd<T> {
    pub(crate) fn new(work: impl Future<Output = T> + Send + 'static, runtime: Handle) -> Self {
        Self {
            work: Some(Box::pin(work)),
            begun: false,
            runtime,
        }
    }
}

impl<T: Send + 'static> Future for ToItsEnd<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        // Away while it is polled: what panics is not polled again.
        let Some(mut work) = self.work.take() else {
            return Poll::Pending;
        };
        self.begun = true;
        let polled = work.as_mut().poll(context);
        if polled.is_pending() {
            self.work = Some(work);
        }
        polled
    }
}

impl<T: Send + 'static> Drop for ToItsEnd<T> {
    fn drop(&mut self) {
        if self.begun
            && let Some(work) = self.work.take()
        {
            self.runtime.spawn(work);
        }
    }
}

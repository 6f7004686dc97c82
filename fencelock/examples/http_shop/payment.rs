//! The payment provider, simulated.

use std::future::pending;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tokio::time::sleep;

use crate::lines::say;

/// How long a payment takes.
const PAYMENT: Duration = Duration::from_millis(5);

/// The payments of one instance.
pub(crate) struct Payments {
    begun: AtomicU32,
    /// The payment that never ends, so that the instance can be killed in the middle of it.
    endless: Option<u32>,
}

impl Payments {
    pub(crate) fn new(endless: Option<u32>) -> Self {
        Self {
            begun: AtomicU32::new(0),
            endless,
        }
    }

    pub(crate) async fn pay(&self) {
        let number = self.begun.fetch_add(1, Ordering::Relaxed) + 1;
        if self.endless == Some(number) {
            // If the output is closed, then the parent process has ended and this one ends too.
            let _ = say(format_args!("paying"));
            pending::<()>().await;
        }
        sleep(PAYMENT).await;
    }
}

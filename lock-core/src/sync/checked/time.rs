//! Timers of a time that the checker lets pass.
//!
//! Time stands still until [`pass`] is scheduled, which goes on to the next timer. All tasks of an execution run on one thread, so that
//! its time is thread-local.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use crate::{Clock, ManualClock};

/// Longer than all that the tests wait for. Something that is still waited for then never comes.
const END: Duration = Duration::from_secs(600);

thread_local! {
    static TIME: RefCell<Time> = RefCell::default();
}

#[derive(Default)]
struct Time {
    now: Duration,
    hand: Option<ManualClock>,
    timers: BTreeMap<(Duration, u64), Waker>,
    serial: u64,
    /// Of [`pass`], while there is no timer.
    idle: Option<Waker>,
    passes_any_time: bool,
}

/// Starts the time of an execution. The clock follows the timers.
pub(crate) fn start() -> (Clock, ManualClock) {
    let (clock, hand) = Clock::manual();
    let new = Time {
        hand: Some(hand.clone()),
        ..Time::default()
    };
    // Dropped outside of the borrow: it may own what looks at the time.
    drop(TIME.replace(new));
    (clock, hand)
}

/// From now on time may also pass while there is something else to do.
pub(crate) fn let_pass() {
    TIME.with_borrow_mut(|time| time.passes_any_time = true);
}

pub(crate) fn passes_any_time() -> bool {
    TIME.with_borrow(|time| time.passes_any_time)
}

/// Goes on to the next timer whenever it is polled.
pub(crate) async fn pass() {
    poll_fn(|context| {
        let due = TIME.with_borrow_mut(Time::next);
        if due.is_empty() {
            TIME.with_borrow_mut(|time| time.idle = Some(context.waker().clone()));
        } else {
            due.into_iter().for_each(Waker::wake);
            context.waker().wake_by_ref();
        }
        Poll::Pending
    })
    .await
}

impl Time {
    fn next(&mut self) -> Vec<Waker> {
        let Some((&(at, _), _)) = self.timers.first_key_value() else {
            return Vec::new();
        };
        assert!(at < END, "time passes, and a task waits for what never comes");
        if let Some(hand) = &self.hand {
            hand.advance(at.saturating_sub(self.now));
        }
        self.now = at;
        let later = self.timers.split_off(&(at, u64::MAX));
        std::mem::replace(&mut self.timers, later).into_values().collect()
    }
}

#[derive(Debug)]
pub(crate) struct Sleep {
    until: Duration,
    timer: Option<u64>,
}

pub(crate) fn sleep(length: Duration) -> Sleep {
    Sleep {
        until: TIME.with_borrow(|time| time.now.saturating_add(length)),
        timer: None,
    }
}

impl Sleep {
    fn forget(&mut self) {
        if let Some(timer) = self.timer.take() {
            let waker = TIME.with_borrow_mut(|time| time.timers.remove(&(self.until, timer)));
            drop(waker);
        }
    }
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        self.forget();
        // What would not end within the test is not waited for.
        if self.until > END * 10 {
            return Poll::Pending;
        }
        let idle = TIME.with_borrow_mut(|time| {
            if time.now >= self.until {
                return None;
            }
            time.serial += 1;
            self.timer = Some(time.serial);
            time.timers.insert((self.until, time.serial), context.waker().clone());
            Some(time.idle.take())
        });
        match idle {
            None => Poll::Ready(()),
            Some(idle) => {
                idle.into_iter().for_each(Waker::wake);
                Poll::Pending
            }
        }
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        self.forget();
    }
}

#[derive(Debug)]
pub(crate) struct Elapsed;

pub(crate) async fn timeout<F: Future>(limit: Duration, work: F) -> Result<F::Output, Elapsed> {
    let mut work = pin!(work);
    let mut limit = pin!(sleep(limit));
    poll_fn(|context| match work.as_mut().poll(context) {
        Poll::Ready(done) => Poll::Ready(Ok(done)),
        Poll::Pending => limit.as_mut().poll(context).map(|()| Err(Elapsed)),
    })
    .await
}

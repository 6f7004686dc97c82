//! What belongs to one process, for whoever writes a backend.
//!
//! A forked child has a copy of its parent's memory, shares its sockets and files, and has none of its threads but the one that forked.
//! A mutex that another thread held stays locked for ever, work that was given to another thread is never done, and whatever is sent on
//! an inherited connection comes between the parent and its server. So a client answers with an error in a child and touches nothing, not
//! even when it is dropped; and what a client of the child needs is made anew.
//!
//! A process is known by its identifier, which the system is asked for each time. A child in another pid namespace can have the same
//! one as its parent, as when each is the first of its namespace: it is then taken for the parent.

use std::fmt;
use std::future::Future;
use std::mem;
use std::ops::Deref;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

use arc_swap::{ArcSwapOption, Guard};

use crate::LockError;
use crate::sync::oneshot;

/// Whether this is that process. A system call.
pub(crate) fn is_here(process: u32) -> bool {
    std::process::id() == process
}

/// The client belongs to the parent process.
pub(crate) fn inherited() -> LockError {
    LockError::configuration(
        "this client was made before a fork and belongs to the parent process; connect a new client in the child",
    )
}

/// A value that is shared by its clones, and dropped with the last of them; in a forked child it is never dropped.
///
/// For what a backend's connections are worked with. A backend tells [`process`](Self::process) in
/// [`DistributedLock::process`](crate::DistributedLock::process).
pub struct OfProcess<T> {
    value: Arc<T>,
    process: u32,
}

impl<T> OfProcess<T> {
    /// A value of this process.
    pub fn new(value: T) -> Self {
        Self {
            value: Arc::new(value),
            process: std::process::id(),
        }
    }

    /// The process in which it was made.
    #[must_use]
    pub fn process(&self) -> u32 {
        self.process
    }

    /// The value, for tasks of the same process.
    #[must_use]
    pub fn arc(&self) -> &Arc<T> {
        &self.value
    }
}

impl<T> Clone for OfProcess<T> {
    fn clone(&self) -> Self {
        Self {
            value: Arc::clone(&self.value),
            process: self.process,
        }
    }
}

impl<T> Deref for OfProcess<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> Drop for OfProcess<T> {
    fn drop(&mut self) {
        if !is_here(self.process) {
            leak(&self.value);
        }
    }
}

impl<T: fmt::Debug> fmt::Debug for OfProcess<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.value.fmt(f)
    }
}

/// Keeps the value for ever.
pub(crate) fn leak<T: ?Sized>(value: &Arc<T>) {
    mem::forget(Arc::clone(value));
}

/// A value for a `static`, of which each process has its own: a forked child begins with a new one. What it inherited is never dropped.
///
/// No thread waits for another one, which might not be there after a fork. The value may hold a mutex, since only threads of one process
/// see it.
pub struct PerProcess<T>(ArcSwapOption<Own<T>>);

struct Own<T> {
    process: u32,
    value: T,
}

impl<T: Default> PerProcess<T> {
    /// No value so far.
    #[must_use]
    pub const fn new() -> Self {
        Self(ArcSwapOption::const_empty())
    }

    /// Does `work` with the value of this process, which is made if there is none.
    pub fn with<R>(&self, work: impl FnOnce(&T) -> R) -> R {
        self.with_in(std::process::id(), work)
    }

    /// The same by a caller that knows the process it is in.
    fn with_in<R>(&self, process: u32, work: impl FnOnce(&T) -> R) -> R {
        let mut found = self.0.load();
        if let Some(own) = found.as_ref().filter(|own| own.process == process) {
            return work(&own.value);
        }
        let new = Arc::new(Own {
            process,
            value: T::default(),
        });
        loop {
            let before = self.0.compare_and_swap(&found, Some(Arc::clone(&new)));
            if same(&before, &found) {
                // It belongs to the parent's threads.
                mem::forget(Guard::into_inner(before));
                return work(&new.value);
            }
            // Another thread was faster.
            if let Some(own) = before.as_ref().filter(|own| own.process == process) {
                return work(&own.value);
            }
            found = before;
        }
    }

    /// Does `work` with the value of that process, if it has one and is this one or its parent.
    pub(crate) fn peek<R>(&self, process: u32, work: impl FnOnce(&T) -> R) -> Option<R> {
        let found = self.0.load();
        let own = found.as_ref().filter(|own| own.process == process)?;
        Some(work(&own.value))
    }
}

impl<T: Default> Default for PerProcess<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> fmt::Debug for PerProcess<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PerProcess").finish_non_exhaustive()
    }
}

fn same<T>(a: &Option<Arc<T>>, b: &Option<Arc<T>>) -> bool {
    a.as_ref().map(Arc::as_ptr) == b.as_ref().map(Arc::as_ptr)
}

/// A value for a `static` that is computed at its first use. Unlike [`LazyLock`](std::sync::LazyLock), threads that come at once each
/// compute it: none waits for another one, which might not be there after a fork.
pub struct Computed<T> {
    value: ArcSwapOption<T>,
    compute: fn() -> T,
}

impl<T> Computed<T> {
    /// Nothing is computed so far.
    #[must_use]
    pub const fn new(compute: fn() -> T) -> Self {
        Self {
            value: ArcSwapOption::const_empty(),
            compute,
        }
    }

    /// The value.
    pub fn get(&self) -> Arc<T> {
        if let Some(value) = &*self.value.load() {
            return Arc::clone(value);
        }
        let value = Arc::new((self.compute)());
        self.value.store(Some(Arc::clone(&value)));
        value
    }
}

impl<T> fmt::Debug for Computed<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Computed").finish_non_exhaustive()
    }
}

/// How many there are of something in this process, for a `static`. Both numbers in one value, the process in its upper half, so that
/// threads that begin together agree on who was first.
#[derive(Debug, Default)]
pub struct Count(AtomicU64);

/// One that is counted until this is dropped.
#[derive(Debug)]
pub struct Counted {
    count: &'static Count,
    process: u32,
}

impl Count {
    /// None.
    #[must_use]
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Counts one more. What was inherited is forgotten.
    #[must_use]
    pub fn one(&'static self) -> Counted {
        self.one_in(std::process::id())
    }

    pub(crate) fn one_in(&'static self, process: u32) -> Counted {
        self.begin(process);
        Counted { count: self, process }
    }

    /// How many the parent had when it forked; none once this process has counted one of its own.
    #[must_use]
    pub fn inherited(&self) -> u32 {
        let state = self.0.load(Ordering::Acquire);
        if is_here(of(state)) { 0 } else { count(state) }
    }

    /// How many that process has. None: it has had none so far.
    pub(crate) fn in_process(&self, process: u32) -> Option<u32> {
        let state = self.0.load(Ordering::Acquire);
        (of(state) == process).then_some(count(state))
    }

    fn begin(&self, process: u32) {
        let first = u64::from(process) << u32::BITS;
        self.update(|state| Some(if of(state) == process { state } else { first } + 1));
    }

    fn end(&self, process: u32) {
        self.update(|state| (of(state) == process && count(state) > 0).then(|| state - 1));
    }

    fn update(&self, change: impl Fn(u64) -> Option<u64>) {
        let _ = self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, change);
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.count.end(self.process);
    }
}

fn of(state: u64) -> u32 {
    (state >> u32::BITS) as u32
}

fn count(state: u64) -> u32 {
    state as u32
}

/// A task that belongs to this process: in a forked child `work` is neither polled nor dropped.
///
/// For whatever a backend spawns on a runtime that the user may have brought. A child can inherit such a runtime, and run or drop its
/// tasks, which would send on the parent's connections or unregister their sockets.
pub fn confined<F: Future>(work: F) -> Confined<F> {
    Confined::new(Box::pin(work), None)
}

/// Work that belongs to one process; see [`confined`].
pub struct Confined<F: Future + ?Sized> {
    // None once it has ended.
    work: Option<Pin<Box<F>>>,
    process: u32,
    elsewhere: Option<F::Output>,
}

impl<F: Future + ?Sized> Confined<F> {
    /// `elsewhere` is its outcome in a child. Without one it never ends there.
    pub(crate) fn new(work: Pin<Box<F>>, elsewhere: Option<F::Output>) -> Self {
        Self::of(std::process::id(), work, elsewhere)
    }

    /// The same for work of a process that is known.
    pub(crate) fn of(process: u32, work: Pin<Box<F>>, elsewhere: Option<F::Output>) -> Self {
        Self {
            work: Some(work),
            process,
            elsewhere,
        }
    }
}

// Nothing in it is pinned but what is in the box.
impl<F: Future + ?Sized> Unpin for Confined<F> {}

impl<F: Future + ?Sized> Future for Confined<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let this = self.get_mut();
        if !is_here(this.process) {
            return this.elsewhere.take().map_or(Poll::Pending, Poll::Ready);
        }
        let Some(work) = &mut this.work else {
            return Poll::Pending;
        };
        let polled = work.as_mut().poll(context);
        if polled.is_ready() {
            this.work = None;
        }
        polled
    }
}

impl<F: Future + ?Sized> Drop for Confined<F> {
    fn drop(&mut self) {
        if let Some(work) = self.work.take()
            && !is_here(self.process)
        {
            mem::forget(work);
        }
    }
}

impl<F: Future + ?Sized> fmt::Debug for Confined<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Confined").finish_non_exhaustive()
    }
}

/// What a caller waits for, from a task. `None` if the task ended without an answer, or if this is another process by now.
///
/// The other side's waker belongs to a runtime, whose mutex a vanished thread may hold: in a child it is not dropped.
pub(crate) struct Told<T> {
    // None once it is answered.
    answer: Option<oneshot::Receiver<T>>,
    process: u32,
    /// Before the first poll, which comes from the caller that knows its process.
    fresh: bool,
}

impl<T> Told<T> {
    /// What hears the answer, and what tells it, to a caller in that process.
    pub(crate) fn channel(process: u32) -> (oneshot::Sender<T>, Self) {
        let (tell, answer) = oneshot::channel();
        let told = Self {
            answer: Some(answer),
            process,
            fresh: true,
        };
        (tell, told)
    }
}

impl<T> Future for Told<T> {
    type Output = Option<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<T>> {
        let Some(answer) = &mut self.answer else {
            return Poll::Ready(None);
        };
        match Pin::new(answer).poll(context) {
            Poll::Ready(told) => {
                self.answer = None;
                Poll::Ready(told.ok())
            }
            Poll::Pending if mem::take(&mut self.fresh) || is_here(self.process) => Poll::Pending,
            Poll::Pending => Poll::Ready(None),
        }
    }
}

impl<T> Drop for Told<T> {
    fn drop(&mut self) {
        if let Some(answer) = self.answer.take()
            && !is_here(self.process)
        {
            mem::forget(answer);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::sync::{Barrier, Mutex};
    use std::task::Waker;
    use std::thread;

    use super::*;

    /// No process has it.
    const ANOTHER: u32 = 0;

    /// Nor this: identifiers are small numbers, and in a container this process may have any of the first ones.
    const PARENT: u32 = u32::MAX;

    struct Dropped<'a>(&'a AtomicUsize);

    impl Drop for Dropped<'_> {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::AcqRel);
        }
    }

    fn poll<F: Future + Unpin>(work: &mut F) -> Poll<F::Output> {
        Pin::new(work).poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn a_value_is_dropped_by_the_last_clone_and_by_no_other_process() {
        let dropped = AtomicUsize::new(0);
        let value = OfProcess::new(Dropped(&dropped));
        drop(value.clone());
        assert_eq!(dropped.load(Ordering::Acquire), 0);
        drop(value);
        assert_eq!(dropped.load(Ordering::Acquire), 1);
        let mut value = OfProcess::new(Dropped(&dropped));
        value.process = ANOTHER;
        drop(value);
        assert_eq!(dropped.load(Ordering::Acquire), 1);
    }

    #[test]
    fn each_process_has_a_value_of_its_own_and_drops_no_other() {
        let values: PerProcess<Arc<()>> = PerProcess::new();
        assert_eq!(values.peek(7, |_| ()), None);
        let first = values.with_in(7, Arc::clone);
        assert!(values.with_in(7, |again| Arc::ptr_eq(again, &first)));
        let second = values.with_in(8, Arc::clone);
        assert!(!Arc::ptr_eq(&first, &second));
        assert_eq!((values.peek(7, |_| ()), values.peek(8, |_| ())), (None, Some(())));
        assert_eq!(Arc::strong_count(&first), 2, "the one of the parent is kept");
    }

    #[test]
    fn a_mutex_that_a_thread_of_the_parent_holds_is_not_waited_for() {
        let values: PerProcess<Mutex<()>> = PerProcess::new();
        values.with_in(7, |of_parent| {
            let _held = of_parent.lock().unwrap();
            assert!(values.with_in(8, |own| own.try_lock().is_ok()));
        });
    }

    #[test]
    fn threads_that_come_together_get_one_value() {
        const THREADS: usize = 4;
        for round in 0..500 {
            let (values, together) = (PerProcess::<Arc<()>>::new(), Barrier::new(THREADS));
            let got: Vec<_> = thread::scope(|scope| {
                let get = || {
                    together.wait();
                    values.with(Arc::clone)
                };
                let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(get)).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            assert!(got.iter().all(|one| Arc::ptr_eq(one, &got[0])), "round {round}");
        }
    }

    #[test]
    fn a_computed_value_is_kept() {
        static VALUE: Computed<String> = Computed::new(|| "computed".to_owned());
        let first = VALUE.get();
        assert_eq!(*first, "computed");
        assert!(Arc::ptr_eq(&first, &VALUE.get()));
    }

    #[test]
    fn what_begins_together_is_all_counted() {
        const THREADS: u32 = 4;
        for round in 0..2_000 {
            let (count, together) = (Count::new(), Barrier::new(THREADS as usize));
            thread::scope(|scope| {
                for _ in 0..THREADS {
                    scope.spawn(|| {
                        together.wait();
                        count.begin(PARENT);
                    });
                }
            });
            assert_eq!(count.in_process(PARENT), Some(THREADS), "round {round}");
        }
    }

    #[test]
    fn a_forked_child_knows_what_its_parent_had_and_counts_its_own() {
        let count = Count::new();
        assert_eq!((count.in_process(PARENT), count.inherited()), (None, 0));
        count.begin(PARENT);
        count.begin(PARENT);
        let here = std::process::id();
        assert_eq!((count.in_process(PARENT), count.in_process(here)), (Some(2), None));
        assert_eq!(count.inherited(), 2);
        count.begin(here);
        // One of the parent that is dropped in the child.
        count.end(PARENT);
        assert_eq!((count.in_process(PARENT), count.in_process(here)), (None, Some(1)));
        assert_eq!(count.inherited(), 0);
        count.end(here);
        count.end(here);
        assert_eq!(count.in_process(here), Some(0));
    }

    #[test]
    fn work_of_another_process_is_neither_polled_nor_dropped() {
        let (polls, dropped) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let work = || {
            let alive = Dropped(&dropped);
            async {
                let _alive = alive;
                polls.fetch_add(1, Ordering::AcqRel);
                5
            }
        };
        let mut here = confined(work());
        assert_eq!(poll(&mut here), Poll::Ready(5));
        drop(here);
        let seen = || (polls.load(Ordering::Acquire), dropped.load(Ordering::Acquire));
        assert_eq!(seen(), (1, 1));
        drop(confined(work()));
        assert_eq!(seen(), (1, 2));
        let mut elsewhere = confined(work());
        elsewhere.process = ANOTHER;
        assert_eq!(poll(&mut elsewhere), Poll::Pending);
        drop(elsewhere);
        let mut elsewhere = Confined::new(Box::pin(work()), Some(6));
        elsewhere.process = ANOTHER;
        assert_eq!(poll(&mut elsewhere), Poll::Ready(6));
        drop(elsewhere);
        assert_eq!(seen(), (1, 2));
    }

    #[test]
    fn an_answer_for_another_process_is_not_waited_for() {
        let here = std::process::id();
        let (tell, mut told) = Told::channel(here);
        assert_eq!(poll(&mut told), Poll::Pending);
        assert_eq!(poll(&mut told), Poll::Pending);
        tell.send(5).unwrap();
        assert_eq!(poll(&mut told), Poll::Ready(Some(5)));
        let (tell, mut told) = Told::<()>::channel(ANOTHER);
        assert_eq!(poll(&mut told), Poll::Pending, "the caller knows its process");
        assert_eq!(poll(&mut told), Poll::Ready(None));
        drop(told);
        assert!(!tell.is_closed(), "nothing is told to the parent's task");
    }
}

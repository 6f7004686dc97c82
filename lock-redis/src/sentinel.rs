//! A primary that sentinels know.
//!
//! A client keeps one connection to each sentinel. It asks all of them for the primary before each connection to it, and subscribes to
//! what they announce, so that a connection to a server that has been replaced is closed at once although that server still answers.
//!
//! Sentinels can disagree: one that was cut off or stopped names the primary before the last failover. Each answer has the epoch of the
//! sentinel's configuration, which every failover raises, and the answer with the highest one counts, as it does among sentinels.

mod address;
mod node;
mod service;

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::select_all;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use lock_core::LockError;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

pub(crate) use address::read;
use node::{Answer, Primary, Sentinel};
pub(crate) use service::Service;

use crate::failure::Failure;
use crate::transport::Place;

/// How long a sentinel that has not answered is waited for once another one has, if no majority has.
const GRACE: Duration = Duration::from_millis(250);

/// The longest that one sentinel may take to connect and answer.
const LIMIT: Duration = Duration::from_secs(2);

/// Before a primary that could not be used, or a sentinel that did not answer, is asked again, unless a sentinel announces something.
const RETRY: Duration = Duration::from_millis(200);
const RETRY_SENTINEL: Duration = Duration::from_secs(2);

/// The sentinels of a service, as one client asks them.
pub(crate) struct Sentinels {
    service: Service,
    nodes: Vec<Arc<Sentinel>>,
    /// For one answer of one of them.
    limit: Duration,
    /// For a search of a primary, with the connection to it.
    search_limit: Duration,
    /// Whether a primary has been found before.
    found: AtomicBool,
    closed: CancellationToken,
}

impl Sentinels {
    pub(crate) fn new(service: Service, op_timeout: Duration) -> Result<Self, LockError> {
        if service.sentinels.is_empty() || service.name.is_empty() {
            return Err(LockError::configuration(
                "there is no sentinel, or no name of a service; give at least one sentinel and the name that it knows the service by",
            ));
        }
        let closed = CancellationToken::new();
        let node = |place: &Place| Arc::new(Sentinel::new(place.clone(), &service, op_timeout, closed.clone()));
        Ok(Self {
            nodes: service.sentinels.iter().map(node).collect(),
            service,
            limit: (op_timeout / 2).min(LIMIT),
            // Less than the caller waits, so that the caller gets the reason.
            search_limit: op_timeout * 3 / 4,
            found: AtomicBool::new(false),
            closed,
        })
    }

    pub(crate) fn service(&self) -> &Service {
        &self.service
    }

    /// Closes the connections to the sentinels. There will be no others.
    pub(crate) fn close(&self) {
        self.closed.cancel();
    }

    /// Begins to look for a primary to connect to.
    pub(crate) fn search(self: &Arc<Self>) -> Search {
        Search {
            sentinels: Arc::clone(self),
            end: Instant::now() + self.search_limit,
            announcement: self.announcement(),
        }
    }

    /// Completes with the next announcement of any sentinel.
    fn announcement(&self) -> Event<()> {
        let each = self.nodes.iter().map(|node| Box::pin(node.announcement()));
        Box::pin(select_all(each).map(drop))
    }

    /// Completes as soon as a sentinel names a primary that has replaced this one.
    fn replaced(&self, primary: &Primary) -> Event<Primary> {
        let each = self.nodes.iter().map(|node| {
            let (node, nodes) = (Arc::clone(node), self.nodes.clone());
            let (primary, limit) = (primary.clone(), self.limit);
            Box::pin(async move {
                let has_replaced = |now: &Primary| now.replaces(&primary) || agree_on_another(&nodes, &primary);
                node.until_replaced(has_replaced, limit, RETRY_SENTINEL).await
            })
        });
        Box::pin(select_all(each).map(|(primary, ..)| primary))
    }

    /// Asks all sentinels at once, and returns the latest primary that they name. Waits until most have named one, and no longer than
    /// [`GRACE`] after the first of them.
    async fn primary(&self) -> Result<Primary, LockError> {
        let ask = |(number, node): (usize, &'_ Arc<Sentinel>)| {
            let node = Arc::clone(node);
            let limit = self.limit;
            async move { (number, node.ask_within(limit).await) }
        };
        let mut asking: FuturesUnordered<_> = self.nodes.iter().enumerate().map(ask).collect();
        let mut answers: Vec<_> = self.nodes.iter().map(|_| None).collect();
        let mut late = std::pin::pin!(sleep(self.limit * 3 / 2));
        let mut named = 0;
        while named <= self.nodes.len() / 2 {
            let answer = tokio::select! {
                biased;
                answer = asking.next() => answer,
                () = &mut late => None,
            };
            let Some((number, answer)) = answer else { break };
            if let Ok(Answer::Primary(_)) = answer {
                named += 1;
                if named == 1 {
                    late.as_mut().reset(Instant::now() + GRACE);
                }
            }
            answers[number] = Some(answer);
        }
        // The last answer of a sentinel counts until it has answered again: it may be the only one to know of a failover.
        let known = self
            .nodes
            .iter()
            .zip(&answers)
            .filter_map(|(node, answer)| match answer {
                Some(Ok(Answer::Primary(primary))) => Some(primary.clone()),
                Some(_) => None,
                None => node.last(),
            });
        match known.max_by_key(|primary| primary.epoch) {
            Some(primary) => {
                self.found.store(true, Ordering::Release);
                Ok(primary)
            }
            None => Err(self.unknown(answers)),
        }
    }

    /// The error if no sentinel names a primary.
    fn unknown(&self, answers: Vec<Option<Result<Answer, LockError>>>) -> LockError {
        let failed = answers.into_iter().map(|answer| match answer {
            Some(Ok(Answer::NoService { known })) => self.no_service(&known),
            Some(Err(error)) => error,
            Some(Ok(Answer::Primary(_))) | None => LockError::no_answer("asking a sentinel", self.limit),
        });
        let failed: Vec<_> = failed.collect();
        // One that is set up in another way than the rest, or is just being set up, is no reason to give up.
        let wrong = failed.iter().filter(|error| !error.is_retryable());
        if wrong.clone().count() > failed.len() / 2
            && let Some(wrong) = wrong.into_iter().next()
        {
            return wrong.clone();
        }
        let message = format!(
            "none of the sentinels {} names a primary of {:?}; see that they run, and that the address is right",
            self.service.hosts(),
            self.service.name
        );
        let first = failed.into_iter().next();
        let error = LockError::unavailable("connecting", message);
        match first {
            Some(first) => error.with_source(first),
            None => error,
        }
    }

    fn no_service(&self, known: &[String]) -> LockError {
        let known = match known {
            [] => "they watch none".to_owned(),
            known => format!("they watch {}", known.join(", ")),
        };
        let message = format!(
            "the sentinels know no service {:?}; {known}. Correct the name behind the hosts in the address",
            self.service.name
        );
        // Sentinels that knew it are being set up anew.
        match self.found.load(Ordering::Acquire) {
            true => LockError::unavailable("connecting", message),
            false => LockError::configuration(message),
        }
    }

    fn named(&self, place: &Place) -> String {
        format!(
            "the server at {place}, which the sentinels name as the primary of {:?}",
            self.service.name
        )
    }

    /// Adds to an error which server it is about, and why that one.
    fn explained(&self, place: &Place, error: LockError) -> LockError {
        let which = self.named(place);
        match error {
            LockError::Configuration {
                message,
                source,
                lasting,
                ..
            } => {
                let message = format!(
                    "{message}. This is {which}; USER:PASSWORD@ in the address is for the servers, sentinel_user and sentinel_password \
                     are for the sentinels"
                );
                let mut error = LockError::configuration(message);
                if lasting {
                    error = error.lasting();
                }
                match source {
                    Some(source) => error.with_source(source),
                    None => error,
                }
            }
            LockError::UnsafeConfiguration { message, .. } => {
                LockError::unsafe_configuration(format!("{message}. This is {which}"))
            }
            error => error,
        }
    }
}

/// Whether all sentinels that are there, and more than half of those that there are, name the same other server, whatever its epoch: they
/// have been told to (`SENTINEL REMOVE` and `SENTINEL MONITOR`), and begin to count at 0 then.
fn agree_on_another(nodes: &[Arc<Sentinel>], primary: &Primary) -> bool {
    let named: Vec<_> = nodes.iter().filter_map(|node| node.last()).collect();
    named.len() > nodes.len() / 2 && named.iter().all(|now| !now.is_at(primary) && now.is_at(&named[0]))
}

impl fmt::Debug for Sentinels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.service.fmt(f)
    }
}

impl Drop for Sentinels {
    fn drop(&mut self) {
        self.close();
    }
}

type Event<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// A search for a primary that can be used: [`next`](Self::next), and [`failed`](Self::failed) if that primary cannot.
pub(crate) struct Search {
    sentinels: Arc<Sentinels>,
    end: Instant,
    announcement: Event<()>,
}

impl Search {
    /// The primary, as the sentinels say now.
    pub(crate) async fn next(&mut self) -> Result<Found, LockError> {
        // Before the question, so that nothing is missed.
        self.announcement = self.sentinels.announcement();
        let primary = self.sentinels.primary().await?;
        Ok(Found {
            place: self.sentinels.service.sentinels[0].at(&primary.host, primary.port),
            replaced: self.sentinels.replaced(&primary),
            end: self.end,
        })
    }

    /// Waits before the next attempt after one that failed. Returns the error if no time is left, or no retry would help.
    pub(crate) async fn failed(&mut self, found: Found, failure: Failure) -> Result<(), LockError> {
        let failed = self.sentinels.explained(&found.place, failure.explain("connecting"));
        if !failed.is_retryable() || Instant::now() + RETRY > self.end {
            return Err(failed);
        }
        tracing::debug!(target: "fencelock", "asking the sentinels again: {failed:#}");
        let _ = timeout(RETRY, &mut self.announcement).await;
        Ok(())
    }
}

/// A primary that the sentinels name.
pub(crate) struct Found {
    pub(crate) place: Place,
    replaced: Event<Primary>,
    end: Instant,
}

impl Found {
    /// Runs `work` until it is done, the primary is replaced, or the time of the search is over.
    pub(crate) async fn attempt<T>(&mut self, work: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
        let message = tokio::select! {
            done = timeout_at(self.end, work) => match done {
                Ok(done) => return done,
                Err(_) => format!("the server at {}, which the sentinels name as the primary, does not answer", self.place),
            },
            _ = &mut self.replaced => format!("the primary at {} was replaced", self.place),
        };
        Err(LockError::unavailable("connecting", message).into())
    }

    /// Cancels `ending`, which closes the connection to it, as soon as a sentinel names another primary. Completes when it is cancelled.
    pub(crate) async fn watch(self, ending: CancellationToken) {
        tokio::select! {
            biased;
            () = ending.cancelled() => {}
            now = self.replaced => {
                let (place, Primary { host, port, .. }) = (self.place, now);
                tracing::debug!(
                    target: "fencelock",
                    "closing the connection to {place}: the sentinels name {host}:{port} as the primary now"
                );
                ending.cancel();
            }
        }
    }
}

//! A [tower] layer that runs each request under a lock. For axum 0.8, tonic, hyper, and what else speaks `http` 1.
//!
//! ```
//! # use fencelock::tower::{LockLayer, decoded_path};
//! # async fn example(app: axum::Router, locks: fencelock::Locks) -> Result<axum::Router, fencelock::LockError> {
//! use std::time::Duration;
//!
//! // One request for an order at a time; others wait for up to 2 s.
//! let layer = LockLayer::new(locks, |request| {
//!     let path = decoded_path(request);
//!     Some(format!("order/{}", path.strip_prefix("/orders/")?))
//! });
//! let app = app.layer(layer.wait_for(Duration::from_secs(2)));
//! # Ok(app) }
//! ```
//!
//! **A request without a name passes unlocked**, so the name has to follow from what the handler acts on, however the client spells it:
//! `/orders/7` and `/orders/%37` are the same order to most routers. Take the path from [`decoded_path`]; if the handler reads a number
//! from it, read the same number. A handler that takes its token from the extensions, and fails without it, is never run unlocked:
//! the example `http_shop` has such an extractor for axum. Put the layer around the routes that need it (`Router::route_layer` in axum),
//! so that requests for other paths take no lock.
//!
//! The handler finds its [`FencingToken`](crate::FencingToken) and its [`LossSignal`] among the extensions of the request.
//!
//! | what happens | answer |
//! |---|---|
//! | the lock is busy to the end of the wait | 423 with `Retry-After` |
//! | too many requests wait already | 503 with `Retry-After`, or [another status](LockLayer::status_when_full) |
//! | the lock server fails, or its configuration is wrong | 503, and an event at the level `ERROR` |
//! | the lock is lost | the handler is cancelled at its next await; 503 without `Retry-After`, as a write that was under way may have been carried out |
//! | the name cannot be used, such as one with control characters | 400 |
//!
//! These answers are `application/problem+json`, and name neither the lock nor its holder. Of two layers around each other, the
//! handler finds the token of the inner one.
//!
//! The lock is released before the answer is sent, or with the [end of the body](LockLayer::until_end_of_body). A client that
//! hangs up, and a handler that panics, release it too: their futures are dropped.
//!
//! [tower]: https://docs.rs/tower

use std::borrow::Cow;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, RETRY_AFTER};
use http::request::Parts;
use http::{HeaderValue, Request, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use percent_encoding::percent_decode_str;
use tower_layer::Layer;
use tower_service::Service;

use crate::{LockError, LockGuard, LockRequest, Locks, LossSignal};

type Name = dyn Fn(&Parts) -> Option<String> + Send + Sync;
type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Runs each request of a service under the lock that the request names.
#[derive(Clone)]
#[must_use]
pub struct LockLayer {
    settings: Settings,
    /// Requests that wait for a lock at present, of all services that the layer was put around.
    waiting: Arc<AtomicUsize>,
}

#[derive(Clone)]
struct Settings {
    locks: Locks,
    name: Arc<Name>,
    wait: Duration,
    ttl: Option<Duration>,
    max_hold: Option<Duration>,
    max_waiting: usize,
    status_when_full: StatusCode,
    retry_after: Duration,
    until_end_of_body: bool,
}

/// Returns the path of a request with its percent-encoding removed, as routers hand its parts to handlers. Bytes that are not UTF-8 are
/// replaced by U+FFFD; axum answers such a request with 400.
#[must_use]
pub fn decoded_path(request: &Parts) -> Cow<'_, str> {
    percent_decode_str(request.uri.path()).decode_utf8_lossy()
}

impl LockLayer {
    /// The most requests that wait for a lock at once, unless set with [`max_waiting`](Self::max_waiting).
    pub const MAX_WAITING: usize = 1_024;

    /// A layer that takes the lock that `name` gives from the client `locks`. A request for which it gives none passes unlocked.
    pub fn new(locks: Locks, name: impl Fn(&Parts) -> Option<String> + Send + Sync + 'static) -> Self {
        Self {
            settings: Settings {
                locks,
                name: Arc::new(name),
                wait: Duration::ZERO,
                ttl: None,
                max_hold: None,
                max_waiting: Self::MAX_WAITING,
                status_when_full: StatusCode::SERVICE_UNAVAILABLE,
                retry_after: Duration::from_secs(1),
                until_end_of_body: false,
            },
            waiting: Arc::default(),
        }
    }

    /// Waits at most that long for a lock that is busy. Does not wait unless set.
    pub fn wait_for(mut self, limit: Duration) -> Self {
        self.settings.wait = limit;
        self
    }

    /// The ttl of the locks. See [`LockRequest::ttl`].
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.settings.ttl = Some(ttl);
        self
    }

    /// Ends a request that holds its lock for longer, as a loss does. See [`LockRequest::max_hold`]. For bodies that may never end.
    pub fn max_hold(mut self, limit: Duration) -> Self {
        self.settings.max_hold = Some(limit);
        self
    }

    /// How many requests may wait for locks at once, so that memory stays bounded: [`MAX_WAITING`](Self::MAX_WAITING) unless set. Further
    /// ones are refused at once. A request counts until the lock server has answered it, also if its lock is free.
    pub fn max_waiting(mut self, requests: usize) -> Self {
        self.settings.max_waiting = requests;
        self
    }

    /// The status of requests that are refused because too many wait: 503 unless set; 429 for a client that sends too many.
    pub fn status_when_full(mut self, status: StatusCode) -> Self {
        self.settings.status_when_full = status;
        self
    }

    /// When a refused client may ask again, in whole seconds rounded up: 1 s unless set.
    pub fn retry_after(mut self, pause: Duration) -> Self {
        self.settings.retry_after = pause;
        self
    }

    /// Holds the lock until the body of the response has ended or is dropped, instead of until the handler has returned. If the lock is
    /// lost before, the body ends with an error.
    pub fn until_end_of_body(mut self) -> Self {
        self.settings.until_end_of_body = true;
        self
    }
}

impl fmt::Debug for LockLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockLayer")
            .field("locks", &self.settings.locks)
            .field("wait", &self.settings.wait)
            .field("waiting", &self.waiting)
            .finish_non_exhaustive()
    }
}

impl<S> Layer<S> for LockLayer {
    type Service = LockService<S>;

    fn layer(&self, inner: S) -> LockService<S> {
        LockService {
            layer: self.clone(),
            inner,
        }
    }
}

/// A service whose requests run under locks. Made by [`LockLayer`].
#[derive(Clone, Debug)]
pub struct LockService<S> {
    layer: LockLayer,
    inner: S,
}

impl<S, B, R> Service<Request<B>> for LockService<S>
where
    S: Service<Request<B>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Send,
    B: Send + 'static,
    R: Body<Data = Bytes> + Send,
    R::Error: Into<BoxError>,
{
    type Response = Response<LockBody<R>>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        // The one that is ready; the clone has to become so.
        let next = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, next);
        let layer = self.layer.clone();
        let (mut parts, body) = request.into_parts();
        Box::pin(async move {
            let settings = &layer.settings;
            let Some(name) = (settings.name)(&parts) else {
                let answer = inner.call(Request::from_parts(parts, body)).await?;
                return Ok(answer.map(LockBody::unlocked));
            };
            let guard = match layer.acquire(&name).await {
                Ok(guard) => guard,
                Err(refusal) => return Ok(refusal.answer(settings)),
            };
            parts.extensions.insert(guard.token());
            parts.extensions.insert(guard.lost());
            let answer = match guard.run(inner.call(Request::from_parts(parts, body))).await {
                Ok(answer) => answer?,
                Err(error) => return Ok(Refusal::of(&error).answer(settings)),
            };
            if settings.until_end_of_body {
                return Ok(answer.map(|body| LockBody::locked(body, guard)));
            }
            // The server frees the lock at its ttl if this fails.
            if let Err(error) = guard.release().await {
                tracing::warn!(target: "fencelock", error = format_args!("{error:#}"), "the lock of a request could not be released");
            }
            Ok(answer.map(LockBody::unlocked))
        })
    }
}

impl LockLayer {
    async fn acquire(&self, name: &str) -> Result<LockGuard, Refusal> {
        let settings = &self.settings;
        let mut request: LockRequest = settings.locks.lock(name).wait_for(settings.wait);
        if let Some(ttl) = settings.ttl {
            request = request.ttl(ttl);
        }
        if let Some(limit) = settings.max_hold {
            request = request.max_hold(limit);
        }
        let waiting = Waiting::one_more(&self.waiting);
        if waiting.before >= settings.max_waiting {
            return Err(Refusal::Full);
        }
        request.await.map_err(|error| Refusal::of(&error))
    }
}

/// One request that waits for its lock.
struct Waiting<'a> {
    count: &'a AtomicUsize,
    before: usize,
}

impl<'a> Waiting<'a> {
    fn one_more(count: &'a AtomicUsize) -> Self {
        let before = count.fetch_add(1, Ordering::Relaxed);
        Self { count, before }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Why a request is not carried out, or not to its end.
#[derive(Clone, Copy, Debug)]
enum Refusal {
    Busy,
    Full,
    Lost,
    Name,
    Broken,
}

impl Refusal {
    fn of(error: &LockError) -> Self {
        match error {
            LockError::InvalidName { .. } => Self::Name,
            LockError::Lost { .. } => Self::Lost,
            busy if busy.is_busy() => Self::Busy,
            broken => {
                // The client is told no more than that.
                tracing::error!(target: "fencelock", error = format_args!("{broken:#}"), "a request could not get its lock");
                Self::Broken
            }
        }
    }

    fn answer<R>(self, settings: &Settings) -> Response<LockBody<R>> {
        let (status, detail) = match self {
            Self::Busy => (StatusCode::LOCKED, "another request holds the lock; try again"),
            Self::Full => (
                settings.status_when_full,
                "too many requests wait for a lock; try again",
            ),
            Self::Lost => (
                StatusCode::SERVICE_UNAVAILABLE,
                "the lock was lost while the request was under way",
            ),
            Self::Name => (StatusCode::BAD_REQUEST, "the request names a lock that cannot be used"),
            Self::Broken => (StatusCode::SERVICE_UNAVAILABLE, "the lock server cannot be used now"),
        };
        let title = status.canonical_reason().unwrap_or("Refused");
        let code = status.as_u16();
        // Nothing in it comes from outside, so nothing has to be escaped.
        let problem = format!(r#"{{"type":"about:blank","title":"{title}","status":{code},"detail":"{detail}"}}"#);
        let mut answer = Response::new(LockBody::problem(problem));
        *answer.status_mut() = status;
        let headers = answer.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if !matches!(self, Self::Name | Self::Lost) {
            let seconds = settings.retry_after.as_nanos().div_ceil(1_000_000_000);
            headers.insert(
                RETRY_AFTER,
                HeaderValue::from(u64::try_from(seconds).unwrap_or(u64::MAX)),
            );
        }
        answer
    }
}

pin_project_lite::pin_project! {
    /// The body of a response: that of the service, or a problem.
    pub struct LockBody<R> {
        #[pin]
        inner: Option<R>,
        problem: Option<Bytes>,
        held: Option<Held>,
    }
}

/// The lock that is held until the end of a body.
struct Held {
    guard: LockGuard,
    lost: Pin<Box<dyn Future<Output = crate::LossReason> + Send>>,
}

impl<R> LockBody<R> {
    fn unlocked(body: R) -> Self {
        Self {
            inner: Some(body),
            problem: None,
            held: None,
        }
    }

    fn locked(body: R, guard: LockGuard) -> Self {
        Self {
            inner: Some(body),
            problem: None,
            held: Some(Held {
                lost: Box::pin(wait(guard.lost())),
                guard,
            }),
        }
    }

    fn problem(text: String) -> Self {
        Self {
            inner: None,
            problem: Some(text.into()),
            held: None,
        }
    }
}

async fn wait(signal: LossSignal) -> crate::LossReason {
    signal.wait().await
}

impl Held {
    /// The error if the lock was lost.
    fn check(&mut self, cx: &mut Context<'_>) -> Result<(), BoxError> {
        if self.lost.as_mut().poll(cx).is_ready() || !self.guard.is_held() {
            return Err("the lock was lost before the body had ended".into());
        }
        Ok(())
    }
}

impl<R> Body for LockBody<R>
where
    R: Body<Data = Bytes>,
    R::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let mut this = self.project();
        if let Some(held) = this.held
            && let Err(lost) = held.check(cx)
        {
            this.inner.set(None);
            *this.held = None;
            return Poll::Ready(Some(Err(lost)));
        }
        let Some(inner) = this.inner.as_mut().as_pin_mut() else {
            return Poll::Ready(this.problem.take().map(|problem| Ok(Frame::data(problem))));
        };
        let polled = inner.poll_frame(cx);
        if matches!(polled, Poll::Ready(None | Some(Err(_)))) {
            // Releases in the background.
            *this.held = None;
        }
        polled.map(|frame| frame.map(|frame| frame.map_err(Into::into)))
    }

    fn is_end_stream(&self) -> bool {
        match &self.inner {
            Some(inner) => inner.is_end_stream(),
            None => self.problem.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match (&self.inner, &self.problem) {
            (Some(inner), _) => inner.size_hint(),
            (None, Some(problem)) => SizeHint::with_exact(problem.len() as u64),
            (None, None) => SizeHint::with_exact(0),
        }
    }
}

impl<R> fmt::Debug for LockBody<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockBody")
            .field("is_locked", &self.held.is_some())
            .finish_non_exhaustive()
    }
}

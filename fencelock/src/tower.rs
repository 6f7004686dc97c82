//! A [tower] layer that runs each request under a lock. For axum 0.8, tonic, hyper, and other users of `http` 1.
//!
//! ```
//! # use fencelock::tower::{LockLayer, decoded_path};
//! # fn example(app: axum::Router, locks: fencelock::Locks) -> axum::Router {
//! use std::time::Duration;
//!
//! // One request for an order at a time; others wait for up to 2 s.
//! let layer = LockLayer::new(locks, |request| {
//!     let path = decoded_path(request);
//!     Some(format!("order/{}", path.strip_prefix("/orders/")?))
//! });
//! app.route_layer(layer.wait_for(Duration::from_secs(2)))
//! # }
//! ```
//!
//! **A request without a name is refused**, unless the layer is told to [run it unlocked](LockLayer::without_name). Put the layer around
//! the routes that need it (`Router::route_layer` in axum), so that requests for other paths do not meet it.
//!
//! The name must follow from what the handler acts on, however the client spells it: `/orders/7` and `/orders/%37` are the same order to
//! most routers. Take the path from [`decoded_path`], or the parameters of the route as axum decoded them:
//!
//! ```
//! # use fencelock::tower::LockLayer;
//! # fn example(locks: fencelock::Locks) -> LockLayer {
//! use axum::extract::{FromRequestParts, RawPathParams};
//! use futures_util::FutureExt;
//!
//! LockLayer::new(locks, |request| {
//!     // This extractor never waits.
//!     let parameters = RawPathParams::from_request_parts(request, &()).now_or_never()?.ok()?;
//!     let (_, id) = parameters.iter().find(|(name, _)| *name == "id")?;
//!     Some(format!("order/{id}"))
//! })
//! # }
//! ```
//!
//! If the handler reads a number from the path, read the same number for the name: `/orders/07` is order 7, too.
//!
//! The handler finds its [`FencingToken`](crate::FencingToken) and its [`LossSignal`] among the extensions of the request. Of two layers
//! around each other, it finds the token of the inner one. The example `http` has an extractor of the token for axum.
//!
//! | what happens | response |
//! |---|---|
//! | the request has no name | 500, or as [chosen](LockLayer::without_name); a warning in the log |
//! | the lock is held to the end of the wait | 423 with `Retry-After` |
//! | the lock server fails, or its configuration is wrong | 503 with `Retry-After`; an error in the log |
//! | the lock is lost | the handler is cancelled at its next await; 503 without `Retry-After`, as a write that was under way may have been carried out |
//! | the name cannot be used, such as one with control characters | 400 |
//!
//! These responses are `application/problem+json`, and name neither the lock nor its holder. Handlers that take their locks themselves give the
//! same ones with [`response`].
//!
//! The lock is released before the response is sent, or with the [end of the body](LockLayer::until_end_of_body). If the client
//! hangs up, or the handler panics, the lock is released too, because the future of the request is dropped.
//!
//! # A limit for waiting requests
//!
//! Each waiting request takes memory. The layers of tower bound how many requests are in work, those that wait for a lock included:
//!
//! ```
//! # use fencelock::tower::LockLayer;
//! # fn example(app: axum::Router, layer: LockLayer) -> axum::Router {
//! use axum::error_handling::HandleErrorLayer;
//! use axum::http::StatusCode;
//! use tower::limit::GlobalConcurrencyLimitLayer;
//! use tower::{BoxError, ServiceBuilder};
//!
//! let limited = ServiceBuilder::new()
//!     .layer(HandleErrorLayer::new(|_: BoxError| async { StatusCode::SERVICE_UNAVAILABLE }))
//!     .load_shed()
//!     .layer(GlobalConcurrencyLimitLayer::new(1_024))
//!     .layer(layer);
//! app.route_layer(limited)
//! # }
//! ```
//!
//! `ConcurrencyLimitLayer` limits each route for itself.
//!
//! [tower]: https://docs.rs/tower

use std::borrow::Cow;
use std::fmt;
use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::Arc;
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

type Name = dyn Fn(&mut Parts) -> Option<String> + Send + Sync;
type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Runs each request of a service under the lock that the request names.
#[derive(Clone)]
#[must_use]
pub struct LockLayer {
    locks: Locks,
    name: Arc<Name>,
    without_name: WithoutName,
    wait: Duration,
    ttl: Option<Duration>,
    max_hold: Option<Duration>,
    retry_after: Duration,
    until_end_of_body: bool,
}

/// What happens to a request for which the layer finds no name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WithoutName {
    /// It is refused with this status.
    Refuse(StatusCode),
    /// The handler runs without a lock.
    RunUnlocked,
}

/// Returns the path of a request with its percent-encoding removed, as routers hand its parts to handlers. Bytes that are not UTF-8 are
/// replaced by U+FFFD; axum answers such a request with 400.
#[must_use]
pub fn decoded_path(request: &Parts) -> Cow<'_, str> {
    percent_decode_str(request.uri.path()).decode_utf8_lossy()
}

/// Returns the response of the layer to a failed lock. For handlers that take their locks themselves, with `#[locked]` or
/// [`Locks::lock_all`].
///
/// `retry_after` says when the client may try again, rounded up to seconds; a request that lost its lock is not invited to. The body names
/// neither the lock nor its holder. If the lock server failed, the error is logged, as the client does not see it.
///
/// ```
/// use std::time::Duration;
/// use axum::extract::{Path, State};
/// use axum::response::{IntoResponse, Response};
/// use fencelock::{LockError, Locks};
///
/// struct Refusal(LockError);
///
/// impl From<LockError> for Refusal {
///     fn from(error: LockError) -> Self {
///         Self(error)
///     }
/// }
///
/// impl IntoResponse for Refusal {
///     fn into_response(self) -> Response {
///         fencelock::tower::response(&self.0, Duration::from_secs(1)).into_response()
///     }
/// }
///
/// async fn transfer(State(locks): State<Locks>, Path((from, to)): Path<(String, String)>) -> Result<(), Refusal> {
///     let accounts = locks.lock_all([from, to]).no_wait().await?;
///     accounts.release().await?;
///     Ok(())
/// }
/// # let _: axum::Router<Locks> = axum::Router::new().route("/{from}/{to}", axum::routing::post(transfer));
/// ```
#[must_use]
pub fn response(error: &LockError, retry_after: Duration) -> Response<String> {
    let unavailable = StatusCode::SERVICE_UNAVAILABLE;
    let (status, detail, may_retry) = match error {
        LockError::TimedOut { .. } => (StatusCode::LOCKED, "another request holds the lock; try again", true),
        LockError::Lost { .. } => (unavailable, "the lock was lost while the request was under way", false),
        LockError::InvalidName { .. } => (
            StatusCode::BAD_REQUEST,
            "the request names a lock that cannot be used",
            false,
        ),
        broken => {
            tracing::error!(target: "fencelock", error = format_args!("{broken:#}"), "a request could not get its lock");
            (unavailable, "the lock server cannot be used now", true)
        }
    };
    problem(status, detail, may_retry.then_some(retry_after))
}

fn problem(status: StatusCode, detail: &str, retry_after: Option<Duration>) -> Response<String> {
    let title = status.canonical_reason().unwrap_or("Refused");
    let code = status.as_u16();
    // Nothing in it comes from outside, so nothing has to be escaped.
    let mut response = Response::new(format!(
        r#"{{"type":"about:blank","title":"{title}","status":{code},"detail":"{detail}"}}"#
    ));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
    if let Some(pause) = retry_after {
        let seconds = pause.as_secs().saturating_add(u64::from(pause.subsec_nanos() > 0));
        headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
    }
    response
}

impl LockLayer {
    /// Makes a layer that takes the lock that `name` returns from the client `locks`. `name` sees method, URI, headers and extensions of the
    /// request.
    pub fn new(locks: Locks, name: impl Fn(&mut Parts) -> Option<String> + Send + Sync + 'static) -> Self {
        Self {
            locks,
            name: Arc::new(name),
            without_name: WithoutName::Refuse(StatusCode::INTERNAL_SERVER_ERROR),
            wait: Duration::ZERO,
            ttl: None,
            max_hold: None,
            retry_after: Duration::from_secs(1),
            until_end_of_body: false,
        }
    }

    /// Sets what happens to a request for which there is no name: refused with 500 unless set, so that no handler runs unlocked by mistake.
    pub fn without_name(mut self, action: WithoutName) -> Self {
        self.without_name = action;
        self
    }

    /// Waits at most that long for a lock that is held. Does not wait unless set.
    pub fn wait_for(mut self, limit: Duration) -> Self {
        self.wait = limit;
        self
    }

    /// Sets the ttl of the locks. See [`LockRequest::ttl`](crate::LockRequest::ttl).
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = Some(ttl);
        self
    }

    /// Ends a request that holds its lock for longer, as a loss does. See [`LockRequest::max_hold`](crate::LockRequest::max_hold). For bodies
    /// that may never end.
    pub fn max_hold(mut self, limit: Duration) -> Self {
        self.max_hold = Some(limit);
        self
    }

    /// Sets when a refused client may try again, rounded up to seconds: 1 s unless set.
    pub fn retry_after(mut self, pause: Duration) -> Self {
        self.retry_after = pause;
        self
    }

    /// Holds the lock until the body of the response has ended or is dropped, instead of until the handler has returned. If the lock is
    /// lost before, the body ends with an error.
    pub fn until_end_of_body(mut self) -> Self {
        self.until_end_of_body = true;
        self
    }

    async fn acquire(&self, name: &str) -> Result<LockGuard, LockError> {
        let request = self.locks.lock(name).wait_for(self.wait);
        let request = self.ttl.into_iter().fold(request, LockRequest::ttl);
        self.max_hold.into_iter().fold(request, LockRequest::max_hold).await
    }

    fn refuse<R>(&self, error: &LockError) -> Response<LockBody<R>> {
        response(error, self.retry_after).map(LockBody::problem)
    }
}

impl fmt::Debug for LockLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockLayer")
            .field("locks", &self.locks)
            .field("wait", &self.wait)
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
            let Some(name) = (layer.name)(&mut parts) else {
                let WithoutName::Refuse(status) = layer.without_name else {
                    let answer = inner.call(Request::from_parts(parts, body)).await?;
                    return Ok(answer.map(|body| LockBody::of_service(body, None)));
                };
                tracing::warn!(target: "fencelock", path = parts.uri.path(), "a request names no lock and is refused");
                return Ok(problem(status, "the request names no lock", None).map(LockBody::problem));
            };
            let guard = match layer.acquire(&name).await {
                Ok(guard) => guard,
                Err(error) => return Ok(layer.refuse(&error)),
            };
            parts.extensions.insert(guard.token());
            parts.extensions.insert(guard.lost());
            let answer = match guard.run(inner.call(Request::from_parts(parts, body))).await {
                Ok(answer) => answer?,
                Err(error) => return Ok(layer.refuse(&error)),
            };
            if layer.until_end_of_body {
                return Ok(answer.map(|body| LockBody::of_service(body, Some(guard))));
            }
            // The server frees the lock at its ttl if this fails.
            if let Err(error) = guard.release().await {
                tracing::warn!(target: "fencelock", error = format_args!("{error:#}"), "the lock of a request could not be released");
            }
            Ok(answer.map(|body| LockBody::of_service(body, None)))
        })
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
    lost: <LossSignal as IntoFuture>::IntoFuture,
}

impl<R> LockBody<R> {
    fn of_service(inner: R, guard: Option<LockGuard>) -> Self {
        let held = guard.map(|guard| {
            let lost = guard.lost().into_future();
            Held { guard, lost }
        });
        Self {
            inner: Some(inner),
            problem: None,
            held,
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

impl<R> Body for LockBody<R>
where
    R: Body<Data = Bytes>,
    R::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let mut this = self.project();
        if let Some(Held { guard, lost }) = this.held
            && (lost.as_mut().poll(cx).is_ready() || !guard.is_held())
        {
            this.inner.set(None);
            *this.held = None;
            return Poll::Ready(Some(Err("the lock was lost before the body had ended".into())));
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

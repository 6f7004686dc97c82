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
//! around each other, it finds the token of the inner one.
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
//! Each waiting request takes memory. The layers of tower bound how many requests are in work, those that wait for a lock included
//! (`ConcurrencyLimitLayer` limits each route for itself):
//!
//! ```
//! # fn example(app: axum::Router, layer: fencelock::tower::LockLayer) -> axum::Router {
//! use axum::{error_handling::HandleErrorLayer, http::StatusCode};
//! use tower::{BoxError, ServiceBuilder, limit::GlobalConcurrencyLimitLayer};
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
use http_body_util::BodyExt;
use http_body_util::combinators::UnsyncBoxBody;
use percent_encoding::percent_decode_str;
use tower_layer::Layer;
use tower_service::Service;

use crate::{LockError, LockGuard, LockRequest, Locks, LossSignal};

type Name = dyn Fn(&mut Parts) -> Option<String> + Send + Sync;
type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The body of a response: that of the service, or a problem.
pub type LockBody = UnsyncBoxBody<Bytes, BoxError>;

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
/// use axum::response::{IntoResponse, Response};
/// use fencelock::{LockError, Locks};
///
/// async fn transfer(locks: Locks) -> Response {
///     let moved = locks.lock_all(["account/1", "account/2"]).no_wait().await;
///     match moved {
///         Ok(accounts) => format!("moved with the tokens of {accounts:?}").into_response(),
///         Err(error) => fencelock::tower::response(&error, std::time::Duration::from_secs(1)).into_response(),
///     }
/// }
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

    fn request(&self, name: &str) -> LockRequest {
        let request = self.locks.lock(name).wait_for(self.wait);
        let request = self.ttl.into_iter().fold(request, LockRequest::ttl);
        self.max_hold.into_iter().fold(request, LockRequest::max_hold)
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
    R: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    type Response = Response<LockBody>;
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
        let of_layer = |text: String| text.map_err(|never| match never {}).boxed_unsync();
        let of_service = |body: R| body.map_err(Into::into).boxed_unsync();
        Box::pin(async move {
            let Some(name) = (layer.name)(&mut parts) else {
                let WithoutName::Refuse(status) = layer.without_name else {
                    let answer = inner.call(Request::from_parts(parts, body)).await?;
                    return Ok(answer.map(of_service));
                };
                tracing::warn!(target: "fencelock", path = parts.uri.path(), "a request names no lock and is refused");
                return Ok(problem(status, "the request names no lock", None).map(of_layer));
            };
            let refused = |error: LockError| Ok(response(&error, layer.retry_after).map(of_layer));
            let guard = match layer.request(&name).await {
                Ok(guard) => guard,
                Err(error) => return refused(error),
            };
            parts.extensions.insert(guard.token());
            parts.extensions.insert(guard.lost());
            let answer = match guard.run(inner.call(Request::from_parts(parts, body))).await {
                Ok(answer) => answer?.map(of_service),
                Err(error) => return refused(error),
            };
            if layer.until_end_of_body {
                let lost = guard.lost().into_future();
                let held = |body| HeldBody(body, Some((guard, lost))).boxed_unsync();
                return Ok(answer.map(held));
            }
            // The server frees the lock at its ttl if this fails.
            if let Err(error) = guard.release().await {
                tracing::warn!(target: "fencelock", error = format_args!("{error:#}"), "the lock of a request could not be released");
            }
            Ok(answer)
        })
    }
}

/// A body with the lock that is held until its end.
struct HeldBody(LockBody, Option<(LockGuard, <LossSignal as IntoFuture>::IntoFuture)>);

impl Body for HeldBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let Self(body, held) = &mut *self;
        let Some((guard, lost)) = held else {
            return Poll::Ready(None);
        };
        let polled = match lost.as_mut().poll(cx).is_ready() || !guard.is_held() {
            true => Poll::Ready(Some(Err("the lock was lost before the body had ended".into()))),
            false => Pin::new(body).poll_frame(cx),
        };
        if matches!(polled, Poll::Ready(None | Some(Err(_)))) {
            // Releases in the background.
            *held = None;
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.1.is_none() || self.0.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.0.size_hint()
    }
}

//! The tower layer, around an axum service.

use std::convert::Infallible;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::error_handling::HandleErrorLayer;
use axum::extract::{Extension, FromRequestParts, Path, RawPathParams, Request};
use axum::http::{StatusCode, header};
use axum::response::Response;
use axum::routing::get;
use fencelock::tower::{LockBody, LockLayer, WithoutName, decoded_path, response};
use fencelock::{Clock, FencingToken, Locks, LossSignal, MemoryLock};
use futures_util::FutureExt;
use http_body::Frame;
use http_body_util::BodyExt;
use tokio::sync::{mpsc, oneshot};
use tower::limit::GlobalConcurrencyLimitLayer;
use tower::{BoxError, Layer, Service, ServiceBuilder, ServiceExt, service_fn};

/// Longest time for what must happen. A test that waits longer fails.
const HANG_LIMIT: Duration = Duration::from_secs(60);

/// Waits until `condition` holds.
async fn until(condition: impl Fn() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < HANG_LIMIT, "the condition does not come true");
        tokio::task::yield_now().await;
    }
}

fn layer(locks: &Locks) -> LockLayer {
    LockLayer::new(locks.clone(), |request| {
        Some(decoded_path(request).strip_prefix("/orders/")?.to_owned())
    })
}

fn app(layer: LockLayer) -> Router {
    Router::new()
        .route(
            "/orders/{id}",
            get(async |Path(id): Path<String>, Extension(token): Extension<FencingToken>| format!("{id}: {token}")),
        )
        .route("/", get(async || "no lock"))
        .layer(layer)
}

async fn ask(app: &Router, path: &str) -> Response {
    let request = Request::get(path).body(Body::empty()).unwrap();
    app.clone().oneshot(request).await.unwrap()
}

async fn text<B: HttpBody<Data = Bytes>>(body: B) -> String
where
    B::Error: std::fmt::Debug,
{
    String::from_utf8(body.collect().await.unwrap().to_bytes().to_vec()).unwrap()
}

/// A refusal: with its status, when to ask again, and nothing of what others do.
async fn is_refused(answer: Response, status: StatusCode, again: bool) {
    assert_eq!(answer.status(), status);
    assert_eq!(answer.headers()[header::CONTENT_TYPE], "application/problem+json");
    assert_eq!(answer.headers().contains_key(header::RETRY_AFTER), again);
    let problem = text(answer.into_body()).await;
    let problem: std::collections::BTreeMap<&str, &str> = problem
        .trim_matches(['{', '}'])
        .split(",\"")
        .map(|pair| pair.split_once("\":").unwrap())
        .map(|(key, value)| (key.trim_matches('"'), value.trim_matches('"')))
        .collect();
    assert_eq!(problem["status"], status.as_u16().to_string());
    assert_eq!(problem.len(), 4, "{problem:?}");
    for word in problem.values() {
        assert!(!word.contains("secret") && !word.contains("pid"), "{word}");
    }
}

#[tokio::test]
async fn a_request_runs_under_the_lock_that_it_names() {
    let locks = Locks::new(MemoryLock::new());
    let app = app(layer(&locks));
    let first = text(ask(&app, "/orders/7").await.into_body()).await;
    let second = text(ask(&app, "/orders/7").await.into_body()).await;
    let token = |answer: &str| answer.strip_prefix("7: ").unwrap().parse::<u64>().unwrap();
    assert!(token(&second) > token(&first), "{first}, {second}");
    assert_eq!(locks.stats().acquired, 2);
    assert_eq!(locks.list("").await.unwrap(), [], "released before the answer");
}

#[tokio::test]
async fn a_busy_lock_is_423_and_waited_for_if_that_is_asked_for() {
    let locks = Locks::new(MemoryLock::new());
    let held = locks.lock("secret").label("secret").await.unwrap();
    let answer = ask(&app(layer(&locks)), "/orders/secret").await;
    assert_eq!(answer.headers()[header::RETRY_AFTER], "1");
    is_refused(answer, StatusCode::LOCKED, true).await;
    let patient = layer(&locks)
        .wait_for(Duration::from_millis(20))
        .retry_after(Duration::from_millis(1_500));
    let answer = ask(&app(patient), "/orders/secret").await;
    assert_eq!(answer.headers()[header::RETRY_AFTER], "2");
    is_refused(answer, StatusCode::LOCKED, true).await;

    let patient = app(layer(&locks).wait_for(HANG_LIMIT));
    let waits = tokio::spawn(async move { ask(&patient, "/orders/secret").await });
    until(|| locks.stats().waiting > 0).await;
    held.release().await.unwrap();
    assert_eq!(waits.await.unwrap().status(), StatusCode::OK);
}

#[tokio::test]
async fn a_request_cannot_evade_its_lock_by_its_spelling() {
    let locks = Locks::new(MemoryLock::new());
    let app = app(layer(&locks));
    let held = locks.lock("7 b").await.unwrap();
    for path in ["/orders/7%20b", "/orders/%37%20b", "/orders/%37%20%62"] {
        assert_eq!(ask(&app, path).await.status(), StatusCode::LOCKED, "{path}");
    }
    held.release().await.unwrap();
    for path in ["/orders/7%20b", "/orders/%37%20b"] {
        let answer = text(ask(&app, path).await.into_body()).await;
        assert!(answer.starts_with("7 b: "), "{answer}");
    }
    // What is no UTF-8 is refused by the router, and by none of the names a lock that is held for another.
    assert_eq!(ask(&app, "/orders/%FF").await.status(), StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn a_broken_server_is_503_and_an_unusable_name_400() {
    let memory = Arc::new(MemoryLock::new());
    let locks = Locks::new(Arc::clone(&memory));
    memory.set_reachable(false);
    is_refused(
        ask(&app(layer(&locks)), "/orders/a").await,
        StatusCode::SERVICE_UNAVAILABLE,
        true,
    )
    .await;
    memory.set_reachable(true);
    for path in ["/orders/two%0Alines", &format!("/orders/{}", "x".repeat(600))] {
        let answer = ask(&app(layer(&locks)), path).await;
        is_refused(answer, StatusCode::BAD_REQUEST, false).await;
    }
    locks.shutdown().await.unwrap();
    is_refused(
        ask(&app(layer(&locks)), "/orders/a").await,
        StatusCode::SERVICE_UNAVAILABLE,
        true,
    )
    .await;
}

/// A service whose handler waits for ever, and tells when it begins and when it is dropped.
fn endless(layer: &LockLayer) -> (Router, mpsc::UnboundedReceiver<&'static str>) {
    struct Dropped(mpsc::UnboundedSender<&'static str>);
    impl Drop for Dropped {
        fn drop(&mut self) {
            let _ = self.0.send("dropped");
        }
    }
    let (tell, told) = mpsc::unbounded_channel();
    let handler = async move |Extension(lost): Extension<LossSignal>| {
        let _dropped = Dropped(tell.clone());
        let _ = tell.send("begun");
        lost.await;
        std::future::pending::<()>().await;
    };
    (
        Router::new().route("/orders/{id}", get(handler)).layer(layer.clone()),
        told,
    )
}

#[tokio::test]
async fn a_loss_cancels_the_handler_and_is_503() {
    let locks = Locks::new(MemoryLock::new());
    let (app, mut told) = endless(&layer(&locks));
    let asks = tokio::spawn(async move { ask(&app, "/orders/a").await });
    assert_eq!(told.recv().await, Some("begun"));
    locks.force_release("a").await.unwrap();
    assert_eq!(told.recv().await, Some("dropped"));
    is_refused(asks.await.unwrap(), StatusCode::SERVICE_UNAVAILABLE, false).await;
}

#[tokio::test]
async fn a_client_that_hangs_up_releases_and_leaves_no_waiter() {
    let locks = Locks::new(MemoryLock::new());
    let (app, mut told) = endless(&layer(&locks).wait_for(HANG_LIMIT));
    let (first, second) = (app.clone(), app);
    let holds = tokio::spawn(async move { ask(&first, "/orders/a").await });
    assert_eq!(told.recv().await, Some("begun"));
    let waits = tokio::spawn(async move { ask(&second, "/orders/a").await });
    until(|| locks.stats().waiting > 0).await;
    waits.abort();
    assert!(waits.await.unwrap_err().is_cancelled());
    holds.abort();
    assert_eq!(told.recv().await, Some("dropped"));
    locks.drain().await;
    assert!(locks.try_lock("a").await.unwrap().is_some());
    assert_eq!(locks.stats().waiting, 0);
}

#[tokio::test]
async fn a_panic_in_the_handler_releases() {
    let locks = Locks::new(MemoryLock::new());
    let panics = service_fn(async |_: Request| -> Result<Response, Infallible> { panic!("on purpose") });
    let mut service = layer(&locks).layer(panics);
    let request = Request::get("/orders/a").body(Body::empty()).unwrap();
    let called = service.ready().await.unwrap().call(request);
    AssertUnwindSafe(called).catch_unwind().await.unwrap_err();
    locks.drain().await;
    assert!(locks.try_lock("a").await.unwrap().is_some());
}

/// A body that has one part, and then waits for a word to end.
struct Slow {
    part: Option<&'static str>,
    end: oneshot::Receiver<()>,
}

impl HttpBody for Slow {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if let Some(part) = self.part.take() {
            return Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(part.as_bytes())))));
        }
        Pin::new(&mut self.end).poll(cx).map(|_| None)
    }
}

/// The answer of a service whose body ends when the sender says so, or is dropped.
async fn slow_answer(layer: LockLayer) -> (Response<LockBody<Slow>>, oneshot::Sender<()>) {
    let (end, ended) = oneshot::channel();
    let slow = Arc::new(Mutex::new(Some(Slow {
        part: Some("part"),
        end: ended,
    })));
    let service = service_fn(move |_: Request| {
        let body = slow.lock().unwrap().take().unwrap();
        async move { Ok::<_, Infallible>(Response::new(body)) }
    });
    let request = Request::get("/orders/a").body(Body::empty()).unwrap();
    let answer = layer.layer(service).oneshot(request).await.unwrap();
    (answer, end)
}

#[tokio::test]
async fn a_lock_can_be_held_until_the_body_has_ended() {
    let locks = Locks::new(MemoryLock::new());
    let (answer, _end) = slow_answer(layer(&locks)).await;
    assert!(
        locks.try_lock("a").await.unwrap().is_some(),
        "not held unless that is asked for"
    );
    drop(answer);
    locks.drain().await;

    let (answer, end) = slow_answer(layer(&locks).until_end_of_body()).await;
    let mut body = answer.into_body();
    assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "part");
    assert!(locks.try_lock("a").await.unwrap().is_none());
    end.send(()).unwrap();
    assert!(body.frame().await.is_none());
    locks.drain().await;
    assert!(locks.try_lock("a").await.unwrap().is_some());
    locks.drain().await;

    let (answer, _end) = slow_answer(layer(&locks).until_end_of_body()).await;
    drop(answer);
    locks.drain().await;
    assert!(
        locks.try_lock("a").await.unwrap().is_some(),
        "a body that is dropped releases"
    );
}

#[tokio::test]
async fn a_body_that_never_ends_is_ended_by_a_loss_and_by_the_longest_hold() {
    let (clock, hand) = Clock::manual();
    let locks = Locks::new(MemoryLock::with_clock(clock));
    let held = layer(&locks).until_end_of_body();
    let (answer, _end) = slow_answer(held.clone()).await;
    let mut body = answer.into_body();
    body.frame().await.unwrap().unwrap();
    locks.force_release("a").await.unwrap();
    let lost = body.frame().await.unwrap().unwrap_err();
    assert!(lost.to_string().contains("lost"), "{lost}");
    assert!(body.frame().await.is_none());

    let longest = Duration::from_secs(10);
    let (answer, _end) = slow_answer(held.max_hold(longest)).await;
    let mut body = answer.into_body();
    body.frame().await.unwrap().unwrap();
    hand.advance(longest);
    body.frame().await.unwrap().unwrap_err();
    locks.drain().await;
    assert!(locks.try_lock("a").await.unwrap().is_some());
}

#[tokio::test]
async fn a_request_without_a_name_is_refused_unless_it_may_run_unlocked() {
    let locks = Locks::new(MemoryLock::new());
    is_refused(
        ask(&app(layer(&locks)), "/").await,
        StatusCode::INTERNAL_SERVER_ERROR,
        false,
    )
    .await;
    let chosen = WithoutName::Refuse(StatusCode::NOT_FOUND);
    let answer = ask(&app(layer(&locks).without_name(chosen)), "/").await;
    is_refused(answer, StatusCode::NOT_FOUND, false).await;
    let unlocked = app(layer(&locks).without_name(WithoutName::RunUnlocked));
    assert_eq!(text(ask(&unlocked, "/").await.into_body()).await, "no lock");
    assert_eq!(locks.stats().acquired, 0);
}

#[tokio::test]
async fn a_name_can_come_from_the_parameters_and_the_headers_of_a_request() {
    let locks = Locks::new(MemoryLock::new());
    let named = LockLayer::new(locks.clone(), |request| {
        let tenant = request.headers.get("tenant")?.to_str().ok()?.to_owned();
        let parameters = RawPathParams::from_request_parts(request, &()).now_or_never()?.ok()?;
        let (_, id) = parameters.iter().find(|(name, _)| *name == "id")?;
        Some(format!("{tenant}/{id}"))
    });
    let app = app(named);
    let held = locks.lock("a/7 b").await.unwrap();
    for (tenant, status) in [("a", StatusCode::LOCKED), ("b", StatusCode::OK)] {
        let request = Request::get("/orders/%37%20b").header("tenant", tenant);
        let answer = app.clone().oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
        assert_eq!(answer.status(), status, "{tenant}");
    }
    held.release().await.unwrap();
}

#[tokio::test]
async fn handlers_that_lock_themselves_answer_as_the_layer_does() {
    let locks = Locks::new(MemoryLock::new());
    let again = Duration::from_millis(1_500);
    let answer = |error| response(&error, again).map(Body::from);
    let accounts = locks.lock_all(["a", "secret"]).label("secret").await.unwrap();
    let busy = answer(locks.lock_all(["b", "secret"]).no_wait().await.unwrap_err());
    assert_eq!(busy.headers()[header::RETRY_AFTER], "2");
    is_refused(busy, StatusCode::LOCKED, true).await;
    locks.force_release("secret").await.unwrap();
    let lost = accounts.run(std::future::pending::<()>()).await.unwrap_err();
    is_refused(answer(lost), StatusCode::SERVICE_UNAVAILABLE, false).await;
    let unusable = locks.lock("two\nlines").await.unwrap_err();
    is_refused(answer(unusable), StatusCode::BAD_REQUEST, false).await;
    locks.shutdown().await.unwrap();
    let closed = locks.lock("a").await.unwrap_err();
    is_refused(answer(closed), StatusCode::SERVICE_UNAVAILABLE, true).await;
}

#[tokio::test]
async fn the_layers_of_tower_bound_how_many_requests_wait() {
    let locks = Locks::new(MemoryLock::new());
    let held = locks.lock("7").await.unwrap();
    let limited = ServiceBuilder::new()
        .layer(HandleErrorLayer::new(|_: BoxError| async {
            StatusCode::SERVICE_UNAVAILABLE
        }))
        .load_shed()
        .layer(GlobalConcurrencyLimitLayer::new(1))
        .layer(layer(&locks).wait_for(HANG_LIMIT));
    let handler = get(async || "done");
    let app = Router::new().route("/orders/{id}", handler).route_layer(limited);
    let client = app.clone();
    let waits = tokio::spawn(async move { ask(&client, "/orders/7").await });
    until(|| locks.stats().waiting > 0).await;
    assert_eq!(ask(&app, "/orders/8").await.status(), StatusCode::SERVICE_UNAVAILABLE);
    held.release().await.unwrap();
    assert_eq!(waits.await.unwrap().status(), StatusCode::OK);
    assert_eq!(ask(&app, "/orders/8").await.status(), StatusCode::OK);
}

//! The tower layer, around an axum service.

use std::convert::Infallible;
use std::fmt::Debug;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{Extension, FromRequestParts, Path, RawPathParams, Request};
use axum::http::{StatusCode as Status, header};
use axum::response::Response;
use axum::routing::get;
use fencelock::tower::{LockLayer, WithoutName, decoded_path};
use fencelock::{Clock, FencingToken, Locks, LossSignal, MemoryLock};
use futures_util::{FutureExt, StreamExt, stream};
use http_body_util::BodyExt;
use tokio::sync::{mpsc, oneshot};
use tower::{Layer, Service, ServiceExt, service_fn};

/// Longest time for what must happen. A test that waits longer fails.
const HANG_LIMIT: Duration = Duration::from_secs(60);

async fn someone_waits(locks: &Locks) {
    let waits = async {
        while locks.stats().waiting == 0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(HANG_LIMIT, waits).await.unwrap();
}

async fn is_free(locks: &Locks) -> bool {
    locks.drain().await;
    let free = locks.try_lock("a").await.unwrap().is_some();
    locks.drain().await;
    free
}

fn locks() -> Locks {
    Locks::new(MemoryLock::new())
}

fn layer(locks: &Locks) -> LockLayer {
    LockLayer::new(locks.clone(), |request| {
        Some(decoded_path(request).strip_prefix("/orders/")?.to_owned())
    })
}

fn app(layer: LockLayer) -> Router {
    let order = async |Path(id): Path<String>, Extension(token): Extension<FencingToken>| format!("{id}: {token}");
    let routes = Router::new().route("/orders/{id}", get(order));
    routes.route("/", get(async || "no lock")).layer(layer)
}

fn request(path: &str) -> Request {
    Request::get(path).body(Body::empty()).unwrap()
}

async fn ask(app: &Router, path: &str) -> Response {
    app.clone().oneshot(request(path)).await.unwrap()
}

async fn text<B: HttpBody<Data = Bytes, Error: Debug>>(body: B) -> String {
    String::from_utf8(body.collect().await.unwrap().to_bytes().to_vec()).unwrap()
}

/// A refusal has its status, says when to ask again, if at all, and shows nothing of what others do.
async fn is_refused(answer: Response, status: Status, retry_after: Option<&str>) {
    assert_eq!(answer.status(), status);
    assert_eq!(answer.headers()[header::CONTENT_TYPE], "application/problem+json");
    let again = answer.headers().get(header::RETRY_AFTER);
    assert_eq!(again.map(|again| again.to_str().unwrap()), retry_after);
    let problem = text(answer.into_body()).await;
    let [code, title] = [status.as_str(), status.canonical_reason().unwrap()];
    let start = format!(r#"{{"type":"about:blank","title":"{title}","status":{code},"detail":""#);
    assert!(problem.starts_with(&start) && problem.ends_with("\"}"), "{problem}");
    assert!(!problem.contains("secret") && !problem.contains("pid"), "{problem}");
}

#[tokio::test]
async fn a_request_runs_under_the_lock_that_it_names_however_it_spells_it() {
    let locks = locks();
    let app = app(layer(&locks));
    let spellings = ["/orders/7%20b", "/orders/%37%20b", "/orders/%37%20%62"];
    let mut last = 0;
    for path in spellings {
        let answer = text(ask(&app, path).await.into_body()).await;
        let token = answer.strip_prefix("7 b: ").unwrap().parse::<u64>().unwrap();
        assert!(token > last, "{answer}");
        last = token;
    }
    assert_eq!(locks.stats().acquired, 3);
    assert_eq!(locks.list("").await.unwrap(), [], "released before the answer");
    let _held = locks.lock("7 b").await.unwrap();
    for path in spellings {
        assert_eq!(ask(&app, path).await.status(), Status::LOCKED, "{path}");
    }
    // The router refuses what is no UTF-8, whatever its lock is called.
    assert_eq!(ask(&app, "/orders/%FF").await.status(), Status::BAD_REQUEST);
}

#[tokio::test]
async fn a_busy_lock_is_423_and_waited_for_if_that_is_asked_for() {
    let locks = locks();
    let held = locks.lock("secret").label("secret").await.unwrap();
    let answer = ask(&app(layer(&locks)), "/orders/secret").await;
    is_refused(answer, Status::LOCKED, Some("1")).await;
    let waits = layer(&locks).wait_for(Duration::from_millis(20));
    let answer = ask(&app(waits.retry_after(Duration::from_millis(1_500))), "/orders/secret").await;
    is_refused(answer, Status::LOCKED, Some("2")).await;

    let waits = app(layer(&locks).wait_for(HANG_LIMIT));
    let waits = tokio::spawn(async move { ask(&waits, "/orders/secret").await });
    someone_waits(&locks).await;
    held.release().await.unwrap();
    assert_eq!(waits.await.unwrap().status(), Status::OK);
}

#[tokio::test]
async fn a_broken_server_is_503_and_an_unusable_name_400() {
    let memory = Arc::new(MemoryLock::new());
    let locks = Locks::new(Arc::clone(&memory));
    let app = app(layer(&locks));
    memory.set_reachable(false);
    is_refused(ask(&app, "/orders/a").await, Status::SERVICE_UNAVAILABLE, Some("1")).await;
    memory.set_reachable(true);
    for path in ["/orders/two%0Alines", &format!("/orders/{}", "x".repeat(600))] {
        is_refused(ask(&app, path).await, Status::BAD_REQUEST, None).await;
    }
    locks.shutdown().await.unwrap();
    is_refused(ask(&app, "/orders/a").await, Status::SERVICE_UNAVAILABLE, Some("1")).await;
}

/// A service whose handler waits for ever, and tells when it begins and when it is dropped.
fn endless(layer: LockLayer) -> (Router, mpsc::UnboundedReceiver<&'static str>) {
    struct Dropped(mpsc::UnboundedSender<&'static str>);
    impl Drop for Dropped {
        fn drop(&mut self) {
            let _ = self.0.send("dropped");
        }
    }
    let (tell, events) = mpsc::unbounded_channel();
    let handler = async move |Extension(lost): Extension<LossSignal>| {
        let _dropped = Dropped(tell.clone());
        let _ = tell.send("begun");
        lost.await;
        std::future::pending::<()>().await;
    };
    (Router::new().route("/orders/{id}", get(handler)).layer(layer), events)
}

#[tokio::test]
async fn a_loss_cancels_the_handler_and_is_503() {
    let locks = locks();
    let (app, mut events) = endless(layer(&locks));
    let asks = tokio::spawn(async move { ask(&app, "/orders/a").await });
    assert_eq!(events.recv().await, Some("begun"));
    locks.force_release("a").await.unwrap();
    assert_eq!(events.recv().await, Some("dropped"));
    is_refused(asks.await.unwrap(), Status::SERVICE_UNAVAILABLE, None).await;
}

#[tokio::test]
async fn a_client_that_hangs_up_releases_and_leaves_no_waiter() {
    let locks = locks();
    let (app, mut events) = endless(layer(&locks).wait_for(HANG_LIMIT));
    let (first, second) = (app.clone(), app);
    let holds = tokio::spawn(async move { ask(&first, "/orders/a").await });
    assert_eq!(events.recv().await, Some("begun"));
    let waits = tokio::spawn(async move { ask(&second, "/orders/a").await });
    someone_waits(&locks).await;
    waits.abort();
    assert!(waits.await.unwrap_err().is_cancelled());
    holds.abort();
    assert_eq!(events.recv().await, Some("dropped"));
    assert!(is_free(&locks).await);
    assert_eq!(locks.stats().waiting, 0);
}

#[tokio::test]
async fn a_panic_in_the_handler_releases() {
    let locks = locks();
    let panics = service_fn(async |_: Request| -> Result<Response, Infallible> { panic!("on purpose") });
    let mut service = layer(&locks).layer(panics);
    let called = service.ready().await.unwrap().call(request("/orders/a"));
    AssertUnwindSafe(called).catch_unwind().await.unwrap_err();
    assert!(is_free(&locks).await);
}

/// An answer whose body has one part, and ends when the sender says so.
async fn slow_answer(layer: LockLayer) -> (Body, oneshot::Sender<()>) {
    let (end, ended) = oneshot::channel::<()>();
    let ended = ended.shared();
    let service = service_fn(move |_: Request| {
        let end = stream::once(ended.clone()).filter_map(async |_| None);
        let parts = stream::iter([Ok::<_, Infallible>("part")]).chain(end);
        std::future::ready(Ok::<_, Infallible>(Response::new(Body::from_stream(parts))))
    });
    let answer = layer.layer(service).oneshot(request("/orders/a")).await.unwrap();
    let mut body = Body::new(answer.into_body());
    assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "part");
    (body, end)
}

#[tokio::test]
async fn a_lock_can_be_held_until_the_body_has_ended() {
    let (clock, hand) = Clock::manual();
    let locks = Locks::new(MemoryLock::with_clock(clock));
    let (_body, _end) = slow_answer(layer(&locks)).await;
    assert!(is_free(&locks).await, "not held unless that is asked for");

    let held = layer(&locks).until_end_of_body();
    let (mut body, end) = slow_answer(held.clone()).await;
    assert!(!is_free(&locks).await);
    end.send(()).unwrap();
    assert!(body.frame().await.is_none());
    assert!(is_free(&locks).await);

    let (body, _end) = slow_answer(held.clone()).await;
    drop(body);
    assert!(is_free(&locks).await, "a body that is dropped releases");

    let (mut body, _end) = slow_answer(held.clone()).await;
    locks.force_release("a").await.unwrap();
    let lost = body.frame().await.unwrap().unwrap_err();
    assert!(lost.to_string().contains("lost"), "{lost}");
    assert!(body.frame().await.is_none());

    let longest = Duration::from_secs(10);
    let (mut body, _end) = slow_answer(held.max_hold(longest)).await;
    hand.advance(longest);
    body.frame().await.unwrap().unwrap_err();
    assert!(is_free(&locks).await);
}

#[tokio::test]
async fn a_request_without_a_name_is_refused_unless_it_may_run_unlocked() {
    let locks = locks();
    let answer = ask(&app(layer(&locks)), "/").await;
    is_refused(answer, Status::INTERNAL_SERVER_ERROR, None).await;
    let chosen = layer(&locks).without_name(WithoutName::Refuse(Status::NOT_FOUND));
    is_refused(ask(&app(chosen), "/").await, Status::NOT_FOUND, None).await;
    let unlocked = layer(&locks).without_name(WithoutName::RunUnlocked);
    assert_eq!(text(ask(&app(unlocked), "/").await.into_body()).await, "no lock");
    assert_eq!(locks.stats().acquired, 0);
}

#[tokio::test]
async fn a_name_can_come_from_the_parameters_and_the_headers_of_a_request() {
    let locks = locks();
    let app = app(LockLayer::new(locks.clone(), |request| {
        let tenant = request.headers.get("tenant")?.to_str().ok()?.to_owned();
        let parameters = RawPathParams::from_request_parts(request, &()).now_or_never()?.ok()?;
        let (_, id) = parameters.iter().find(|(name, _)| *name == "id")?;
        Some(format!("{tenant}/{id}"))
    }));
    let _held = locks.lock("a/7 b").await.unwrap();
    for (tenant, status) in [("a", Status::LOCKED), ("b", Status::OK)] {
        let mut request = request("/orders/%37%20b");
        request.headers_mut().insert("tenant", tenant.parse().unwrap());
        assert_eq!(app.clone().oneshot(request).await.unwrap().status(), status, "{tenant}");
    }
}

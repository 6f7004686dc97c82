//! What the service answers, without sockets and with tokens of the test's choice.

use std::sync::Arc;

use axum::body::Body;
use axum::http::{Request, StatusCode, header};
use axum::response::Response;
use axum::{Extension, Router};
use fencelock::FencingToken;
use tempfile::TempDir;
use tower::ServiceExt;

use crate::Outcome;
use crate::payment::Payments;
use crate::service::{self, Shop};
use crate::stock::store;

/// A service with that many articles, and the folder of its store.
async fn service(stock: u32) -> Outcome<(Router, TempDir)> {
    let (url, folder) = store::address(None, "fencelock-http-shop-")?;
    let folder = folder.ok_or("an address of its own has a folder")?;
    let store = store::connect(&url, "test", 1).await?;
    store.open(stock).await?;
    let payments = Arc::new(Payments::new(None));
    Ok((service::routes(Shop { store, payments }), folder))
}

async fn buy(routes: Router, buyer: u32) -> Outcome<Response> {
    let request = Request::post(format!("/purchases/{buyer}")).body(Body::empty())?;
    Ok(routes.oneshot(request).await?)
}

async fn buy_with(routes: &Router, buyer: u32, token: u64) -> Outcome<Response> {
    let token = FencingToken::new(token)?;
    buy(routes.clone().layer(Extension(token)), buyer).await
}

#[tokio::test]
async fn sold_out_is_409() -> Outcome<()> {
    let (routes, _folder) = service(1).await?;
    assert_eq!(buy_with(&routes, 1, 7).await?.status(), StatusCode::OK);
    assert_eq!(buy_with(&routes, 2, 8).await?.status(), StatusCode::CONFLICT);
    Ok(())
}

#[tokio::test]
async fn a_stale_token_is_503_and_sells_nothing() -> Outcome<()> {
    let (routes, _folder) = service(2).await?;
    assert_eq!(buy_with(&routes, 1, 8).await?.status(), StatusCode::OK);
    let late = buy_with(&routes, 2, 7).await?;
    assert_eq!(late.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(late.headers()[header::RETRY_AFTER], "1");
    assert_eq!(buy_with(&routes, 3, 9).await?.status(), StatusCode::OK);
    assert_eq!(buy_with(&routes, 4, 10).await?.status(), StatusCode::CONFLICT);
    Ok(())
}

#[tokio::test]
async fn a_token_that_becomes_stale_during_the_payment_is_503_and_sells_nothing() -> Outcome<()> {
    let (routes, _folder) = service(2).await?;
    // Both requests run until their payments before the runtime looks at its timers.
    let (late, next) = tokio::join!(buy_with(&routes, 1, 7), buy_with(&routes, 2, 8));
    assert_eq!(late?.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(next?.status(), StatusCode::OK);
    Ok(())
}

#[tokio::test]
async fn a_request_without_a_lock_is_500_and_sells_nothing() -> Outcome<()> {
    let (routes, _folder) = service(1).await?;
    assert_eq!(
        buy(routes.clone(), 1).await?.status(),
        StatusCode::INTERNAL_SERVER_ERROR
    );
    assert_eq!(buy_with(&routes, 2, 7).await?.status(), StatusCode::OK);
    Ok(())
}

//! The service: each request buys one article, one request at a time among all instances.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{FromRequestParts, Path, State};
use axum::http::request::Parts;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use fencelock::fence::StaleToken;
use fencelock::tower::LockLayer;
use fencelock::{FencingToken, Locks};

use crate::payment::Payments;
use crate::stock::store::{Sale, Store, StoreError};

/// How long a request waits for the lock. It covers the ttl of an instance that was killed and all requests before this one.
pub(crate) const WAIT: Duration = Duration::from_secs(30);

/// After this time at most, the lock of an instance that was killed is free.
const TTL: Duration = Duration::from_secs(2);

/// State of the handlers.
#[derive(Clone)]
pub(crate) struct Shop {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) payments: Arc<Payments>,
}

/// The routes, each request under the lock `name`. A request that matches no route takes no lock.
pub(crate) fn app(shop: Shop, locks: Locks, name: String) -> Router {
    let ttl = TTL.max(locks.capabilities().min_ttl);
    let lock = LockLayer::new(locks, move |_| Some(name.clone()));
    routes(shop).route_layer(lock.ttl(ttl).wait_for(WAIT))
}

pub(crate) fn routes(shop: Shop) -> Router {
    Router::new().route("/purchases/{buyer}", post(buy)).with_state(shop)
}

async fn buy(State(shop): State<Shop>, Path(buyer): Path<u32>, Token(token): Token) -> Result<String, Refusal> {
    // Before the read: from here on the store refuses the writes of every earlier holder.
    shop.store.admit(token).await?;
    let left = shop.store.left().await.map_err(StoreError::Broken)?;
    let left = left.checked_sub(1).ok_or(Refusal::SoldOut)?;
    shop.payments.pay().await;
    let token = Some(token);
    shop.store.sell(&Sale { buyer, left, token }, true).await?;
    Ok(format!("sold, {left} left\n"))
}

/// Extractor of the token of the lock that the request runs under.
struct Token(FencingToken);

impl<S: Sync> FromRequestParts<S> for Token {
    type Rejection = (StatusCode, &'static str);

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
        // Also the guard against a route without the layer: its handler never runs.
        let missing = (StatusCode::INTERNAL_SERVER_ERROR, "the route has no lock\n");
        parts.extensions.get().copied().map(Self).ok_or(missing)
    }
}

/// Why nothing was sold. The layer answers 423 and 503 by itself.
enum Refusal {
    SoldOut,
    /// Another request has held the lock since this one got it.
    Stale(StaleToken),
    Broken(Box<dyn Error + Send + Sync>),
}

impl From<StoreError> for Refusal {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Stale(stale) => Self::Stale(stale),
            StoreError::Broken(error) => Self::Broken(error),
        }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        match self {
            Self::SoldOut => (StatusCode::CONFLICT, "sold out\n").into_response(),
            // Nothing was written by this request, and the client may try again.
            Self::Stale(stale) => {
                eprintln!("refused: {stale}");
                let retry = [(header::RETRY_AFTER, "1")];
                (StatusCode::SERVICE_UNAVAILABLE, retry, "the lock was lost\n").into_response()
            }
            Self::Broken(error) => {
                eprintln!("the store failed: {error}");
                (StatusCode::INTERNAL_SERVER_ERROR, "the store failed\n").into_response()
            }
        }
    }
}

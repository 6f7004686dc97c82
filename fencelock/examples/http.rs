//! An HTTP service that sells a limited stock. Each purchase runs under a lock, so the service may have several instances.
//!
//! ```sh
//! cargo run --example http --features sqlite,tower -- sqlite:locks.db stock.db
//! curl -X POST http://localhost:3000/purchases/7
//! ```

use std::error::Error;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::extract::{self, State};
use axum::http::StatusCode;
use axum::routing::post;
use axum::{Extension, Router};
use fencelock::sqlite::fence::{self, FenceError};
use fencelock::sqlite::rusqlite::{self, Connection, TransactionBehavior};
use fencelock::tower::LockLayer;
use fencelock::{FencingToken, Locks};

type Outcome<T> = Result<T, Box<dyn Error>>;

#[tokio::main]
async fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [locks, data] = &arguments[..] else {
        return Err("give the address of the locks and the path of the database".into());
    };
    let app = app(fencelock::connect(locks).await?, Shop::open(Path::new(data), 100)?);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    Ok(axum::serve(listener, app).await?)
}

/// The service. A request that matches no route takes no lock.
fn app(locks: Locks, shop: Shop) -> Router {
    let lock = LockLayer::new(locks, |_| Some("example/stock".to_owned()));
    routes(shop).route_layer(lock.wait_for(Duration::from_secs(30)))
}

fn routes(shop: Shop) -> Router {
    Router::new().route("/purchases/{buyer}", post(buy)).with_state(shop)
}

/// Sells one. Without the layer there is no token: the answer is 500, and the handler does not run.
async fn buy(
    State(shop): State<Shop>,
    extract::Path(buyer): extract::Path<u32>,
    Extension(token): Extension<FencingToken>,
) -> Result<String, (StatusCode, &'static str)> {
    // Admitted with the read: from here on the database refuses the writes of all earlier holders.
    let left = shop.step(token, |data| {
        data.query_row("SELECT amount FROM stock", [], |row| row.get(0))
    });
    let left: u32 = left.map_err(refusal)?;
    if left == 0 {
        return Err((StatusCode::CONFLICT, "sold out\n"));
    }
    // The payment.
    tokio::time::sleep(Duration::from_millis(1)).await;
    let sale = shop.step(token, |data| {
        data.execute("UPDATE stock SET amount = ?1", [left - 1])?;
        data.execute("INSERT INTO sale VALUES (?1)", [buyer])
    });
    sale.map_err(refusal)?;
    Ok(format!("sold, {} left\n", left - 1))
}

/// The answer to a request whose lock was lost, or whose database failed. The layer answers 423 and 503 by itself.
fn refusal(error: FenceError) -> (StatusCode, &'static str) {
    match error {
        FenceError::Stale(_) => (StatusCode::SERVICE_UNAVAILABLE, "nothing was written, try again\n"),
        error => {
            eprintln!("the database failed: {error}");
            (StatusCode::INTERNAL_SERVER_ERROR, "the database failed\n")
        }
    }
}

/// The database, with the mark of its fence.
#[derive(Clone)]
struct Shop(Arc<Mutex<Connection>>);

impl Shop {
    fn open(path: &Path, stock: u32) -> Outcome<Self> {
        let data = Connection::open(path)?;
        data.busy_timeout(Duration::from_secs(10))?;
        data.execute_batch(fence::CREATE_SQL)?;
        data.execute_batch("CREATE TABLE IF NOT EXISTS stock (id INTEGER PRIMARY KEY, amount INTEGER)")?;
        data.execute_batch("CREATE TABLE IF NOT EXISTS sale (buyer INTEGER)")?;
        data.execute("INSERT OR IGNORE INTO stock VALUES (1, ?1)", [stock])?;
        Ok(Self(Arc::new(Mutex::new(data))))
    }

    /// Runs a step in one transaction, which the fence refuses if the token is stale.
    fn step<T>(
        &self,
        token: FencingToken,
        step: impl FnOnce(&Connection) -> rusqlite::Result<T>,
    ) -> Result<T, FenceError> {
        // Takes microseconds. Slower statements belong into `spawn_blocking`.
        let mut data = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let transaction = data.transaction_with_behavior(TransactionBehavior::Immediate)?;
        fence::admit(&transaction, "stock", token)?;
        let done = step(&transaction)?;
        transaction.commit()?;
        Ok(done)
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::http::Request;
    use tokio::task::JoinSet;
    use tower::ServiceExt;

    use super::*;

    async fn status(app: Router, buyer: u32) -> StatusCode {
        let request = Request::post(format!("/purchases/{buyer}")).body(Body::empty());
        app.oneshot(request.unwrap()).await.unwrap().status()
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn instances_sell_all_and_not_more() {
        let folder = tempfile::tempdir().unwrap();
        let (url, data) = (
            format!("sqlite:{}/locks.db", folder.path().display()),
            folder.path().join("stock.db"),
        );
        let mut requests = JoinSet::new();
        for instance in 0..3 {
            let app = app(fencelock::connect(&url).await.unwrap(), Shop::open(&data, 20).unwrap());
            for buyer in 0..20 {
                requests.spawn(status(app.clone(), 20 * instance + buyer));
            }
        }
        let answers = requests.join_all().await;
        let count = |status| answers.iter().filter(|&&answer| answer == status).count();
        assert_eq!(
            (count(StatusCode::OK), count(StatusCode::CONFLICT)),
            (20, 40),
            "{answers:?}"
        );
        let shop = Shop::open(&data, 0).unwrap();
        let sold = "SELECT count(*) FROM sale";
        assert_eq!(shop.0.lock().unwrap().query_row(sold, [], |row| row.get(0)), Ok(20));
    }

    #[tokio::test]
    async fn a_stale_token_and_a_missing_lock_sell_nothing() {
        let shop = Shop::open(Path::new(":memory:"), 2).unwrap();
        let with = |token| routes(shop.clone()).layer(Extension(FencingToken::new(token).unwrap()));
        // Both requests read before the first one writes.
        let (late, next) = tokio::join!(status(with(7), 1), status(with(8), 2));
        assert_eq!((late, next), (StatusCode::SERVICE_UNAVAILABLE, StatusCode::OK));
        assert_eq!(status(with(7), 3).await, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(status(routes(shop.clone()), 4).await, StatusCode::INTERNAL_SERVER_ERROR);
        assert_eq!(status(with(9), 5).await, StatusCode::OK);
        assert_eq!(status(with(9), 6).await, StatusCode::CONFLICT);
    }
}

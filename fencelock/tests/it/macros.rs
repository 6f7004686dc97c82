//! `#[fencelock::locked]`: what the attribute makes of functions and methods.

use std::any::Any;
use std::error::Error;
use std::fmt::Debug;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use fencelock::{LockError, LockGuard, Locks, LossReason, MemoryLock, locked};
use futures_util::FutureExt;

#[derive(Debug)]
enum ShopError {
    Lock(LockError),
    SoldOut,
}

impl From<LockError> for ShopError {
    fn from(error: LockError) -> Self {
        Self::Lock(error)
    }
}

struct Order {
    id: u64,
}

fn locks() -> Locks {
    Locks::new(MemoryLock::new())
}

fn name_of(guard: &LockGuard) -> String {
    guard.name().to_string()
}

#[locked("order/{order_id:02}/{{}}", guard = guard)]
async fn by_argument(locks: &Locks, order_id: u64) -> Result<String, LockError> {
    Ok(name_of(guard))
}

#[locked(format!("{{order}}/{:04}", order.id), guard = held, locks = shop)]
async fn by_expression(shop: Locks, order: Order) -> Result<String, LockError> {
    // The argument is still the body's own.
    let Order { id } = order;
    assert_eq!(id, 7);
    Ok(name_of(held))
}

#[locked(order.id + 1, guard = guard,)]
async fn by_value(locks: &Locks, order: &Order) -> Result<String, LockError> {
    Ok(name_of(guard))
}

#[locked("{name}")]
async fn by_text(locks: &Locks, name: &str) -> Result<(), LockError> {
    Ok(())
}

#[tokio::test]
async fn names_come_from_arguments_and_expressions() {
    let locks = locks();
    let client = locks.clone();
    let spawned = tokio::spawn(async move { by_argument(&client, 7).await });
    assert_eq!(spawned.await.unwrap().unwrap(), "order/07/{}");
    assert_eq!(by_value(&locks, &Order { id: 7 }).await.unwrap(), "8");
    for name in ["", "two\nlines"] {
        let refused = by_text(&locks, name).await.unwrap_err();
        assert!(matches!(refused, LockError::InvalidName { .. }), "{refused}");
    }
    assert_eq!(by_expression(locks, Order { id: 7 }).await.unwrap(), "{order}/0007");
}

#[locked("boxed")]
async fn boxed(locks: &Locks, early: bool) -> Result<Box<dyn Fn() -> u8 + Send>, Box<dyn Error + Send + Sync>> {
    if early {
        return Err(Box::new(std::fmt::Error));
    }
    match locks.stats().waiting {
        0 => Ok(Box::new(|| 1)),
        _ => Ok(Box::new(|| 2)),
    }
}

#[locked("slice")]
async fn slice(locks: &Locks) -> Result<&'static [u8], LockError> {
    Ok(b"abc")
}

#[locked("function")]
async fn function(locks: &Locks) -> Result<fn(u8) -> u8, LockError> {
    Ok(|x| x + 1)
}

#[locked("any")]
async fn any(locks: &Locks, value: Arc<u8>) -> Result<Arc<dyn Any + Send + Sync>, LockError> {
    Ok(value)
}

#[locked("generic")]
async fn generic<T: Debug + Send>(locks: &Locks, value: &mut T) -> Result<String, LockError> {
    Ok(format!("{value:?}"))
}

#[locked("never")]
async fn never(locks: &Locks) -> Result<u8, LockError> {
    std::future::pending().await
}

#[tokio::test]
async fn values_are_coerced_to_the_return_type_as_without_the_attribute() {
    let locks = locks();
    assert!(boxed(&locks, true).await.is_err());
    assert_eq!(boxed(&locks, false).await.unwrap()(), 1);
    assert_eq!(slice(&locks).await.unwrap(), b"abc");
    assert_eq!(function(&locks).await.unwrap()(1), 2);
    assert!(any(&locks, Arc::new(7)).await.unwrap().is::<u8>());
    assert_eq!(generic(&locks, &mut 7).await.unwrap(), "7");
    assert!(never(&locks).now_or_never().is_none());
}

#[locked("door")]
async fn at_once(locks: &Locks) -> Result<(), ShopError> {
    Ok(())
}

#[locked("door", wait_for = "30ms")]
async fn after_a_while(locks: &Locks) -> Result<(), LockError> {
    Ok(())
}

#[locked("door", wait_for = forever, guard = guard)]
async fn whenever(locks: &Locks) -> Result<u64, ShopError> {
    Ok(guard.token().get())
}

#[locked("door", busy = skip)]
async fn or_not(locks: &Locks) -> Result<(), ShopError> {
    Err(ShopError::SoldOut)
}

#[locked("door", busy = skip)]
async fn or_none(locks: &Locks) -> Result<Option<u32>, ShopError> {
    Ok(Some(5))
}

#[tokio::test]
async fn a_busy_lock_is_an_error_or_skipped() {
    let locks = locks();
    assert_eq!(or_none(&locks).await.unwrap(), Some(5));
    assert!(matches!(or_not(&locks).await, Err(ShopError::SoldOut)), "not skipped");
    let held = locks.lock("door").await.unwrap();
    assert!(matches!(at_once(&locks).await, Err(ShopError::Lock(busy)) if busy.is_busy()));
    let LockError::TimedOut { waited, .. } = after_a_while(&locks).await.unwrap_err() else {
        panic!("not busy");
    };
    assert!(waited >= Duration::from_millis(30));
    or_not(&locks).await.unwrap();
    assert_eq!(or_none(&locks).await.unwrap(), None);

    let client = locks.clone();
    let waits = tokio::spawn(async move { whenever(&client).await });
    let token = held.token().get();
    held.release().await.unwrap();
    assert!(waits.await.unwrap().unwrap() > token);

    locks.shutdown().await.unwrap();
    let closed = or_not(&locks).await;
    assert!(matches!(closed, Err(ShopError::Lock(LockError::Closed { .. }))));
}

#[locked("hourly", at_least = "1h", busy = skip)]
async fn hourly(locks: &Locks) -> Result<Option<u32>, LockError> {
    Ok(Some(7))
}

#[locked("rarely", at_least = pause, busy = skip)]
async fn rarely(locks: &Locks, pause: Duration) -> Result<Option<u32>, LockError> {
    Ok(Some(7))
}

#[locked("door", max_hold = "10ms")]
async fn too_long(locks: &Locks) -> Result<(), LockError> {
    std::future::pending().await
}

#[tokio::test]
async fn the_times_of_the_attribute_are_those_of_the_request() {
    let locks = locks();
    for ran in [Some(7), None] {
        assert_eq!(hourly(&locks).await.unwrap(), ran);
        assert_eq!(rarely(&locks, Duration::from_secs(3600)).await.unwrap(), ran);
    }
    let lost = too_long(&locks).await;
    assert!(matches!(lost, Err(LockError::Lost { reason, .. }) if reason == LossReason::MaxHold));
}

struct Till {
    locks: Locks,
    ttl: Duration,
}

fn till() -> Till {
    let (locks, ttl) = (locks(), Duration::from_secs(70));
    Till { locks, ttl }
}

impl Till {
    #[locked("till", ttl = self.ttl, guard = guard, label = "till 1")]
    async fn open(&mut self) -> Result<Duration, LockError> {
        let holder = self.locks.holder("till").await?.unwrap_or_default();
        assert_eq!(holder.label.as_deref(), Some("till 1"));
        self.ttl += Duration::from_secs(1);
        Ok(guard.ttl())
    }

    #[locked("till", ttl = "1m 30s", guard = guard)]
    async fn into_ttl(self) -> Result<Duration, LockError> {
        Ok(guard.ttl())
    }

    #[locked("till/{i}")]
    async fn borrowed(&self, i: usize) -> Result<&Locks, LockError> {
        Ok(&self.locks)
    }

    /// The future is returned as a value.
    #[locked("till/{article}", guard = guard)]
    fn later(&self, article: u64) -> impl Future<Output = Result<String, LockError>> + Send {
        async move { Ok(name_of(guard)) }
    }

    #[locked("till/{article}", guard = guard)]
    fn boxed(&self, article: u64) -> Pin<Box<dyn Future<Output = Result<String, LockError>> + Send + '_>> {
        Box::pin(async { Ok(name_of(guard)) })
    }
}

#[tokio::test]
async fn methods_use_their_client_and_their_fields() {
    let mut till = till();
    assert_eq!(till.open().await.unwrap(), Duration::from_secs(70));
    assert_eq!(till.open().await.unwrap(), Duration::from_secs(71));
    assert_eq!(till.borrowed(1).await.unwrap().list("").await.unwrap(), []);
    assert_eq!(till.later(3).await.unwrap(), "till/3");
    assert_eq!(till.boxed(4).await.unwrap(), "till/4");
    assert_eq!(till.into_ttl().await.unwrap(), Duration::from_secs(90));
}

#[async_trait]
trait Sells: Sync {
    async fn sell(&self, article: &str, count: u32) -> Result<String, ShopError>;

    #[locked(format!("default of {}", self.shop()), locks = self.client(), guard = guard)]
    async fn close(&self) -> Result<String, ShopError> {
        Ok(name_of(guard))
    }

    fn client(&self) -> &Locks;

    fn shop(&self) -> u32 {
        3
    }
}

#[async_trait]
impl Sells for Till {
    #[locked(format!("{article}/{}", self.ttl.as_secs()), wait_for = self.ttl, guard = guard)]
    async fn sell(&self, article: &str, count: u32) -> Result<String, ShopError> {
        if count == 0 {
            return Err(ShopError::SoldOut);
        }
        self.locks.holder(guard.name()).await?;
        Ok(name_of(guard))
    }

    fn client(&self) -> &Locks {
        &self.locks
    }
}

/// What traits write without a crate's help.
trait Plain {
    fn run(&self) -> impl Future<Output = Result<u64, LockError>> + Send;
}

impl Plain for Till {
    #[locked("plain", guard = guard)]
    async fn run(&self) -> Result<u64, LockError> {
        Ok(guard.token().get())
    }
}

#[tokio::test]
async fn methods_of_traits_are_locked_with_async_trait_and_without() {
    let till = till();
    let sells: &dyn Sells = &till;
    assert_eq!(sells.sell("pen", 1).await.unwrap(), "pen/70");
    assert!(matches!(sells.sell("pen", 0).await, Err(ShopError::SoldOut)));
    assert_eq!(sells.close().await.unwrap(), "default of 3");
    till.run().await.unwrap();
}

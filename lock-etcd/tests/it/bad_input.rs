//! Servers, settings and requests that are not as they should be: each its own clear refusal, and nothing harmed.

use std::net::SocketAddr;
use std::time::Duration;

use crate::server::{
    Etcd, LONG, Plain, claim, client, config, config_at, granted, plain, plain_as, queue, shared, start_with,
    until_queued, waiting,
};
use lock_core::{DistributedLock, LockError, Locks, Released, Renewal};
use lock_etcd::EtcdConfig;
use lock_etcd::etcd_client::Permission;
use test_servers::Server;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

pub(crate) const SECRET: &str = "hunter2";

async fn refused(config: EtcdConfig) -> LockError {
    let error = config.connect().await.unwrap_err();
    assert!(!format!("{error} {error:?}").contains(SECRET), "{error:?}");
    error
}

fn assert_configuration(error: &LockError, words: &str) {
    assert!(matches!(error, LockError::Configuration { .. }), "{error:?}");
    assert!(format!("{error:#}").contains(words), "{error}");
}

fn assert_unavailable(error: &LockError, words: &str) {
    assert!(matches!(error, LockError::Unavailable { .. }), "{error:?}");
    assert!(format!("{error:#}").contains(words), "{error}");
}

/// An address at which nobody listens, for as long as the listener is not asked to.
async fn nobody() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap()
}

/// A server that asks for users, with the users `root` and `locks`, who has the rights that `docs/etcd.md` lists.
pub(crate) async fn with_users(arguments: &[&str]) -> (Etcd, Plain) {
    let server = without_users(arguments).await;
    let root = ask_for_users(&server).await;
    (server, root)
}

/// A server whose users are added quickly.
async fn without_users(arguments: &[&str]) -> Etcd {
    let arguments: Vec<_> = ["--bcrypt-cost", "4", "--unsafe-no-fsync"]
        .iter()
        .chain(arguments)
        .copied()
        .collect();
    start_with(&arguments).await
}

async fn ask_for_users(server: &Etcd) -> Plain {
    let mut auth = plain(server).await.auth_client();
    auth.user_add("root", SECRET, None).await.unwrap();
    auth.user_grant_role("root", "root").await.unwrap();
    for (user, prefix) in [("locks", "fencelock:"), ("other", "other:")] {
        auth.role_add(user).await.unwrap();
        let right = Permission::read_write(prefix).with_prefix();
        auth.role_grant_permission(user, right).await.unwrap();
        auth.user_add(user, SECRET, None).await.unwrap();
        auth.user_grant_role(user, user).await.unwrap();
    }
    auth.auth_enable().await.unwrap();
    as_root(server).await
}

pub(crate) async fn as_root(server: &Etcd) -> Plain {
    plain_as(server, "root", SECRET).await
}

#[tokio::test]
async fn a_server_that_comes_to_ask_for_users_is_logged_in_to_without_a_failure() {
    let server = without_users(&[]).await;
    let connected = async |name: &str| {
        let config = config_at(&format!("locks:{SECRET}@{}", server.authority()));
        let lock = config.connect().await.unwrap();
        let claim = claim(name, LONG);
        let grant = granted(&lock, &claim).await;
        (lock, claim, grant)
    };
    // Each has a connection of its own, on which nobody asks anything else.
    let [renewing, releasing, taking, asking] = [
        connected("a").await,
        connected("b").await,
        connected("c").await,
        connected("d").await,
    ];
    let (waiter, ..) = connected("e").await;
    let waiting = waiting(&waiter, &claim("b", LONG));
    until_queued(&plain(&server).await, "b", 1).await;
    ask_for_users(&server).await;
    let (lock, _, grant) = renewing;
    assert_eq!(lock.renew(&grant.lease).await.unwrap(), Renewal::Renewed);
    let (lock, mine, _) = releasing;
    assert_eq!(lock.release(&mine, None).await.unwrap(), Released::Released);
    waiting.await.unwrap();
    let (lock, _, grant) = taking;
    assert!(granted(&lock, &claim("f", LONG)).await.token > grant.token);
    let (lock, mine, grant) = asking;
    let holder = lock.holders(mine.name()).await.unwrap().pop().unwrap();
    assert_eq!(holder.token, Some(grant.token));
    assert_eq!(lock.list("").await.unwrap().len(), 6);
}

#[tokio::test]
async fn a_login_from_before_users_changed_is_made_anew_without_a_failure() {
    // Any file does for a secret.
    let signed = ["--auth-token", "jwt,sign-method=HS256,priv-key=/etc/passwd,ttl=1h"];
    let (server, root) = with_users(&signed).await;
    let lock = config(&server).credentials("locks", SECRET).connect().await.unwrap();
    let other = config(&server).credentials("locks", SECRET).connect().await.unwrap();
    let mine = claim("a", LONG);
    let grant = granted(&lock, &mine).await;
    let change = async |user: &str| {
        root.auth_client().user_add(user, SECRET, None).await.unwrap();
    };
    change("renewing").await;
    assert_eq!(lock.renew(&grant.lease).await.unwrap(), Renewal::Renewed);
    change("asking").await;
    assert_eq!(
        lock.holders(mine.name()).await.unwrap().pop().unwrap().token,
        Some(grant.token)
    );
    change("taking").await;
    assert!(granted(&lock, &claim("c", LONG)).await.token > grant.token);
    change("waiting").await;
    let waiting = waiting(&other, &claim("a", LONG));
    until_queued(&as_root(&server).await, "a", 1).await;
    change("releasing").await;
    assert_eq!(lock.release(&mine, None).await.unwrap(), Released::Released);
    waiting.await.unwrap();
    // Nothing has been asked for under its lease since the change.
    granted(&lock, &claim("b", LONG)).await;
    change("closing").await;
    lock.close().await.unwrap();
    assert_eq!(queue(&as_root(&server).await, "b").await.len(), 0);
}

#[tokio::test]
async fn endpoints_that_cannot_be_reached_are_all_named() {
    let (one, other) = (nobody().await, nobody().await);
    let error = refused(config_at(&format!("joe:{SECRET}@{one}"))).await;
    assert_unavailable(&error, &format!("cannot be reached at {one}"));
    let error = refused(config_at(&format!("{one},{other}"))).await;
    assert_unavailable(&error, &one.to_string());
    assert_unavailable(&error, &other.to_string());
    let error = refused(config_at("no-such-host.invalid")).await;
    assert_unavailable(&error, "no-such-host.invalid");
}

#[tokio::test]
async fn an_endpoint_that_cannot_be_used_does_not_hide_one_that_can() {
    let server = shared().await;
    let both = config_at(&format!("{},{}", nobody().await, server.authority()));
    let config = both.namespace(server.namespace());
    granted(&config.connect().await.unwrap(), &claim("n", LONG)).await;
}

#[tokio::test]
async fn a_member_that_hangs_up_may_be_starting_or_want_tls() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let hanging_up = tokio::spawn(async move { while listener.accept().await.is_ok() {} });
    let error = refused(config_at(&address)).await;
    assert_unavailable(&error, "starting");
    assert_unavailable(&error, "etcds:");
    hanging_up.abort();
}

#[tokio::test]
async fn wrong_or_missing_credentials_are_said_to_be_so() {
    let (server, _root) = with_users(&[]).await;
    for (user, password) in [("locks", "wrong"), ("nobody", SECRET)] {
        assert_configuration(
            &refused(config(&server).credentials(user, password)).await,
            "user name or the password",
        );
    }
    assert_configuration(&refused(config(&server)).await, "wants a user and a password");
    let right = config(&server).credentials("locks", SECRET);
    granted(&right.connect().await.unwrap(), &claim("n", LONG)).await;
}

#[tokio::test]
async fn a_user_without_the_right_to_the_namespace_is_told_which_is_missing() {
    let (server, root) = with_users(&[]).await;
    let other = config(&server).credentials("other", SECRET);
    assert_configuration(&refused(other.clone()).await, "lacks a right");
    granted(&other.namespace("other").connect().await.unwrap(), &claim("n", LONG)).await;
    // One that loses it later is told so, too.
    let lock = config(&server).credentials("locks", SECRET).connect().await.unwrap();
    granted(&lock, &claim("n", LONG)).await;
    let mut auth = root.auth_client();
    auth.user_revoke_role("locks", "locks").await.unwrap();
    assert_configuration(&lock.try_acquire(&claim("m", LONG)).await.unwrap_err(), "lacks a right");
}

#[tokio::test]
async fn a_ttl_beyond_what_etcd_grants_is_refused() {
    let server = shared().await;
    let lock = client(&server).await;
    let most = lock.capabilities().max_ttl;
    granted(&lock, &claim("most", most)).await;
    let more = most + Duration::from_secs(1);
    assert_configuration(
        &lock.try_acquire(&claim("more", more)).await.unwrap_err(),
        "the ttl is larger",
    );
    let refused = Locks::new(lock).lock("more").ttl(more).await.unwrap_err();
    assert!(matches!(refused, LockError::InvalidTtl { .. }), "{refused:?}");
}

/// A way to a server that tells another version of it.
async fn telling(server: &Server, version: &str) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (target, told) = (server.authority().to_owned(), version.to_owned());
    let real = server.version().rsplit(' ').next().unwrap().to_owned();
    assert_eq!(real.len(), told.len());
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let (mut from_client, mut to_client) = client.into_split();
            let (mut from_server, mut to_server) = TcpStream::connect(&target).await.unwrap().into_split();
            tokio::spawn(async move { tokio::io::copy(&mut from_client, &mut to_server).await });
            let (real, told) = (real.clone(), told.clone());
            tokio::spawn(async move {
                let mut bytes = vec![0; 65_536];
                while let Ok(read @ 1..) = from_server.read(&mut bytes).await {
                    let bytes = &mut bytes[..read];
                    let places = bytes
                        .windows(real.len())
                        .enumerate()
                        .filter(|(_, at)| *at == real.as_bytes());
                    for at in places.map(|(at, _)| at).collect::<Vec<_>>() {
                        bytes[at..at + told.len()].copy_from_slice(told.as_bytes());
                    }
                    if to_client.write_all(bytes).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    address
}

#[tokio::test]
async fn a_version_that_can_lose_revisions_is_refused_unless_that_is_allowed() {
    let server = shared().await;
    let real = server.version().rsplit(' ').next().unwrap();
    let mut parts = real.split('.');
    let (major, minor, patch) = (parts.next().unwrap(), parts.next().unwrap(), parts.next().unwrap());
    let old = format!("{major}.{minor}.{:0width$}", 1, width = patch.len());
    let at = telling(&server, &old).await.to_string();
    let config = config_at(&at).namespace(server.namespace());
    let error = refused(config.clone()).await;
    assert!(matches!(error, LockError::UnsafeConfiguration { .. }), "{error:?}");
    assert!(format!("{error:#}").contains(&old), "{error}");
    let allowed = config.allow_unsafe_configuration(true).connect().await.unwrap();
    granted(&allowed, &claim("n", LONG)).await;
    assert_eq!(allowed.server_info().await.unwrap().to_string(), format!("etcd {old}"));
    let known = client(&server).await.server_info().await.unwrap();
    assert_eq!(known.to_string(), server.version());
}

#[tokio::test]
async fn any_limit_for_requests_but_zero_will_do() {
    let server = shared().await;
    let lock = config(&server).op_timeout(Duration::MAX).connect().await.unwrap();
    let grant = granted(&lock, &claim("n", LONG)).await;
    assert_eq!(lock.renew(&grant.lease).await.unwrap(), Renewal::Renewed);
    assert_configuration(&refused(config(&server).op_timeout(Duration::ZERO)).await, "op_timeout");
}

//! Redis and Redlock: rslock, distkit and PING.

use std::time::Duration;

use distkit::DistkitRedisKey;
use distkit::lock::{LockOptions, Mutex};
use futures_util::future::try_join_all;
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use redis::aio::MultiplexedConnection;
use redis::io::tcp::TcpSettings;
use redis::{Client, IntoConnectionInfo as _};
use rslock::LockManager;

use crate::contestant::{Contestant, Result, contestant, round_trips};

pub(crate) const FLOOR: &str = "2 x PING";
pub(crate) const FLOOR_OF_NODES: &str = "2 x PING, a majority";
const RSLOCK: &str = "rslock 0.10";
pub(crate) const PEERS: &[&str] = &[RSLOCK, "distkit 0.7"];
pub(crate) const PEERS_OF_NODES: &[&str] = &[RSLOCK];

pub(crate) async fn connect(who: &str, url: &str, ttl: Duration) -> Result<Contestant> {
    let urls = urls(url);
    Ok(match who {
        FLOOR | FLOOR_OF_NODES => {
            let servers = try_join_all(urls.iter().map(|url| connection(url))).await?;
            round_trips(servers, |servers, _, _| async move {
                let ping = async |mut server: MultiplexedConnection| redis::cmd("PING").exec_async(&mut server).await;
                let majority = servers.len() / 2 + 1;
                let mut answers: FuturesUnordered<_> = servers.into_iter().map(ping).collect();
                for _ in 0..majority {
                    answers.next().await.ok_or("there is no server")??;
                }
                Ok(())
            })
        }
        RSLOCK => {
            let manager = LockManager::new(urls.iter().map(String::as_str).collect::<Vec<_>>());
            contestant(manager, move |manager, name, body| async move {
                let guard = manager.acquire(name.as_str(), ttl).await?;
                body.await;
                guard.release().await;
                Ok(())
            })
        }
        _ => {
            let manager = client(url)?.get_connection_manager().await?;
            contestant(manager, move |manager, name, body| async move {
                let options = LockOptions::builder(DistkitRedisKey::try_from(name)?, manager).ttl(ttl);
                let guard = Mutex::new(options.build()).lock().await?;
                body.await;
                guard.release().await?;
                Ok(())
            })
        }
    })
}

/// The addresses of the servers of `redis://HOST` or `redlock://HOST,HOST,HOST`.
fn urls(url: &str) -> Vec<String> {
    let (_, hosts) = url.split_once("://").unwrap_or(("", url));
    hosts.split(',').map(|host| format!("redis://{host}")).collect()
}

fn client(url: &str) -> Result<Client> {
    // As fencelock connects.
    let settings = TcpSettings::default().set_nodelay(true);
    Ok(Client::open(url.into_connection_info()?.set_tcp_settings(settings))?)
}

async fn connection(url: &str) -> Result<MultiplexedConnection> {
    Ok(client(url)?.get_multiplexed_async_connection().await?)
}

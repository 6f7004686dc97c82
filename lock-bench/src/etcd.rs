//! etcd: its own Lock service, and bare writes.

use std::time::Duration;

use etcd_client::{Client, LockOptions};

use crate::contestant::{Contestant, Result, contestant, round_trips};

pub(crate) const FLOOR: &str = "2 x put";
pub(crate) const PEERS: &[&str] = &["etcd-client 0.21 Lock, a lease per lock"];

pub(crate) async fn connect(who: &str, url: &str, ttl: Duration) -> Result<Contestant> {
    let client = Client::connect([url.trim_start_matches("etcd://")], None).await?;
    if who == FLOOR {
        return Ok(round_trips(client, |client, name, _| async move {
            client.kv_client().put(format!("bench/{name}"), "x", None).await?;
            Ok(())
        }));
    }
    // So each lock ends by itself if its holder does not come back; nothing renews it.
    let seconds = i64::try_from(ttl.as_secs())?;
    Ok(contestant(client, move |mut client, name, body| async move {
        let lease = client.lease_grant(seconds, None).await?.id();
        let options = LockOptions::new().with_lease(lease);
        let answer = client.lock(name, Some(options)).await?;
        body.await;
        client.unlock(answer.key()).await?;
        client.lease_revoke(lease).await?;
        Ok(())
    }))
}

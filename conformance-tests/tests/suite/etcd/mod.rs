//! What the suite needs to know of the etcd backend.

mod resource;
mod role;
mod servers;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use conformance_tests::{Fault, Harness, Injection, Namespace, Resource};
use lock_core::{DistributedLock, LockError, LockName, OwnerId};
use lock_etcd::EtcdConfig;
use lock_etcd::etcd_client::{
    AlarmAction, AlarmType, Client, Compare, CompareOp, DeleteOptions, Error, GetOptions, KeyValue, PutOptions,
    SortOrder, SortTarget, Txn, TxnOp,
};
use test_servers::Kind;
use tokio::runtime::Handle;
use tokio::sync::OnceCell;

use crate::hosts::{Hosts, locked};
use resource::FencedKey;
use servers::Servers;

/// Tells a child process where the server of its namespace is.
const URL: &str = "FENCELOCK_CONFORMANCE_ETCD";

/// One server for all cases at once may be slow on a small machine.
const OP_TIMEOUT: Duration = Duration::from_secs(30);

/// One etcd for all namespaces, and one more for each that wants its own.
pub(crate) struct EtcdHarness {
    name: String,
    members: usize,
    servers: Hosts<Servers>,
    // One for each namespace, as each has a runtime of its own.
    admins: Mutex<HashMap<String, Arc<OnceCell<Client>>>>,
}

impl EtcdHarness {
    /// With that many members each.
    pub(crate) fn new(members: usize) -> Self {
        let name = Kind::ETCD.title().to_owned();
        Self {
            name: if members == 1 {
                name
            } else {
                format!("{name}, {members} members")
            },
            members,
            servers: Hosts::new(move |is_own| Servers::start(members, is_own)),
            admins: Mutex::default(),
        }
    }
}

#[async_trait]
impl Harness for EtcdHarness {
    fn name(&self) -> &str {
        &self.name
    }

    fn known_skips(&self) -> Option<&str> {
        let skips = match self.members {
            1 => include_str!("../skips/etcd.txt"),
            _ => include_str!("../skips/etcd-cluster.txt"),
        };
        Some(skips).filter(|_| Kind::ETCD.is_started_here())
    }

    async fn begin(&self) -> Result<Option<String>, LockError> {
        let servers = self.servers.shared().await?;
        let members = servers.members().iter().map(ToString::to_string);
        let members = members.collect::<Vec<_>>().join(" and ");
        if !servers.is_ours() {
            return Ok(Some(format!("{members}, as its address says")));
        }
        Ok(Some(format!(
            "{members}, as the user {:?} with the role in docs/etcd.md",
            role::USER
        )))
    }

    async fn client(&self, namespace: &Namespace) -> Result<Arc<dyn DistributedLock>, LockError> {
        let config = config(&self.url(namespace).await?, namespace)?.op_timeout(OP_TIMEOUT);
        Ok(Arc::new(config.connect().await?))
    }

    async fn client_on(&self, namespace: &Namespace, runtime: Handle) -> Result<Arc<dyn DistributedLock>, LockError> {
        let config = config(&self.url(namespace).await?, namespace)?.op_timeout(OP_TIMEOUT);
        Ok(Arc::new(config.runtime(runtime).connect().await?))
    }

    async fn address(&self, namespace: &Namespace) -> Result<Option<String>, LockError> {
        Ok(Some(
            self.servers.of(namespace).await?.members()[0].authority().to_owned(),
        ))
    }

    async fn client_at(
        &self,
        namespace: &Namespace,
        address: SocketAddr,
    ) -> Result<Arc<dyn DistributedLock>, LockError> {
        let url = self.servers.of(namespace).await?.members()[0].url_at(address);
        let config = config(&url, namespace)?.op_timeout(Duration::from_secs(5));
        Ok(Arc::new(config.connect().await?))
    }

    /// Of the frames of HTTP/2 only these belong to an answer; an acknowledgement and a ping come before it.
    fn is_reply(&self, bytes: &[u8]) -> bool {
        const DATA: u8 = 0;
        const HEADERS: u8 = 1;
        let mut rest = bytes;
        while let Some((&[high, middle, low, kind, ..], after)) = rest.split_first_chunk::<9>() {
            if kind == DATA || kind == HEADERS {
                return true;
            }
            let length = u32::from_be_bytes([0, high, middle, low]);
            rest = after.get(length as usize..).unwrap_or_default();
        }
        false
    }

    async fn in_line(&self, namespace: &Namespace, name: &LockName) -> Result<Option<usize>, LockError> {
        let all = GetOptions::new().with_prefix().with_count_only();
        let mut kv = self.admin(namespace).await?.kv_client();
        let answer = kv.get(queue(namespace, name), Some(all)).await.map_err(failed)?;
        Ok(Some(usize::try_from(answer.count()).unwrap_or(0).saturating_sub(1)))
    }

    async fn over(&self, namespace: &Namespace) {
        if !self.servers.end(namespace).await
            && let Ok(client) = self.admin(namespace).await
        {
            let all = DeleteOptions::new().with_prefix();
            let _ = client.kv_client().delete(prefix(namespace, ""), Some(all)).await;
        }
        locked(&self.admins).remove(namespace.name());
    }

    async fn leftovers(&self, namespace: &Namespace) -> Result<Option<Vec<String>>, LockError> {
        let kvs = self.get(namespace, prefix(namespace, "lock/")).await?;
        let keys = kvs.iter().map(|kv| String::from_utf8_lossy(kv.key()).into_owned());
        Ok(Some(keys.collect()))
    }

    async fn inject(&self, namespace: &Namespace, fault: &Fault) -> Result<Injection, LockError> {
        match fault {
            Fault::Expire(name) => {
                let holder = self.holder(namespace, name).await?;
                let mut leases = self.admin(namespace).await?.lease_client();
                leases.revoke(holder.lease()).await.map_err(failed)?;
            }
            Fault::Delete(name) => {
                let holder = self.holder(namespace, name).await?;
                let mut kv = self.admin(namespace).await?.kv_client();
                kv.delete(holder.key(), None).await.map_err(failed)?;
            }
            Fault::Steal(name) => self.steal(namespace, name).await?,
            Fault::SetBackCounter(_) => {
                let mut kv = self.admin(namespace).await?.kv_client();
                kv.put(prefix(namespace, "base"), "5", None).await.map_err(failed)?;
            }
            Fault::DeleteCounter(_) => {
                let mut kv = self.admin(namespace).await?.kv_client();
                kv.delete(prefix(namespace, "base"), None).await.map_err(failed)?;
            }
            fault => return self.inject_into_server(namespace, fault).await,
        }
        Ok(Injection::Done)
    }

    async fn resource(&self, namespace: &Namespace, resource: &str) -> Result<Option<Arc<dyn Resource>>, LockError> {
        let client = self.admin(namespace).await?;
        Ok(Some(Arc::new(FencedKey::new(client, prefix(namespace, resource)))))
    }

    fn child_environment(&self, namespace: &Namespace) -> Vec<(String, String)> {
        let url = self
            .servers
            .known(namespace)
            .map(|servers| (URL.to_owned(), servers.url()));
        url.into_iter().collect()
    }

    // Sent by one task, answered by another.
    fn fewest_polls(&self) -> usize {
        2
    }

    // An acquisition on a lease of which a third is over renews it first.
    fn acquisitions_renew(&self) -> bool {
        true
    }

    fn connects_without_runtime(&self) -> bool {
        true
    }
}

impl EtcdHarness {
    /// What is done to the whole server is felt by all who use it.
    async fn inject_into_server(&self, namespace: &Namespace, fault: &Fault) -> Result<Injection, LockError> {
        if !self.servers.shared().await?.is_ours() {
            return Ok(Injection::NotPossible);
        }
        if !namespace.wants_own_server() {
            return Ok(Injection::NeedsOwnServer);
        }
        let admin = self.admin(namespace).await?;
        match fault {
            Fault::DeleteAll => {
                let all = DeleteOptions::new().with_all_keys();
                admin.kv_client().delete("", Some(all)).await.map_err(failed)?;
            }
            Fault::Revoke => role::revoke(&admin).await?,
            Fault::Permit => role::permit(&admin).await?,
            Fault::Full => self.alarm(&admin, AlarmAction::Activate).await?,
            Fault::Room => self.alarm(&admin, AlarmAction::Deactivate).await?,
            fault => {
                // What it knows of the server need not be so any more.
                locked(&self.admins).remove(namespace.name());
                return self.servers.of(namespace).await?.inject(&admin, fault).await;
            }
        }
        Ok(Injection::Done)
    }

    /// etcd raises this alarm itself when its quota is used up, and refuses writes until somebody takes it back.
    async fn alarm(&self, admin: &Client, action: AlarmAction) -> Result<(), LockError> {
        let mut member = admin.maintenance_client();
        member
            .alarm(action, AlarmType::Nospace, None)
            .await
            .map(drop)
            .map_err(failed)
    }

    /// Puts a stranger's key in the place of the holder's, on a lease that nobody renews.
    async fn steal(&self, namespace: &Namespace, name: &LockName) -> Result<(), LockError> {
        let holder = self.holder(namespace, name).await?;
        let client = self.admin(namespace).await?;
        let mut leases = client.lease_client();
        let granted = leases.time_to_live(holder.lease(), None).await.map_err(failed)?;
        let lease = leases.grant(granted.granted_ttl(), None).await.map_err(failed)?;
        let stranger = OwnerId::random();
        let key = format!("{}{stranger}", queue(namespace, name));
        let value = String::from_utf8_lossy(holder.value()).into_owned();
        // Format, owner, and what else there is.
        let mut parts: Vec<_> = value.splitn(3, ' ').map(str::to_owned).collect();
        let Some(owner) = parts.get_mut(1) else {
            return Err(LockError::unavailable("stealing a lock", "its value names no owner"));
        };
        *owner = stranger.to_string();
        let put = PutOptions::new().with_lease(lease.id());
        let steal = Txn::new()
            .when([Compare::create_revision(
                holder.key(),
                CompareOp::Equal,
                holder.create_revision(),
            )])
            .and_then([
                TxnOp::delete(holder.key(), None),
                TxnOp::put(key, parts.join(" "), Some(put)),
            ]);
        let stolen = client.kv_client().txn(steal).await.map_err(failed)?;
        if stolen.succeeded() {
            Ok(())
        } else {
            Err(LockError::unavailable("stealing a lock", "its holder has changed"))
        }
    }

    async fn holder(&self, namespace: &Namespace, name: &LockName) -> Result<KeyValue, LockError> {
        let held = self.queue(namespace, name).await?.into_iter().next();
        held.ok_or_else(|| LockError::unavailable("looking for a holder", "nobody holds the lock"))
    }

    /// All claims on a name, the oldest first.
    async fn queue(&self, namespace: &Namespace, name: &LockName) -> Result<Vec<KeyValue>, LockError> {
        self.get(namespace, queue(namespace, name)).await
    }

    async fn get(&self, namespace: &Namespace, prefix: String) -> Result<Vec<KeyValue>, LockError> {
        let oldest_first = GetOptions::new()
            .with_prefix()
            .with_sort(SortTarget::Create, SortOrder::Ascend);
        let mut kv = self.admin(namespace).await?.kv_client();
        let mut answer = kv.get(prefix, Some(oldest_first)).await.map_err(failed)?;
        Ok(answer.take_kvs())
    }

    async fn url(&self, namespace: &Namespace) -> Result<String, LockError> {
        match std::env::var(URL) {
            Ok(url) => Ok(url),
            Err(_) => Ok(self.servers.of(namespace).await?.url()),
        }
    }

    /// As somebody who may do everything. To log in costs the server more than most questions.
    async fn admin(&self, namespace: &Namespace) -> Result<Client, LockError> {
        let admin = Arc::clone(locked(&self.admins).entry(namespace.name().to_owned()).or_default());
        let logged_in = admin.get_or_try_init(async || role::admin(&self.url(namespace).await?).await);
        logged_in.await.cloned()
    }
}

/// As a user who may do no more than a user should be allowed to.
fn config(url: &str, namespace: &Namespace) -> Result<EtcdConfig, LockError> {
    let url = url
        .replacen("http://", "etcd://", 1)
        .replacen("https://", "etcds://", 1);
    let config = EtcdConfig::from_url(&url)?.namespace(namespace.name());
    Ok(if role::is_named(&url) {
        config
    } else {
        config.credentials(role::USER, role::PASSWORD)
    })
}

fn prefix(namespace: &Namespace, rest: &str) -> String {
    format!("{}:{rest}", namespace.name())
}

fn queue(namespace: &Namespace, name: &LockName) -> String {
    let escaped = name.as_str().replace('%', "%25").replace('/', "%2F");
    prefix(namespace, &format!("lock/{escaped}/"))
}

fn failed(error: Error) -> LockError {
    LockError::failed("looking at the server", error)
}

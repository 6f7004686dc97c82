//! What the suite needs to know of the etcd backend.

mod resource;
mod role;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use conformance_tests::servers::{Data, Kind, Server, ServerError};
use conformance_tests::{Fault, Harness, Injection, Namespace, Resource};
use lock_core::{DistributedLock, LockError, LockName, OwnerId};
use lock_etcd::EtcdConfig;
use lock_etcd::etcd_client::{
    AlarmAction, AlarmType, Client, Compare, CompareOp, DeleteOptions, Error, GetOptions, KeyValue, PutOptions,
    SortOrder, SortTarget, Txn, TxnOp,
};
use tokio::sync::OnceCell;

use resource::FencedKey;

/// Tells a child process where the server of its namespace is.
const URL: &str = "FENCELOCK_CONFORMANCE_ETCD";

/// Checking passwords and waiting for disks is not what the suite is about.
const ARGUMENTS: [&str; 3] = ["--bcrypt-cost", "4", "--unsafe-no-fsync"];

/// One server for all cases at once may be slow on a small machine.
const OP_TIMEOUT: Duration = Duration::from_secs(15);

type Place = Arc<OnceCell<Arc<Server>>>;

/// One server for all namespaces, and one more for each that wants its own.
pub(crate) struct EtcdHarness {
    kind: &'static Kind,
    shared: Place,
    own: Mutex<HashMap<String, Place>>,
}

impl EtcdHarness {
    pub(crate) fn new(kind: &'static Kind) -> Self {
        Self {
            kind,
            shared: Place::default(),
            own: Mutex::default(),
        }
    }
}

#[async_trait]
impl Harness for EtcdHarness {
    fn name(&self) -> &str {
        self.kind.title()
    }

    async fn begin(&self) -> Result<Option<String>, LockError> {
        let server = self.shared().await?;
        if !server.is_ours() {
            return Ok(Some(format!("{server}, as its address says")));
        }
        Ok(Some(format!(
            "{server}, as the user {:?} with the role in docs/etcd.md",
            role::USER
        )))
    }

    async fn client(&self, namespace: &Namespace) -> Result<Arc<dyn DistributedLock>, LockError> {
        let config = config(&self.url(namespace).await?, namespace)?.op_timeout(OP_TIMEOUT);
        Ok(Arc::new(config.connect().await?))
    }

    async fn address(&self, namespace: &Namespace) -> Result<Option<String>, LockError> {
        Ok(Some(self.server(namespace).await?.authority().to_owned()))
    }

    async fn client_at(
        &self,
        namespace: &Namespace,
        address: SocketAddr,
    ) -> Result<Arc<dyn DistributedLock>, LockError> {
        let url = self.server(namespace).await?.url_at(address);
        let config = config(&url, namespace)?.op_timeout(Duration::from_secs(2));
        Ok(Arc::new(config.connect().await?))
    }

    async fn in_line(&self, namespace: &Namespace, name: &LockName) -> Result<Option<usize>, LockError> {
        Ok(Some(self.queue(namespace, name).await?.len().saturating_sub(1)))
    }

    async fn over(&self, namespace: &Namespace) {
        let own = self.own().remove(namespace.name());
        if own.is_some() {
            // That takes as long as the engine takes.
            let _ = tokio::task::spawn_blocking(move || drop(own)).await;
        } else if let Ok(client) = self.admin(namespace).await {
            let all = DeleteOptions::new().with_prefix();
            let _ = client.kv_client().delete(prefix(namespace, ""), Some(all)).await;
        }
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
        let server = self.place(namespace).get().cloned();
        let url = server.map(|server| (URL.to_owned(), server.url().to_owned()));
        url.into_iter().collect()
    }

    // Sent by one task, answered by another.
    fn fewest_polls(&self) -> usize {
        2
    }
}

impl EtcdHarness {
    /// What is done to the whole server is felt by all who use it.
    async fn inject_into_server(&self, namespace: &Namespace, fault: &Fault) -> Result<Injection, LockError> {
        if !self.shared().await?.is_ours() {
            return Ok(Injection::NotPossible);
        }
        if !namespace.wants_own_server() {
            return Ok(Injection::NeedsOwnServer);
        }
        let server = self.server(namespace).await?;
        match fault {
            Fault::DeleteAll => {
                let mut kv = self.admin(namespace).await?.kv_client();
                let all = DeleteOptions::new().with_all_keys();
                kv.delete("", Some(all)).await.map_err(failed)?;
                Ok(())
            }
            Fault::Full => return self.alarm(namespace, AlarmAction::Activate).await,
            Fault::Room => return self.alarm(namespace, AlarmAction::Deactivate).await,
            Fault::Freeze(time) => server.pause_for(*time).await,
            Fault::Restart => server.restart(Data::Kept).await,
            Fault::RestartWithoutData => {
                server.restart(Data::Lost).await.map_err(no_server)?;
                role::set_up(&server).await?;
                Ok(())
            }
            Fault::Copy => server.copy().await,
            Fault::Restore => server.restart(Data::Copied).await,
            _ => return Ok(Injection::NotPossible),
        }
        .map_err(no_server)?;
        Ok(Injection::Done)
    }

    /// etcd raises this alarm itself when its quota is used up, and refuses writes until somebody takes it back.
    async fn alarm(&self, namespace: &Namespace, action: AlarmAction) -> Result<Injection, LockError> {
        let mut member = self.admin(namespace).await?.maintenance_client();
        member.alarm(action, AlarmType::Nospace, None).await.map_err(failed)?;
        Ok(Injection::Done)
    }

    /// Puts a stranger's key in the place of the holder's, on a lease that nobody renews.
    async fn steal(&self, namespace: &Namespace, name: &LockName) -> Result<(), LockError> {
        let holder = self.holder(namespace, name).await?;
        let client = self.admin(namespace).await?;
        let mut leases = client.lease_client();
        let granted = leases.time_to_live(holder.lease(), None).await.map_err(failed)?;
        let lease = leases.grant(granted.granted_ttl(), None).await.map_err(failed)?;
        let key = format!("{}{}", queue(namespace, name), OwnerId::random());
        let put = PutOptions::new().with_lease(lease.id());
        let steal = Txn::new()
            .when([Compare::create_revision(
                holder.key(),
                CompareOp::Equal,
                holder.create_revision(),
            )])
            .and_then([
                TxnOp::delete(holder.key(), None),
                TxnOp::put(key, holder.value(), Some(put)),
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
            Err(_) => Ok(self.server(namespace).await?.url().to_owned()),
        }
    }

    fn place(&self, namespace: &Namespace) -> Place {
        if namespace.wants_own_server() {
            Arc::clone(self.own().entry(namespace.name().to_owned()).or_default())
        } else {
            Arc::clone(&self.shared)
        }
    }

    async fn server(&self, namespace: &Namespace) -> Result<Arc<Server>, LockError> {
        if !namespace.wants_own_server() {
            return self.shared().await;
        }
        let place = self.place(namespace);
        let server = place.get_or_try_init(async || self.start_own().await);
        server.await.cloned()
    }

    async fn shared(&self) -> Result<Arc<Server>, LockError> {
        let server = self.shared.get_or_try_init(async || {
            let named = std::env::var(self.kind.url_variable()).is_ok_and(|url| !url.is_empty());
            if named {
                return Server::start(self.kind).await.map(Arc::new).map_err(no_server);
            }
            self.start_own().await
        });
        server.await.cloned()
    }

    async fn start_own(&self) -> Result<Arc<Server>, LockError> {
        let server = Server::start_own(self.kind, &ARGUMENTS).await.map_err(no_server)?;
        role::set_up(&server).await?;
        Ok(Arc::new(server))
    }

    fn own(&self) -> MutexGuard<'_, HashMap<String, Place>> {
        self.own.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As somebody who may do everything.
    async fn admin(&self, namespace: &Namespace) -> Result<Client, LockError> {
        role::admin(&*self.server(namespace).await?).await
    }
}

/// As a user who may do no more than a user should be allowed to.
fn config(url: &str, namespace: &Namespace) -> Result<EtcdConfig, LockError> {
    let url = url
        .replacen("http://", "etcd://", 1)
        .replacen("https://", "etcds://", 1);
    let config = EtcdConfig::from_url(&url)?.namespace(namespace.name());
    // Only a server of the suite's own has its user.
    Ok(if url.contains('@') {
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
    LockError::unavailable("looking at the server", error)
}

/// Its debug output is what people should read.
fn no_server(error: ServerError) -> LockError {
    LockError::unavailable("seeing to a server", format!("{error:?}"))
}

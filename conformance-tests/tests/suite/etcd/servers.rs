//! Where the locks are kept.

use conformance_tests::{Fault, Injection};
use lock_core::LockError;
use lock_etcd::etcd_client::Client;
use test_servers::{EtcdCluster, Kind, Server};

use super::{failed, role};
use crate::hosts::{inject_into, no_server};

/// Checking passwords and waiting for disks is not what the suite is about.
const ARGUMENTS: [&str; 3] = ["--bcrypt-cost", "4", "--unsafe-no-fsync"];

/// One member, or a cluster of several.
pub(crate) enum Servers {
    One(Server),
    Several(EtcdCluster),
}

impl Servers {
    /// Servers with the suite's user; or else, if they are to be shared, the one that the environment names.
    pub(crate) async fn start(members: usize, is_own: bool) -> Result<Self, LockError> {
        if !is_own && !Kind::ETCD.is_started_here() {
            return Server::start(&Kind::ETCD).await.map(Self::One).map_err(no_server);
        }
        let servers = match members {
            1 => Server::start_own(&Kind::ETCD, &ARGUMENTS).await.map(Self::One),
            _ => EtcdCluster::start(members, &ARGUMENTS).await.map(Self::Several),
        };
        let servers = servers.map_err(no_server)?;
        role::set_up(servers.members()[0].authority()).await?;
        Ok(servers)
    }

    pub(crate) fn members(&self) -> &[Server] {
        match self {
            Self::One(server) => std::slice::from_ref(server),
            Self::Several(cluster) => cluster.members(),
        }
    }

    pub(crate) fn is_ours(&self) -> bool {
        self.members()[0].is_ours()
    }

    /// How a client reaches all of them.
    pub(crate) fn url(&self) -> String {
        let others = self.members()[1..]
            .iter()
            .map(|member| format!(",{}", member.authority()));
        others.fold(self.members()[0].url().to_owned(), |url, other| url + &other)
    }

    /// Does it to the one member, or to the one that leads the others.
    pub(crate) async fn inject(&self, admin: &Client, fault: &Fault) -> Result<Injection, LockError> {
        let server = match (self, fault) {
            (Self::One(server), _) => server,
            (_, Fault::Freeze(_) | Fault::Restart) => self.leader(admin).await?,
            _ => return Ok(Injection::NotPossible),
        };
        let injection = inject_into(std::slice::from_ref(server), fault).await?;
        if *fault == Fault::RestartWithoutData {
            role::set_up(server.authority()).await?;
        }
        Ok(injection)
    }

    async fn leader(&self, admin: &Client) -> Result<&Server, LockError> {
        let status = admin.maintenance_client().status().await.map_err(failed)?;
        let known = admin.cluster_client().member_list().await.map_err(failed)?;
        let mut known = known.members().iter();
        let urls = known
            .find(|member| member.id() == status.leader())
            .map(|leader| leader.client_urls());
        let is_leader = |server: &&Server| urls.is_some_and(|urls| urls.iter().any(|url| url == server.url()));
        let leader = self.members().iter().find(is_leader);
        leader.ok_or_else(|| LockError::unavailable("looking for the leader", "there is none"))
    }
}

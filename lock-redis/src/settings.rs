//! What a client was configured with.

use std::time::Duration;

use lock_core::{Executor, LockError};

use crate::error;
use crate::keys::Keys;
use crate::login::Login;
use crate::redlock::Membership;
use crate::server_check::{self, Server};
use crate::transport::Place;

/// Which servers there are, and how the client finds them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Topology {
    Server,
    Sentinels,
    Cluster,
}

#[derive(Debug)]
pub(crate) struct Settings {
    /// What the address leads to, for display.
    pub(crate) target: String,
    pub(crate) topology: Topology,
    pub(crate) login: Login,
    pub(crate) database: u32,
    pub(crate) keys: Keys,
    pub(crate) op_timeout: Duration,
    pub(crate) counter_retention: Duration,
    pub(crate) allow_unsafe: bool,
    pub(crate) executor: Executor,
    /// If the server is one of several independent ones.
    pub(crate) node: Option<Membership>,
}

impl Settings {
    pub(crate) fn is_cluster(&self) -> bool {
        self.topology == Topology::Cluster
    }

    /// Refuses a server, found at `place`, that the client cannot use, or that locks are not safe on. `was_primary` as for
    /// [`Server::check`].
    pub(crate) fn check(&self, place: &Place, server: &Server, was_primary: bool) -> Result<(), LockError> {
        if let Some(node) = &self.node {
            server.check_is_alone()?;
            node.found(server.run_id())?;
        }
        match (self.topology, server.is_in_cluster()) {
            (Topology::Cluster, true) => return server.check_in_cluster(self.allow_unsafe),
            (Topology::Cluster, false) if !server.is_sentinel() => return Err(server_check::not_a_cluster(place)),
            (Topology::Server | Topology::Sentinels, true) => return Err(server_check::needs_cluster_address(place)),
            _ => {}
        }
        let is_named = self.topology == Topology::Sentinels;
        server.check(place, self.allow_unsafe, is_named || was_primary)?;
        // Also if replicas are allowed: sentinels name what should be a primary.
        if is_named && !server.is_primary() {
            return Err(LockError::unavailable("connecting", error::DEMOTED.to_owned()));
        }
        Ok(())
    }
}

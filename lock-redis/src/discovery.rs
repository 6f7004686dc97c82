//! Where the server is.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use lock_core::LockError;

use crate::sentinel::{Sentinels, Service};
use crate::transport::Place;

/// What the configuration says of where the server is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// At this place.
    Server(Place),
    /// Where sentinels say that it is.
    Service(Service),
}

impl Target {
    /// The places that the configuration names: of the server, or of the sentinels.
    #[cfg(feature = "tls")]
    pub(crate) fn places_mut(&mut self) -> &mut [Place] {
        match self {
            Self::Server(place) => std::slice::from_mut(place),
            Self::Service(service) => &mut service.sentinels,
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Server(place) => place.fmt(f),
            Self::Service(service) => service.fmt(f),
        }
    }
}

/// Finds the server, anew for each connection. All connections of one client share it.
#[derive(Debug)]
pub(crate) enum Discovery {
    /// It is always at this place.
    Fixed(Place),
    /// Sentinels are asked for it.
    Sentinels(Arc<Sentinels>),
}

impl Discovery {
    /// For a client whose requests may take `op_timeout`.
    pub(crate) fn new(target: Target, op_timeout: Duration) -> Result<Self, LockError> {
        match target {
            Target::Server(place) => Ok(Self::Fixed(place)),
            Target::Service(service) => Ok(Self::Sentinels(Arc::new(Sentinels::new(service, op_timeout)?))),
        }
    }

    /// Closes what it has open.
    pub(crate) fn close(&self) {
        if let Self::Sentinels(sentinels) = self {
            sentinels.close();
        }
    }
}

impl fmt::Display for Discovery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(place) => place.fmt(f),
            Self::Sentinels(sentinels) => sentinels.service().fmt(f),
        }
    }
}

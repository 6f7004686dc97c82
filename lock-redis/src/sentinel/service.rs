//! What an address says of sentinels.

use std::fmt;

use crate::login::Login;
use crate::transport::Place;

/// A service, and the sentinels that know its primary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Service {
    pub(crate) name: String,
    /// All of them with TLS or none; so are the servers.
    pub(crate) sentinels: Vec<Place>,
    /// For the sentinels.
    pub(crate) login: Login,
}

impl Service {
    pub(crate) fn new(name: impl Into<String>, sentinels: Vec<Place>) -> Self {
        Self {
            name: name.into(),
            sentinels,
            login: Login::default(),
        }
    }

    /// The places of the sentinels, for display.
    pub(super) fn hosts(&self) -> String {
        let places: Vec<_> = self.sentinels.iter().map(Place::to_string).collect();
        places.join(", ")
    }
}

impl fmt::Display for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} of the sentinels {}", self.name, self.hosts())
    }
}

//! What a client was configured with.

use std::time::Duration;

use lock_core::Executor;
use lock_transport::{Endpoint, Secret, TlsFiles};

use crate::keys::Keys;

#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) hosts: Vec<Endpoint>,
    pub(crate) tls: Option<TlsFiles>,
    pub(crate) login: Option<(String, Secret)>,
    pub(crate) keys: Keys,
    pub(crate) op_timeout: Duration,
    pub(crate) allow_unsafe: bool,
    pub(crate) executor: Executor,
}

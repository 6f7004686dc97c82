//! Credentials.

use lock_core::LockError;
use lock_transport::Secret;
use redis::{ProtocolVersion, RedisConnectionInfo};

/// The user and the password of a server or a sentinel, as far as it wants any.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Login {
    pub(crate) user: Option<String>,
    pub(crate) password: Option<Secret>,
}

impl Login {
    /// A user without a password logs in, too: with an empty one.
    pub(crate) fn new(user: Option<String>, password: Option<Secret>) -> Self {
        let password = password.or_else(|| user.as_ref().map(|_| Secret::new("")));
        Self { user, password }
    }

    /// How a connection begins. It chooses no database: a sentinel has none.
    pub(crate) async fn greeting(&self) -> Result<RedisConnectionInfo, LockError> {
        let mut greeting = RedisConnectionInfo::default()
            .set_protocol(ProtocolVersion::RESP3)
            .set_skip_set_lib_name();
        if let Some(user) = &self.user {
            greeting = greeting.set_username(user);
        }
        if let Some(password) = &self.password {
            greeting = greeting.set_password(password.get().await?);
        }
        Ok(greeting)
    }
}

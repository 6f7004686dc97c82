//! Credentials.

use std::fmt;

use redis::{ProtocolVersion, RedisConnectionInfo};

/// A text that is never shown.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Secret(pub(crate) String);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// The user and the password of a server or a sentinel, as far as it wants any.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Login {
    pub(crate) user: Option<String>,
    pub(crate) password: Option<Secret>,
}

impl Login {
    /// How a connection begins. It chooses no database: a sentinel has none.
    pub(crate) fn greeting(&self) -> RedisConnectionInfo {
        let mut greeting = RedisConnectionInfo::default()
            .set_protocol(ProtocolVersion::RESP3)
            .set_skip_set_lib_name();
        if let Some(user) = &self.user {
            greeting = greeting.set_username(user);
        }
        if let Some(Secret(password)) = &self.password {
            greeting = greeting.set_password(password);
        }
        greeting
    }
}

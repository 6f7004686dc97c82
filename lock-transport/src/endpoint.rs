use std::fmt;

use percent_encoding::percent_decode_str;

/// Host and port of a server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Endpoint {
    /// A name or an IP address, without brackets.
    pub host: String,
    /// The TCP port.
    pub port: u16,
}

impl Endpoint {
    /// The server at that host and port.
    pub fn new(host: impl Into<String>, port: u16) -> Self {
        Self {
            host: host.into(),
            port,
        }
    }

    /// Reads `HOST`, `HOST:PORT` or `[IPV6]:PORT`, where the host may be percent-encoded. `None` if it is none of these.
    pub fn parse(text: &str, default_port: u16) -> Option<Self> {
        // Other separators would make the text more than a host and a port.
        if text.is_empty() || text.contains(['/', '?', '#', '@', ',', '\\']) {
            return None;
        }
        let url = url::Url::parse(&format!("server://{text}")).ok()?;
        let host = match url.host()? {
            url::Host::Domain(name) => percent_decode_str(name).decode_utf8().ok()?.into_owned(),
            url::Host::Ipv4(address) => address.to_string(),
            url::Host::Ipv6(address) => address.to_string(),
        };
        (!host.is_empty()).then(|| Self::new(host, url.port().unwrap_or(default_port)))
    }
}

/// As addresses have it: `HOST:PORT`, an IPv6 address in brackets.
impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

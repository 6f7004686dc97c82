//! The way from a client to its server, as an address has it.

use std::fmt;
use std::io;

use crate::faults::Proxy;

/// An address whose servers are reached by TCP, so that proxies can stand on the way.
#[derive(Clone)]
pub struct Route {
    scheme: String,
    /// With its `@`; may be secret.
    user: String,
    /// With their ports.
    hosts: Vec<String>,
    /// The path and the parameters; may be secret.
    rest: String,
}

impl Route {
    /// The route that an address describes.
    ///
    /// # Errors
    ///
    /// With the reason, if no proxy can stand there. It holds nothing secret.
    pub fn of(address: &str) -> Result<Self, &'static str> {
        const NO_SERVER: &str = "the locks are not kept by a server that is reached by TCP";
        const TLS: &str = "the connection uses TLS, and the server's certificate does not fit a proxy";
        const SENTINELS: &str = "sentinels tell clients where the server is, which leads them past any proxy";
        const NODES: &str = "nodes tell clients where the others are, which leads them past any proxy";
        let (scheme, rest) = address.split_once("://").ok_or(NO_SERVER)?;
        let port = match scheme.to_ascii_lowercase().as_str() {
            "redis" | "redlock" | "valkey" => 6379,
            "postgres" | "postgresql" => 5432,
            "etcd" => 2379,
            "rediss" | "redlocks" | "valkeys" | "etcds" => return Err(TLS),
            scheme if scheme.ends_with("+sentinel") => return Err(SENTINELS),
            scheme if scheme.ends_with("+cluster") => return Err(NODES),
            _ => return Err(NO_SERVER),
        };
        let (authority, rest) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
        let (user, hosts) = authority.split_at(authority.rfind('@').map_or(0, |at| at + 1));
        for parameter in rest.split_once('?').map_or("", |(_, query)| query).split('&') {
            match parameter.split_once('=') {
                Some(("host" | "hostaddr" | "port", _)) => {
                    return Err("the server is named by a parameter of the address");
                }
                Some(("sslmode", mode)) if mode != "disable" => return Err(TLS),
                _ => {}
            }
        }
        if user.contains(',') {
            return Err("each server has its own user in the address");
        }
        if hosts.is_empty() || hosts.contains('%') {
            return Err(NO_SERVER);
        }
        Ok(Self {
            scheme: scheme.to_owned(),
            user: user.to_owned(),
            hosts: hosts.split(',').map(|host| with_port(host, port)).collect(),
            rest: rest.to_owned(),
        })
    }

    /// The address through a proxy for each server, and the proxies.
    pub(super) async fn through_proxies(&self) -> io::Result<(String, Vec<Proxy>)> {
        let mut proxies = Vec::new();
        for host in &self.hosts {
            proxies.push(Proxy::start(host.as_str()).await?);
        }
        let hosts: Vec<_> = proxies.iter().map(|proxy| proxy.address().to_string()).collect();
        let Self { scheme, user, rest, .. } = self;
        Ok((format!("{scheme}://{user}{}{rest}", hosts.join(",")), proxies))
    }
}

/// An IPv6 address has colons of its own, within brackets.
fn with_port(host: &str, port: u16) -> String {
    let name_end = host.rfind(']').map_or(0, |end| end + 1);
    if host[name_end..].contains(':') {
        host.to_owned()
    } else {
        format!("{host}:{port}")
    }
}

impl fmt::Debug for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Route")
            .field("hosts", &self.hosts)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_servers_of_an_address_are_found_with_their_ports() {
        for (address, hosts) in [
            ("redis://localhost", &["localhost:6379"][..]),
            ("redis://joe:p@ss@h:1/0?x=1", &["h:1"]),
            ("redlock://:p@a,b:1,c?max_ttl=3s", &["a:6379", "b:1", "c:6379"]),
            ("postgres://h/shop", &["h:5432"]),
            ("postgres://h/shop?sslmode=disable", &["h:5432"]),
            (
                "etcd://a,b:1,[::1],[::1]:2?x",
                &["a:2379", "b:1", "[::1]:2379", "[::1]:2"],
            ),
        ] {
            assert_eq!(Route::of(address).unwrap().hosts, hosts, "{address}");
        }
    }

    #[test]
    fn where_no_proxy_can_stand_the_reason_is_given() {
        for (address, says) in [
            ("sqlite:a.db", "TCP"),
            ("sqlite:///a.db", "TCP"),
            ("redis+unix:/r.sock", "TCP"),
            ("rediss://h", "TLS"),
            ("redlock://:p@a,:q@b,:r@c", "its own user"),
            ("redis+sentinel://a,b/s", "sentinels"),
            ("rediss+cluster://a,b", "nodes"),
            ("postgres://h/shop?sslmode=verify-full", "TLS"),
            ("postgres:///shop?host=/run/postgresql", "parameter"),
            ("postgres://%2Frun/shop", "TCP"),
        ] {
            assert!(Route::of(address).unwrap_err().contains(says), "{address}");
        }
    }

    #[tokio::test]
    async fn everything_but_the_servers_stays_as_it_was_and_is_not_shown() {
        let route = Route::of("etcd://joe:hunter2@h:1,i:2/p?namespace=n").unwrap();
        assert!(!format!("{route:?}").contains("hunter2"));
        let (address, proxies) = route.through_proxies().await.unwrap();
        let [first, second] = [proxies[0].address(), proxies[1].address()];
        assert_eq!(address, format!("etcd://joe:hunter2@{first},{second}/p?namespace=n"));
    }
}

//! What an address of several nodes means.

use lock_core::LockError;

use super::RedlockConfig;
use crate::RedisConfig;

/// The parameters that a single node can have.
const OF_NODE: [&str; 4] = ["user", "password", "db", "ca"];

/// Reads an address. No error shows any of it but the names of parameters.
pub(super) fn read(url: &str) -> Result<RedlockConfig, LockError> {
    let (scheme, rest) = url.split_once("://").ok_or_else(|| wrong(FORM))?;
    let scheme = match scheme {
        "redlock" => "redis",
        "redlocks" => "rediss",
        _ => return Err(wrong(FORM)),
    };
    if rest.contains('#') {
        return Err(wrong("holds a #; write it as %23"));
    }
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (hosts, path) = rest.split_once('/').unwrap_or((rest, ""));
    let hosts: Vec<_> = hosts.split(',').collect();
    let login = |host: &str| host.rsplit_once('@').map(|(login, _)| login.to_owned());
    let shared = login(hosts[0]);
    let mut for_all = Vec::new();
    let mut of_node = vec![Vec::new(); hosts.len()];
    let mut max_ttl = None;
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        if name == "max_ttl" {
            let time =
                humantime::parse_duration(value).map_err(|_| wrong("has a wrong max_ttl; give a time such as 1m"))?;
            if max_ttl.replace(time).is_some() {
                return Err(wrong("gives max_ttl twice; give it once"));
            }
        } else if let Some((node, name)) = name.strip_prefix("node").and_then(|name| name.split_once('.')) {
            let node: usize = node.parse().map_err(|_| wrong(NODES))?;
            let own = node
                .checked_sub(1)
                .and_then(|node| of_node.get_mut(node))
                .ok_or_else(|| wrong(NODES))?;
            if !OF_NODE.contains(&name) {
                return Err(wrong(NODES));
            }
            if own.iter().any(|(known, _)| *known == name) {
                return Err(wrong(format!("gives node{node}.{name} twice; give it once")));
            }
            own.push((name, value));
        } else {
            for_all.push(pair);
        }
    }
    let mut nodes = Vec::new();
    for (host, own) in hosts.iter().zip(of_node) {
        let given = |name: &str| own.iter().find(|(known, _)| *known == name).map(|(_, value)| *value);
        let bare = host.rsplit_once('@').map_or(*host, |(_, bare)| bare);
        if bare.is_empty() {
            return Err(wrong(
                "names no host between two commas, or before the first one; give HOST,HOST,HOST",
            ));
        }
        let mut login = login(host).or_else(|| shared.clone()).unwrap_or_default();
        if given("user").is_some() || given("password").is_some() {
            let (user, password) = login.split_once(':').unwrap_or((&login, ""));
            let (user, password) = (given("user").unwrap_or(user), given("password").unwrap_or(password));
            login = format!("{user}:{password}");
        }
        let at = if login.is_empty() { "" } else { "@" };
        let database = given("db").unwrap_or(path);
        let query: Vec<_> = for_all
            .iter()
            .filter(|pair| !(pair.starts_with("ca=") && given("ca").is_some()))
            .map(|pair| (*pair).to_owned())
            .chain(given("ca").map(|ca| format!("ca={ca}")))
            .collect();
        let url = format!("{scheme}://{login}{at}{bare}/{database}?{}", query.join("&"));
        nodes.push(RedisConfig::from_url(&url)?);
    }
    let mut config = RedlockConfig::new(nodes);
    if let Some(time) = max_ttl {
        config = config.max_ttl(time);
    }
    Ok(config)
}

const FORM: &str = "must start with redlock:// or redlocks:// (TLS), as in redlock://host1,host2,host3";

const NODES: &str =
    "has a wrong parameter of a node; known are user, password, db and ca, as in node2.password=..., counted from 1";

fn wrong(why: impl std::fmt::Display) -> LockError {
    LockError::configuration(format!("the address of the Redis servers {why}"))
}

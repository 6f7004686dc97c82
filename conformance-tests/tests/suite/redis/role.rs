//! The user that the backend works as.

use super::host::Topology;

/// The user that clients log in as.
pub(crate) const USER: &str = "fencelock-tests";
/// Its password.
pub(crate) const PASSWORD: &str = "secret";

/// The user with the least rights that the documentation names for such servers, in the words of `ACL SETUSER`: in all namespaces of the
/// suite, and nowhere else.
pub(crate) fn rule(topology: Topology) -> Vec<String> {
    let user = if topology == Topology::Cluster {
        "nodes"
    } else {
        "locks"
    };
    let page = include_str!("../../../../docs/redis.md");
    let rule = page
        .split_once(&format!("ACL SETUSER {user} "))
        .and_then(|(_, rest)| rest.split_once("```"));
    let Some((rule, _)) = rule else {
        panic!("docs/redis.md has no rule that begins with ACL SETUSER {user}");
    };
    let words = rule.split_whitespace().map(|word| {
        // The suite's namespaces all begin like this.
        word.replace("fencelock:", "fencelock-*:").replace("PASSWORD", PASSWORD)
    });
    [USER.to_owned()].into_iter().chain(words).collect()
}

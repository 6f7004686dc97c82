//! As whom the backend works.

use std::time::Duration;

use lock_core::LockError;
use lock_etcd::etcd_client::{Client, ConnectOptions, Error, Permission, RoleRevokePermissionOptions};

use super::failed;

/// The user that clients log in as.
pub(crate) const USER: &str = "fencelock-tests";
/// Its password, and that of the user who may do everything.
pub(crate) const PASSWORD: &str = "secret";

const ROOT: &str = "root";
/// How long a request may take.
const LIMIT: Duration = Duration::from_secs(20);

/// Has the server ask for users, and adds one with the least rights that the documentation names.
pub(crate) async fn set_up(authority: &str) -> Result<(), LockError> {
    let set_up = async {
        let mut auth = Client::connect([authority], None).await?.auth_client();
        auth.user_add(ROOT, PASSWORD, None).await?;
        auth.user_grant_role(ROOT, ROOT).await?;
        auth.role_add(USER).await?;
        auth.role_grant_permission(USER, right()).await?;
        auth.user_add(USER, PASSWORD, None).await?;
        auth.user_grant_role(USER, USER).await?;
        auth.auth_enable().await?;
        Ok::<_, Error>(())
    };
    set_up.await.map_err(failed)
}

/// Takes away what the user may do.
pub(crate) async fn revoke(admin: &Client) -> Result<(), LockError> {
    let range = RoleRevokePermissionOptions::new().with_prefix();
    let mut auth = admin.auth_client();
    let revoked = auth.role_revoke_permission(USER, prefix(), Some(range)).await;
    revoked.map(drop).map_err(failed)
}

/// Gives it back.
pub(crate) async fn permit(admin: &Client) -> Result<(), LockError> {
    let granted = admin.auth_client().role_grant_permission(USER, right()).await;
    granted.map(drop).map_err(failed)
}

fn right() -> Permission {
    Permission::read_write(prefix()).with_prefix()
}

/// A client that may do everything: on a server of ours, as its root.
pub(crate) async fn admin(url: &str) -> Result<Client, LockError> {
    let (scheme, rest) = url.split_once("://").unwrap_or(("http", url));
    let (user, password, hosts) = match rest.rsplit_once('@') {
        Some((user_info, hosts)) => {
            let (user, password) = user_info.split_once(':').unwrap_or((user_info, ""));
            (user, password, hosts)
        }
        None => (ROOT, PASSWORD, rest),
    };
    let options = ConnectOptions::new().with_user(user, password).with_timeout(LIMIT);
    // One member, the first that answers: another one may not have heard yet of a token that this one has given.
    let mut connected = Err(Error::InvalidArgs("the address names no member".to_owned()));
    for member in hosts.split(',').map(|host| format!("{scheme}://{host}")) {
        connected = match Client::connect([&member], Some(options.clone())).await {
            // One that the environment names may know no users.
            Err(Error::GRpcStatus(status)) if status.message().contains("authentication is not enabled") => {
                Client::connect([&member], None).await
            }
            connected => connected,
        };
        if connected.is_ok() {
            break;
        }
    }
    connected.map_err(failed)
}

/// Whether the address names a user: only a server of the suite's own has those of the suite.
pub(crate) fn is_named(url: &str) -> bool {
    url.contains('@')
}

/// What the documented role may read and write, in all namespaces of the suite and nowhere else.
fn prefix() -> String {
    let page = include_str!("../../../../docs/etcd.md");
    let right = page.split_once("grant-permission locks --prefix=true readwrite ");
    let right = right.and_then(|(_, rest)| rest.lines().next());
    let Some(namespace) = right.and_then(|prefix| prefix.strip_suffix(':')) else {
        panic!("docs/etcd.md has no right to read and write what begins with a namespace and a colon");
    };
    // The suite's namespaces all begin like this.
    format!("{namespace}-")
}

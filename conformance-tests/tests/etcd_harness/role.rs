//! As whom the backend works.

use conformance_tests::servers::Server;
use lock_core::LockError;
use lock_etcd::etcd_client::{Client, ConnectOptions, Error, Permission};

use super::failed;

/// The user that clients log in as.
pub(crate) const USER: &str = "fencelock-tests";
/// Its password, and that of the user who may do everything.
pub(crate) const PASSWORD: &str = "secret";

const ROOT: &str = "root";

/// Has the server ask for users, and adds one with the least rights that the documentation names.
pub(crate) async fn set_up(server: &Server) -> Result<(), LockError> {
    let set_up = async {
        let mut auth = Client::connect([server.authority()], None).await?.auth_client();
        auth.user_add(ROOT, PASSWORD, None).await?;
        auth.user_grant_role(ROOT, ROOT).await?;
        auth.role_add(USER).await?;
        let prefix = Permission::read_write(prefix()).with_prefix();
        auth.role_grant_permission(USER, prefix).await?;
        auth.user_add(USER, PASSWORD, None).await?;
        auth.user_grant_role(USER, USER).await?;
        auth.auth_enable().await?;
        Ok::<_, Error>(())
    };
    set_up.await.map_err(failed)
}

/// A client that may do everything: on a server of ours, as its root.
pub(crate) async fn admin(server: &Server) -> Result<Client, LockError> {
    let options = ConnectOptions::new().with_user(ROOT, PASSWORD);
    let options = server.is_ours().then_some(options);
    Client::connect([server.authority()], options).await.map_err(failed)
}

/// What the documented role may read and write, in all namespaces of the suite and nowhere else.
fn prefix() -> String {
    let page = include_str!("../../../docs/etcd.md");
    let right = page.split_once("grant-permission locks --prefix=true readwrite ");
    let right = right.and_then(|(_, rest)| rest.lines().next());
    let Some(namespace) = right.and_then(|prefix| prefix.strip_suffix(':')) else {
        panic!("docs/etcd.md has no right to read and write what begins with a namespace and a colon");
    };
    // The suite's namespaces all begin like this.
    format!("{namespace}-")
}

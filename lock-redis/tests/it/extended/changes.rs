//! Changes of holders that are not pushed.

use lock_core::Locks;

use crate::changes::users;
use crate::server::Server;

#[tokio::test]
async fn a_user_that_may_not_subscribe_finds_changes_out_by_polling() {
    let server = Server::start();
    for (lock, _) in users(&server).await {
        let locks = Locks::new(lock);
        let mut leaders = locks.observe("n");
        assert!(leaders.next().await.unwrap().is_none());
        let guard = locks.lock("n").await.unwrap();
        assert_eq!(leaders.next().await.unwrap().unwrap().token, Some(guard.token()));
        guard.release().await.unwrap();
    }
}

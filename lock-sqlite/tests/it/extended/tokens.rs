//! Tokens after a loss of power.

use lock_core::DistributedLock;

use crate::file::File;
use crate::tokens::{copy, draw, far_ahead, with};

#[tokio::test]
async fn grants_lost_with_the_power_are_not_granted_again() {
    for before in [0, 1, 1000, 1024, 1030] {
        let file = File::new();
        let lock = file.client().await;
        far_ahead(&file);
        lock.close().await.unwrap();
        let lock = file.client().await;
        draw(&lock, before).await;
        // What is on the disk: at least everything up to the last raise of the ceiling.
        for suffix in ["", "-wal"] {
            copy(&with(&file, suffix), &file.beside(&format!("disk{suffix}")));
        }
        let ceiling = file.number("SELECT ceiling FROM counter");
        let mut lost = 0;
        while file.number("SELECT token < ceiling FROM counter") == 1 {
            lost = draw(&lock, 1).await;
        }
        assert_eq!(file.number("SELECT ceiling FROM counter"), ceiling);
        lock.close().await.unwrap();
        for suffix in ["", "-wal"] {
            copy(&file.beside(&format!("disk{suffix}")), &with(&file, suffix));
        }
        let token = draw(&file.client().await, 1).await;
        assert!(token > lost, "{token} after {lost}");
    }
}

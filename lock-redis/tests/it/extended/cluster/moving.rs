//! Slots that move to another node while names in them are held and waited for.

use std::time::Duration;

use lock_core::{DistributedLock, LockError, Mode, Released, Renewal};

use super::{TTL, queue, served};
use crate::server::{Cluster, busy, claim, granted, name, waiting};

/// The slot of `n`, the node that serves it, and another one.
async fn way(cluster: &Cluster) -> (u16, usize, usize) {
    let slot = cluster.slot("n").await;
    let from = cluster.owner(slot).await;
    (slot, from, (from + 1) % 3)
}

#[tokio::test]
async fn a_moved_name_keeps_its_holder_and_its_waiters_in_their_order() {
    let cluster = Cluster::with(3, false, &[]).await;
    let slot = cluster.slot("n").await;
    let mut at = cluster.owner(slot).await;
    let first = cluster.patient().await;
    let mut last = granted(&first, &claim("n", TTL)).await;
    let queue = queue(&cluster, "n", 6).await;
    let mut before = first;
    for (served, (lock, wait)) in queue.into_iter().enumerate() {
        // Twice to the next node, and then back and forth, while it is held and waited for.
        for _ in 0..3 {
            let to = (at + 1 + served % 2) % 3;
            cluster.move_slot(slot, at, to).await;
            at = to;
            assert_eq!(before.renew(&last.lease).await.unwrap(), Renewal::Renewed);
        }
        // At once: those who wait may not have found the new node yet.
        assert_eq!(before.release(&last.claim, None).await.unwrap(), Released::Released);
        let next = wait.await.unwrap();
        assert!(next.token > last.token, "{} after {}", next.token, last.token);
        (before, last) = (lock, next);
    }
    assert_eq!(before.release(&last.claim, None).await.unwrap(), Released::Released);
    for node in &cluster.nodes {
        assert_eq!(node.leftovers().await, [""; 0]);
    }
}

#[tokio::test]
async fn a_waiter_that_dies_while_its_slot_moves_is_in_the_way_for_one_ttl_at_most() {
    let cluster = Cluster::with(3, false, &[]).await;
    let (slot, from, to) = way(&cluster).await;
    let (one, other, dead) = (
        cluster.patient().await,
        cluster.patient().await,
        cluster.patient().await,
    );
    let held = granted(&one, &claim("n", TTL)).await;
    let short = claim("n", Duration::from_secs(4));
    let dying = waiting(&dead, &short);
    cluster.until_queued("n", 1).await;
    let wait = waiting(&other, &claim("n", TTL));
    cluster.until_queued("n", 2).await;
    dying.abort();
    let _ = dying.await;
    drop(dead);
    cluster.move_slot(slot, from, to).await;
    one.release(&held.claim, None).await.unwrap();
    // It asks again when the lease of the dead one has ended, long before it would refresh its own place.
    assert!(wait.await.unwrap().token > held.token);
}

#[tokio::test]
async fn waiters_hear_messages_of_the_node_that_their_slot_has_moved_to() {
    let cluster = Cluster::with(3, false, &[]).await;
    let (slot, from, to) = way(&cluster).await;
    let one = cluster.patient().await;
    let held = granted(&one, &claim("n", TTL)).await;
    let queue = queue(&cluster, "n", 3).await;
    cluster.move_slot(slot, from, to).await;
    cluster.until_known().await;
    assert_eq!(one.release(&held.claim, None).await.unwrap(), Released::Released);
    served(queue, held.token).await;
}

#[tokio::test]
async fn while_a_slot_is_moved_its_locks_are_renewed_and_everything_else_waits() {
    for mode in [Mode::Exclusive, Mode::Shared] {
        renewed_while_moved(mode).await;
    }
}

async fn renewed_while_moved(mode: Mode) {
    let cluster = Cluster::with(3, false, &[]).await;
    let (slot, from, to) = way(&cluster).await;
    let (one, other) = (cluster.patient().await, cluster.patient().await);
    let held = granted(&one, &claim("n", TTL).with_mode(mode)).await;
    // Its keys stay where they are, and are then moved; the slot stays open in both cases.
    for moved in [false, true] {
        if moved {
            assert!(cluster.move_keys(slot, from, to).await > 0);
        } else {
            cluster.open_slot(slot, from, to).await;
        }
        assert_eq!(one.renew(&held.lease).await.unwrap(), Renewal::Renewed);
        let holder = other.holders(&name("n")).await.unwrap().pop().unwrap();
        assert_eq!(holder.token, Some(held.token));
        assert_eq!(other.list("").await.unwrap().len(), 1);
        let short = cluster
            .config()
            .op_timeout(Duration::from_millis(300))
            .connect()
            .await
            .unwrap();
        let error = short.try_acquire(&claim("n", TTL)).await.unwrap_err();
        assert!(matches!(error, LockError::Unavailable { .. }), "{error:?}");
        assert!(error.to_string().contains("is being moved"), "{error}");
    }
    let wait = waiting(&other, &claim("n", TTL));
    let releasing = tokio::spawn(async move { one.release(&held.claim, None).await.map(|released| (released, held)) });
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(!wait.is_finished() && !releasing.is_finished());
    cluster.close_slot(slot, from, to).await;
    let (released, held) = releasing.await.unwrap().unwrap();
    assert_eq!(released, Released::Released);
    assert!(wait.await.unwrap().token > held.token);
}

#[tokio::test]
async fn a_release_while_a_slot_is_moved_loses_no_waiter() {
    let cluster = Cluster::with(3, false, &[]).await;
    let (slot, from, to) = way(&cluster).await;
    let one = cluster.patient().await;
    let held = granted(&one, &claim("n", TTL)).await;
    // All keys of the name are stored, so the node would serve a script that needs no other.
    let queue = queue(&cluster, "n", 2).await;
    cluster.open_slot(slot, from, to).await;
    let releasing = tokio::spawn(async move { one.release(&held.claim, None).await.map(|_| held.token) });
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(!releasing.is_finished());
    assert_eq!(cluster.move_keys(slot, from, to).await, 4);
    cluster.close_slot(slot, from, to).await;
    served(queue, releasing.await.unwrap().unwrap()).await;
}

#[tokio::test]
async fn a_wait_goes_on_whichever_node_is_told_first_that_the_slot_has_moved() {
    let cluster = Cluster::with(3, false, &[]).await;
    let (slot, from, to) = way(&cluster).await;
    let (one, other) = (cluster.patient().await, cluster.patient().await);
    let held = granted(&one, &claim("n", TTL)).await;
    let wait = waiting(&other, &claim("n", TTL));
    cluster.until_queued("n", 1).await;
    cluster.open_slot(slot, from, to).await;
    cluster.move_keys(slot, from, to).await;
    let id = cluster.id(to).await;
    // Between these each of the two nodes says that the other one serves the slot.
    let _: () = cluster.nodes[from]
        .command(&format!("CLUSTER SETSLOT {slot} NODE {id}"))
        .await;
    let renewing = tokio::spawn({
        let (one, lease) = (one.clone(), held.lease.clone());
        async move { one.renew(&lease).await }
    });
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(!renewing.is_finished() && !wait.is_finished());
    let _: () = cluster.nodes[to]
        .command(&format!("CLUSTER SETSLOT {slot} NODE {id}"))
        .await;
    assert_eq!(renewing.await.unwrap().unwrap(), Renewal::Renewed);
    one.release(&held.claim, None).await.unwrap();
    assert!(wait.await.unwrap().token > held.token);
}

#[tokio::test]
async fn other_names_of_the_node_are_waited_for_undisturbed_while_slots_leave_it() {
    let cluster = Cluster::with(2, false, &[]).await;
    let lock = cluster.patient().await;
    // Some names of the first node. Their slots leave it one after the other, but for the last.
    let mut names = Vec::new();
    for number in 0..40 {
        let text = number.to_string();
        if cluster.owner(cluster.slot(&text).await).await == 0 {
            names.push(text);
        }
    }
    let (stays, leave) = names.split_last().unwrap();
    assert!(leave.len() > 5);
    let waiter = cluster.patient().await;
    let mut waits = Vec::new();
    for text in &names {
        let held = granted(&lock, &claim(text, TTL)).await;
        let wait = waiting(&waiter, &claim(text, TTL));
        cluster.until_queued(text, 1).await;
        waits.push((held, wait));
    }
    let connections = || async { cluster.nodes[0].command::<String>("CLIENT LIST").await.lines().count() };
    let before = connections().await;
    for text in leave {
        let slot = cluster.slot(text).await;
        cluster.move_slot(slot, 0, 1).await;
        // Also while requests about other channels are under way.
        busy(&lock, &claim(stays, TTL)).await;
    }
    assert_eq!(connections().await, before, "no connection was made anew");
    let place = waits.len() - 1;
    let (held, wait) = waits.swap_remove(place);
    lock.release(&held.claim, None).await.unwrap();
    assert!(wait.await.unwrap().token > held.token);
    for (held, wait) in waits {
        lock.release(&held.claim, None).await.unwrap();
        assert!(wait.await.unwrap().token > held.token);
    }
}

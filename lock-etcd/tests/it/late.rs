//! What reaches the server late.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::task::Poll;

use crate::again::through;
use crate::server::{
    Etcd, LONG, claim, clean_up, client, config, config_behind, deliver, fails, granted, is_answer, plain, queue,
    raise_base, shared, start, until, until_queued, waiting,
};
use conformance_tests::faults::{Held, Proxy, Then};
use lock_core::{Claim, DistributedLock, Grant, Locks, ReleaseOutcome, Released, Renew};
use lock_etcd::EtcdLock;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

#[tokio::test]
async fn a_commit_delayed_past_its_clean_up_leaves_no_key_while_the_client_lives_on() {
    let server = start().await;
    raise_base(&plain(&server).await).await;
    let proxy = Proxy::start(server.authority()).await.unwrap();
    let lock = through(&server, &proxy).await;
    let etcd = plain(&server).await;
    // Keeps the lease alive that both share.
    let kept = granted(&lock, &claim("kept", LONG)).await;
    let given_up = claim("n", LONG);
    let held = proxy.hold(given_up.owner().to_string().as_bytes());
    fails(&proxy, &held, lock.try_acquire(&given_up)).await;
    let released = clean_up(&lock, &given_up).await;
    assert_eq!(released, Released::NotHeld);
    deliver(&server, &proxy, held).await;
    assert!(queue(&etcd, "n").await.is_empty());
    assert_eq!(queue(&etcd, "kept").await.len(), 1);
    assert!(kept.lease.is_valid(lock.clock().now()));
    // What it shut out was its own: the next one is granted.
    granted(&lock, &claim("n", LONG)).await;
}

/// A holder, its claim, and a waiter that has looked at the queue and whose watch is held back.
async fn about_to_watch(server: &Etcd) -> (Proxy, EtcdLock, Claim, Held, JoinHandle<Grant>) {
    let proxy = Proxy::start(server.authority()).await.unwrap();
    let (holder, held) = (client(server).await, claim("n", LONG));
    let waiter = config_behind(server, &proxy).connect().await.unwrap();
    granted(&holder, &held).await;
    // Of what the waiter sends only its watch names the holder's key.
    let watching = proxy.hold(queue(&plain(server).await, "n").await[0].key());
    let wait = waiting(&waiter, &claim("n", LONG));
    watching.caught().await;
    (proxy, holder, held, watching, wait)
}

#[tokio::test]
async fn a_release_between_the_look_at_the_queue_and_the_beginning_of_the_watch_is_noticed() {
    let server = shared().await;
    let (_proxy, holder, held, watching, wait) = about_to_watch(&server).await;
    holder.release(&held, None).await.unwrap();
    watching.deliver();
    wait.await.unwrap();
}

#[tokio::test]
async fn a_place_that_is_lost_between_the_look_at_the_queue_and_the_beginning_of_the_watch_is_taken_again() {
    let server = shared().await;
    let etcd = plain(&server).await;
    let (_proxy, holder, held, watching, wait) = about_to_watch(&server).await;
    let lost = queue(&etcd, "n").await.remove(1);
    etcd.kv_client().delete(lost.key(), None).await.unwrap();
    watching.deliver();
    let came_again = async || {
        let queued = queue(&etcd, "n").await;
        queued
            .get(1)
            .is_some_and(|kv| kv.create_revision() > lost.create_revision())
    };
    until(came_again).await;
    holder.release(&held, None).await.unwrap();
    wait.await.unwrap();
}

#[tokio::test]
async fn a_forced_release_whose_answer_is_lost_spares_the_next_holder() {
    let server = shared().await;
    let proxy = Proxy::start(server.authority()).await.unwrap();
    let (holder, next, etcd) = (client(&server).await, client(&server).await, plain(&server).await);
    let forcing = config_behind(&server, &proxy).connect().await.unwrap();
    let held = claim("n", LONG);
    let first = granted(&holder, &held).await.token;
    let wanted = claim("n", LONG);
    let waiting = waiting(&next, &wanted);
    until_queued(&etcd, "n", 1).await;
    // Of what is sent only the deletion names the key.
    let trap = proxy.swallow_reply_that(queue(&etcd, "n").await[0].key(), is_answer, Then::Cut);
    let ended = forcing.force_release(held.name()).await.unwrap().pop().unwrap();
    assert!(trap.has_sprung(), "the answer was lost");
    assert_eq!(ended.token, Some(first));
    let second = waiting.await.unwrap().token;
    let found = holder.holders(held.name()).await.unwrap().pop();
    assert_eq!(
        found.and_then(|found| found.token),
        Some(second),
        "the next holder holds it"
    );
    assert_eq!(next.release(&wanted, None).await.unwrap(), Released::Released);
}

#[tokio::test]
async fn a_try_that_learns_late_of_releases_ends_no_lock_on_their_lease() {
    let server = shared().await;
    // The connection is worked on this thread, so that no answer comes within a poll.
    let lock = config(&server).runtime(Handle::current()).connect().await.unwrap();
    let kept = granted(&lock, &claim("kept", LONG)).await;
    for round in 0..20 {
        // Each is released without it being known whether it was granted, for which the key of the lease is written anew.
        let given_up = ["a", "b"].map(|name| claim(&format!("{name}{round}"), LONG));
        for claim in &given_up {
            sent(&mut pin!(lock.try_acquire(claim))).await;
        }
        let wanted = claim(&format!("n{round}"), LONG);
        let (mut first, mut late) = (pin!(lock.release(&given_up[0], None)), pin!(lock.try_acquire(&wanted)));
        sent(&mut first).await;
        // With the key of the lease as it was before both releases; the client reads the answer after those to both.
        sent(&mut late).await;
        first.await.unwrap();
        lock.release(&given_up[1], None).await.unwrap();
        assert!(late.await.unwrap().granted().is_some());
        assert!(kept.lease.is_valid(lock.clock().now()), "round {round}");
    }
}

/// Sends a request, whose answer is read later or never.
async fn sent<F: Future>(request: &mut Pin<&mut F>) {
    let is_done = poll_fn(|cx| Poll::Ready(request.as_mut().poll(cx).is_ready())).await;
    assert!(!is_done, "the server is asked");
}

#[tokio::test]
async fn the_outcome_of_a_release_is_known_if_the_answer_to_the_end_of_its_lease_is_lost() {
    let server = shared().await;
    let proxy = Proxy::start(server.authority()).await.unwrap();
    let (lock, etcd) = (
        config_behind(&server, &proxy).connect().await.unwrap(),
        plain(&server).await,
    );
    for held in [claim("n", LONG).with_own_lease(), claim("n", LONG).with_at_least(LONG)] {
        granted(&lock, &held).await;
        // What a request holds that ends the lease: it is the number that the claim's key is on.
        let mut request = vec![0x08];
        let mut id = queue(&etcd, "n").await[0].lease() as u64;
        while id >= 0x80 {
            request.push(id as u8 | 0x80);
            id >>= 7;
        }
        request.push(id as u8);
        let trap = proxy.swallow_reply_that(&request, is_answer, Then::Cut);
        assert_eq!(lock.release(&held, None).await.unwrap(), Released::Released);
        assert!(trap.has_sprung(), "the answer was lost");
        assert!(queue(&etcd, "n").await.is_empty());
    }
}

#[tokio::test]
async fn a_release_whose_answer_is_lost_is_an_error_and_not_a_loss() {
    let server = shared().await;
    let proxy = Proxy::start(server.authority()).await.unwrap();
    let etcd = plain(&server).await;
    let locks = Locks::new(config_behind(&server, &proxy).connect().await.unwrap());
    for renew in [Renew::UntilReleased, Renew::Never] {
        let guard = locks.lock("n").ttl(LONG).renew(renew).await.unwrap();
        let trap = proxy.swallow_reply_that(queue(&etcd, "n").await[0].key(), is_answer, Then::Cut);
        // It was released, or taken away before: that is not known.
        guard.release().await.unwrap_err();
        assert!(trap.has_sprung(), "the answer was lost");
        assert!(queue(&etcd, "n").await.is_empty());
    }
    // It is known if the deletion did not reach the server.
    let guard = locks.lock("n").ttl(LONG).await.unwrap();
    let held_back = proxy.hold(queue(&etcd, "n").await[0].key());
    let (released, ()) = tokio::join!(guard.release(), async {
        held_back.caught().await;
        drop(held_back);
    });
    assert_eq!(released.unwrap(), ReleaseOutcome::Released);
}

//! The queue of keys in etcd.

use libtest_mimic::Trial;
use models::etcd_queue::{Bug, EXCLUSION, EtcdQueue, NOTHING_LEFT, RISE, RISE_LATER};

use crate::report::{holds, violates};

fn three(bug: Option<Bug>) -> EtcdQueue<3> {
    EtcdQueue {
        puts: 2,
        restores: 0,
        bug,
    }
}

fn restored<const A: usize>(puts: u8, bug: Option<Bug>) -> EtcdQueue<A> {
    EtcdQueue { puts, restores: 1, bug }
}

fn four() -> EtcdQueue<4> {
    EtcdQueue {
        puts: 1,
        restores: 0,
        bug: None,
    }
}

pub(crate) fn trials() -> Vec<Trial> {
    let planted = [
        ("only the own key is checked", Bug::OnlyTheOwnKeyIsChecked, EXCLUSION),
        (
            "the predecessor's deletion is believed",
            Bug::PredecessorsDeletionIsBelieved,
            EXCLUSION,
        ),
        ("the base is lowered", Bug::BaseIsLowered, RISE),
        ("the lease is not compared", Bug::LeaseIsNotCompared, NOTHING_LEFT),
    ];
    let planted = planted.map(|(name, bug, property)| {
        violates(&format!("etcd_queue: {name}"), "3 claims", property, move || {
            three(Some(bug))
        })
    });
    let sound = [
        holds("etcd_queue", "3 claims, 2 puts each", || three(None)),
        holds("etcd_queue", "4 claims, 1 put each", four),
        holds("etcd_queue", "2 claims, 2 puts each, 1 restore; tokens only", || {
            restored::<2>(2, None)
        }),
        holds("etcd_queue", "3 claims, 1 put each, 1 restore; tokens only", || {
            restored::<3>(1, None)
        }),
        violates(
            "etcd_queue: the base is not raised",
            "3 claims, 1 restore",
            RISE_LATER,
            || restored::<3>(1, Some(Bug::BaseIsNotRaised)),
        ),
    ];
    sound.into_iter().chain(planted).collect()
}

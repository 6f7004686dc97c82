//! Random histories of `Locks` over `MemoryLock`, against a model of what a lock is.

use std::collections::HashMap;
use std::time::Duration;

use lock_core::{LockGuard, LockName, Locks, LossReason, MemoryLock, ReleaseOutcome};
use proptest::prelude::*;

use crate::until;

const NAMES: [&str; 3] = ["a", "b", "c"];

#[derive(Clone, Debug)]
enum Step {
    Try { client: usize, name: usize },
    GiveUp { client: usize, name: usize },
    Release { name: usize },
    Drop { name: usize },
    Expire { name: usize },
    Steal { name: usize },
    Force { client: usize, name: usize },
    RenewNow { name: usize },
}

fn step() -> impl Strategy<Value = Step> {
    let (client, name) = (0..3_usize, 0..NAMES.len());
    prop_oneof![
        6 => (client.clone(), name.clone()).prop_map(|(client, name)| Step::Try { client, name }),
        2 => (client.clone(), name.clone()).prop_map(|(client, name)| Step::GiveUp { client, name }),
        3 => name.clone().prop_map(|name| Step::Release { name }),
        2 => name.clone().prop_map(|name| Step::Drop { name }),
        1 => name.clone().prop_map(|name| Step::Expire { name }),
        1 => name.clone().prop_map(|name| Step::Steal { name }),
        1 => (client, name.clone()).prop_map(|(client, name)| Step::Force { client, name }),
        1 => name.prop_map(|name| Step::RenewNow { name }),
    ]
}

/// What must be true of one name.
#[derive(Default)]
struct Model {
    /// The guard of the holder, and whether it still holds.
    guard: Option<LockGuard>,
    held: bool,
    stolen: bool,
    mark: u64,
}

impl Model {
    fn free(&self) -> bool {
        !self.held && !self.stolen
    }

    fn rises(&mut self, token: u64) {
        assert!(token > self.mark, "token {token} after {}", self.mark);
        self.mark = token;
    }
}

async fn run(steps: Vec<Step>, shared: bool) {
    let memory = MemoryLock::new();
    let memory = if shared { memory.sharing_leases() } else { memory };
    let clients: Vec<_> = (0..3).map(|_| Locks::new(memory.client())).collect();
    let names: Vec<LockName> = NAMES.iter().map(|n| n.parse().unwrap()).collect();
    let mut models: HashMap<usize, Model> = HashMap::new();
    for step in steps {
        match step {
            Step::Try { client, name } => {
                let model = models.entry(name).or_default();
                let got = clients[client].try_lock(NAMES[name]).await.unwrap();
                assert_eq!(got.is_some(), model.free(), "try on {}", NAMES[name]);
                if let Some(guard) = got {
                    model.rises(guard.token().get());
                    (model.guard, model.held) = (Some(guard), true);
                }
            }
            Step::GiveUp { client, name } => {
                let model = models.entry(name).or_default();
                let request = clients[client].lock(NAMES[name]);
                if let Ok(guard) = tokio::time::timeout(Duration::ZERO, request).await {
                    let guard = guard.unwrap();
                    assert!(model.free());
                    model.rises(guard.token().get());
                    (model.guard, model.held) = (Some(guard), true);
                }
                settled(&clients).await;
            }
            Step::Release { name } => {
                let model = models.entry(name).or_default();
                if let Some(guard) = model.guard.take() {
                    let expected = if model.held {
                        ReleaseOutcome::Released
                    } else {
                        ReleaseOutcome::AlreadyLost
                    };
                    assert_eq!(guard.release().await.unwrap(), expected);
                    model.held = false;
                }
            }
            Step::Drop { name } => {
                let model = models.entry(name).or_default();
                if let Some(guard) = model.guard.take() {
                    let (signal, held) = (guard.lost(), model.held);
                    drop(guard);
                    assert_eq!(signal.await == LossReason::Released, held);
                    model.held = false;
                    settled(&clients).await;
                }
            }
            Step::Expire { name } => {
                let model = models.entry(name).or_default();
                assert_eq!(memory.expire(&names[name]), !model.free());
                (model.held, model.stolen) = (false, false);
                settled(&clients).await;
            }
            Step::Steal { name } => {
                let model = models.entry(name).or_default();
                let token = memory.steal(&names[name]);
                assert_eq!(token.is_some(), !model.free());
                if let Some(token) = token {
                    model.rises(token.get());
                    (model.held, model.stolen) = (false, true);
                }
                settled(&clients).await;
            }
            Step::Force { client, name } => {
                let model = models.entry(name).or_default();
                let victim = clients[client].force_release(NAMES[name]).await.unwrap();
                assert_eq!(
                    victim.first().map(|v| v.token.unwrap().get()),
                    (!model.free()).then_some(model.mark)
                );
                (model.held, model.stolen) = (false, false);
                settled(&clients).await;
            }
            Step::RenewNow { name } => {
                let model = models.entry(name).or_default();
                if let Some(guard) = &model.guard {
                    assert_eq!(guard.renew_now().await.is_ok(), model.held);
                }
            }
        }
        for (name, model) in &models {
            let guard = model.guard.as_ref();
            assert_eq!(
                guard.is_some_and(LockGuard::is_held),
                model.held,
                "belief in {}",
                NAMES[*name]
            );
            let holder = clients[0].holder(NAMES[*name]).await.unwrap();
            assert_eq!(
                holder.map(|h| h.token.unwrap().get()),
                (!model.free()).then_some(model.mark)
            );
        }
    }
    models.clear();
    for client in &clients {
        client.shutdown().await.unwrap();
        assert_eq!(client.stats().held, 0);
        assert_eq!(client.stats().waiting, 0);
    }
    assert_eq!(memory.waiters(), 0);
}

/// Waits until what was dropped or given up is cleaned up.
async fn settled(clients: &[Locks]) {
    for client in clients {
        until(|| client.stats().waiting + client.stats().releasing == 0).await;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn locks_over_memory_behave_like_a_lock(steps in prop::collection::vec(step(), 1..60), shared: bool) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(run(steps, shared));
    }
}

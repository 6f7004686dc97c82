//! Resources that check tokens, but not well.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use lock_core::{FencingToken, LockError};

use super::Bug;
use crate::harness::Resource;

pub(super) struct BrokenFence {
    bug: Bug,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    mark: Option<FencingToken>,
    number: i64,
}

impl BrokenFence {
    pub(super) fn new(bug: Bug) -> Self {
        Self {
            bug,
            state: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn accepts(&self, mark: Option<FencingToken>, token: FencingToken) -> bool {
        let Some(mark) = mark else { return true };
        match self.bug {
            Bug::FenceRefusesItsHolder => token > mark,
            Bug::FenceTakesWhatDiffers => true,
            _ => token >= mark,
        }
    }
}

#[async_trait]
impl Resource for BrokenFence {
    async fn admit(&self, token: FencingToken) -> Result<bool, LockError> {
        let mut state = self.lock();
        let accepted = self.accepts(state.mark, token);
        if accepted && self.bug != Bug::FenceAdmitsWithoutAMark {
            state.mark = Some(token);
        }
        Ok(accepted)
    }

    async fn read(&self) -> Result<i64, LockError> {
        Ok(self.lock().number)
    }

    async fn write(&self, token: FencingToken, number: i64) -> Result<bool, LockError> {
        if self.bug == Bug::FenceChecksBeforeItWrites {
            if !self.accepts(self.lock().mark, token) {
                return Ok(false);
            }
            // There is a round trip between the two.
            tokio::time::sleep(Duration::from_millis(1)).await;
            let mark = Some(token);
            *self.lock() = State { mark, number };
            return Ok(true);
        }
        let mut state = self.lock();
        let accepted = self.accepts(state.mark, token);
        if accepted {
            *state = State {
                mark: Some(token),
                number,
            };
        }
        Ok(accepted)
    }
}

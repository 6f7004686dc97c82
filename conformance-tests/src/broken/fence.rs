//! Resources that check tokens, but not well.

use std::sync::{Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use lock_core::{FencingToken, LockError};

use super::Bug;
use crate::harness::Resource;

pub(super) struct BrokenFence {
    bug: Bug,
    state: Mutex<(Option<FencingToken>, i64)>,
}

impl BrokenFence {
    pub(super) fn new(bug: Bug) -> Self {
        Self {
            bug,
            state: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, (Option<FencingToken>, i64)> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn accepts(&self, mark: Option<FencingToken>, token: FencingToken) -> bool {
        Some(token) >= mark || self.bug == Bug::FenceTakesWhatDiffers
    }
}

#[async_trait]
impl Resource for BrokenFence {
    async fn admit(&self, token: FencingToken) -> Result<bool, LockError> {
        let mut state = self.lock();
        let accepted = self.accepts(state.0, token);
        if accepted && self.bug != Bug::FenceAdmitsWithoutAMark {
            state.0 = Some(token);
        }
        Ok(accepted)
    }

    async fn admit_shared(&self, token: FencingToken) -> Result<bool, LockError> {
        Ok(self.accepts(self.lock().0, token))
    }

    async fn read(&self) -> Result<i64, LockError> {
        Ok(self.lock().1)
    }

    async fn write(&self, token: FencingToken, number: i64) -> Result<bool, LockError> {
        let mut state = self.lock();
        let accepted = self.accepts(state.0, token);
        if accepted {
            *state = (Some(token), number);
        }
        Ok(accepted)
    }
}

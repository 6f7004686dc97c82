//! What is held while the command runs: a lock, or a permit of a semaphore.

use std::time::Duration;

use fencelock::{FencingToken, LockError, LockGuard, Locks, LossReason, LossSignal, OwnerId, Permit, ReleaseOutcome};

use crate::args::Run;

pub(crate) enum Guard {
    Lock(LockGuard),
    Permit(Permit),
}

/// Methods of both.
macro_rules! of_either {
    ($($name:ident: $type:ty),+) => {
        $(
            pub(crate) fn $name(&self) -> $type {
                match self {
                    Self::Lock(guard) => guard.$name(),
                    Self::Permit(guard) => guard.$name(),
                }
            }
        )+
    };
}

impl Guard {
    /// Waits for what `run` asks for.
    pub(crate) async fn acquire(locks: &Locks, run: &Run) -> Result<Self, LockError> {
        macro_rules! set {
            ($request:expr) => {{
                let mut request = $request.ttl(run.ttl);
                if let Some(label) = &run.label {
                    request = request.label(label.as_str());
                }
                if let Some(longest) = run.max_hold {
                    request = request.max_hold(longest);
                }
                match run.wait {
                    _ if run.no_wait => request.no_wait(),
                    Some(limit) => request.wait_for(limit),
                    None => request.wait_forever(),
                }
            }};
        }
        if let Some(holders) = run.max_holders {
            return set!(locks.semaphore(&run.name, holders)).await.map(Self::Permit);
        }
        let mut request = set!(locks.lock(&run.name));
        if run.shared {
            request = request.shared();
        }
        if let Some(length) = run.min_hold {
            request = request.at_least(length);
        }
        request.await.map(Self::Lock)
    }

    // The ttl is zero once it is lost.
    of_either! { owner: OwnerId, ttl: Duration, remaining: Duration, lost: LossSignal }

    /// Permits have none: several work at once.
    pub(crate) fn token(&self) -> Option<FencingToken> {
        match self {
            Self::Lock(guard) => Some(guard.token()),
            Self::Permit(_) => None,
        }
    }

    pub(crate) async fn renew_now(&self) -> Result<(), LockError> {
        match self {
            Self::Lock(guard) => guard.renew_now().await,
            Self::Permit(guard) => guard.renew_now().await,
        }
    }

    pub(crate) async fn release(self) -> Result<ReleaseOutcome, LockError> {
        match self {
            Self::Lock(guard) => guard.release().await,
            Self::Permit(guard) => guard.release().await,
        }
    }
}

/// Why the lock is lost by now, if it is.
pub(crate) async fn loss(signal: &LossSignal) -> Option<LossReason> {
    tokio::time::timeout(Duration::ZERO, signal.wait()).await.ok()
}

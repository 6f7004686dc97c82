//! What is held while the command runs: a lock, or a permit of a semaphore.

use std::pin::Pin;
use std::time::Duration;

use fencelock::{FencingToken, LockError, LockGuard, Locks, LossReason, LossSignal, OwnerId, Permit, ReleaseOutcome};

use crate::arguments::Run;

pub(crate) enum Guard {
    Lock(LockGuard),
    Permit(Permit),
}

/// An acquisition under way.
pub(crate) type Acquiring = Pin<Box<dyn Future<Output = Result<Guard, LockError>> + Send>>;

macro_rules! of_either {
    ($self:ident, $guard:ident => $value:expr) => {
        match $self {
            Guard::Lock($guard) => $value,
            Guard::Permit($guard) => $value,
        }
    };
}

impl Guard {
    /// Asks for what `run` wants.
    pub(crate) fn acquire(locks: &Locks, run: &Run) -> Acquiring {
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
            let request = set!(locks.semaphore(&run.name, holders));
            return Box::pin(async { request.await.map(Self::Permit) });
        }
        let mut request = set!(locks.lock(&run.name));
        if run.shared {
            request = request.shared();
        }
        if let Some(length) = run.min_hold {
            request = request.at_least(length);
        }
        Box::pin(async { request.await.map(Self::Lock) })
    }

    pub(crate) fn owner(&self) -> OwnerId {
        of_either!(self, guard => guard.owner())
    }

    /// Permits have none: several work at once.
    pub(crate) fn token(&self) -> Option<FencingToken> {
        match self {
            Self::Lock(guard) => Some(guard.token()),
            Self::Permit(_) => None,
        }
    }

    /// Zero once it is lost.
    pub(crate) fn ttl(&self) -> Duration {
        of_either!(self, guard => guard.ttl())
    }

    pub(crate) fn remaining(&self) -> Duration {
        of_either!(self, guard => guard.remaining())
    }

    pub(crate) fn lost(&self) -> LossSignal {
        of_either!(self, guard => guard.lost())
    }

    pub(crate) async fn renew_now(&self) -> Result<(), LockError> {
        of_either!(self, guard => guard.renew_now().await)
    }

    pub(crate) async fn release(self) -> Result<ReleaseOutcome, LockError> {
        of_either!(self, guard => guard.release().await)
    }
}

/// Why the lock is lost by now, if it is.
pub(crate) async fn loss(signal: &LossSignal) -> Option<LossReason> {
    tokio::time::timeout(Duration::ZERO, signal.wait()).await.ok()
}

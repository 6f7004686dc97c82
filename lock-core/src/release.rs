//! A claim that is being released.

use tokio_util::sync::DropGuard;
use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::exit::ExitDelay;
use crate::stats::Gauge;
use crate::sync::oneshot;
use crate::{Claim, Lease, LockError, Released, Stamp};

/// A claim whose release is not confirmed.
pub(crate) struct Release {
    pub(crate) claim: Claim,
    pub(crate) reservation: Reservation,
    /// The lease, if other locks may keep it alive.
    pub(crate) shared: Option<Lease>,
    /// The caller that waits for the first response.
    pub(crate) reply: Option<oneshot::Sender<Result<Released, LockError>>>,
    /// By then the server has let go by itself, unless the lease is shared.
    pub(crate) until: Stamp,
    pub(crate) is_repeated: bool,
    /// The claim never became a guard. Its release undoes whatever the server may have done with it.
    pub(crate) is_clean_up: bool,
    /// Lets those go on that wait for the first response about a claim that was kept.
    pub(crate) kept: Option<DropGuard>,
    pub(crate) _counted: Releasing,
}

/// What the server may have reserved for a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reservation {
    None,
    /// It was requested, without a response: whatever the server did is to be undone.
    Requested,
    /// It was made, and stays until then.
    Until(Stamp),
}

/// A request to release.
pub(crate) struct Releasable {
    pub(crate) claim: Claim,
    pub(crate) reservation: Reservation,
    pub(crate) is_repeated: bool,
}

/// A release that is under way: for [`Stats`](crate::Stats), for [`Locks::drain`](crate::Locks::drain), and for the end of the process.
pub(crate) struct Releasing {
    pub(crate) _counted: Gauge,
    pub(crate) _drained: TaskTrackerToken,
    pub(crate) _exit: ExitDelay,
}

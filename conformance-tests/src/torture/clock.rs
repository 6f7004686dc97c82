//! One clock for all processes of this machine.

use std::time::Duration;

use lock_core::Clock;

/// The time since the origin of the clock that leases are measured with: the same for all who run since the same boot.
pub(super) fn since_boot() -> Duration {
    let now = Clock::system().now();
    // Saturates at the origin.
    now.since(now - Duration::MAX)
}

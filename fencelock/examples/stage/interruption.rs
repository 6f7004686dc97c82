//! Somebody wants it to end.

use tokio::signal::unix::{SignalKind, signal};

/// Waits for that, and says how it was said.
pub(crate) async fn interruption() -> &'static str {
    let (Ok(mut int), Ok(mut term), Ok(mut hup)) = (
        signal(SignalKind::interrupt()),
        signal(SignalKind::terminate()),
        signal(SignalKind::hangup()),
    ) else {
        // Without handlers the signals end the process, and the workers end with their input.
        return std::future::pending().await;
    };
    tokio::select! {
        _ = int.recv() => "Ctrl-C",
        _ = term.recv() => "SIGTERM",
        _ = hup.recv() => "SIGHUP",
    }
}

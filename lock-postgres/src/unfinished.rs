//! Work on a session that must not be left half done.

use std::sync::Arc;

use crate::session::Session;

/// Ends the session when dropped, unless the work was done: what became of its lock, or of its commit, is not known otherwise.
pub(crate) struct Unfinished(Option<Arc<Session>>);

impl Unfinished {
    pub(crate) fn on(session: &Arc<Session>) -> Self {
        Self(Some(Arc::clone(session)))
    }

    pub(crate) fn done(mut self) {
        self.0 = None;
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if let Some(session) = &self.0 {
            session.wire.end();
        }
    }
}

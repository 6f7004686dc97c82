//! What happens once, to the first that matches.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use super::proxy::Direction;

/// A fault that was set and happens once.
///
/// Dropping it takes it away, if it has not happened.
#[derive(Debug)]
pub struct Trap {
    traps: Traps,
    id: u64,
    sprung: watch::Receiver<bool>,
}

impl Trap {
    /// Waits until it has happened. False if it cannot any more: a connection ended before the reply came that was to be
    /// swallowed.
    pub async fn sprung(&self) -> bool {
        self.sprung.clone().wait_for(|sprung| *sprung).await.is_ok()
    }

    /// Whether it has happened.
    #[must_use]
    pub fn has_sprung(&self) -> bool {
        *self.sprung.borrow()
    }
}

impl Drop for Trap {
    fn drop(&mut self) {
        self.traps.lock().waiting.retain(|trap| trap.id != self.id);
    }
}

/// A request that is held back, or will be when it comes.
///
/// Dropping it throws the request away and ends its connection.
#[derive(Debug)]
pub struct Held {
    pub(super) trap: Trap,
    /// Whether it is delivered, once that is decided.
    pub(super) delivered: watch::Sender<Option<bool>>,
}

impl Held {
    /// Waits until a request is held.
    pub async fn caught(&self) {
        // Whatever is met is caught in the same moment.
        let _ = self.trap.sprung().await;
    }

    /// Whether a request is held.
    #[must_use]
    pub fn has_caught(&self) -> bool {
        self.trap.has_sprung()
    }

    /// Sends the request on, and what came after it. Without a request none will be held any more.
    pub fn deliver(self) {
        self.delivered.send_replace(Some(true));
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.delivered
            .send_modify(|delivered| *delivered = delivered.or(Some(false)));
    }
}

/// What becomes of a connection after one of its replies was swallowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// It is reset towards both ends.
    Cut,
    /// Nothing comes from the server any more, and it does not end.
    Silence,
    /// It goes on. The client must have sent one request at a time, or it takes a later reply for this one.
    Pass,
}

/// All traps of a proxy.
#[derive(Clone, Default)]
pub(super) struct Traps(Arc<Mutex<Set>>);

#[derive(Default)]
struct Set {
    last: u64,
    waiting: Vec<Waiting>,
}

struct Waiting {
    id: u64,
    /// To be told when it has happened.
    sprung: watch::Sender<bool>,
    kind: Kind,
}

pub(super) enum Kind {
    /// That many bytes pass, then the connection ends.
    CutAfter { direction: Direction, left: usize },
    /// The request waits until it is decided whether it is delivered.
    Hold {
        pattern: Vec<u8>,
        delivered: watch::Receiver<Option<bool>>,
    },
    /// The request passes, and its reply does not.
    Swallow { pattern: Vec<u8>, swallowing: Swallowing },
}

/// Tells a reply from what else a server sends.
type IsReply = dyn Fn(&[u8]) -> bool + Send;

/// Which piece is thrown away as the reply, and what comes then.
pub(super) struct Swallowing {
    pub(super) is_reply: Box<IsReply>,
    pub(super) then: Then,
}

impl Traps {
    pub(super) fn set(&self, kind: Kind) -> Trap {
        let mut set = self.lock();
        set.last += 1;
        let (id, sprung) = (set.last, watch::Sender::new(false));
        let trap = Trap {
            traps: self.clone(),
            id,
            sprung: sprung.subscribe(),
        };
        set.waiting.push(Waiting { id, sprung, kind });
        trap
    }

    /// The trap that a piece meets which is about to pass: the oldest that fits. It is not set any more.
    pub(super) fn meet(&self, way: Direction, piece: &[u8]) -> Option<(Kind, watch::Sender<bool>)> {
        let mut set = self.lock();
        let met = set.waiting.iter_mut().position(|trap| match &mut trap.kind {
            Kind::CutAfter { direction, left } if *direction == way || *direction == Direction::Both => {
                // The cut comes with the last byte that passes, not with the first that does not.
                let cut = piece.len() >= *left;
                if !cut {
                    *left -= piece.len();
                }
                cut
            }
            Kind::CutAfter { .. } => false,
            Kind::Hold { pattern, .. } | Kind::Swallow { pattern, .. } => {
                way == Direction::ToServer && contains(piece, pattern)
            }
        });
        let Waiting { sprung, kind, .. } = set.waiting.remove(met?);
        Some((kind, sprung))
    }

    fn lock(&self) -> MutexGuard<'_, Set> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Traps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Traps").finish_non_exhaustive()
    }
}

fn contains(piece: &[u8], pattern: &[u8]) -> bool {
    pattern.is_empty() || piece.windows(pattern.len()).any(|window| window == pattern)
}

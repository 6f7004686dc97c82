//! What happens once, to the first that matches.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use super::connection::Way;
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
        self.traps.remove(self.id);
    }
}

/// A request that is held back, or will be when it comes.
///
/// Dropping it throws the request away and ends its connection.
#[derive(Debug)]
pub struct Held {
    trap: Trap,
    fate: watch::Sender<Fate>,
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
        self.fate.send_replace(Fate::Delivered);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.fate.send_if_modified(|fate| {
            let open = *fate == Fate::Open;
            if open {
                *fate = Fate::Dropped;
            }
            open
        });
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Open,
    Delivered,
    Dropped,
}

/// All traps of a proxy.
#[derive(Clone, Debug, Default)]
pub(super) struct Traps(Arc<Mutex<Set>>);

#[derive(Debug, Default)]
struct Set {
    last: u64,
    traps: Vec<Waiting>,
}

#[derive(Debug)]
struct Waiting {
    id: u64,
    sprung: watch::Sender<bool>,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    CutAfter {
        direction: Direction,
        left: usize,
    },
    Hold {
        pattern: Vec<u8>,
        fate: watch::Receiver<Fate>,
    },
    Swallow {
        pattern: Vec<u8>,
        swallowing: Swallowing,
    },
}

/// Tells a reply from what else a server sends.
type IsReply = dyn Fn(&[u8]) -> bool + Send;

/// What is thrown away, and what comes then.
pub(super) struct Swallowing {
    pub(super) is_reply: Box<IsReply>,
    pub(super) then: Then,
}

impl fmt::Debug for Swallowing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Swallowing")
            .field("then", &self.then)
            .finish_non_exhaustive()
    }
}

/// What a piece of traffic met.
#[derive(Debug)]
pub(super) enum Met {
    /// Nothing.
    Nothing,
    /// That many bytes pass, then the connection ends.
    Cut { after: usize },
    /// It waits for its fate.
    Hold(watch::Receiver<Fate>),
    /// It passes, and its reply does not; the sender is told when the reply came.
    Swallow(Swallowing, watch::Sender<bool>),
}

impl Traps {
    pub(super) fn cut_after(&self, direction: Direction, bytes: usize) -> Trap {
        self.set(Kind::CutAfter { direction, left: bytes })
    }

    pub(super) fn hold(&self, pattern: &[u8]) -> Held {
        let fate = watch::Sender::new(Fate::Open);
        let trap = self.set(Kind::Hold {
            pattern: pattern.to_vec(),
            fate: fate.subscribe(),
        });
        Held { trap, fate }
    }

    pub(super) fn swallow(&self, pattern: &[u8], swallowing: Swallowing) -> Trap {
        self.set(Kind::Swallow {
            pattern: pattern.to_vec(),
            swallowing,
        })
    }

    /// What a piece that is about to pass meets. One piece meets one trap, the oldest that fits.
    pub(super) fn meet(&self, way: Way, piece: &[u8]) -> Met {
        let mut set = self.lock();
        let met = set.traps.iter_mut().position(|trap| match &mut trap.kind {
            Kind::CutAfter { direction, left } if way.is(*direction) => {
                // The cut comes with the last byte that passes, not with the first that does not.
                let cut = piece.len() >= *left;
                if !cut {
                    *left -= piece.len();
                }
                cut
            }
            Kind::CutAfter { .. } => false,
            Kind::Hold { pattern, .. } | Kind::Swallow { pattern, .. } => {
                way == Way::ToServer && contains(piece, pattern)
            }
        });
        let Some(met) = met else {
            return Met::Nothing;
        };
        let Waiting { sprung, kind, .. } = set.traps.remove(met);
        match kind {
            Kind::CutAfter { left, .. } => {
                sprung.send_replace(true);
                Met::Cut { after: left }
            }
            Kind::Hold { fate, .. } => {
                sprung.send_replace(true);
                Met::Hold(fate)
            }
            Kind::Swallow { swallowing, .. } => Met::Swallow(swallowing, sprung),
        }
    }

    fn set(&self, kind: Kind) -> Trap {
        let mut set = self.lock();
        set.last += 1;
        let sprung = watch::Sender::new(false);
        let trap = Trap {
            traps: self.clone(),
            id: set.last,
            sprung: sprung.subscribe(),
        };
        set.traps.push(Waiting {
            id: trap.id,
            sprung,
            kind,
        });
        trap
    }

    fn remove(&self, id: u64) {
        self.lock().traps.retain(|trap| trap.id != id);
    }

    fn lock(&self) -> MutexGuard<'_, Set> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn contains(piece: &[u8], pattern: &[u8]) -> bool {
    pattern.is_empty() || piece.windows(pattern.len()).any(|window| window == pattern)
}

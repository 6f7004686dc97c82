//! Who may take a name.
//!
//! A claim is granted a name beside the live rows of `lock` for it if its mode admits them: an exclusive claim beside none, a shared
//! one beside shared ones, a permit beside fewer than there are permits. Rows of `waiter` set limits, too, so that no claim waits for
//! ever:
//!
//! - A reader waits while a writer waits that came before it.
//! - Each grant counts as a pass for the claims that wait. One that was passed [`PASSES`] times goes before all that came after it.

use lock_core::{Busy, Claim, FencingToken, Holder, LockError, Mode};

/// How many later claims may be granted before one that waits.
const PASSES: u32 = 32;

/// A row of `waiter` that counts.
pub(crate) struct Waiter {
    pub(crate) owner: String,
    pub(crate) mode: Mode,
    pub(crate) place: i64,
    pub(crate) passed: u32,
    pub(crate) expires: i64,
}

pub(crate) enum Admission {
    /// The claim holds the name already.
    Held(FencingToken),
    Free,
    Busy(Busy),
}

/// Whether the claim goes on beside those holders and those claims that wait, given in the order in which they came.
///
/// # Errors
///
/// If the name has another kind now, or the claim holds it in another mode.
pub(crate) fn admission(claim: &Claim, holders: &[Holder], waiting: &[Waiter]) -> Result<Admission, LockError> {
    let (name, asked, owner) = (claim.name(), claim.mode(), claim.owner().to_string());
    let is_mine = |holder: &&Holder| holder.owner == Some(claim.owner()) && !holder.is_reserved;
    if let Some((held, token)) = holders
        .iter()
        .find(is_mine)
        .and_then(|mine| Some((mine.mode, mine.token?)))
    {
        // A writer can become a reader.
        return match held == asked || (held, asked) == (Mode::Exclusive, Mode::Shared) {
            true => Ok(Admission::Held(token)),
            false => Err(LockError::invalid_mode(name, asked, held)),
        };
    }
    let others = || waiting.iter().filter(|waiter| waiter.owner != owner);
    let found = holders.first().map(|holder| holder.mode);
    if let Some(found) = found.or_else(|| Some(others().next()?.mode))
        && !found.is_same_kind(asked)
    {
        return Err(LockError::invalid_mode(name, asked, found));
    }
    let mine = waiting.iter().find(|waiter| waiter.owner == owner);
    let place = mine.map_or(i64::MAX, |waiter| waiter.place);
    let before = || others().filter(|waiter| waiter.place < place);
    let first = before().filter(|waiter| waiter.passed >= PASSES).count();
    let is_free = match asked {
        Mode::Shared => {
            holders.iter().all(|holder| holder.mode == asked) && !before().any(|waiter| waiter.mode != asked)
        }
        Mode::Permit { of } => holders.len() + first < of as usize,
        _ => holders.is_empty() && first == 0,
    };
    if is_free {
        return Ok(Admission::Free);
    }
    let mut busy = Busy::default();
    // The one that ends first makes room.
    if let Some(holder) = holders.iter().min_by_key(|holder| holder.remaining) {
        busy = busy
            .with_retry_after(holder.remaining.unwrap_or_default())
            .with_holder(holder.clone());
    }
    Ok(Admission::Busy(busy))
}

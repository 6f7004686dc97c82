//! The stores behind `memory:` addresses.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use crate::{LockError, MemoryLock};

/// A client of the store of that name, or of a store of its own if the name is empty.
///
/// A named store lives as long as the process, so that its tokens go on rising when its last client is gone. A forked child has
/// stores of its own.
pub(crate) fn store(name: &str) -> Result<MemoryLock, LockError> {
    static STORES: Mutex<BTreeMap<(u32, String), MemoryLock>> = Mutex::new(BTreeMap::new());
    let name = name.strip_prefix("//").unwrap_or(name);
    if name.contains(|c: char| c == '?' || c == '#' || c.is_control()) {
        return Err(LockError::configuration(
            "what follows \"memory:\" is the name of a store, without ?, # and control characters; there are no settings",
        ));
    }
    if name.is_empty() {
        return Ok(MemoryLock::new());
    }
    let mut stores = STORES.lock().unwrap_or_else(PoisonError::into_inner);
    let store = stores.entry((std::process::id(), name.to_owned())).or_default();
    Ok(store.client())
}

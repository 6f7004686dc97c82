//! Everything that is held, a page at a time.

use std::collections::BTreeMap;
use std::sync::Arc;

use lock_core::{Holder, LockError, LockName};

use crate::failure::Failure;
use crate::fields::Fields;
use crate::link::Link;
use crate::session::Session;
use crate::{record, scripts};

/// How many keys of any kind the server looks through in one step.
const SCANNED: u32 = 1000;

/// How many locks are read in one step.
const READ: usize = 250;

const OPERATION: &str = "listing locks";

type Holders = BTreeMap<LockName, Holder>;

impl Session {
    /// Lists everything that is held under names that start with `prefix`. Each page has the time that one operation may take.
    pub(crate) async fn list(&self, prefix: &str) -> Result<Vec<Holder>, LockError> {
        // A cursor means nothing to another server, so all pages come over one connection.
        let link = self.limited(OPERATION, self.link()).await?;
        let pattern = self.settings().keys.pattern(prefix);
        let (mut holders, mut cursor) = (Holders::new(), "0".to_owned());
        loop {
            let page = self.list_page(&link, &pattern, &cursor, &mut holders);
            cursor = self.limited(OPERATION, page).await?;
            if cursor == "0" {
                return Ok(holders.into_values().collect());
            }
        }
    }

    /// Lists the names under which a lock is stored here and that start with `prefix`, in no order. Each page has the time that one
    /// operation may take.
    pub(crate) async fn names(&self, prefix: &str) -> Result<Vec<LockName>, LockError> {
        let link = self.limited(OPERATION, self.link()).await?;
        let pattern = self.settings().keys.pattern(prefix);
        let (mut names, mut cursor) = (Vec::new(), "0".to_owned());
        loop {
            let (next, found) = self.limited(OPERATION, self.scan(&link, &pattern, &cursor)).await?;
            names.extend(found);
            cursor = next;
            if cursor == "0" {
                return Ok(names);
            }
        }
    }

    /// Where the next page begins, and the names on this one. A scan may come by a name twice.
    async fn scan(&self, link: &Arc<Link>, pattern: &str, cursor: &str) -> Result<(String, Vec<LockName>), Failure> {
        let mut scan = redis::cmd("SCAN");
        scan.arg(cursor).arg("MATCH").arg(pattern).arg("COUNT").arg(SCANNED);
        let mut page = Fields::read(link.ask(&scan).await?)?;
        let next = page.word()?;
        let keys = page.field::<Vec<Vec<u8>>>()?;
        let names = keys.iter().filter_map(|key| self.settings().keys.name(key));
        Ok((next, names.collect()))
    }

    /// Adds what a page tells, and returns where the next one begins.
    async fn list_page(
        &self,
        link: &Arc<Link>,
        pattern: &str,
        cursor: &str,
        holders: &mut Holders,
    ) -> Result<String, Failure> {
        let (next, mut found) = self.scan(link, pattern, cursor).await?;
        found.retain(|name| !holders.contains_key(name));
        for names in found.chunks(READ) {
            for (name, holder) in names.iter().zip(self.holders_on(link, names).await?) {
                match holder {
                    Ok(Some(holder)) => {
                        holders.insert(name.clone(), holder);
                    }
                    Ok(None) => {}
                    Err(failure) => {
                        tracing::warn!(target: "fencelock", "left out of the list: {}", failure.explain(OPERATION))
                    }
                }
            }
        }
        Ok(next)
    }

    /// Returns who holds each of those names. It is an error of that name alone if its key is of another type.
    pub(crate) async fn holders_on(
        &self,
        link: &Arc<Link>,
        names: &[LockName],
    ) -> Result<Vec<Result<Option<Holder>, Failure>>, Failure> {
        let keys: Vec<_> = names.iter().map(|name| self.settings().keys.lock(name)).collect();
        let mut answer = Fields::read(scripts::HOLDER.run(link, self.setting(), &keys, &[]).await?)?;
        let holder = |name: &LockName| {
            // Both are read in any case: those of the next name come after them.
            let (value, remaining) = (answer.field::<Option<String>>(), answer.time());
            let foreign = |_| Failure::Foreign(self.settings().keys.lock(name));
            let (value, remaining) = (value.map_err(foreign)?, remaining.map_err(foreign)?);
            Ok(value.map(|value| record::holder(name, &value, remaining)))
        };
        Ok(names.iter().map(holder).collect())
    }
}

//! Runs a model, and prints what was visited.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::hash::Hash;
use std::time::Instant;

use libtest_mimic::Trial;
use stateright::{Checker, Expectation, HasDiscoveries, Model};

/// A model that must have all its properties. Every state is visited.
pub(crate) fn holds<M>(name: &str, bound: &'static str, model: impl FnOnce() -> M + Send + 'static) -> Trial
where
    M: Model + Send + Sync + 'static,
    M::State: Clone + Debug + Hash + PartialEq + Send + Sync + 'static,
    M::Action: Clone + Debug + PartialEq,
{
    let name = format!("{name} [{bound}]");
    Trial::test(name.clone(), move || {
        let began = Instant::now();
        let checker = model().checker().spawn_bfs().join();
        let discoveries = checker.discoveries();
        let mut wrong = String::new();
        for property in checker.model().properties() {
            let path = discoveries.get(property.name);
            match (property.expectation, path) {
                (Expectation::Sometimes, None) => wrong += &format!("\nnever reached: {}", property.name),
                (Expectation::Always | Expectation::Eventually, Some(path)) => {
                    let state = path.last_state();
                    wrong += &format!("\nviolated: {}\n{path}{state:#?}", property.name);
                }
                _ => {}
            }
        }
        println!(
            "{name}: {} states, depth {}, {:.1} s",
            checker.unique_state_count(),
            checker.max_depth(),
            began.elapsed().as_secs_f64(),
        );
        if !checker.is_done() {
            wrong += "\nnot every state was visited";
        }
        if wrong.is_empty() { Ok(()) } else { Err(wrong.into()) }
    })
}

/// A model with a planted bug that must violate that property.
pub(crate) fn violates<M>(
    name: &str,
    bound: &'static str,
    property: &'static str,
    model: impl FnOnce() -> M + Send + 'static,
) -> Trial
where
    M: Model + Send + Sync + 'static,
    M::State: Clone + Debug + Hash + PartialEq + Send + Sync + 'static,
    M::Action: Clone + Debug + PartialEq,
{
    let name = format!("{name} [{bound}]");
    Trial::test(name.clone(), move || {
        let began = Instant::now();
        let only = HasDiscoveries::AnyOf(BTreeSet::from([property]));
        let model = model();
        let expectation = model.property(property).expectation;
        if expectation != Expectation::Always {
            return Err(format!("{property} is not a property that always holds").into());
        }
        let checker = model.checker().finish_when(only).spawn_bfs().join();
        let found = checker.discovery(property);
        let length = found.as_ref().map(|path| path.clone().into_actions().len());
        println!(
            "{name}: {}; {} states, depth {}, {:.1} s",
            match length {
                Some(length) => format!("violates \"{property}\" in {length} steps"),
                None => format!("ESCAPED: \"{property}\" holds"),
            },
            checker.unique_state_count(),
            checker.max_depth(),
            began.elapsed().as_secs_f64(),
        );
        if std::env::var_os("MODELS_SHOW_PATHS").is_some()
            && let Some(path) = &found
        {
            println!("{path}");
        }
        found
            .map(drop)
            .ok_or_else(|| format!("the bug was not found: {property}").into())
    })
}

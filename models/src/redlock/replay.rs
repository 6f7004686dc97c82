//! The state of all nodes and acquisitions while a trace is replayed.

use std::collections::{BTreeMap, BTreeSet};

use super::node::{Answer, Born, Circumstances, Outcome, Request, Rules};
use super::place::{Place, life};
use super::trace::{OnBusy, Run, Script, Step};
use crate::redis_queue::server::{Entry, Push};

/// What is known of an acquisition.
#[derive(Clone, Debug, Default)]
struct Acquisition {
    /// The highest token that was given before the first request arrived.
    before: u64,
    granted: BTreeMap<usize, BTreeSet<u64>>,
    confirmed: BTreeMap<usize, BTreeSet<(u64, u64)>>,
    /// The token, from when it was given until the acquisition ends.
    holds: Option<u64>,
    is_over: bool,
    /// The nodes that lost their data while they held the name for it.
    emptied: BTreeSet<usize>,
}

#[derive(Clone)]
pub(super) struct Replay<'a> {
    places: Vec<Place<'a>>,
    acquisitions: BTreeMap<&'a str, Acquisition>,
    max_ttl: u64,
    now: u64,
    given: u64,
    any_emptied: bool,
}

impl<'a> Replay<'a> {
    pub(super) fn new(nodes: usize, max_ttl: u64) -> Self {
        Self {
            places: (0..nodes).map(|_| Place::new()).collect(),
            acquisitions: BTreeMap::new(),
            max_ttl,
            now: 0,
            given: 0,
            any_emptied: false,
        }
    }

    pub(super) fn step(&mut self, step: &'a Step) -> Result<(), String> {
        let (Step::Ran(Run { at, .. })
        | Step::Emptied { at, .. }
        | Step::Restarted { at, .. }
        | Step::Given { at, .. }
        | Step::Ended { at, .. }) = step;
        if *at < self.now {
            return Err("the clock went back".to_owned());
        }
        self.now = *at;
        // A deadline that is at this moment has passed before a lease that ends now.
        if let Step::Ended { owner, .. } = step {
            let acquisition = self.acquisition(owner);
            acquisition.holds = None;
            acquisition.is_over = true;
        }
        let now = self.now / 1000;
        for node in 0..self.places.len() {
            self.expire(node, [now; 2])?;
        }
        match step {
            Step::Ran(run) => self.ran_once(run),
            Step::Emptied { node, .. } => {
                self.any_emptied = true;
                let lost = std::mem::replace(self.place(*node)?, Place::new());
                if let Some(lock) = lost.node.lock {
                    self.acquisition(lock.owner).emptied.insert(*node);
                }
                Ok(())
            }
            Step::Restarted { node, .. } => {
                self.place(*node)?.restarted();
                Ok(())
            }
            Step::Given { owner, token, q1, .. } => self.given(owner, *token, q1),
            Step::Ended { .. } => Ok(()),
        }
    }

    /// In the millisecond in which a key ends, Redis may have removed it or not: requests find it still, until the server comes upon it by itself.
    fn ran_once(&mut self, run: &'a Run) -> Result<(), String> {
        let now = self.now / 1000;
        let [lease, queue] = self.place(run.node)?.ends(now);
        let before = (lease || queue).then(|| self.clone());
        let kept = self.ran(run);
        let Some(before) = before.filter(|_| kept.is_err()) else {
            return kept;
        };
        for (ends_lease, ends_queue) in [(lease, false), (false, queue), (lease, queue)] {
            let mut other = before.clone();
            let ends = [ends_lease, ends_queue].map(|ends| now + u64::from(ends));
            if other.expire(run.node, ends).and_then(|()| other.ran(run)).is_ok() {
                *self = other;
                return Ok(());
            }
        }
        kept
    }

    /// Ends the lease and the queue of a node if they end before these moments.
    fn expire(&mut self, node: usize, ends: [u64; 2]) -> Result<(), String> {
        let Some(owner) = self.places[node].expire(ends) else {
            return Ok(());
        };
        let majority = self.majority();
        let left: BTreeSet<_> = (0..self.places.len())
            .filter(|at| self.places[*at].node.is_held_by(owner))
            .collect();
        let acquisition = self.acquisition(owner);
        let kept = left.union(&acquisition.emptied).count();
        if acquisition.holds.is_some() && kept < majority {
            return Err(format!(
                "the lease of {owner} ended at node {node} before the holder's deadline"
            ));
        }
        Ok(())
    }

    fn ran(&mut self, run: &'a Run) -> Result<(), String> {
        let place = self.place(run.node)?;
        if let Some(owner) = run.unheard.iter().find(|owner| !place.waits(owner)) {
            return Err(format!("{owner} was removed, and does not wait"));
        }
        // These look in any case since when the node has its data, the others only if the name is free and a waiter is there for it.
        if let Script::Acquire { .. } | Script::Born { .. } = run.script {
            place.touch(run.at);
        }
        let push = match &run.script {
            Script::Acquire { .. } => self.acquired(run)?,
            Script::Confirm { .. } => self.confirmed(run)?,
            Script::Renew { .. } => self.renewed(run)?,
            Script::Release { .. } => self.released(run)?,
            Script::Born { .. } => self.born(run)?,
        };
        if push != run.push {
            return Err(format!(
                "node {} pushed {:?}, and the protocol says {push:?}",
                run.node, run.push
            ));
        }
        if let Some(Push { owner, token, .. }) = &run.push {
            let acquisition = self.acquisition(owner);
            acquisition.granted.entry(run.node).or_default().insert(*token);
        }
        self.places[run.node].leave(run)
    }

    fn acquired(&mut self, run: &'a Run) -> Result<Option<Push<String>>, String> {
        let Script::Acquire {
            owner,
            ttl,
            stop,
            sent,
            on_busy,
            answer,
            life: told,
        } = &run.script
        else {
            return Ok(None);
        };
        self.acquisition(owner);
        let now = run.at / 1000;
        let max_ttl = self.max_ttl;
        let place = self.place(run.node)?;
        let delay_over = place.delay_over(run.at, max_ttl);
        if place.node.is_young(delay_over) {
            return expect(run, (*answer, *told), (Answer::Young, 0)).map(|()| None);
        }
        let Some(life) = life(now, *ttl, *stop) else {
            return expect(run, (*answer, *told), (Answer::Late, 0)).map(|()| None);
        };
        let (held, queued) = (place.node.is_held_by(owner), place.waits(owner));
        let yields = *on_busy == OnBusy::Yield;
        let stamp = place.stamp(run, yields && held);
        let proposal = place.draws(run);
        let claim = &**owner;
        let request = match on_busy {
            OnBusy::Yield => Request::YieldAndAcquire {
                owner: claim,
                proposal,
                stamp,
            },
            OnBusy::Fail | OnBusy::Queue => Request::Acquire {
                owner: claim,
                proposal,
                waits: (*on_busy == OnBusy::Queue).then_some(stamp),
            },
        };
        let gave_back = yields && held && !place.node.queue.is_empty();
        if gave_back {
            place.keep_queue(now + life);
        }
        let (expected, push) = self.handle(run, request)?;
        let waits = *on_busy != OnBusy::Fail && expected == Answer::Busy;
        let lives = waits || matches!(expected, Answer::Granted(_));
        expect(run, (*answer, *told), (expected, if lives { life } else { 0 }))?;
        let place = &mut self.places[run.node];
        if waits {
            let first = place.node.queue.len() == 1;
            let entry = Entry {
                owner: &**owner,
                stop: now + life,
                ttl: *ttl,
                sent: *sent,
                life,
            };
            place.enqueued(entry, first && !queued && !gave_back);
        }
        if let Answer::Granted(token) = expected {
            let again = held && !gave_back;
            place.end = if again { place.end.max(now + life) } else { now + life };
            let granted = self.acquisition(owner).granted.entry(run.node).or_default();
            if gave_back {
                // What was given back counts no more.
                granted.clear();
            }
            granted.insert(token);
        } else if gave_back {
            self.acquisition(owner).granted.remove(&run.node);
        }
        Ok(push)
    }

    fn confirmed(&mut self, run: &'a Run) -> Result<Option<Push<String>>, String> {
        let Script::Confirm {
            owner,
            presented,
            token,
            confirmed,
        } = &run.script
        else {
            return Ok(None);
        };
        let request = Request::Confirm {
            owner: &**owner,
            presented: *presented,
            token: *token,
        };
        let (expected, push) = self.handle(run, request)?;
        expect(run, *confirmed, expected == Answer::Confirmed)?;
        if *confirmed {
            // From now on that is what the node has granted, and a higher one may be confirmed there.
            let granted = self.acquisition(owner).granted.entry(run.node).or_default();
            granted.insert(*token);
            let all = &mut self.acquisition(owner).confirmed;
            all.entry(run.node).or_default().insert((*presented, *token));
        }
        Ok(push)
    }

    fn renewed(&mut self, run: &'a Run) -> Result<Option<Push<String>>, String> {
        let Script::Renew {
            owner,
            ttl,
            stop,
            answer,
        } = &run.script
        else {
            return Ok(None);
        };
        let now = run.at / 1000;
        if self.place(run.node)?.node.is_held_by(owner) && now > *stop {
            return expect(run, *answer, Answer::Late).map(|()| None);
        }
        let (expected, push) = self.handle(run, Request::Renew { owner: &**owner })?;
        expect(run, *answer, expected)?;
        if expected == Answer::Renewed {
            self.places[run.node].end = now + ttl;
        }
        Ok(push)
    }

    fn released(&mut self, run: &'a Run) -> Result<Option<Push<String>>, String> {
        let Script::Release { owner, stop, released } = &run.script else {
            return Ok(None);
        };
        if stop.is_some_and(|stop| run.at / 1000 > stop) {
            return expect(run, *released, false).map(|()| None);
        }
        let (expected, push) = self.handle(run, Request::Release { owner: &**owner })?;
        let freed = expected == Answer::Released;
        self.may_free(run.node, owner, freed)?;
        expect(run, *released, freed)?;
        Ok(push)
    }

    fn born(&mut self, run: &'a Run) -> Result<Option<Push<String>>, String> {
        let Script::Born { open, is_new, since } = &run.script else {
            return Ok(None);
        };
        let place = self.place(run.node)?;
        if place.node.born == Born::Absent {
            place.node.is_young(false);
        }
        if place.is_new && *open == Some(place.since(run.at)) {
            place.is_new = false;
            place.node.born = Born::Open;
        }
        expect(run, (*is_new, *since), (place.is_new, place.since(run.at)))?;
        Ok(None)
    }

    /// Carries out a request. The answer, and the grant that was pushed.
    fn handle(
        &mut self,
        run: &'a Run,
        request: Request<&'a str, u64>,
    ) -> Result<(Answer<u64>, Option<Push<String>>), String> {
        let max_ttl = self.max_ttl;
        let place = self.place(run.node)?;
        let now = run.at / 1000;
        let (gone, unheard) = (place.gone(now), run.unheard.iter().map(|owner| &**owner));
        let circumstances = Circumstances {
            clock: place.draws(run),
            delay_over: place.delay_over(run.at, max_ttl),
            gone: &gone,
            unheard: &unheard.collect::<Vec<_>>(),
        };
        let Outcome { answer, pushed } = place.node.handle(&Rules::default(), request, circumstances);
        if place.node.born != Born::Absent {
            place.touch(run.at);
        }
        let push = pushed.map(|(owner, token)| place.pushed(owner, token, now));
        Ok((answer, push))
    }

    /// While an acquisition holds the name, no request of its own may free a node.
    fn may_free(&mut self, node: usize, owner: &'a str, freed: bool) -> Result<(), String> {
        if freed && self.acquisition(owner).holds.is_some() {
            return Err(format!("{owner} was released at node {node} before it ended"));
        }
        Ok(())
    }

    fn given(&mut self, owner: &'a str, token: u64, q1: &[(usize, u64)]) -> Result<(), String> {
        let (majority, given, any_emptied) = (self.majority(), self.given, self.any_emptied);
        if let Some((other, _)) = self.acquisitions.iter().find(|(_, other)| other.holds.is_some()) {
            return Err(format!("{owner} was given a token while {other} holds"));
        }
        let acquisition = self.acquisition(owner);
        if acquisition.is_over {
            return Err(format!("{owner} was given a token after it had ended"));
        }
        let nodes: BTreeSet<_> = q1.iter().map(|(node, _)| *node).collect();
        if nodes.len() != q1.len() {
            return Err("a node is counted twice".to_owned());
        }
        for (node, granted) in q1 {
            if !acquisition.granted.get(node).is_some_and(|all| all.contains(granted)) {
                return Err(format!("node {node} has not granted {granted} to {owner}"));
            }
        }
        let highest = q1.iter().map(|(_, granted)| *granted).max();
        if highest != Some(token) {
            return Err(format!("the token is {token}, and the highest grant is {highest:?}"));
        }
        let is_at_token = |(node, granted): &&(usize, u64)| {
            let confirmed = acquisition.confirmed.get(node);
            *granted == token || confirmed.is_some_and(|all| all.contains(&(*granted, token)))
        };
        let at_token = q1.iter().filter(is_at_token).count();
        if at_token < majority {
            return Err(format!(
                "{at_token} nodes are at the token {token}, and a majority is {majority}"
            ));
        }
        if token <= acquisition.before || token <= given && !any_emptied {
            return Err(format!(
                "the token {token} is not above {given}, which was given before"
            ));
        }
        acquisition.holds = Some(token);
        self.given = given.max(token);
        Ok(())
    }

    fn majority(&self) -> usize {
        self.places.len() / 2 + 1
    }

    fn acquisition(&mut self, owner: &'a str) -> &mut Acquisition {
        let before = self.given;
        self.acquisitions.entry(owner).or_insert_with(|| Acquisition {
            before,
            ..Acquisition::default()
        })
    }

    fn place(&mut self, node: usize) -> Result<&mut Place<'a>, String> {
        self.places
            .get_mut(node)
            .ok_or_else(|| format!("there is no node {node}"))
    }
}

fn expect<T: PartialEq + std::fmt::Debug>(run: &Run, answered: T, expected: T) -> Result<(), String> {
    if answered == expected {
        return Ok(());
    }
    Err(format!(
        "node {} answered {answered:?}, and the protocol says {expected:?}",
        run.node
    ))
}

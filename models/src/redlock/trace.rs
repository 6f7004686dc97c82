//! Replays what real nodes and coordinators did, and says whether the protocol allows it.
//!
//! The nodes' answers are compared with those of [`Node::handle`], the function that the model uses. What a trace does not show is
//! inferred from the answers: the clock of a node from the token that it drew, and the end of the restart delay from a grant. The end of a
//! lease and of a waiter's patience must be steps of their own.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::node::{Answer, Circumstances, Node, Outcome, Request, Rules};

/// One event of one name. Events are in the order in which the nodes' scripts ran and the coordinators decided.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "step", rename_all = "snake_case")]
pub enum Step {
    /// A node answered ACQUIRE.
    NodeAcquire {
        /// The node, from 0.
        node: usize,
        /// The acquisition.
        owner: String,
        /// The token that the client proposed.
        proposal: u64,
        /// The stamp that orders waiters, if the acquisition waits.
        waits: Option<u64>,
        /// What the node answered.
        answer: Answer<u64>,
    },
    /// A node answered CONFIRM.
    NodeConfirm {
        /// The node, from 0.
        node: usize,
        /// The acquisition.
        owner: String,
        /// What the client says that this node granted.
        presented: u64,
        /// The token to confirm.
        token: u64,
        /// Whether the node confirmed.
        confirmed: bool,
    },
    /// A node answered RENEW.
    NodeRenew {
        /// The node, from 0.
        node: usize,
        /// The acquisition.
        owner: String,
        /// Whether the lease was lengthened.
        renewed: bool,
    },
    /// A node answered RELEASE.
    NodeRelease {
        /// The node, from 0.
        node: usize,
        /// The acquisition.
        owner: String,
        /// Whether the name was freed.
        released: bool,
    },
    /// A node answered YIELD.
    NodeYield {
        /// The node, from 0.
        node: usize,
        /// The acquisition.
        owner: String,
        /// What the client says that this node granted.
        presented: u64,
        /// The stamp that orders waiters.
        stamp: u64,
        /// Whether the name was freed.
        released: bool,
    },
    /// The step before granted the name to the first waiter of that node.
    PushedGrant {
        /// The node, from 0.
        node: usize,
        /// The waiter.
        owner: String,
        /// The token that was drawn.
        g: u64,
    },
    /// A lease ended.
    NodeExpired {
        /// The node, from 0.
        node: usize,
        /// The acquisition whose lease ended.
        owner: String,
    },
    /// A waiter was removed, because it was not heard of for too long or its push had no receiver.
    WaiterExpired {
        /// The node, from 0.
        node: usize,
        /// The waiter.
        owner: String,
    },
    /// A node lost its data.
    NodeEmptied {
        /// The node, from 0.
        node: usize,
    },
    /// A coordinator gave its caller a token.
    Given {
        /// The acquisition.
        owner: String,
        /// The token.
        token: u64,
        /// The nodes that the coordinator counted as having granted, and what they granted.
        q1: Vec<(usize, u64)>,
    },
    /// An acquisition ended: it was released or given up, or its deadline has passed.
    Ended {
        /// The acquisition.
        owner: String,
    },
}

/// Why a trace is not one of the protocol.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("step {at}: {reason}")]
pub struct Rejected {
    /// The number of the step, from 0.
    pub at: usize,
    /// What is wrong with it.
    pub reason: String,
}

/// Checks the trace of one name on `nodes` nodes that have no lock and no counter at its beginning, and grant.
///
/// # Errors
///
/// The first step that the protocol does not allow.
pub fn accepts(nodes: usize, trace: &[Step]) -> Result<(), Rejected> {
    let mut replay = Replay::new(nodes);
    for (at, step) in trace.iter().enumerate() {
        let next = trace.get(at + 1);
        replay.step(step, next).map_err(|reason| Rejected { at, reason })?;
    }
    Ok(())
}

/// What is known of an acquisition.
#[derive(Debug, Default)]
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

struct Replay<'a> {
    nodes: Vec<Node<&'a str, u64>>,
    acquisitions: BTreeMap<&'a str, Acquisition>,
    given: u64,
    any_emptied: bool,
    /// What the step before granted to a waiter, and no step has told of yet.
    pushed: Option<(usize, &'a str, u64)>,
}

impl<'a> Replay<'a> {
    fn new(nodes: usize) -> Self {
        Self {
            nodes: vec![Node::open(None); nodes],
            acquisitions: BTreeMap::new(),
            given: 0,
            any_emptied: false,
            pushed: None,
        }
    }

    fn majority(&self) -> usize {
        self.nodes.len() / 2 + 1
    }

    fn step(&mut self, step: &'a Step, next: Option<&Step>) -> Result<(), String> {
        if let Some((node, owner, token)) = self.pushed.take() {
            return match step {
                Step::PushedGrant {
                    node: told,
                    owner: to,
                    g,
                } if (*told, &**to, *g) == (node, owner, token) => {
                    let acquisition = self.acquisitions.entry(owner).or_default();
                    acquisition.granted.entry(node).or_default().insert(token);
                    Ok(())
                }
                _ => Err(format!(
                    "node {node} granted {token} to the waiter {owner}, and no step tells so"
                )),
            };
        }
        match step {
            Step::NodeAcquire {
                node,
                owner,
                proposal,
                waits,
                answer,
            } => self.acquired(*node, owner, (*proposal, *waits), *answer, next),
            Step::NodeConfirm {
                node,
                owner,
                presented,
                token,
                confirmed,
            } => {
                let request = Request::Confirm {
                    owner: &**owner,
                    presented: *presented,
                    token: *token,
                };
                let answer = if *confirmed { Answer::Confirmed } else { Answer::Lost };
                self.request(*node, request, answer, next)?;
                if *confirmed {
                    let acquisition = self.acquisitions.entry(owner).or_default();
                    acquisition
                        .confirmed
                        .entry(*node)
                        .or_default()
                        .insert((*presented, *token));
                }
                Ok(())
            }
            Step::NodeRenew { node, owner, renewed } => {
                let answer = if *renewed { Answer::Renewed } else { Answer::Lost };
                self.request(*node, Request::Renew { owner }, answer, next)
            }
            Step::NodeRelease { node, owner, released } => {
                let answer = if *released { Answer::Released } else { Answer::Lost };
                if self.holds(owner) && *released {
                    return Err(format!("{owner} was released at node {node} before it ended"));
                }
                self.request(*node, Request::Release { owner }, answer, next)
            }
            Step::NodeYield {
                node,
                owner,
                presented,
                stamp,
                released,
            } => {
                let request = Request::Yield {
                    owner: &**owner,
                    presented: *presented,
                    stamp: *stamp,
                };
                let answer = if *released { Answer::Released } else { Answer::Lost };
                self.request(*node, request, answer, next)?;
                // What was given back counts no more.
                if let Some(granted) = self.acquisition(owner).granted.get_mut(node) {
                    granted.remove(presented);
                }
                Ok(())
            }
            Step::PushedGrant { node, owner, g } => {
                Err(format!("node {node} has not granted {g} to the waiter {owner}"))
            }
            Step::NodeExpired { node, owner } => self.expired(*node, owner),
            Step::WaiterExpired { node, owner } => {
                self.node(*node)?.forget(owner);
                Ok(())
            }
            Step::NodeEmptied { node } => {
                self.any_emptied = true;
                let lost = std::mem::replace(self.node(*node)?, Node::emptied());
                if let Some(lock) = lost.lock {
                    self.acquisition(lock.owner).emptied.insert(*node);
                }
                Ok(())
            }
            Step::Given { owner, token, q1 } => self.given(owner, *token, q1),
            Step::Ended { owner } => {
                let acquisition = self.acquisition(owner);
                acquisition.holds = None;
                acquisition.is_over = true;
                Ok(())
            }
        }
    }

    fn acquired(
        &mut self,
        node: usize,
        owner: &'a str,
        (proposal, waits): (u64, Option<u64>),
        answer: Answer<u64>,
        next: Option<&Step>,
    ) -> Result<(), String> {
        self.acquisition(owner);
        if answer == Answer::Late {
            return Ok(());
        }
        let request = Request::Acquire { owner, proposal, waits };
        self.request(node, request, answer, next)?;
        if let Answer::Granted(token) = answer {
            self.acquisition(owner).granted.entry(node).or_default().insert(token);
        }
        Ok(())
    }

    /// Carries out a request, and compares the answer.
    fn request(
        &mut self,
        node: usize,
        request: Request<&'a str, u64>,
        answer: Answer<u64>,
        next: Option<&Step>,
    ) -> Result<(), String> {
        // If a token was drawn that the counter does not explain, then it is the clock of the node, or what the client proposed.
        let clock = match (answer, next) {
            (Answer::Granted(token), _) => token,
            (_, Some(Step::PushedGrant { g, .. })) => *g,
            _ => 0,
        };
        let circumstances = Circumstances {
            clock,
            delay_over: answer != Answer::Young,
        };
        let state = self.node(node)?;
        let Outcome {
            answer: expected,
            pushed,
        } = state.handle(&Rules::default(), request, circumstances);
        if answer != expected {
            return Err(format!(
                "node {node} answered {answer:?}, and the protocol says {expected:?}"
            ));
        }
        self.pushed = pushed.map(|(owner, token)| (node, owner, token));
        Ok(())
    }

    fn expired(&mut self, node: usize, owner: &'a str) -> Result<(), String> {
        let majority = self.majority();
        let state = self.node(node)?;
        if !state.is_held_by(owner) {
            return Err(format!("{owner} has no lease at node {node} that could end"));
        }
        state.expire();
        let left: BTreeSet<_> = (0..self.nodes.len())
            .filter(|at| self.nodes[*at].is_held_by(owner))
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

    fn holds(&mut self, owner: &'a str) -> bool {
        self.acquisition(owner).holds.is_some()
    }

    fn acquisition(&mut self, owner: &'a str) -> &mut Acquisition {
        let before = self.given;
        self.acquisitions.entry(owner).or_insert_with(|| Acquisition {
            before,
            ..Acquisition::default()
        })
    }

    fn node(&mut self, node: usize) -> Result<&mut Node<&'a str, u64>, String> {
        self.nodes
            .get_mut(node)
            .ok_or_else(|| format!("there is no node {node}"))
    }
}

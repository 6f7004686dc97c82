//! One node: what the coordinator asks of it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use lock_core::{Busy, Claim, FencingToken, Lease, LockError, LockName, Released, Renewal, Stamp};
use tokio_util::sync::CancellationToken;

use crate::failure::Failure;
use crate::fields::Fields;
use crate::link::Link;
use crate::listeners::Listeners;
use crate::record;
use crate::requests::{NOBODY, answered, millis};
use crate::scripts::{self, Forms};
use crate::session::Session;

/// What the coordinator asks of a node.
#[async_trait]
pub(crate) trait Node: Send + Sync + 'static {
    /// Where the node is, for errors.
    fn place(&self) -> String;

    /// The clock that leases count by.
    fn now(&self) -> Stamp;

    /// The least that the node's clock can show now, in microseconds, if that is known.
    fn server_micros(&self) -> Option<u64>;

    /// Asks for the lock, unless the attempt is over before the request is sent.
    async fn acquire(&self, claim: &Claim, attempt: &Attempt) -> Result<Answer, LockError>;

    /// Raises the node to `token` if it still has the grant with the token `presented`. False if it has not.
    async fn confirm(&self, claim: &Claim, presented: FencingToken, token: FencingToken) -> Result<bool, LockError>;

    /// Renews the claim. False if the node does not have it.
    async fn renew(&self, claim: &Claim) -> Result<bool, LockError>;

    /// Releases what the claim was granted by attempts up to the number `last`. `None` if it is not known whether it had anything.
    async fn release(&self, claim: &Claim, last: u64) -> Result<Option<bool>, LockError>;

    /// Asks since when the node has its data. If that is since `open`, the node may grant at once from now on.
    ///
    /// `None` if the user may only look at locks, and so cannot let a node grant any.
    async fn born(&self, open: &str) -> Result<Option<Born>, LockError>;
}

/// What a node answers to an acquire.
pub(crate) enum Answer {
    Granted(FencingToken, Lease),
    Busy(Busy),
    /// The node is new, was restarted or has lost its data, and grants nothing for that long.
    Young(Duration),
}

/// One attempt to get a claim granted by a majority.
///
/// Attempts of a client are numbered, so that a release which the network holds back does not end what a later attempt is granted.
pub(crate) struct Attempt {
    pub(super) number: u64,
    /// The proposed token, the same for all nodes.
    pub(super) proposal: u64,
    pub(super) over: CancellationToken,
    /// The token of the grant that this attempt came to.
    pub(super) given: OnceLock<FencingToken>,
    pub(super) held: Listeners,
}

impl Attempt {
    /// Whether a request of this attempt is still to be sent: until the attempt is given up, or its grant is released.
    pub(super) fn is_wanted(&self, claim: &Claim) -> bool {
        let given = self.given.get().copied();
        !self.over.is_cancelled() || given.is_some() && self.held.token(claim.owner()) == given
    }
}

/// What a node says of its data.
#[derive(Clone, Debug)]
pub(crate) struct Born {
    pub(super) is_new: bool,
    pub(super) age: Duration,
    pub(super) since: String,
    /// How old its process is, which may have lost data long before the first request that noticed.
    pub(super) process_age: Duration,
}

#[async_trait]
impl Node for Session {
    fn place(&self) -> String {
        self.settings().server.to_string()
    }

    fn now(&self) -> Stamp {
        self.clock().now()
    }

    fn server_micros(&self) -> Option<u64> {
        Some(self.current_link()?.earliest_server_micros(self.now()))
    }

    async fn acquire(&self, claim: &Claim, attempt: &Attempt) -> Result<Answer, LockError> {
        // If a first request was carried out, the same attempt gets the same token.
        let asking = self.twice(|link, _| async move { self.acquire_on(&link, claim, attempt).await });
        self.limited("acquire", asking).await
    }

    async fn confirm(&self, claim: &Claim, presented: FencingToken, token: FencingToken) -> Result<bool, LockError> {
        let asking = self.twice(|link, _| async move {
            let arguments = [&*claim.owner().to_string(), &presented.to_string(), &token.to_string()];
            let (word, _) = self
                .ask_node(&scripts::NODE_CONFIRM, &link, Some(claim.name()), &arguments)
                .await?;
            Ok(word == "confirmed")
        });
        self.limited("acquire", asking).await
    }

    async fn renew(&self, claim: &Claim) -> Result<bool, LockError> {
        let asking = self.twice(|_, _| Session::renew(self, claim));
        Ok(self.limited("renew", asking).await? == Renewal::Renewed)
    }

    async fn release(&self, claim: &Claim, last: u64) -> Result<Option<bool>, LockError> {
        let asking = self.twice(|link, was_sent| async move {
            let arguments = [
                &*claim.owner().to_string(),
                &self.client_at(&link, claim.name()),
                &last.to_string(),
            ];
            let released = self.ask_node(&scripts::NODE_RELEASE, &link, Some(claim.name()), &arguments);
            let is_released = released.await?.0 == "released";
            // The first request may have released it.
            Ok(Some(is_released).filter(|_| is_released || !was_sent))
        });
        self.limited("release", asking).await
    }

    async fn born(&self, open: &str) -> Result<Option<Born>, LockError> {
        let asking = async {
            let link = self.link().await?;
            let (state, mut answer) = match self.ask_node(&scripts::NODE_BORN, &link, None, &[NOBODY, open]).await {
                Err(failure) if failure.is_denied() => return Ok(None),
                answer => answer?,
            };
            Ok(Some(Born {
                is_new: state == "new",
                age: Duration::from_millis(answer.number()?),
                since: answer.word()?,
                process_age: link.server_age(),
            }))
        };
        self.limited("connecting", asking).await
    }
}

impl Session {
    async fn acquire_on(&self, link: &Arc<Link>, claim: &Claim, attempt: &Attempt) -> Result<Answer, Failure> {
        let ttl = millis(claim.ttl());
        let mut late = false;
        loop {
            if !attempt.is_wanted(claim) {
                let over = LockError::unavailable("acquire", "the claim was given up before the request was sent");
                return Err(over.unsent().into());
            }
            let sent = self.now();
            let arguments = [
                &*claim.owner().to_string(),
                &ttl.to_string(),
                &(link.server_millis(sent) + ttl).to_string(),
                &self.client_at(link, claim.name()),
                &attempt.number.to_string(),
                &record::info(claim),
                &attempt.proposal.to_string(),
            ];
            let asking = self.ask_node(&scripts::NODE_ACQUIRE, link, Some(claim.name()), &arguments);
            let (word, mut answer) = asking.await?;
            match &*word {
                // An idea of the server's clock that has become wrong was put right by this answer.
                "late" if !late => late = true,
                "late" => {
                    let (round_trip, ttl) = (self.now().since(sent), claim.ttl());
                    return Err(Failure::Late { round_trip, ttl });
                }
                "young" => return Ok(Answer::Young(Duration::from_millis(answer.number()?))),
                "granted" => {
                    let token = answer.word()?.parse().map_err(|_| Failure::Nonsense)?;
                    let life = Duration::from_millis(answer.number()?);
                    // What was given is what counts.
                    let lease = Lease::for_claim(claim, sent - claim.ttl().saturating_sub(life));
                    return Ok(Answer::Granted(token, lease));
                }
                "busy" => {
                    let lease = answer.time()?;
                    let holder = record::holder(claim.name(), &answer.word()?, lease);
                    let busy = Busy::default().with_retry_after(lease.unwrap_or(claim.ttl()));
                    return Ok(Answer::Busy(busy.with_holder(holder)));
                }
                _ => return Err(Failure::Nonsense),
            }
        }
    }

    /// Runs a script that only nodes have: the first word of the answer, and what follows the reading of the clock.
    async fn ask_node(
        &self,
        script: &Forms,
        link: &Arc<Link>,
        name: Option<&LockName>,
        arguments: &[&str],
    ) -> Result<(String, Fields), Failure> {
        let settings = self.settings();
        let mut keys = match name {
            Some(name) => settings.keys.of(name).to_vec(),
            None => vec![settings.keys.unused(); 4],
        };
        keys.push(settings.keys.born());
        let retention = settings.counter_retention.as_millis().to_string();
        let channels = settings.keys.channels();
        let node = settings.node.as_ref().ok_or(Failure::Nonsense)?;
        let tail = [&*node.nodes, link.run_id(), &*node.max_ttl];
        let arguments = [&[&*channels, &*retention], arguments, &tail].concat();
        let sent = self.now();
        let mut answer = answered(script.run(link, false, &keys, &arguments).await, &keys)?;
        let (word, time) = (answer.word()?, answer.number()?);
        match &*word {
            "late" => link.relearn(time, sent),
            _ => link.learn(time, sent),
        }
        if word == "differs" {
            return Err(answer.difference()?);
        }
        Ok((word, answer))
    }

    pub(super) async fn release_reserved(&self, claim: &Claim, rest: Duration) -> Result<Option<bool>, LockError> {
        let asking = async {
            let link = self.link().await?;
            self.release_reserved_on(&link, claim, rest).await
        };
        Ok(Some(self.limited("release", asking).await? == Released::Released))
    }
}

/// What the session with one of several nodes knows of the others.
#[derive(Debug)]
pub(crate) struct Membership {
    /// Which of the nodes it is.
    number: usize,
    found: Found,
    /// How many nodes there are, and the longest ttl in ms, as scripts are told.
    nodes: String,
    max_ttl: String,
}

/// The run ids of the servers that were found as each of the nodes.
pub(super) type Found = Arc<Mutex<HashMap<usize, String>>>;

impl Membership {
    pub(super) fn new(number: usize, found: &Found, nodes: usize, max_ttl: Duration) -> Self {
        Self {
            number,
            found: Arc::clone(found),
            nodes: nodes.to_string(),
            max_ttl: millis(max_ttl).to_string(),
        }
    }

    /// Takes note of the server that was found as this node, and refuses one that was found as another node: its failure would count twice.
    pub(crate) fn found(&self, run_id: &str) -> Result<(), LockError> {
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        let other = found.iter().find(|(other, id)| **other != self.number && *id == run_id);
        if let Some((other, _)) = other {
            return Err(same(*other, self.number));
        }
        found.insert(self.number, run_id.to_owned());
        Ok(())
    }
}

/// Two nodes, by their numbers from 0, are one server.
pub(super) fn same(one: usize, other: usize) -> LockError {
    let (one, other) = (one.min(other) + 1, one.max(other) + 1);
    LockError::configuration(format!(
        "nodes {one} and {other} are the same server, whose failure would count twice; give independent servers"
    ))
}

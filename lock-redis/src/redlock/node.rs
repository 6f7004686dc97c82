//! One node: what the coordinator asks of it.

use std::time::Duration;

use async_trait::async_trait;
use lock_core::{Busy, Claim, FencingToken, Lease, LockError, LockName, Renewal, Stamp};

use super::attempt::Attempt;
use crate::client::Client;
use crate::commands::{NO_OWNER, flag, millis};
use crate::connection::Connection;
use crate::error::Failure;
use crate::fields::Fields;
use crate::record;
use crate::scripts;

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

    /// Raises the node to `token` if it still has the grant with the token `presented`. `is_agreed` says that a majority has that token.
    async fn confirm(
        &self,
        claim: &Claim,
        presented: FencingToken,
        token: FencingToken,
        is_agreed: bool,
    ) -> Result<Confirmed, LockError>;

    /// Renews the claim. False if the node does not have it.
    async fn renew(&self, claim: &Claim) -> Result<bool, LockError>;

    /// Releases what the claim was granted by attempts up to the number `last`. `None` if it is not known whether it had anything.
    ///
    /// If the claim `goes_on` waiting, it keeps shared claims out as before.
    async fn release(&self, claim: &Claim, last: u64, goes_on: bool) -> Result<Option<bool>, LockError>;

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

/// What a node answers to a confirmation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Confirmed {
    Yes,
    /// The node does not have the grant.
    Lost,
    /// The node has drawn that token already, perhaps for another shared claim. This is the last one that it has drawn.
    Passed(u64),
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
impl Node for Client {
    fn place(&self) -> String {
        self.settings().target.clone()
    }

    fn now(&self) -> Stamp {
        self.clock().now()
    }

    fn server_micros(&self) -> Option<u64> {
        Some(self.router().current()?.earliest_server_micros(self.now()))
    }

    async fn acquire(&self, claim: &Claim, attempt: &Attempt) -> Result<Answer, LockError> {
        // If a first request was carried out, the same attempt gets the same token.
        self.call("acquire", claim.name(), |connection, _| async move {
            self.acquire_attempt_on(&connection, claim, attempt).await
        })
        .await
    }

    async fn confirm(
        &self,
        claim: &Claim,
        presented: FencingToken,
        token: FencingToken,
        is_agreed: bool,
    ) -> Result<Confirmed, LockError> {
        self.call("acquire", claim.name(), |connection, _| async move {
            let (owner, presented, token) = (claim.owner().to_string(), presented.to_string(), token.to_string());
            let arguments = [&*presented, &token, flag(is_agreed)];
            let (word, mut answer) = self
                .ask_node("confirm", &connection, Some(claim.name()), &owner, &arguments)
                .await?;
            Ok(match &*word {
                "confirmed" => Confirmed::Yes,
                "passed" => Confirmed::Passed(answer.number()?),
                _ => Confirmed::Lost,
            })
        })
        .await
    }

    async fn renew(&self, claim: &Claim) -> Result<bool, LockError> {
        let asking = |connection, _| async move { self.renew_on(&connection, claim).await };
        Ok(self.call("renew", claim.name(), asking).await? == Renewal::Renewed)
    }

    async fn release(&self, claim: &Claim, last: u64, goes_on: bool) -> Result<Option<bool>, LockError> {
        self.call("release", claim.name(), |connection, resent| async move {
            let (owner, client, last) = (claim.owner().to_string(), self.client_at(&connection), last.to_string());
            let arguments = [&*client, &last, flag(goes_on)];
            let released = self.ask_node("release", &connection, Some(claim.name()), &owner, &arguments);
            let is_released = released.await?.0 == "released";
            // The first request may have released it.
            Ok(Some(is_released).filter(|_| is_released || !resent))
        })
        .await
    }

    async fn born(&self, open: &str) -> Result<Option<Born>, LockError> {
        let asking = async {
            let connection = self.router().any().await?;
            let asked = self.ask_node("born", &connection, None, NO_OWNER, &[open]).await;
            let (state, mut answer) = match asked {
                Err(failure) if failure.is_denied() => return Ok(None),
                answer => answer?,
            };
            Ok(Some(Born {
                is_new: state == "new",
                age: Duration::from_millis(answer.number()?),
                since: answer.word()?,
                process_age: connection.server_age(),
            }))
        };
        self.limited("connecting", asking).await
    }
}

impl Client {
    async fn acquire_attempt_on(
        &self,
        connection: &Connection,
        claim: &Claim,
        attempt: &Attempt,
    ) -> Result<Answer, Failure> {
        let (owner, ttl) = (&*claim.owner().to_string(), &*millis(claim.ttl()).to_string());
        let (client, info) = (&*self.client_at(connection), &*record::info(claim));
        let (number, proposal) = (&*attempt.number.to_string(), &*attempt.proposal.to_string());
        let (mode, known) = (
            &*record::mode(claim.mode()),
            &*attempt.known.map_or(0, FencingToken::get).to_string(),
        );
        let announced = &*millis(attempt.announced).to_string();
        let answer = self.until_not_late(connection, claim, claim.ttl(), |_, stop| async move {
            if !attempt.is_wanted(claim) {
                let over = LockError::unavailable("acquire", "the claim was given up before the request was sent");
                return Err(over.unsent().into());
            }
            let arguments = [ttl, &*stop, client, number, info, proposal, mode, known, announced];
            self.run_node("acquire", connection, Some(claim.name()), owner, &arguments)
                .await
        });
        let (word, mut answer, sent) = answer.await?;
        match &*word {
            "young" => Ok(Answer::Young(Duration::from_millis(answer.number()?))),
            "granted" => {
                let token = answer.word()?.parse().map_err(|_| Failure::Nonsense)?;
                let life = Duration::from_millis(answer.number()?);
                // What was given is what counts.
                let lease = Lease::for_claim(claim, sent - claim.ttl().saturating_sub(life));
                Ok(Answer::Granted(token, lease))
            }
            "busy" => {
                let (lease, value) = (answer.time()?, answer.word()?);
                let busy = Busy::default().with_retry_after(lease.unwrap_or(claim.ttl()));
                // Of an exclusive claim that waits, nothing is known.
                Ok(Answer::Busy(match value.is_empty() {
                    true => busy,
                    false => busy.with_holder(record::holder(claim.name(), &value, lease)),
                }))
            }
            "differs" => Err(answer.difference()?),
            _ => Err(Failure::Nonsense),
        }
    }

    /// Runs the script that only nodes have, which never finds itself late: the first word of the answer, and what follows the reading of the
    /// clock.
    async fn ask_node(
        &self,
        what: &str,
        connection: &Connection,
        name: Option<&LockName>,
        owner: &str,
        arguments: &[&str],
    ) -> Result<(String, Fields), Failure> {
        let sent = self.now();
        let mut answer = self.run_node(what, connection, name, owner, arguments).await?;
        let (word, time) = (answer.word()?, answer.number()?);
        connection.learn(time, sent);
        match &*word {
            "differs" => Err(answer.difference()?),
            _ => Ok((word, answer)),
        }
    }

    async fn run_node(
        &self,
        what: &str,
        connection: &Connection,
        name: Option<&LockName>,
        owner: &str,
        arguments: &[&str],
    ) -> Result<Fields, Failure> {
        let settings = self.settings();
        let mut keys = match name {
            Some(name) => settings.keys.of(name).to_vec(),
            None => vec![settings.keys.unused(); 6],
        };
        keys.push(settings.keys.born());
        let node = settings.node.as_ref().ok_or(Failure::Nonsense)?;
        let tail = [&*node.nodes, connection.run_id(), &*node.max_ttl];
        let arguments = [&[owner, what], arguments, &tail].concat();
        self.run_on(&scripts::NODE, connection, &keys, &arguments).await
    }
}

//! One node: what the coordinator asks of it.

use std::time::Duration;

use async_trait::async_trait;
use lock_core::{Busy, Claim, FencingToken, Lease, LockError, LockName, Renewal, Stamp};

use super::attempt::Attempt;
use crate::client::Client;
use crate::commands::{flag, lease, millis};
use crate::connection::Connection;
use crate::error::Failure;
use crate::record;
use crate::scripts::{self, Fields};

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
        self.settings.config.target.to_string()
    }

    fn now(&self) -> Stamp {
        self.settings.clock.now()
    }

    fn server_micros(&self) -> Option<u64> {
        Some(self.router.current()?.time().earliest(self.now()))
    }

    async fn acquire(&self, claim: &Claim, attempt: &Attempt) -> Result<Answer, LockError> {
        // If a first request was carried out, the same attempt gets the same token.
        let asking = |connection, _| async move { self.acquire_attempt(&connection, claim, attempt).await };
        self.call("acquire", claim.name(), asking).await
    }

    async fn confirm(
        &self,
        claim: &Claim,
        presented: FencingToken,
        token: FencingToken,
        is_agreed: bool,
    ) -> Result<Confirmed, LockError> {
        let (owner, presented, token) = &(claim.owner().to_string(), presented.to_string(), token.to_string());
        let asking = |connection, _| async move {
            let arguments = [owner, "confirm", presented, token, flag(is_agreed)];
            let (word, mut answer) = self.ask_node(&connection, claim.name(), &arguments).await?;
            Ok(match &*word {
                "confirmed" => Confirmed::Yes,
                "passed" => Confirmed::Passed(answer.number()?),
                _ => Confirmed::Lost,
            })
        };
        self.call("acquire", claim.name(), asking).await
    }

    async fn renew(&self, claim: &Claim) -> Result<bool, LockError> {
        Ok(self.renew_claim(claim).await? == Renewal::Renewed)
    }

    async fn release(&self, claim: &Claim, last: u64, goes_on: bool) -> Result<Option<bool>, LockError> {
        let (owner, last) = &(claim.owner().to_string(), last.to_string());
        let asking = |connection: Connection, resent: bool| async move {
            let client = self.settings.client_at(connection.server().run_id());
            let arguments = [owner, "release", &*client, last, flag(goes_on)];
            let is_released = self.ask_node(&connection, claim.name(), &arguments).await?.0 == "released";
            // The first request may have released it.
            Ok(Some(is_released).filter(|_| is_released || !resent))
        };
        self.call("release", claim.name(), asking).await
    }

    async fn born(&self, open: &str) -> Result<Option<Born>, LockError> {
        // What is asked is not about a name.
        let name = &LockName::new("none")?;
        let asking = |connection: Connection, _| async move {
            let (state, mut answer) = match self.ask_node(&connection, name, &["-", "born", open]).await {
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
        self.call("connecting", name, asking).await
    }
}

impl Client {
    async fn acquire_attempt(
        &self,
        connection: &Connection,
        claim: &Claim,
        attempt: &Attempt,
    ) -> Result<Answer, Failure> {
        let settings = &*self.settings;
        let (owner, ttl) = (&*claim.owner().to_string(), &*millis(claim.ttl()).to_string());
        let (client, info) = (
            &*settings.client_at(connection.server().run_id()),
            &*record::info(claim),
        );
        let (number, proposal) = (&*attempt.number.to_string(), &*attempt.proposal.to_string());
        let known = &*attempt.known.map_or(0, FencingToken::get).to_string();
        let (mode, announced) = (&*record::mode(claim.mode()), &*millis(attempt.announced).to_string());
        let answer = settings.until_not_late(connection, claim, claim.ttl(), |_, stop| async move {
            if !attempt.is_wanted(claim) {
                let over = LockError::unavailable("acquire", "the claim was given up before the request was sent");
                return Err(over.unsent().into());
            }
            let arguments = [
                owner, "acquire", ttl, &*stop, client, number, info, proposal, mode, known, announced,
            ];
            self.run_node(connection, claim.name(), &arguments).await
        });
        let (word, mut answer, sent) = answer.await?;
        match &*word {
            "young" => Ok(Answer::Young(Duration::from_millis(answer.number()?))),
            "granted" => {
                let token = answer.word()?.parse().map_err(|_| Failure::Nonsense)?;
                let life = Duration::from_millis(answer.number()?);
                Ok(Answer::Granted(token, lease(claim, sent, life)))
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
            _ => Err(different(answer)),
        }
    }

    /// Runs the script that only nodes have, which never finds itself late: the first word of the answer, and what follows the reading of the
    /// clock.
    async fn ask_node(
        &self,
        connection: &Connection,
        name: &LockName,
        arguments: &[&str],
    ) -> Result<(String, Fields), Failure> {
        let sent = self.now();
        let mut answer = self.run_node(connection, name, arguments).await?;
        let (word, time) = (answer.word()?, answer.number()?);
        connection.learn(time, sent, false);
        match &*word {
            "differs" => Err(different(answer)),
            _ => Ok((word, answer)),
        }
    }

    async fn run_node(&self, connection: &Connection, name: &LockName, arguments: &[&str]) -> Result<Fields, Failure> {
        let settings = &*self.settings;
        let mut keys = settings.keys.of(name).to_vec();
        keys.push(settings.keys.born());
        let nodes = settings.node.as_ref().map_or(0, |node| node.nodes).to_string();
        let max_ttl = settings.config.max_ttl.as_millis().to_string();
        let arguments = [arguments, &[&*nodes, connection.server().run_id(), &*max_ttl]].concat();
        settings.run_on(&scripts::NODE, connection, &keys, &arguments).await
    }
}

/// The error for a client that knows the nodes in another way than those before it.
fn different(mut answer: Fields) -> Failure {
    let (Ok(nodes), Ok(max_ttl)) = (answer.number(), answer.number().map(Duration::from_millis)) else {
        return Failure::Nonsense;
    };
    let message = format!(
        "other clients of this namespace use {nodes} nodes with a max_ttl of {max_ttl:?}; give all clients the same nodes and the same \
         max_ttl, or choose another namespace"
    );
    LockError::configuration(message).into()
}

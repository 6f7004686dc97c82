//! Every grant of a name carries a higher token than all grants of that name before it.

use std::num::NonZeroU32;
use std::sync::Arc;

use lock_core::{Attempt, Claim, DistributedLock, FencingToken, Grant, Renewal, Wait};

use super::{Entry, cases};
use crate::case::Case;
use crate::harness::Fault;
use crate::link::Link;
use crate::outcome::{Outcome, ensure, fail};

pub(crate) const CASES: &[Entry] = cases![
    tokens_rise_across_releases_by_any_client,
    tokens_rise_across_expiry,
    tokens_rise_across_a_new_client_and_a_closed_one,
    tokens_rise_across_the_kill_of_a_holder,
    tokens_rise_across_a_restart => |case| rise_across(&case, Fault::Restart),
    tokens_rise_across_a_restart_without_data => |case| rise_across(&case, Fault::RestartWithoutData),
    tokens_rise_across_the_deletion_of_a_lock => |case| rise_across(&case, Fault::Delete(case.name("n"))),
    tokens_rise_across_the_deletion_of_a_counter => |case| rise_across(&case, Fault::DeleteCounter(case.name("n"))),
    tokens_rise_across_a_counter_that_is_set_back,
    tokens_rise_across_the_deletion_of_everything => |case| rise_across(&case, Fault::DeleteAll),
    tokens_rise_across_the_loss_of_prepared_requests => |case| rise_across(&case, Fault::DropPrepared),
    tokens_rise_across_the_restore_of_an_older_copy,
    a_token_is_drawn_at_the_grant_and_not_at_the_attempt,
    renewal_leaves_the_token_as_it_is,
    asking_again_gives_the_same_token,
];

/// How many tokens a client asks for that has waiters of its own. A backend may grant fewer.
const TOKENS: NonZeroU32 = NonZeroU32::new(64).unwrap();

/// Checks tokens of one name as they come.
#[derive(Default)]
pub(super) struct Rising(Option<FencingToken>);

impl Rising {
    /// All tokens of a grant, which are at most as many as were asked for.
    pub(super) fn grant(&mut self, grant: &Grant) -> Outcome {
        let (first, last) = (grant.first_token(), grant.token);
        self.next(first)?;
        let most = u64::from(grant.claim.tokens_wanted().get());
        ensure!(
            first <= last && last.get() - first.get() < most,
            "the backend",
            "a grant has the tokens that were asked for, or fewer; {first} to {last} are more than {most}"
        );
        self.0 = Some(last);
        Ok(())
    }

    /// The claim is granted at once, and released.
    async fn turn(&mut self, case: &Case, client: &Link, claim: Claim) -> Outcome {
        self.grant(&case.take(client, &claim).await?)?;
        client.release(&claim, None).await?;
        Ok(())
    }

    /// The same, across a fault.
    async fn turn_through(&mut self, case: &Case, client: &Link, claim: Claim) -> Outcome {
        let limit = case.ttl() + case.hang_limit();
        self.grant(&case.take_through(client, &claim, limit).await?)?;
        client.release(&claim, None).await?;
        Ok(())
    }

    fn next(&mut self, token: FencingToken) -> Outcome {
        if let Some(last) = self.0 {
            ensure!(
                token > last,
                "the backend",
                "a later grant carries a higher token; {token} came after {last}"
            );
        }
        let value = token.get();
        ensure!(
            value > 0 && value < 1 << 53,
            "the backend",
            "tokens are from 1 to 2^53 - 1; it gave {value}"
        );
        self.0 = Some(token);
        Ok(())
    }
}

/// A claim to the name `n` that can use many tokens.
fn block(case: &Case) -> Claim {
    case.claim("n").with_tokens_wanted(TOKENS)
}

pub(crate) async fn tokens_rise_across_releases_by_any_client(case: Arc<Case>) -> Outcome {
    let clients = [case.client().await?, case.client().await?];
    let mut rising = Rising::default();
    for turn in 0..20 {
        // Both clients twice in a row: a counter per client would show.
        let client = &clients[turn / 2 % 2];
        rising.turn(&case, client, block(&case)).await?;
    }
    Ok(())
}

pub(crate) async fn tokens_rise_across_expiry(case: Arc<Case>) -> Outcome {
    let (first, second) = (case.client().await?, case.client().await?);
    let mut rising = Rising::default();
    rising.grant(&case.take(&first, &case.brief_claim("n")).await?)?;
    let limit = case.ttl() + case.hang_limit();
    let successor = case.claim("n");
    rising.next(case.take_within(&second, &successor, limit).await?.0.token)?;
    second.release(&successor, None).await?;
    let third = case.claim("n");
    rising.grant(&case.take(&first, &third).await?)?;
    first.release(&third, None).await?;
    Ok(())
}

pub(crate) async fn tokens_rise_across_a_new_client_and_a_closed_one(case: Arc<Case>) -> Outcome {
    let mut rising = Rising::default();
    for _ in 0..4 {
        let client = case.client().await?;
        for _ in 0..3 {
            rising.turn(&case, &client, case.claim("n")).await?;
        }
        client.close().await?;
    }
    Ok(())
}

pub(crate) async fn tokens_rise_across_the_kill_of_a_holder(case: Arc<Case>) -> Outcome {
    case.needs_processes()?;
    let client = case.client().await?;
    let mut rising = Rising::default();
    for _ in 0..2 {
        let mut child = case.child().await?;
        rising.next(child.lock("n", case.ttl()).await?)?;
        child.kill().await?;
        let claim = case.claim("n");
        let limit = case.ttl() + case.hang_limit();
        rising.next(case.take_within(&client, &claim, limit).await?.0.token)?;
        client.release(&claim, None).await?;
    }
    Ok(())
}

pub(crate) async fn tokens_rise_across_a_counter_that_is_set_back(case: Arc<Case>) -> Outcome {
    let limit = case.ttl() + case.hang_limit();
    let (first, second) = (case.client().await?, case.client().await?);
    let mut rising = Rising::default();
    for _ in 0..3 {
        rising.turn(&case, &first, case.claim("n")).await?;
    }
    let held = case.claim("n");
    rising.grant(&case.take(&first, &held).await?)?;
    // This one has been granted nothing so far.
    let waiter = {
        let (second, claim, deadline) = (Arc::clone(&second), case.claim("n"), case.now() + case.hang_limit());
        tokio::spawn(async move { (second.acquire(&claim, Wait::until(Some(deadline))).await, claim) })
    };
    case.in_line("n", 1).await?;
    case.inject(Fault::SetBackCounter(case.name("n"))).await?;
    first.release(&held, None).await?;
    let (waited, claim) = waiter.await?;
    let grant = match waited {
        Ok(Attempt::Granted(grant)) => grant,
        // To refuse is right where no higher token can be drawn at once.
        Err(error) if error.is_retryable() => case.take_through(&second, &claim, limit).await?,
        Err(error) => return Err(error.into()),
        Ok(other) => fail!(
            "the backend",
            "a waiter is granted what was released; it said {other:?}"
        ),
    };
    rising.grant(&grant)?;
    second.release(&claim, None).await?;
    // A new client puts the counter right, so it comes last.
    for client in [Some(first), Some(second), None] {
        let client = match client {
            Some(client) => client,
            None => case.client().await?,
        };
        rising.turn_through(&case, &client, case.claim("n")).await?;
    }
    Ok(())
}

pub(crate) async fn tokens_rise_across_the_restore_of_an_older_copy(case: Arc<Case>) -> Outcome {
    let client = case.client().await?;
    let mut rising = Rising::default();
    for turn in 0..6 {
        if turn == 3 {
            case.inject(Fault::Copy).await?;
        }
        rising.turn(&case, &client, block(&case)).await?;
    }
    case.inject(Fault::Restore).await?;
    for client in [client, case.client().await?] {
        rising.turn_through(&case, &client, block(&case)).await?;
    }
    Ok(())
}

/// Before the fault, after it with the client that saw it, and with a new one.
async fn rise_across(case: &Case, fault: Fault) -> Outcome {
    let client = case.client().await?;
    let mut rising = Rising::default();
    for _ in 0..3 {
        rising.turn(case, &client, block(case)).await?;
    }
    let holder = case.brief_claim("n");
    rising.grant(&case.take(&client, &holder).await?)?;
    case.inject(fault).await?;
    for client in [client, case.client().await?] {
        rising.turn_through(case, &client, block(case)).await?;
    }
    Ok(())
}

pub(crate) async fn a_token_is_drawn_at_the_grant_and_not_at_the_attempt(case: Arc<Case>) -> Outcome {
    let clients = [case.client().await?, case.client().await?, case.client().await?];
    let [holder, early, late] = [case.claim("n"), case.claim("n"), case.claim("n")];
    let mut rising = Rising::default();
    rising.grant(&case.take(&clients[0], &holder).await?)?;
    for (client, claim) in [(&clients[1], &early), (&clients[2], &late)] {
        if let Attempt::Granted(grant) = client.try_acquire(claim).await? {
            fail!("the backend", "a held name is busy; it gave {grant:?}");
        }
    }
    clients[0].release(&holder, None).await?;
    // Whoever asked last is served first, so that a token drawn when asking would fall.
    for (client, claim) in [(&clients[2], &late), (&clients[1], &early)] {
        rising.grant(&case.take(client, claim).await?)?;
        client.release(claim, None).await?;
    }
    Ok(())
}

pub(crate) async fn renewal_leaves_the_token_as_it_is(case: Arc<Case>) -> Outcome {
    let party = case.party().await?;
    let guard = party.locks.lock("n").await?;
    let token = guard.token();
    for _ in 0..3 {
        guard.renew_now().await?;
        ensure!(
            guard.token() == token,
            "the guard",
            "its token never changes; {token} became {}",
            guard.token()
        );
    }
    if case.capabilities().holder {
        let seen = party.locks.holder("n").await?.and_then(|holder| holder.token);
        ensure!(
            seen.is_none_or(|seen| seen == token),
            "the backend",
            "a renewal draws no token; {token} became {seen:?}"
        );
    }
    guard.release().await?;
    let client = case.client().await?;
    let claim = case.claim("n");
    let grant = case.take(&client, &claim).await?;
    for _ in 0..3 {
        ensure!(
            client.renew(&grant.lease).await? == Renewal::Renewed,
            "the backend",
            "it renews what is held"
        );
        same_token(&case, &client, &grant).await?;
    }
    client.release(&claim, None).await?;
    Ok(())
}

pub(crate) async fn asking_again_gives_the_same_token(case: Arc<Case>) -> Outcome {
    let (client, other) = (case.client().await?, case.client().await?);
    let claim = case.claim("n");
    let grant = case.take(&client, &claim).await?;
    for _ in 0..3 {
        same_token(&case, &client, &grant).await?;
    }
    case.is_busy(&other, claim.name()).await?;
    let waiting = client.acquire(&claim, Wait::until(Some(case.now()))).await?;
    let again = waiting.granted().map(|grant| grant.token);
    ensure!(
        again == Some(grant.token),
        "the backend",
        "waiting for what is held already ends at once with the same token; {} became {again:?}",
        grant.token
    );
    client.release(&claim, None).await?;
    Ok(())
}

async fn same_token(case: &Case, client: &Link, grant: &Grant) -> Outcome {
    let again = case.take(client, &grant.claim).await?;
    ensure!(
        again.token == grant.token,
        "the backend",
        "the same owner gets the same token again; {} became {}",
        grant.token,
        again.token
    );
    Ok(())
}

//! Judges an act: by the books in the store, and by the answers as far as they must agree with the books.

use std::collections::BTreeSet;
use std::fmt::{self, Display, Formatter};

use axum::http::StatusCode;

use crate::stock::store::Books;
use crate::traffic::Replies;
use crate::{KILLED, Outcome, REQUESTS};

/// What the books say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// As many sales as articles, each with a higher token than the one before.
    Exact,
    Oversold(u32),
    /// Articles that are left, or that are neither left nor sold.
    Unsold(u32),
    TokensDoNotRise,
}

impl Verdict {
    pub(crate) fn of(stock: u32, books: &Books) -> Self {
        let sold = books.sales.len() as u32;
        if sold > stock {
            Self::Oversold(sold - stock)
        } else if sold < stock || books.left > 0 {
            Self::Unsold((stock - sold).max(books.left))
        } else if !books.tokens_rise() {
            Self::TokensDoNotRise
        } else {
            Self::Exact
        }
    }
}

impl Display for Verdict {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exact => write!(f, "exactly sold out, each sale with a higher token than the one before"),
            Self::Oversold(articles) => write!(f, "oversold by {articles}"),
            Self::Unsold(articles) => write!(f, "{articles} not sold"),
            Self::TokensDoNotRise => write!(f, "a sale has no higher token than the one before"),
        }
    }
}

/// Fails if an answer is not one of those that may occur, or does not agree with the books.
pub(crate) fn check(replies: &Replies, books: &Books) -> Outcome<()> {
    let known = [StatusCode::OK, StatusCode::CONFLICT, StatusCode::LOCKED].map(|status| replies.count(status));
    let cut_off = replies.cut_off(|_| true);
    let others = REQUESTS as usize - known.iter().sum::<usize>() - cut_off.len();
    expect(
        others == 0,
        format!("{others} requests were answered with another status than 200, 409 and 423"),
    )?;
    let at_others = replies.cut_off(|instance| instance != KILLED).len();
    expect(
        at_others == 0,
        format!("{at_others} requests were cut off at instances that were not killed"),
    )?;
    expect(!cut_off.is_empty(), "no request was cut off by the kill".to_owned())?;
    let noted: BTreeSet<u32> = books.sales.iter().map(|sale| sale.buyer).collect();
    let sold = replies.sold();
    let lost = sold.difference(&noted).count();
    expect(
        lost == 0,
        format!("{lost} sales were answered with 200 and are not in the books"),
    )?;
    // A killed instance may have sold without an answer.
    let unknown = noted.difference(&(&sold | &cut_off)).count();
    expect(
        unknown == 0,
        format!("{unknown} sales are in the books of requests that were refused"),
    )
}

fn expect(as_expected: bool, otherwise: String) -> Outcome<()> {
    if as_expected {
        Ok(())
    } else {
        Err(format!("Not as it should be: {otherwise}.").into())
    }
}

//! The eight acts: what is done, and how it has to end.

use std::time::{Duration, Instant};

use crate::Outcome;
use crate::judge::{expect, judge};
use crate::shop::{Shop, Tills};

/// The ttl of those to whom something happens.
const BRIEF: Duration = Duration::from_secs(1);
/// The ttl of everyone else.
const LONG: Duration = Duration::from_secs(60);
/// After how long those who get nowhere go home, where somebody has to.
const EVENING: Duration = Duration::from_secs(1);
/// When the others do: never.
const NEVER: Duration = Duration::from_secs(3600);

/// How the tills take turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Free,
    Mutex,
    Sign { expires: bool },
    Lock { fenced: bool },
}

impl Way {
    pub(crate) fn of(act: usize) -> Self {
        match act {
            1 => Self::Free,
            2 => Self::Mutex,
            3 => Self::Sign { expires: false },
            4 => Self::Sign { expires: true },
            6 => Self::Lock { fenced: false },
            _ => Self::Lock { fenced: true },
        }
    }
}

/// An act as it is announced.
pub(crate) struct Act {
    pub(crate) number: usize,
    pub(crate) title: &'static str,
    pub(crate) story: &'static str,
}

pub(crate) const ACTS: [Act; 8] = [
    Act {
        number: 1,
        title: "no lock",
        story: "Each till reads what is left, lets the buyer look, and writes one less.",
    },
    Act {
        number: 2,
        title: "a mutex per process",
        story: "Within a till the buyers take turns now. The other tills know nothing of it.",
    },
    Act {
        number: 3,
        title: "no expiry",
        story: "Who puts up the sign at the door is alone in the shop. The first one is killed inside (kill -9).",
    },
    Act {
        number: 4,
        title: "no owner check",
        story: "The sign falls off by itself. A puts it up, is stopped (SIGSTOP) past the expiry, and B enters. A wakes,\n\
                leaves with empty hands and takes the sign down, which is B's by now: the next one enters beside B.",
    },
    Act {
        number: 5,
        title: "fencelock",
        story: "A lock for each purchase, and its token with each write.",
    },
    Act {
        number: 6,
        title: "a stop, no fence",
        story: "A reads what is left and is stopped (SIGSTOP). Its ttl passes, B gets the lock and sells. A wakes and writes\n\
                what it had in mind, before it looks at its lock. The store takes whatever comes.",
    },
    Act {
        number: 7,
        title: "a stop, and the fence",
        story: "The same once more. The store refuses a token that is lower than one it has seen.",
    },
    Act {
        number: 8,
        title: "work beyond the ttl",
        story: "A takes three times its ttl to sell one, while B waits. The lock is renewed in the background.",
    },
];

/// How an act ended.
pub(crate) struct Ending {
    pub(crate) sold: u32,
    pub(crate) oversold: u32,
    pub(crate) refused: u32,
    pub(crate) took: Duration,
    /// In a word, and what it means.
    pub(crate) result: &'static str,
    pub(crate) meaning: String,
}

pub(crate) async fn play(shop: &Shop, act: &Act) -> Outcome<Ending> {
    let start = Instant::now();
    let mut tills = shop.open(act.number).await?;
    match act.number {
        1 | 2 => all_read_before_one_writes(&mut tills).await?,
        3 => killed_inside(&mut tills).await?,
        4 => sign_of_another(&mut tills).await?,
        5 => {}
        6 | 7 => stopped_past_the_ttl(&mut tills).await?,
        _ => longer_than_the_ttl(&mut tills).await?,
    }
    let closing = if act.number == 3 { EVENING } else { NEVER };
    tills.sell_to_the_rest(closing).await?;
    let books = tills.close().await?;
    let sold = books.sales.len() as u32;
    let (result, meaning) = judge(act.number, shop.stock(), &books, &tills)?;
    Ok(Ending {
        sold,
        oversold: sold.saturating_sub(shop.stock()),
        refused: tills.refused,
        took: start.elapsed(),
        result,
        meaning,
    })
}

/// So that on any machine at least two sell the same article.
async fn all_read_before_one_writes(tills: &mut Tills) -> Outcome<()> {
    for till in 0..tills.count() {
        tills.enter(till, LONG).await?;
        tills.read(till).await?;
    }
    for till in 0..tills.count() {
        tills.write(till).await?;
        tills.leave(till).await?;
    }
    Ok(())
}

async fn killed_inside(tills: &mut Tills) -> Outcome<()> {
    tills.enter(0, LONG).await?;
    tills.kill(0).await
}

async fn sign_of_another(tills: &mut Tills) -> Outcome<()> {
    let (a, b) = (0, 1);
    tills.enter(a, BRIEF).await?;
    tills.till(a).stop()?;
    tills.enter(b, LONG).await?;
    tills.read(b).await?;
    tills.till(a).go_on()?;
    tills.leave(a).await?;
    tills.enter(a, LONG).await?;
    tills.read(a).await?;
    for till in [b, a] {
        tills.write(till).await?;
        tills.leave(till).await?;
    }
    Ok(())
}

async fn stopped_past_the_ttl(tills: &mut Tills) -> Outcome<()> {
    let (a, b) = (0, 1);
    // Not renewed: whoever is stopped in the middle of a renewal may have more than its lock, such as a whole file.
    tills.enter_without_renewal(a, BRIEF).await?;
    tills.read(a).await?;
    tills.till(a).stop()?;
    // It finds this when it wakes.
    tills.tell_write(a).await?;
    tills.enter(b, LONG).await?;
    tills.read(b).await?;
    tills.write(b).await?;
    tills.leave(b).await?;
    tills.till(a).go_on()?;
    tills.hear_written(a).await?;
    tills.leave(a).await
}

async fn longer_than_the_ttl(tills: &mut Tills) -> Outcome<()> {
    let (a, b) = (0, 1);
    let ttl = tills.enter(a, BRIEF).await?;
    tills.read(a).await?;
    tills.tell_enter(b, LONG).await?;
    let entered = tills.till(b).hear_within("entered", 3 * ttl).await?;
    expect(
        entered.is_none(),
        "another got the lock while its holder worked on and renewed it",
    )?;
    tills.write(a).await?;
    tills.leave(a).await?;
    tills.hear_entered(b).await?;
    tills.read(b).await?;
    tills.write(b).await?;
    tills.leave(b).await
}

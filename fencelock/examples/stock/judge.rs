//! What the books must look like after each act.

use crate::Outcome;
use crate::shop::Tills;
use crate::store::Books;

/// The result in a word, and what it means; or what is wrong with it.
pub(crate) fn judge(act: usize, stock: u32, books: &Books, tills: &Tills) -> Outcome<(&'static str, String)> {
    let (sold, left) = (books.sales.len() as u32, books.left);
    let over = sold.saturating_sub(stock);
    expect(
        sold == tills.sold,
        &format!("the tills say that {} were sold, and the books say {sold}", tills.sold),
    )?;
    let meaning = match act {
        1 | 2 | 4 => {
            expect(over > 0, "nothing was oversold, though two sold the same article")?;
            return Ok(("oversold", format!("{over} will not get what they paid for")));
        }
        3 => {
            expect(
                sold == 0 && left == stock && tills.late > 0,
                "somebody got in, though the sign was never taken down",
            )?;
            return Ok((
                "stuck",
                format!("{} went home, and the sign is still there", tills.late),
            ));
        }
        6 => {
            expect(
                over == 1,
                &format!("{over} were oversold, and not the one that A sold once more"),
            )?;
            return Ok((
                "corrupted",
                "A wrote over B's sale: one article was sold twice".to_owned(),
            ));
        }
        7 => {
            expect(
                tills.refused == 1,
                &format!("{} writes were refused, and not A's alone", tills.refused),
            )?;
            "A's write was refused, and its buyer got in line again".to_owned()
        }
        8 => "B got the lock when A was done, and not before".to_owned(),
        _ => "each sale has a higher token than the one before".to_owned(),
    };
    expect(
        sold == stock && left == 0,
        &format!("of {stock} articles {sold} were sold and {left} are left"),
    )?;
    expect(
        books.tokens_rise(),
        "a token is not higher than that of the sale before it",
    )?;
    Ok(("exactly sold out", meaning))
}

pub(crate) fn expect(as_expected: bool, otherwise: &str) -> Outcome<()> {
    if as_expected {
        Ok(())
    } else {
        Err(format!("Not as it should be: {otherwise}").into())
    }
}

//! Fencing tokens.

use std::fmt;
use std::num::NonZeroU64;
use std::str::FromStr;

/// Number of a grant, higher than those of all earlier grants of the name.
///
/// Send it with every write; the resource refuses a token lower than the highest it has seen (see [`fence`](crate::fence)). A token is from 1 to
/// 2<sup>53</sup> - 1, so that JSON, Lua and JavaScript keep it exact, and it fits a signed 64-bit column.
///
/// Martin Kleppmann describes it in *How to do distributed locking* (2016), and Mike Burrows, as *sequencers*, in *The Chubby lock service*
/// (OSDI 2006).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(try_from = "u64", into = "u64"))]
pub struct FencingToken(NonZeroU64);

impl FencingToken {
    /// The highest token, 2<sup>53</sup> - 1.
    pub const MAX: Self = Self(NonZeroU64::new((1 << 53) - 1).unwrap());

    /// A token of that value.
    ///
    /// # Errors
    ///
    /// [`InvalidToken`] if it is zero or above [`MAX`](Self::MAX).
    pub const fn new(value: u64) -> Result<Self, InvalidToken> {
        match NonZeroU64::new(value) {
            Some(token) if value <= Self::MAX.get() => Ok(Self(token)),
            _ => Err(InvalidToken(())),
        }
    }

    /// The token as a number.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0.get()
    }

    /// The token as databases store it; never negative.
    #[must_use]
    pub const fn as_i64(self) -> i64 {
        self.get() as i64
    }
}

impl fmt::Display for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl fmt::Debug for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// The value was not a fencing token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a fencing token; expected a whole number from 1 to 9007199254740991")]
pub struct InvalidToken(());

impl TryFrom<u64> for FencingToken {
    type Error = InvalidToken;

    fn try_from(value: u64) -> Result<Self, InvalidToken> {
        Self::new(value)
    }
}

impl TryFrom<i64> for FencingToken {
    type Error = InvalidToken;

    fn try_from(value: i64) -> Result<Self, InvalidToken> {
        u64::try_from(value).map_err(|_| InvalidToken(())).and_then(Self::new)
    }
}

impl From<FencingToken> for u64 {
    fn from(token: FencingToken) -> Self {
        token.get()
    }
}

impl From<FencingToken> for i64 {
    fn from(token: FencingToken) -> Self {
        token.as_i64()
    }
}

impl FromStr for FencingToken {
    type Err = InvalidToken;

    fn from_str(s: &str) -> Result<Self, InvalidToken> {
        s.parse::<u64>().map_err(|_| InvalidToken(())).and_then(Self::new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn zero_negative_and_huge_are_refused() {
        assert!([0, 1 << 53].iter().all(|value| FencingToken::new(*value).is_err()));
        assert!(FencingToken::try_from(-1_i64).is_err() && "1.5".parse::<FencingToken>().is_err());
    }

    proptest! {
        #[test]
        fn every_token_survives_text_i64_and_f64(value in 1..=FencingToken::MAX.get()) {
            let token = FencingToken::new(value).unwrap();
            prop_assert_eq!(token.to_string().parse(), Ok(token));
            prop_assert_eq!(FencingToken::try_from(i64::from(token)), Ok(token));
            prop_assert_eq!(token.get() as f64 as u64, value);
        }
    }
}

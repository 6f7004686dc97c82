//! The code in `docs/` that takes other libraries, as doctests: apart from the crates of the library, whose tests need not compile those.

#[cfg(doctest)]
#[doc = include_str!("../../docs/fencing.md")]
struct Fencing;

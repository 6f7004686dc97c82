//! All integration tests of `fencelock-macros`, as one program.

mod misuse;

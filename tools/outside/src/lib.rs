//! Only dependencies and tests.

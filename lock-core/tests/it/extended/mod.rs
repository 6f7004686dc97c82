//! Tests that `make test` skips and `make test-all` runs.

mod growth;

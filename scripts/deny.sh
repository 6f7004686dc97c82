#!/bin/sh
# Checks the dependencies as deny.toml says.
set -eu
. "$(dirname "$0")/setup.sh"
command -v cargo-deny >/dev/null 2>&1 ||
    die "cargo-deny is not installed, so nothing was checked: cargo install --locked cargo-deny"
exec cargo deny check

#!/bin/sh
# cargo in the top folder, after a look at whether it can work here. Other scripts source this for the look alone. POSIX sh.
set -eu
cd "$(dirname "$0")/.."

die() {
    printf '%s\n' "$@" >&2
    exit 2
}

# rustup writes to a file that a shell reads only when it starts.
command -v cargo >/dev/null 2>&1 || PATH="${CARGO_HOME:-${HOME:-/root}/.cargo}/bin:$PATH"
command -v cargo >/dev/null 2>&1 ||
    die "cargo was not found: install Rust from https://rustup.rs, or put its bin folder on the PATH."
oldest=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
found=$(cargo --version | awk '{ print $2 }')
[ "$(printf '%s\n' "$oldest" "${found%%-*}" | sort -t. -k1,1n -k2,2n | head -n 1)" = "$oldest" ] ||
    die "Rust $oldest or later is needed, this is $found: run \`rustup update\`."
# SQLite comes as C source with one of the crates.
[ -n "${CC:-}" ] || command -v cc >/dev/null 2>&1 ||
    die "A C compiler was not found: install one (Debian: apt-get install gcc libc6-dev), or set CC."

[ "${0##*/}" != cargo.sh ] || exec cargo "$@"

#!/bin/sh
# Builds and runs the demonstration.
set -eu
. "$(dirname "$0")/setup.sh"
echo "Building. The first time takes up to a minute."
cargo build --quiet -p fencelock --features sqlite --example demo
# Not in a pipe, and in place of this shell: Ctrl-C and the exit code are the demonstration's own.
exec cargo run --quiet -p fencelock --features sqlite --example demo -- "$@"

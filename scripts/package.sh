#!/bin/sh
# Packs every crate that is published, and builds each from what is in the packages alone.
set -eu
. "$(dirname "$0")/setup.sh"

# cargo unpacks a version once: without this, what an earlier run packed would be built again.
rm -rf "${CARGO_HOME:-${HOME:-/root}/.cargo}"/registry/src/-*/
exec cargo package --workspace --exclude lock-bench --exclude models --exclude soak "$@"

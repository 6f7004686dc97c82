#!/bin/sh
# Measures the backends that are named, or all of them, and writes docs/performance.md from what was measured last of each.
set -eu
. "$(dirname "$0")/setup.sh"
exec cargo run --release -p lock-bench -- "$@" --page docs/performance.md

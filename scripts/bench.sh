#!/bin/sh
# Measures the backends that are named, or all of them, and writes docs/performance.md from what was measured last of each.
set -eu
. "$(dirname "$0")/setup.sh"

cargo build --release -p lock-bench
for backend in ${*:-redis redis-cluster redlock postgres etcd sqlite}; do
    cargo run --quiet --release -p lock-bench -- --backend "$backend"
done
# It is the one thing here that may be missing.
if command -v valgrind >/dev/null 2>&1; then
    cargo run --quiet --release -p lock-bench -- instructions
else
    echo "valgrind was not found: the instructions of the client are not counted (Debian: apt-get install valgrind)."
fi
page=$(cargo run --quiet --release -p lock-bench -- page)
printf '%s\n' "$page" >docs/performance.md

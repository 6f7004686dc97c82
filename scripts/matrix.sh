#!/bin/sh
# Writes docs/conformance.md from the reports of the last runs of the suite.
set -eu
. "$(dirname "$0")/setup.sh"

target=$(cargo metadata --no-deps --format-version 1 | sed -n 's/.*"target_directory":"\([^"]*\)".*/\1/p')
page=$(cargo run --quiet -p conformance-tests --example matrix -- "$target/conformance")
printf '%s\n' "$page" >docs/conformance.md

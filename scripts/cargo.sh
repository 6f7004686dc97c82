#!/bin/sh
# cargo, after a look at whether it can work here.
set -eu
. "$(dirname "$0")/setup.sh"
exec cargo "$@"

#!/bin/sh
# Sees to the programs of a PostgreSQL server and to PgBouncer, for the tests that start servers of their own; and to
# faketime, which sets clocks: those of these servers, and those of the clients of `fencelock torture`.
set -eu

# Debian keeps the programs of each version in a folder of their own, and pgbouncer where root alone looks.
PATH=$PATH:/usr/sbin
for folder in /usr/lib/postgresql/*/bin; do PATH=$PATH:$folder; done

# Only what is missing: a PostgreSQL that is here may be wanted in its version.
packages=
for program in initdb pg_basebackup pg_dump postgres; do
    command -v "$program" >/dev/null 2>&1 || packages=postgresql
done
for program in pgbouncer faketime; do
    command -v "$program" >/dev/null 2>&1 || packages="$packages $program"
done
if [ -z "$packages" ]; then
    postgres --version
    pgbouncer --version
    exec faketime --version
fi

if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "Missing: $packages. Install it (Debian, Ubuntu: apt-get install $packages)." >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
# Or else the package makes a database of its own.
no_cluster=/etc/postgresql-common/createcluster.d/fencelock-tests.conf
trap 'rm -f "$no_cluster"' EXIT
mkdir -p "${no_cluster%/*}"
echo "create_main_cluster = false" >"$no_cluster"
apt-get update
# The run level keeps the packages from starting services: the tests start what they need.
# shellcheck disable=SC2086 # several words
RUNLEVEL=1 apt-get install --no-install-recommends --yes $packages

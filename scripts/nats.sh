#!/bin/sh
# Sees to a nats-server, for the backend of examples/nats.rs, which starts servers of its own.
set -eu

if [ -n "${FENCELOCK_TEST_NATS_URL:-}" ]; then
    echo "not needed, the environment names a server"
    exit
fi
# Debian keeps it where root alone looks.
PATH=$PATH:/usr/sbin
program=${NATS_SERVER:-nats-server}
command -v "$program" >/dev/null 2>&1 && exec "$program" --version

if [ -n "${NATS_SERVER:-}" ] || [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "$program is missing. Install it (Debian, Ubuntu: apt-get install nats-server), or name it in NATS_SERVER." >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update
# The run level keeps the package from starting a service: the tests start what they need.
RUNLEVEL=1 apt-get install --no-install-recommends --yes nats-server
exec nats-server --version

#!/bin/sh
# Sees to a redis-server on the PATH, for the tests that start servers of their own.
set -eu

command -v redis-server >/dev/null 2>&1 && exec redis-server --version

if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "redis-server is missing. Install it (Debian, Ubuntu: apt-get install redis-server)." >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update
# The run level keeps the package from starting a service: the tests start what they need.
RUNLEVEL=1 apt-get install --no-install-recommends --yes redis-server
exec redis-server --version

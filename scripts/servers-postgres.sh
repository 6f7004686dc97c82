#!/bin/sh
# The entrypoint of a Postgres image made from Debian packages: makes the database at the first start, then runs the
# server. Knows as much of the official image's ways as tests need. As root it goes on as postgres.
set -eu

if [ "$(id -u)" -eq 0 ]; then
    mkdir -p "$PGDATA" /run/postgresql
    chown postgres: "$PGDATA" /run/postgresql
    exec setpriv --reuid=postgres --regid=postgres --init-groups "$0" "$@"
fi

case ${1:-} in -*) set -- postgres "$@" ;; esac

if [ "${1:-}" = postgres ] && ! [ -s "$PGDATA/PG_VERSION" ]; then
    made=/usr/local/share/postgresql/made.tar
    if [ "${POSTGRES_HOST_AUTH_METHOD:-}${POSTGRES_USER:-}" = trust ] && [ -e "$made" ]; then
        tar -C "$PGDATA" -xpf "$made"
    elif [ "${POSTGRES_HOST_AUTH_METHOD:-}" = trust ]; then
        initdb --pgdata="$PGDATA" --username="${POSTGRES_USER:-postgres}" --auth=trust
    elif [ -n "${POSTGRES_PASSWORD:-}" ]; then
        password=$(mktemp)
        printf '%s\n' "$POSTGRES_PASSWORD" >"$password"
        initdb --pgdata="$PGDATA" --username="${POSTGRES_USER:-postgres}" --auth=scram-sha-256 --pwfile="$password"
        rm -f "$password"
    else
        echo "POSTGRES_PASSWORD is empty: set it, or POSTGRES_HOST_AUTH_METHOD=trust." >&2
        exit 1
    fi
    echo "host all all all ${POSTGRES_HOST_AUTH_METHOD:-scram-sha-256}" >>"$PGDATA/pg_hba.conf"
    echo "listen_addresses = '*'" >>"$PGDATA/postgresql.conf"
fi
exec "$@"

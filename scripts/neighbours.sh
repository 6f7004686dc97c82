#!/bin/sh
# fencelock in programs that have SQLite already: a program links one libsqlite3-sys, so cargo has to find one that goes with all.
# It asks crates.io for the versions there are.
set -eu
. "$(dirname "$0")/setup.sh"

target=$(cargo metadata --no-deps --format-version 1 | sed -n 's/.*"target_directory":"\([^"]*\)".*/\1/p')
dir=${target:?cargo did not tell}/neighbours
# What is compiled stays for the next time.
export CARGO_TARGET_DIR="$dir/target" CARGO_PROFILE_DEV_DEBUG=false
mkdir -p "$dir"

# versions LOCKFILE CRATE: all that are in it.
versions() {
    awk -v name="\"$2\"" '$1 == "name" { here = $3 == name } here && $1 == "version" { gsub(/"/, "", $3); v = v (v == "" ? "" : " ") $3 }
        END { print v }' "$1"
}

# beside NAME DEPENDENCY: whether cargo resolves it together with fencelock; leaves the result in a file.
beside() {
    rm -rf "$dir/beside/$1"
    mkdir -p "$dir/beside/$1/src"
    : >"$dir/beside/$1/src/lib.rs"
    cat >"$dir/beside/$1/Cargo.toml" <<END
[package]
name = "beside-$1"
version = "0.0.0"
edition = "2024"

[workspace]

[dependencies]
fencelock = { path = "$PWD/fencelock", features = ["redis", "sqlite"] }
$2
END
    manifest=$dir/beside/$1/Cargo.toml lock=$dir/beside/$1/Cargo.lock
    if ! cargo generate-lockfile --quiet --manifest-path "$manifest" >"$dir/beside/$1/log" 2>&1; then
        cat "$dir/beside/$1/log"
    else
        sys=$(versions "$lock" libsqlite3-sys)
        printf 'rusqlite %-8s libsqlite3-sys %-8s beside %s\n' "$(versions "$lock" rusqlite | sed 's/.* //')" "$sys" "$2"
        # Spaces mean several.
        case $sys in '' | *' '*) ;; *) : >"$dir/beside/$1/resolved" ;; esac
    fi >"$dir/beside/$1/result"
}

rm -rf "$dir/beside"
while read -r name dependency; do
    beside "$name" "$dependency" &
done <<'END'
deadpool deadpool-sqlite = "0.14"
diesel-2-2 diesel = { version = "~2.2", features = ["sqlite"] }
diesel-2-3 diesel = { version = "~2.3", features = ["sqlite"] }
r2d2-0-31 r2d2_sqlite = "0.31"
r2d2-0-35 r2d2_sqlite = "0.35"
refinery refinery = { version = "0.10", features = ["rusqlite"] }
rusqlite-0-32 rusqlite = "0.32"
rusqlite-0-37 rusqlite = "0.37"
rusqlite-0-38 rusqlite = "0.38"
rusqlite-0-39 rusqlite = "0.39"
rusqlite-0-40 rusqlite = "0.40"
rusqlite-0-43 rusqlite = "0.43"
sea-orm-1 sea-orm = { version = "1", features = ["runtime-tokio-rustls", "sqlx-sqlite"] }
sea-orm-2 sea-orm = { version = "2", features = ["runtime-tokio-rustls", "sqlx-sqlite"] }
sqlx-0-8 sqlx = { version = "0.8", features = ["runtime-tokio", "sqlite"] }
sqlx-0-8-postgres sqlx = { version = "0.8", features = ["postgres", "runtime-tokio"] }
sqlx-0-9 sqlx = { version = "0.9", features = ["runtime-tokio", "sqlite"] }
tokio-rusqlite tokio-rusqlite = "0.8"
END
wait
status=0
for neighbour in "$dir"/beside/*; do
    cat "$neighbour/result"
    [ -e "$neighbour/resolved" ] || { status=1; echo "${neighbour##*/}: FAILED"; }
done

# end NAME RUSQLITE CARGO...: lock-sqlite as it is, with that rusqlite, in a workspace of its own.
end() {
    name=$1 rusqlite=$2
    shift 2
    rm -rf "${dir:?}/$name"
    mkdir -p "$dir/$name"
    cp -R lock-core lock-sqlite Cargo.lock "$dir/$name"
    # Only its examples need the facade.
    sed '/^fencelock = /d' lock-core/Cargo.toml >"$dir/$name/lock-core/Cargo.toml"
    sed -e 's/^members = .*/members = ["lock-core", "lock-sqlite"]/' -e '/^default-members/d' -e '/^\[profile/,$d' \
        -e "s/^rusqlite = .*/rusqlite = \"$rusqlite\"/" Cargo.toml >"$dir/$name/Cargo.toml"
    echo
    echo "lock-sqlite with rusqlite $rusqlite, $name"
    (cd "$dir/$name" && cargo "$@") || status=1
}

end oldest 0.32 test -p lock-sqlite --tests
# Without `bundled`, so that nothing of SQLite is compiled.
end newest 0.43 check -p lock-sqlite --tests --no-default-features
# Later ones link with SQLite 3.44 or later only.
if pkg-config --exists 'sqlite3 >= 3.37' 2>/dev/null; then
    end system 0.40 test -p lock-sqlite --no-default-features --test it -- contract:: tokens::
fi

# The program of a user, with the versions of this workspace where it can have them.
echo
echo "A program with axum, sqlx 0.8 and fencelock"
rm -rf "$dir/outside" "$dir/run"
mkdir -p "$dir/run"
cp -R tools/outside "$dir/outside"
cp Cargo.lock "$dir/outside"
sed "s|\"../../fencelock\"|\"$PWD/fencelock\"|" tools/outside/Cargo.toml >"$dir/outside/Cargo.toml"
redis=
if command -v redis-server >/dev/null 2>&1; then
    # A path for a socket may not be long.
    socket=$(mktemp -d)
    trap 'kill "$redis" 2>/dev/null && wait "$redis" || :; rm -rf "$socket"' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    redis-server --port 0 --unixsocket "$socket/redis" --dir "$socket" --save '' --appendonly no >"$dir/redis.log" &
    redis=$!
    until [ -S "$socket/redis" ]; do
        kill -0 "$redis" 2>/dev/null || die "redis-server has ended: $dir/redis.log"
        sleep 0.1
    done
    export REDIS_URL="redis+unix:$socket/redis"
else
    echo "without Redis: redis-server is missing (sh scripts/servers.sh redis-server)"
fi
cargo build --manifest-path "$dir/outside/Cargo.toml" && (cd "$dir/run" && "$CARGO_TARGET_DIR/debug/outside") || status=1
exit "$status"

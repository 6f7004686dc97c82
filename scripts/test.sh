#!/bin/sh
# The tests. Each step's output is kept in target/test-logs, and shown if the step fails. All steps run, also after one that failed.
#
#   scripts/test.sh               what every change has to pass
#   scripts/test.sh all [PART]... everything else, or the parts of it that are named; `scripts/test.sh parts` lists them
set -eu
. "$(dirname "$0")/setup.sh"

# Which tests of a crate are of the first tier is decided by their names alone: `make test` leaves out those with this, and the parts of
# `make test-all` run them.
EXTENDED=extended::

# The parts. about PART: what it shows. needs PART: the servers that it starts, as scripts/servers.sh names them.
PARTS='versions topologies redlock pgbouncer etcd-cluster redis postgres etcd sqlite core command servers examples
models features oldest docs packages neighbours held torture'
about() {
    case $1 in
    versions) echo "the suite on Redis 7.0, Valkey 8.1 and PostgreSQL 15" ;;
    topologies) echo "the suite on Redis Sentinel and Redis Cluster" ;;
    redlock) echo "the suite on Redlock, five nodes" ;;
    pgbouncer) echo "the suite on PostgreSQL 17 behind PgBouncer" ;;
    etcd-cluster) echo "the suite on etcd with three members" ;;
    redis | postgres | etcd | sqlite) echo "further tests of lock-$1" ;;
    core) echo "further tests of lock-core, fencelock and fencelock-macros" ;;
    command) echo "further tests of the command, on every backend" ;;
    servers) echo "the servers that tests start, failovers, moves between backends, forks" ;;
    examples) echo "the examples, and a backend of a third party under the suite" ;;
    models) echo "models of the protocols" ;;
    features) echo "clippy with no features and with each one, tests with few" ;;
    oldest) echo "the oldest Rust that the manifest promises" ;;
    docs) echo "rustdoc, and the recipes in docs/" ;;
    packages) echo "every crate as it would be published" ;;
    neighbours) echo "beside other users of SQLite" ;;
    held) echo "10 000 held locks" ;;
    torture) echo "a minute of torture on each kind of server" ;;
    *) return 1 ;;
    esac
}

needs() {
    case $1 in
    versions) echo redis70 valkey postgres15 faketime ;;
    topologies | redlock) echo redis faketime ;;
    pgbouncer) echo postgres pgbouncer faketime ;;
    etcd-cluster) echo etcd faketime ;;
    redis) echo redis-server faketime ;;
    postgres) echo postgresql pgbouncer faketime ;;
    etcd) echo etcd ;;
    command | examples) echo redis postgres etcd faketime ;;
    servers | torture) echo redis valkey redis70 postgres postgres15 etcd faketime ;;
    neighbours) echo redis-server ;;
    esac
}

tier=${1:-first}
[ $# -eq 0 ] || shift
case $tier in
first) ;;
parts)
    for part in $PARTS; do printf '  %-13s %s\n' "$part" "$(about "$part")"; done
    exit
    ;;
all)
    [ $# -gt 0 ] || eval "set -- $(echo "$PARTS" | tr '\n' ' ')"
    for part; do about "$part" >/dev/null || die "There is no part \"$part\". The parts: $(echo $PARTS)."; done
    ;;
*) die "$0 takes nothing, \"all\" or \"parts\"." ;;
esac

began_all=$(date +%s)
cargo fmt --version >/dev/null 2>&1 || die "rustfmt is missing: run \`rustup component add rustfmt\`."
cargo clippy --version >/dev/null 2>&1 || die "clippy is missing: run \`rustup component add clippy\`."
case $tier in
first) wanted_servers='redis-server postgresql faketime openssl redis postgres etcd' ;;
*) wanted_servers=$(for part; do needs "$part"; done | tr ' ' '\n' | sort -u) ;;
esac
# shellcheck disable=SC2086 # several words
[ -z "$wanted_servers" ] || sh scripts/servers.sh check $wanted_servers || exit 2

# Programs that were taken out of images, where nothing else has them: as scripts/servers.sh.
roots=${FENCELOCK_TEST_ROOTS:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/fencelock/roots}
for image in "${FENCELOCK_TEST_REDIS_IMAGE:-redis:8}" "${FENCELOCK_TEST_POSTGRES_IMAGE:-postgres:17}"; do
    PATH=$PATH:$roots/$(echo "$image" | tr '/:' '--')-programs/programs
done
export PATH

libraries=$(rustc --print target-libdir)

# Wherever an environment or a configuration puts it.
target=$(cargo metadata --no-deps --format-version 1 | sed -n 's/.*"target_directory":"\([^"]*\)".*/\1/p')
logs=${target:?cargo did not tell}/test-logs
rm -rf "$logs"
mkdir -p "$logs"

# The logs are read below, so they must look the same everywhere.
export CARGO_TERM_COLOR=never CARGO_TERM_QUIET=false CARGO_TERM_VERBOSE=false
# What would run less.
unset FENCELOCK_URL FENCELOCK_TEST_ROWS
# `make matrix` reads them.
export FENCELOCK_CONFORMANCE_REPORTS="${target}/conformance"
# A program that takes longer hangs; the limits of the tests themselves are far below.
: "${FENCELOCK_TEST_PROGRAM_SECONDS:=900}"

passed=0 failed=0 ignored=0
# What failed, a line each, said once more at the end: the logs above it are long.
failures=

# count LOG STATUS: passed, failed and ignored tests in the log of a program or of several. One that ended before it could report is a
# failure; so is one that ran no test, but for the unit tests of a crate, which need not have any.
count() {
    case ${1##*/} in *-it.log | *-suite.log) least=1 ;; test-*) least=0 ;; *) least=1 ;; esac
    awk -v status="$2" -v least="$least" '
        /^test result: / {
            for (i = 2; i <= NF; i++) {
                if ($i == "passed;") p += $(i - 1)
                if ($i == "failed;") f += $(i - 1)
                if ($i == "ignored;") n += $(i - 1)
            }
        }
        /^test result: / { ran++ }
        END { if ((status != 0 || !ran || p + n < least) && f == 0) f = 1; print p + 0, f + 0, n + 0 }' "$1"
}

# took SECONDS: 75 s as 1:15.
took() {
    printf '%d:%02d' $(($1 / 60)) $(($1 % 60))
}

# judge NAME LABEL STATUS SECONDS: counts what the log of that name shows, and says so in a line.
judge() {
    name=$1 label=$2 status=$3 seconds=$4
    case $name in test-* | tests-*) tests=yes ;; *) tests=no ;; esac
    # Steps that only may have tests say so too.
    if [ "$tests" = yes ] || grep -q '^test result: ' "$logs/$name.log"; then
        # shellcheck disable=SC2046 # three words
        set -- $(count "$logs/$name.log" "$status")
        passed=$((passed + $1)) failed=$((failed + $2)) ignored=$((ignored + $3))
        note="$1 passed, $2 failed, $3 ignored" bad=$2
    elif [ "$status" -eq 0 ]; then
        passed=$((passed + 1)) note=ok bad=0
    else
        failed=$((failed + 1)) note=FAILED bad=1
    fi
    printf '%-46s %6s  %s\n' "$label" "$(took "$seconds")" "$note"
    [ "$bad" -ne 0 ] || return 0
    failures="$failures  $label: exit code $status; $logs/$name.log
$(awk '
        /^test result: / { left = 0; open = 0 }
        # What each says first; then the list of their names.
        open && /^---- / { left = 12 }
        left && NF { print "    " substr($0, 1, 400); left-- }
        /^failures:$/ { open = 1; left = 40 }' "$logs/$name.log")
"
    echo "---- $label: exit code $status ----"
    tail -n 2000 "$logs/$name.log"
    echo "---- end of $label ----"
}

# step NAME LABEL COMMAND...
step() {
    name=$1 label=$2
    shift 2
    began=$(date +%s)
    if "$@" >"$logs/$name.log" 2>&1 </dev/null; then status=0; else status=$?; fi
    judge "$name" "$label" "$status" $(($(date +%s) - began))
}

# Without --workspace, here and below: cargo takes the default members then. With the same features each time, or everything would be
# compiled again.
lint() {
    cargo clippy --all-features --all-targets "$@" -- -D warnings
}

# compile ARGUMENTS...: test programs, listed in $logs/programs, one in a line: the folder of its crate, the program.
compile() {
    cargo test --no-run --all-features --message-format=json-render-diagnostics "$@" >"$logs/programs.json" || return
    sed -n 's/.*"reason":"compiler-artifact".*"manifest_path":"\([^"]*\)\/Cargo.toml".*"profile":{[^}]*"test":true}.*"executable":"\([^"]*\)".*/\1 \2/p' \
        "$logs/programs.json" >"$logs/programs"
}

# test_name PROGRAM-LINE: as in lock-redis-it.
test_name() {
    folder=${1%% *} program=${1##*/}
    printf '%s-%s' "${folder##*/}" "${program%-*}" | sed 's/-\([a-z_]*\)-\1$/-\1/; s/_/-/g'
}

# run_program LINE ARGUMENTS...: as cargo runs it, with its output in test-NAME.log, and its exit code and seconds in test-NAME.ended.
run_program() {
    line=$1
    shift
    name=test-$(test_name "$line")
    began=$(date +%s) status=0
    (
        cd "${line%% *}"
        export CARGO_MANIFEST_DIR="${line%% *}"
        # Where the libraries are that a program of a macro is linked to.
        export LD_LIBRARY_PATH="$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
        # Not every system has it.
        if command -v timeout >/dev/null 2>&1; then
            exec timeout --foreground --kill-after=30 "$FENCELOCK_TEST_PROGRAM_SECONDS" "${line##* }" "$@"
        fi
        exec "${line##* }" "$@"
    ) >"$logs/$name.log" 2>&1 </dev/null || status=$?
    case $status in 124 | 137) echo "It was stopped after $FENCELOCK_TEST_PROGRAM_SECONDS s." >>"$logs/$name.log" ;; esac
    echo "$status $(($(date +%s) - began))" >"$logs/$name.ended"
}

# run_programs AT-ONCE ARGUMENTS...: those in $logs/programs, the longest first, so many beside each other.
run_programs() {
    at_once=$1
    shift
    sort -r "$logs/programs" | awk '
        / .*\/suite-/ { first = first $0 "\n"; next }
        / .*\/it-/ { then = then $0 "\n"; next }
        { rest = rest $0 "\n" }
        END { printf "%s%s%s", first, then, rest }' >"$logs/programs.ordered"
    # A pipe of tokens: one is taken for each program that runs.
    mkfifo "$logs/tokens"
    exec 9<>"$logs/tokens"
    for _ in $(seq "$at_once"); do echo >&9; done
    while read -r line; do
        read -r _ <&9
        { run_program "$line" "$@" 9>&-; echo >&9; } &
        running="${running:-} $!"
    done <"$logs/programs.ordered"
    # shellcheck disable=SC2086 # several words
    wait ${running:-} || :
    running=
    exec 9>&-
    rm -f "$logs/tokens"
}

judge_programs() {
    while read -r line; do
        name=test-$(test_name "$line")
        read -r status seconds <"$logs/$name.ended" || status=1 seconds=0
        judge "$name" "tests: ${name#test-}" "$status" "$seconds"
    done <"$logs/programs.ordered"
}

# got: waits for the servers, and prints what was got.
got() {
    wait "$getting" && status=0 || status=$?
    cat "$logs/servers.got"
    return "$status"
}

# cargo_test ARGUMENTS...: each program with the limit of run_program.
cargo_test() {
    if command -v timeout >/dev/null 2>&1; then
        limit="'timeout', '--foreground', '--kill-after=30', '$FENCELOCK_TEST_PROGRAM_SECONDS'"
        set -- --config "target.'cfg(all())'.runner = [$limit]" test "$@"
    else
        set -- test "$@"
    fi
    cargo "$@"
}

# Every event has the one target that users filter by.
log_target() {
    ! grep -rnE 'tracing::(trace|debug|info|warn|error)(_span)?!\(' --include='*.rs' -A1 lock-*/src fencelock*/src |
        grep -v '^lock-bench' | awk '
            /tracing::[a-z_]+!\($/ { open = $0; next }
            open != "" { if ($0 !~ /target: "fencelock"/) { print open; bad = 1 } open = ""; next }
            /tracing::[a-z_]+!\(/ && !/target: "fencelock"/ { print; bad = 1 }
            END { exit !bad }'
}

# The suite on each backend has to come to its end.
rows_reported() {
    for row in memory 'memory, shared leases' sqlite 'Redis 8' 'PostgreSQL 17' 'etcd 3.5'; do
        grep -q "^$row: [1-9][0-9]* passed, .*; planted bugs " "$logs/test-conformance-tests-suite.log" && continue
        echo "The suite on $row did not report."
        return 1
    done
}

doctests() {
    cargo test --all-features --no-fail-fast --doc
}

first_tier() {
    step lockfile "Cargo.lock fits the manifests" cargo metadata --locked --format-version 1
    step fmt "formatting" cargo fmt --all -- --check --color never
    step log-target "one log target" log_target
    step clippy "clippy" lint
    step compile "compiling the tests" compile --lib --bins --test it --test suite
    step doctests "examples in the documentation and README" doctests
    step servers "servers" got
    [ -s "$logs/programs" ] || return 0
    began=$(date +%s)
    # They wait for most of their time.
    run_programs "${FENCELOCK_TEST_AT_ONCE:-4}" --skip "$EXTENDED"
    printf '%-46s %6s\n' "the test programs, side by side" "$(took $(($(date +%s) - began)))"
    judge_programs
    step rows "every row of the suite reported" rows_reported
}

# run_one CRATE PROGRAM ARGUMENTS...: a program that `make test` compiles too, with the same features, and its output.
run_one() (
    compile --lib --bins --test it --test suite || exit
    line=$(grep "/$1 .*/$2-[^/]*\$" "$logs/programs") || { echo "$1 has no test program $2."; exit 1; }
    log=$logs/test-$1-$2
    shift 2
    run_program "$line" "$@"
    cat "$log.log"
    read -r code _ <"$log.ended"
    rm "$log.log"
    exit "$code"
)

# suite ROWS: those rows of the suite.
suite() {
    FENCELOCK_TEST_ROWS=$1
    export FENCELOCK_TEST_ROWS
    run_one conformance-tests suite && code=0 || code=$?
    unset FENCELOCK_TEST_ROWS
    return "$code"
}

# further CRATE...: tests that are not of the first tier.
further() {
    worst=0
    for crate; do run_one "$crate" it "$EXTENDED" || worst=$?; done
    return "$worst"
}

# With all features of the workspace on, errors in what a user of a few compiles are not seen. The backends are without TLS here.
features() {
    cargo clippy --all-targets --no-default-features -- -D warnings || return
    for features in '' etcd macros memory postgres redis sqlite tower; do
        cargo clippy -p fencelock --no-default-features --features "$features" -- -D warnings || return
    done
}

oldest() {
    version=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
    if ! cargo "+$version" --version >/dev/null 2>&1; then
        echo "not judged: Rust $version is not installed: rustup toolchain install $version"
        return
    fi
    cargo "+$version" check --all-features --all-targets --target-dir "$target/oldest"
}

docs() {
    RUSTDOCFLAGS="${RUSTDOCFLAGS:-} -D warnings" cargo doc --all-features --no-deps || return
    RUSTDOCFLAGS="${RUSTDOCFLAGS:-} -D warnings" cargo doc --all-features --no-deps -p models -p soak
}

package() {
    # A checkout under work may be packed too; one that is clean must be packed as it is. `make package` builds them too.
    if [ -z "$(git status --porcelain 2>/dev/null || echo none)" ]; then dirty=; else dirty=--allow-dirty; fi
    cargo package --workspace --exclude doc-tests --exclude lock-bench --exclude models --exclude soak --offline --no-verify $dirty || return
    # What people read who have only the package.
    for crate in "$target"/package/*.crate; do
        for file in README.md:400 LICENSE-MIT:1000 LICENSE-APACHE:10000; do
            packed=$(basename "$crate" .crate)
            size=$(tar -xzOf "$crate" "$packed/${file%:*}" | wc -c)
            [ "$size" -ge "${file#*:}" ] || { echo "$packed: ${file%:*} has $size bytes"; return 1; }
        done
    done
}

part() {
    case $1 in
    versions) step tests-versions "suite: versions" suite "redis-7.0 valkey postgres-15" ;;
    topologies) step tests-topologies "suite: topologies" suite "sentinel cluster" ;;
    redlock) step tests-redlock "suite: Redlock" suite redlock ;;
    pgbouncer) step tests-pgbouncer "suite: PgBouncer" suite pgbouncer ;;
    etcd-cluster) step tests-etcd-cluster "suite: etcd, three members" suite etcd-cluster ;;
    redis | postgres | etcd | sqlite) step "tests-$1" "lock-$1" further "lock-$1" ;;
    core) step tests-core "lock-core, fencelock, fencelock-macros" further lock-core fencelock fencelock-macros ;;
    command) step tests-command "the command" further fencelock-cli ;;
    servers)
        step tests-servers "servers, failovers, moves" further conformance-tests
        step tests-fork "forks" cargo_test -p conformance-tests --all-features --test fork
        ;;
    examples)
        step tests-examples "examples" cargo_test -p fencelock -p conformance-tests --all-features --example http --example third_party
        step demo "the demonstration" sh scripts/demo.sh
        ;;
    models) step tests-models "models" cargo_test -p models --all-features ;;
    features)
        step features "clippy, no features and each one" features
        step clippy-more "clippy, what is no default member" lint -p doc-tests -p models -p soak
        step tests-default "fencelock with its default features" cargo_test -p fencelock --lib
        step tests-none "fencelock with no features" cargo_test -p fencelock --no-default-features --lib
        ;;
    oldest) step oldest "the oldest Rust" oldest ;;
    docs)
        step docs "rustdoc" docs
        step tests-recipes "recipes in docs/" cargo test -p doc-tests --doc
        ;;
    packages) step package "packages for the registry" package ;;
    neighbours) step neighbours "beside other users of SQLite" sh scripts/neighbours.sh ;;
    held) step held "10 000 held locks" cargo_test -p fencelock --all-features --bench held ;;
    torture)
        step tests-soak "torture: its own tests" cargo_test -p soak
        step torture "torture" cargo run -p soak -- "${FENCELOCK_TEST_SOAK_SECONDS:-60}"
        ;;
    esac
}

# Also what runs in the background.
trap 'trap "" TERM; kill -TERM 0; exit 130' HUP INT TERM

# The servers are got while there is enough to do without them.
# shellcheck disable=SC2086 # several words
{ [ -z "$wanted_servers" ] || sh scripts/servers.sh $wanted_servers; } >"$logs/servers.got" 2>&1 </dev/null &
getting=$!

case $tier in
first)
    echo "What a change has to pass. The rest: make test-all."
    first_tier
    ;;
all)
    step servers "servers" got
    for part; do part "$part"; done
    ;;
esac

echo
echo "Servers:"
cat "$logs"/test*.log 2>/dev/null | sed -n 's/^server: /  /p' | sort -u
echo
echo "The suite, per backend:"
cat "$logs"/test*.log 2>/dev/null | awk '
    / passed, .* not applicable.*; planted bugs / { print "  " $0; here = 1; next }
    here && /^  (ESCAPED|NOT JUDGED|too slow to judge|on |smallest margin|two believed)/ { print "  " $0; next }
    /^$/ { here = 0 }'
echo
grep -h '^10000 guards' "$logs/held.log" 2>/dev/null || :
echo "Ignored, other than what is not applicable to a backend:"
cat "$logs"/*.log | awk '
    /^test .* \.\.\. ignored/ && !/ignored \(not applicable: / && !/started by other tests/ { print "  " substr($0, 6); some = 1 }
    /^not judged: / { print "  " $0; some = 1 }
    END { if (!some) print "  none" }'
echo
[ "$failed" -eq 0 ] || printf 'Failed:\n%s\n' "$failures"
echo "In $(took $(($(date +%s) - began_all))) minutes."
echo "$passed passed, $failed failed, $ignored skipped"
[ "$failed" -eq 0 ]

#!/bin/sh
# The tests. Each step's output is kept in target/test-logs, and shown if the step fails. All steps run, also after one that failed.
#
#   scripts/test.sh               what every change has to pass
#   scripts/test.sh all [PART]... everything else, or the parts of it that are named; `scripts/test.sh parts` lists them
set -eu

# The steps of the parts: the part, the servers that it starts as scripts/servers.sh names them, the label, the command.
steps() {
    cat <<'END'
versions|redis70 valkey postgres15 faketime|suite: Redis 7.0, Valkey 8.1, PostgreSQL 15|suite redis-7.0 valkey postgres-15
topologies|redis faketime|suite: Redis Sentinel and Redis Cluster|suite sentinel cluster
redlock|redis faketime|suite: Redlock, five nodes|suite redlock
pgbouncer|postgres pgbouncer faketime|suite: PostgreSQL 17 behind PgBouncer|suite pgbouncer
etcd-cluster|etcd faketime|suite: etcd, three members|suite etcd-cluster
redis|redis-server faketime|lock-redis, further tests|further lock-redis
postgres|postgresql pgbouncer faketime|lock-postgres, further tests|further lock-postgres
etcd|etcd|lock-etcd, further tests|further lock-etcd
sqlite||lock-sqlite, further tests|further lock-sqlite
core||lock-core, fencelock, fencelock-macros|further lock-core fencelock fencelock-macros
command|redis postgres etcd|the command, on every backend|further fencelock-cli
servers|redis valkey redis70 postgres postgres15 etcd faketime|servers, failovers, moves|further test-servers conformance-tests
servers||forks|cargo_test -p conformance-tests --all-features --test fork
examples|redis postgres etcd faketime|examples, and a backend of a third party|cargo_test -p fencelock -p conformance-tests --all-features --example http --example third_party
examples||the demonstration|make demo
models||models of the protocols|cargo_test -p models --all-features
features||clippy, no features and each one|features
features||clippy, what is no default member|lint -p doc-tests -p models -p soak
features||fencelock with its default features|cargo_test -p fencelock --lib
features||fencelock with no features|cargo_test -p fencelock --no-default-features --lib
oldest||the oldest Rust|oldest
docs||rustdoc|docs
docs||recipes in docs/|cargo_test -p doc-tests --doc
packages||packages for the registry|package
neighbours||beside axum and sqlx 0.8, rusqlite 0.32|outside
neighbours||rusqlite 0.43|newest
held||10 000 held locks|held
torture|redis valkey redis70 postgres postgres15 etcd faketime|torture: its own tests|cargo_test -p soak
torture||torture, on each kind of server|torture
END
}

# part NAME: its steps.
part() {
    steps | grep "^$1|" >"$logs/steps"
    n=0
    while IFS='|' read -r _ _ label command <&3; do
        n=$((n + 1))
        case $command in suite* | further* | cargo_test* | outside) name=tests-$1-$n ;; *) name=$1-$n ;; esac
        # shellcheck disable=SC2086 # several words
        step "$name" "$label" $command
    done 3<"$logs/steps"
}

first_tier() {
    step lockfile "Cargo.lock fits the manifests" cargo metadata --locked --format-version 1
    step fmt "formatting" cargo fmt --all -- --check --color never
    step log-target "one log target" log_target
    step clippy "clippy" lint
    step compile "compiling the tests" compile
    step doctests "examples in the documentation and README" cargo test --all-features --no-fail-fast --doc
    step servers "servers" got
    [ -s "$logs/programs" ] || return 0
    began_programs=$(date +%s)
    # They wait for most of their time.
    ARGUMENTS="--skip $EXTENDED" xargs -P "${FENCELOCK_TEST_AT_ONCE:-4}" -L 1 sh scripts/test.sh program <"$logs/programs" || :
    printf '%-46s %6s\n' "the test programs, side by side" "$(took $(($(date +%s) - began_programs)))"
    while read -r name _; do
        read -r status seconds <"$logs/$name.ended" || status=1 seconds=0
        judge "$name" "tests: ${name#test-}" "$status" "$seconds"
    done <"$logs/programs"
    step rows "every row of the suite reported" rows_reported
}

# program NAME FOLDER EXECUTABLE: a test program, as cargo runs it, with $ARGUMENTS. Its output goes to NAME.log, its exit code and seconds
# to NAME.ended.
program() {
    began=$(date +%s) status=0 name=$1 folder=$2
    # shellcheck disable=SC2086 # several words
    set -- "$3" $ARGUMENTS
    # Not every system has a limit.
    ! command -v timeout >/dev/null 2>&1 || set -- timeout --foreground --kill-after=30 "$FENCELOCK_TEST_PROGRAM_SECONDS" "$@"
    (cd "$folder" && CARGO_MANIFEST_DIR=$folder LD_LIBRARY_PATH=$libraries "$@") >"$logs/$name.log" 2>&1 </dev/null || status=$?
    case $status in 124 | 137) echo "It was stopped after $FENCELOCK_TEST_PROGRAM_SECONDS s." >>"$logs/$name.log" ;; esac
    echo "$status $(($(date +%s) - began))" >"$logs/$name.ended"
}

# Which tests of a crate are of the first tier is decided by their names alone: `make test` leaves out those with this, and the parts of
# `make test-all` run them.
EXTENDED=extended::

tier=${1:-first}
[ $# -eq 0 ] || shift
[ "$tier" != program ] || { program "$@"; exit; }
# shellcheck source=scripts/cargo.sh
. "$(dirname "$0")/cargo.sh"
case $tier in
first) wanted='redis-server postgresql faketime openssl redis postgres etcd' ;;
parts)
    steps | awk -F '|' '{ if (!($1 in label)) name[++n] = $1; else label[$1] = label[$1] "; "; label[$1] = label[$1] $3 }
        END { for (i = 1; i <= n; i++) printf "  %-13s %s\n", name[i], label[name[i]] }'
    exit
    ;;
all)
    parts=$(steps | cut -d '|' -f 1 | uniq | xargs)
    # shellcheck disable=SC2086 # several words, here and below
    [ $# -gt 0 ] || set -- $parts
    for part; do steps | grep -q "^$part|" || die "There is no part \"$part\". The parts: $parts."; done
    wanted=$(for part; do steps | sed -n "s/^$part|\([^|]*\)|.*/\1/p"; done | tr ' ' '\n' | sort -u | xargs)
    ;;
*) die "$0 takes nothing, \"all\" or \"parts\"." ;;
esac

began_all=$(date +%s)
cargo fmt --version >/dev/null 2>&1 || die "rustfmt is missing: run \`rustup component add rustfmt\`."
cargo clippy --version >/dev/null 2>&1 || die "clippy is missing: run \`rustup component add clippy\`."
# shellcheck disable=SC2086
[ -z "$wanted" ] || sh scripts/servers.sh check $wanted || exit 2
# Programs that scripts/servers.sh takes out of images, where nothing else has them.
roots=${FENCELOCK_TEST_ROOTS:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/fencelock/roots}
for root in "$roots"/*-programs; do PATH=$PATH:$root/programs; done

# Wherever an environment or a configuration puts it.
target=$(cargo metadata --no-deps --format-version 1 | sed -n 's/.*"target_directory":"\([^"]*\)".*/\1/p')
logs=${target:?cargo did not tell}/test-logs
rm -rf "$logs"
mkdir -p "$logs"
# Those that a program of a macro is linked to.
libraries=$(rustc --print target-libdir)${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
# A program that takes longer hangs; the limits of the tests themselves are far below.
: "${FENCELOCK_TEST_PROGRAM_SECONDS:=900}"
# The logs are read below, so they must look the same everywhere. `make matrix` reads the reports.
export PATH logs libraries FENCELOCK_TEST_PROGRAM_SECONDS CARGO_TERM_COLOR=never CARGO_TERM_QUIET=false CARGO_TERM_VERBOSE=false \
    FENCELOCK_CONFORMANCE_REPORTS="$target/conformance"
# What would run less.
unset FENCELOCK_URL FENCELOCK_TEST_ROWS
# What failed is said once more at the end: the logs above it are long.
passed=0 failed=0 ignored=0 failures=

# took SECONDS: 75 s as 1:15.
took() {
    printf '%d:%02d' $(($1 / 60)) $(($1 % 60))
}

# judge NAME LABEL STATUS SECONDS: counts what the log of that name shows, and says so in a line. A program that ended before it could
# report is a failure; so is one that ran no test, but for the unit tests of a crate, which need not have any.
judge() {
    name=$1 label=$2 status=$3 seconds=$4 log=$logs/$1.log
    case $name in *-it | *-suite) least=1 ;; test-*) least=0 ;; *) least=1 ;; esac
    case $name in test-* | tests-*) tests=yes ;; *) tests=no ;; esac
    # Steps that only may have tests say so too.
    if [ $tests = yes ] || grep -q '^test result: ' "$log"; then
        # shellcheck disable=SC2046 # three words
        set -- $(awk -v status="$status" -v least="$least" '
            /^test result: / {
                ran = 1
                for (i = 2; i <= NF; i++) count[$i] += $(i - 1)
            }
            END {
                p = count["passed;"]; f = count["failed;"]; n = count["ignored;"]
                if ((status != 0 || !ran || p + n < least) && f == 0) f = 1
                print p + 0, f + 0, n + 0
            }' "$log")
        passed=$((passed + $1)) failed=$((failed + $2)) ignored=$((ignored + $3)) bad=$2
        note="$1 passed, $2 failed, $3 ignored"
    elif [ "$status" -eq 0 ]; then
        passed=$((passed + 1)) note=ok bad=0
    else
        failed=$((failed + 1)) note=FAILED bad=1
    fi
    printf '%-46s %6s  %s\n' "$label" "$(took "$seconds")" "$note"
    [ "$bad" -ne 0 ] || return 0
    # What each failed test says first; then the list of their names.
    failures="$failures  $label: exit code $status; $log
$(awk '
        /^test result: / { left = 0; open = 0 }
        open && /^---- / { left = 12 }
        left && NF { print "    " substr($0, 1, 400); left-- }
        /^failures:$/ { open = 1; left = 40 }' "$log")
"
    echo "---- $label: exit code $status ----"
    tail -n 2000 "$log"
    echo "---- end of $label ----"
}

# step NAME LABEL COMMAND...
step() {
    step=$1 label=$2 began=$(date +%s)
    shift 2
    if "$@" >"$logs/$step.log" 2>&1 </dev/null; then status=0; else status=$?; fi
    judge "$step" "$label" "$status" $(($(date +%s) - began))
}

# Without --workspace, here and below: cargo takes the default members then. With the same features each time, or everything would be
# compiled again.
lint() {
    cargo clippy --all-features --all-targets "$@" -- -D warnings
}

# compile: the test programs, listed in $logs/programs as program() takes them: the longest first.
compile() {
    cargo test --no-run --all-features --message-format=json-render-diagnostics --lib --bins --test it --test suite >"$logs/programs.json" ||
        return
    sed -n 's/.*"reason":"compiler-artifact".*"manifest_path":"\([^"]*\)\/Cargo.toml".*"profile":{[^}]*"test":true}.*"executable":"\([^"]*\)".*/\1 \2/p' \
        "$logs/programs.json" | awk '{
            folder = $1; program = $2
            gsub(/.*\//, "", folder); gsub(/.*\/|-[0-9a-f]*$/, "", program)
            name = "test-" folder "-" program; gsub("_", "-", name)
            print (program == "suite" ? 1 : program == "it" ? 2 : 3), name, $0
        }' | sort | cut -d ' ' -f 2- >"$logs/programs"
}

# run_one CRATE PROGRAM ARGUMENTS...: a program that `make test` compiles too, with the same features, and its output.
run_one() (
    compile || exit
    line=$(grep "^test-$1-$2 " "$logs/programs") || { echo "$1 has no test program $2."; exit 1; }
    log=$logs/test-$1-$2
    shift 2
    # shellcheck disable=SC2086 # three words
    ARGUMENTS=$* sh scripts/test.sh program $line
    cat "$log.log"
    read -r status _ <"$log.ended"
    rm "$log.log"
    exit "$status"
)

# suite ROW...: those rows of the suite.
suite() (
    export FENCELOCK_TEST_ROWS="$*"
    run_one conformance-tests suite
)

# further CRATE...: tests that are not of the first tier.
further() {
    worst=0
    for crate; do run_one "$crate" it "$EXTENDED" || worst=$?; done
    return "$worst"
}

# cargo_test ARGUMENTS...: each program with the limit of program().
cargo_test() {
    limit=
    ! command -v timeout >/dev/null 2>&1 || limit="'timeout', '--foreground', '--kill-after=30', '$FENCELOCK_TEST_PROGRAM_SECONDS'"
    cargo --config "target.'cfg(all())'.runner = [$limit]" test "$@"
}

# got: waits for the servers, and prints what was got.
got() {
    wait "$getting" && status=0 || status=$?
    cat "$logs/servers.got"
    return "$status"
}

# Every event has the one target that users filter by.
log_target() {
    ! grep -rnE 'tracing::(trace|debug|info|warn|error)(_span)?!\(' --include='*.rs' -A1 lock-*/src fencelock*/src |
        awk '
            /tracing::[a-z_]+!\($/ { open = $0; next }
            open != "" { if ($0 !~ /target: "fencelock"/) { print open; bad = 1 } open = ""; next }
            /tracing::[a-z_]+!\(/ && !/target: "fencelock"/ { print; bad = 1 }
            END { exit !bad }'
}

# The suite on each backend has to come to its end.
rows_reported() {
    for row in memory 'memory, shared leases' sqlite 'Redis 8' 'PostgreSQL 17' 'etcd 3.5'; do
        grep -q "^$row: [1-9][0-9]* passed, .*; planted bugs " "$logs/test-conformance-tests-suite.log" ||
            { echo "The suite on $row did not report."; return 1; }
    done
}

# With all features of the workspace on, errors in what a user of a few compiles are not seen. The backends are without TLS here.
features() {
    cargo clippy --all-targets --no-default-features -- -D warnings || return
    for features in '' etcd macros memory postgres redis sqlite tower; do
        cargo clippy -p fencelock --no-default-features --features "$features" -- -D warnings || return
    done
}

oldest() {
    cargo "+$oldest" --version >/dev/null 2>&1 ||
        { echo "not judged: Rust $oldest is not installed: rustup toolchain install $oldest"; return; }
    cargo "+$oldest" check --all-features --all-targets --target-dir "$target/oldest"
}

docs() (
    export RUSTDOCFLAGS="${RUSTDOCFLAGS:-} -D warnings"
    cargo doc --all-features --no-deps && cargo doc --all-features --no-deps -p models -p soak
)

held() {
    cargo_test -p fencelock --all-features --bench held
}

torture() {
    cargo run -p soak -- "${FENCELOCK_TEST_SOAK_SECONDS:-60}"
}

package() {
    # A checkout under work may be packed too; one that is clean must be packed as it is. `make package` builds them too.
    if [ -z "$(git status --porcelain 2>/dev/null || echo none)" ]; then dirty=; else dirty=--allow-dirty; fi
    cargo package --workspace --exclude doc-tests --exclude lock-bench --exclude models --exclude soak --exclude test-servers --offline --no-verify $dirty || return
    # What people read who have only the package.
    for crate in "$target"/package/*.crate; do
        for file in README.md:400 LICENSE-MIT:1000 LICENSE-APACHE:10000; do
            packed=$(basename "$crate" .crate)
            size=$(tar -xzOf "$crate" "$packed/${file%:*}" | wc -c)
            [ "$size" -ge "${file#*:}" ] || { echo "$packed: ${file%:*} has $size bytes"; return 1; }
        done
    done
}

# A program of a user, and the tests of lock-sqlite as in that program: no member of the workspace, with a Cargo.lock of its own.
outside() {
    cargo_test --locked --manifest-path tools/outside/Cargo.toml --target-dir "$target/neighbours"
}

newest() {
    cargo check --locked --tests --manifest-path tools/newest/Cargo.toml --target-dir "$target/neighbours"
}

# Also what runs in the background.
trap 'trap "" TERM; kill -TERM 0; exit 130' HUP INT TERM

# The servers are got while there is enough to do without them.
# shellcheck disable=SC2086
{ [ -z "$wanted" ] || sh scripts/servers.sh $wanted; } >"$logs/servers.got" 2>&1 </dev/null &
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
grep -h '^10000 guards' "$logs"/held-*.log 2>/dev/null || :
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

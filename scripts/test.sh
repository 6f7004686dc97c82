#!/bin/sh
# Everything that a change has to pass, from a fresh clone on. Each step's output is kept in target/test-logs and shown
# if the step fails. All steps run, whatever the ones before them came to.
set -eu
. "$(dirname "$0")/setup.sh"

cargo fmt --version >/dev/null 2>&1 || die "rustfmt is missing: run \`rustup component add rustfmt\`."
cargo clippy --version >/dev/null 2>&1 || die "clippy is missing: run \`rustup component add clippy\`."

# Wherever an environment or a configuration puts it.
target=$(cargo metadata --no-deps --format-version 1 | sed -n 's/.*"target_directory":"\([^"]*\)".*/\1/p')
logs=${target:?cargo did not tell}/test-logs
rm -rf "$logs"
mkdir -p "$logs"

# The logs are read below, so they must look the same everywhere.
export CARGO_TERM_COLOR=never CARGO_TERM_QUIET=false CARGO_TERM_VERBOSE=false
unset FENCELOCK_URL
# `make matrix` reads them.
export FENCELOCK_CONFORMANCE_REPORTS="${target}/conformance"

# No program may keep the others from being run, and the whole from telling what was seen: scripts/bounded.sh.
FENCELOCK_TEST_UNTIL=$(($(date +%s) + ${FENCELOCK_TEST_MINUTES:-80} * 60))
export FENCELOCK_TEST_UNTIL

passed=0
failed=0
ignored=0
# What failed, a line each, said once more at the end: the logs above it are long.
failures=

# step NAME LABEL COMMAND...: runs it and counts it as one, or as many tests as its log reports.
step() {
    name=$1 label=$2
    shift 2
    printf '%-44s ' "$label"
    began=$(date +%s)
    if "$@" >"$logs/$name.log" 2>&1 </dev/null; then status=0; else status=$?; fi
    took=$(($(date +%s) - began))
    case $name in
    tests* | doctests)
        # A run that ended before it could report is a failure; so is one that found no test.
        counts=$(awk -v status="$status" '
            /^test result: / {
                for (i = 2; i <= NF; i++) {
                    if ($i == "passed;") p += $(i - 1)
                    if ($i == "failed;") f += $(i - 1)
                    if ($i == "ignored;") n += $(i - 1)
                }
            }
            END { if ((status != 0 || p == 0) && f == 0) f = 1; print p + 0, f + 0, n + 0 }' "$logs/$name.log")
        set -- $counts
        passed=$((passed + $1)) failed=$((failed + $2)) ignored=$((ignored + $3))
        note="$1 passed, $2 failed, $3 ignored"
        ok=$([ "$2" -eq 0 ] && echo yes || echo no)
        ;;
    *)
        if [ "$status" -eq 0 ]; then
            passed=$((passed + 1)) note=ok ok=yes
        else
            failed=$((failed + 1)) note=FAILED ok=no
        fi
        ;;
    esac
    echo "$note ($took s)"
    if [ "$ok" = no ]; then
        failures="$failures  $label: exit code $status
$(awk '
            /^test result: / { left = 0 }
            left && NF { print "    " $0; left-- }
            /^failures:$/ { print "    " program; left = 40 }
            / (Running|Doc-tests) / { program = $0 }' "$logs/$name.log")
"
        echo "---- $label: exit code $status; $logs/$name.log ----"
        cat "$logs/$name.log"
        echo "---- end of $label ----"
    fi
}

# The servers are got while there is enough to do without them. One after the other: apt-get lets only one in.
for name in redis postgres nats images; do
    sh "scripts/$name.sh" >"$logs/$name.got" 2>&1 </dev/null && echo 0 >"$logs/$name.status" || echo 1 >"$logs/$name.status"
done &
getting=$!

# got NAME: waits for the servers, and says what came of that script.
got() {
    wait "$getting" || :
    cat "$logs/$1.got"
    return "$(cat "$logs/$1.status")"
}

# Without --workspace, here and below: cargo takes the default members then, which are all but lock-bench. What that
# measures against is compiled for `make bench` alone.
lint() {
    cargo clippy --all-targets "$@" -- -D warnings
}

docs() {
    RUSTDOCFLAGS="${RUSTDOCFLAGS:-} -D warnings" cargo doc --all-features --no-deps
}

# With all features of the workspace on, nobody sees what a user of a few compiles. The backends are without TLS here.
lint_features() {
    for features in '' etcd macros memory postgres redis sqlite tower; do
        cargo clippy -p fencelock --no-default-features --features "$features" -- -D warnings || return
    done
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

run_tests() {
    cargo --config "target.'cfg(all())'.runner = ['sh', '$PWD/scripts/bounded.sh']" test "$@"
}

# lock-core under a checker of schedules. Apart: everything is compiled with another cfg.
schedules() {
    RUSTFLAGS="${RUSTFLAGS:-} --cfg shuttle" run_tests -p lock-core --lib --target-dir "$target/shuttle" schedules:: -- --show-output
}

lint_schedules() {
    RUSTFLAGS="${RUSTFLAGS:-} --cfg shuttle" cargo clippy -p lock-core --lib --tests --target-dir "$target/shuttle" -- -D warnings
}

package() {
    # A checkout under work may be packed too; one that is clean must be packed as it is. `make package` builds them too.
    if [ -z "$(git status --porcelain 2>/dev/null || echo none)" ]; then dirty=; else dirty=--allow-dirty; fi
    cargo package --workspace --exclude lock-bench --exclude models --exclude recorded-traces --offline --no-verify $dirty || return
    # What people read who have only the package.
    for crate in "$target"/package/*.crate; do
        for file in README.md:400 LICENSE-MIT:1000 LICENSE-APACHE:10000; do
            name=$(basename "$crate" .crate)
            size=$(tar -xzOf "$crate" "$name/${file%:*}" | wc -c)
            [ "$size" -ge "${file#*:}" ] || { echo "$name: ${file%:*} has $size bytes"; return 1; }
        done
    done
}

echo "Everything that a change has to pass; some minutes the first time."
step lockfile "Cargo.lock fits the manifests" cargo metadata --locked --format-version 1
step fmt "formatting" cargo fmt --all -- --check --color never
step log-target "one log target" log_target
step clippy-none "clippy, no features" lint --no-default-features
step clippy-all "clippy, all features" lint --all-features
step clippy-features "clippy, each feature of fencelock" lint_features
step docs "documentation" docs
step redis "a redis-server" got redis
step postgres "a PostgreSQL, a PgBouncer and faketime" got postgres
step nats "a nats-server" got nats
step images "images of the servers" got images
# Not the examples in the documentation, which have a step of their own.
step tests "unit, integration and conformance tests" run_tests --all-features --tests --no-fail-fast
step tests-default "fencelock with its default features" run_tests -p fencelock --lib
step tests-none "fencelock with no features" run_tests -p fencelock --no-default-features --lib
step tests-schedules "lock-core under a checker of schedules" schedules
step clippy-schedules "clippy, with that checker" lint_schedules
step doctests "examples in the documentation and README" run_tests --all-features --no-fail-fast --doc
step neighbours "beside other users of SQLite" sh scripts/neighbours.sh
step held "10 000 held locks" run_tests --all-features --bench held
step demo "the demonstration" sh scripts/demo.sh
step package "packages for the registry" package

echo
echo "Servers:"
grep -h '^server: ' "$logs/tests.log" | sort -u | sed 's/^server: /  /'
echo
echo "Conformance, per backend:"
awk '
    function reasons(   r) { for (r in why) print "    " why[r] " not applicable: " r; split("", why) }
    / passed, .* not applicable; planted bugs / { reasons(); print "  " $0; left = 12; next }
    left && /^  not (applicable|plantable here): / {
        sub(/^  not (applicable|plantable here): /, "")
        why[substr($0, index($0, ": ") + 2)]++
        next
    }
    left && /^  (caught:|  )/ { next }
    left && /^  ESCAPED:/ { print "  " $0; next }
    left && /^  / { if (--left) print "  " $0; else left = 1; next }
    left { reasons(); left = 0 }
    END { reasons() }
' "$logs/tests.log"
# Every program that runs the suite has to come to its end.
for suite in $(grep -lE 'conformance_tests::run[a-z_]*\(' conformance-tests/tests/*.rs conformance-tests/examples/*.rs); do
    suite=${suite#conformance-tests/}
    awk -v suite="$suite" '
        / Running / { here = index($0, " " suite " ") }
        here && / passed, .*; planted bugs / { reported = 1 }
        END { exit !reported }' "$logs/tests.log" && continue
    failures="$failures  $suite: the suite did not report
"
    failed=$((failed + 1))
done

echo
echo "Schedules explored:"
sed -n 's/^schedules::/  /p' "$logs/tests-schedules.log"

echo
echo "Ignored, other than what is not applicable to a backend:"
cat "$logs"/tests*.log "$logs/doctests.log" | awk '
    /^test .* \.\.\. ignored/ && !/ignored \(not applicable: / { print "  " substr($0, 6); some = 1 }
    END { if (!some) print "  none" }'
echo
grep -h '^10000 guards' "$logs/held.log" || true
echo
[ "$failed" -eq 0 ] || printf 'Failed:\n%s\n' "$failures"
echo "$passed passed, $failed failed, $ignored skipped"
[ "$failed" -eq 0 ]

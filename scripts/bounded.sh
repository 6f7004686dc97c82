#!/bin/sh
# What cargo starts a test program with: stops it when it takes longer than any of them may, or when the time of the whole
# run is up ($FENCELOCK_TEST_UNTIL, seconds since 1970), so that the run says which one it was.
set -eu

limit=900
left=$((FENCELOCK_TEST_UNTIL - $(date +%s)))
[ "$left" -lt "$limit" ] || left=$limit
if [ "$left" -le 0 ]; then
    echo "$1 was not run: the time of the whole run is up."
    exit 124
fi
# Not every system has it.
command -v timeout >/dev/null 2>&1 || exec "$@"
status=0
# In the foreground, so that Ctrl-C reaches the program too.
timeout --foreground --kill-after=30 "$left" "$@" || status=$?
case $status in
124 | 137) echo "$1 was stopped after $left s." ;;
esac
exit "$status"

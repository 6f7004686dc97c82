# Sourced by the other scripts: goes to the top folder and checks that what they need is there. POSIX sh.

cd "$(dirname "$0")/.."

die() {
    printf '%s\n' "$@" >&2
    exit 2
}

# rustup writes to a file that a shell reads only when it starts.
command -v cargo >/dev/null 2>&1 || PATH="${CARGO_HOME:-${HOME:-/root}/.cargo}/bin:$PATH"
command -v cargo >/dev/null 2>&1 ||
    die "cargo was not found: install Rust from https://rustup.rs, or put its bin folder on the PATH."

wanted=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
found=$(cargo --version | awk '{ print $2 }')
awk -v found="$found" -v wanted="$wanted" 'BEGIN {
    split(found, f, /[.-]/); split(wanted, w, /[.-]/)
    exit !(f[1] > w[1] || (f[1] == w[1] && f[2] + 0 >= w[2] + 0))
}' || die "Rust $wanted or later is needed, this is $found: run \`rustup update\`."

# SQLite comes as C source with one of the crates.
[ -n "${CC:-}" ] || command -v cc >/dev/null 2>&1 ||
    die "A C compiler was not found: install one (Debian: apt-get install gcc libc6-dev), or set CC."

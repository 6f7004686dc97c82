#!/bin/sh
# Gets the servers that the tests run against, under the names that the tests ask for.
#
#   scripts/servers.sh [NAME]...         images: redis, valkey, redis70, postgres, postgres15, etcd;
#                                        programs: redis-server, postgresql, pgbouncer, faketime, openssl; all of them by default
#   scripts/servers.sh check [NAME]...   says within seconds what is missing and could not be got, and gets nothing
#
# With a container engine: images. What is there stays; what a registry has is pulled; the rest is made from Debian
# packages. Without an engine: nothing for servers that are on the PATH in the version that is wanted; for root, the same
# root file systems, unpacked for chroot. Making them takes root and apt-get. Nothing is got for a server that
# FENCELOCK_TEST_..._URL names.
set -eu
cd "$(dirname "$0")/.."

say() { printf '%s\n' "$@"; }

die() {
    say "$@" >&2
    exit 1
}

# server NAME: what to make and what to call it. Images from Debian take the same arguments as the official ones.
server() {
    entrypoint= folder=/data program=redis-server folders=
    case $1 in
    redis)
        image=${FENCELOCK_TEST_REDIS_IMAGE:-redis:8} suite=trixie package=redis-server user=redis
        version='Redis server v=8.' url=${FENCELOCK_TEST_REDIS_URL:-}
        ;;
    redis70)
        image=${FENCELOCK_TEST_REDIS70_IMAGE:-redis:7.0} suite=bookworm package=redis-server user=redis
        version='Redis server v=7.0.' url=${FENCELOCK_TEST_REDIS70_URL:-}
        ;;
    valkey)
        image=${FENCELOCK_TEST_VALKEY_IMAGE:-valkey/valkey:8.1} suite=trixie package=valkey-server user=valkey
        program=valkey-server version='Valkey server v=8.1.' url=${FENCELOCK_TEST_VALKEY_URL:-}
        ;;
    postgres | postgres15)
        major=17 suite=trixie image=${FENCELOCK_TEST_POSTGRES_IMAGE:-postgres:17} url=${FENCELOCK_TEST_POSTGRES_URL:-}
        [ "$1" = postgres ] || {
            major=15 suite=bookworm image=${FENCELOCK_TEST_POSTGRES15_IMAGE:-postgres:15}
            url=${FENCELOCK_TEST_POSTGRES15_URL:-}
        }
        package=postgresql-$major user=postgres folder=/var/lib/postgresql/data entrypoint=scripts/servers-postgres.sh
        program=postgres folders=:/usr/lib/postgresql/$major/bin version="postgres (PostgreSQL) $major."
        ;;
    etcd)
        image=${FENCELOCK_TEST_ETCD_IMAGE:-quay.io/coreos/etcd:v3.5.16} suite=trixie package=etcd-server user=etcd
        folder=/var/lib/etcd program=etcd version='etcd Version: 3.5.' url=${FENCELOCK_TEST_ETCD_URL:-}
        ;;
    *) die "$1 is no server that the tests know: redis, redis70, valkey, postgres, postgres15, etcd." ;;
    esac
    root=$roots/$(say "$image" | tr '/:' '--')
}

# allowed WAY: whether the tests may use it.
allowed() {
    [ "${FENCELOCK_TEST_SERVERS:-$1}" = "$1" ]
}

# Whether the engine answers, after it was started if that is all it lacks.
engine() {
    allowed container || return 1
    command -v docker >/dev/null 2>&1 || return 1
    docker version >/dev/null 2>&1 && return 0
    # An engine elsewhere is not ours to start, nor is one that somebody else started and that is on its way.
    [ -z "${DOCKER_HOST:-}" ] && [ "$(id -u)" -eq 0 ] && command -v dockerd >/dev/null 2>&1 || return 1
    log=${TMPDIR:-/tmp}/fencelock-dockerd.log
    if [ -s /var/run/docker.pid ] && kill -0 "$(cat /var/run/docker.pid)" 2>/dev/null; then
        say "The container engine is starting."
    else
        say "Starting the container engine; it writes to $log."
        nohup dockerd >"$log" 2>&1 </dev/null &
    fi
    for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
        docker version >/dev/null 2>&1 && return 0
        sleep 1
    done
    say "The container engine does not answer: see $log."
    return 1
}

# on_path: whether the program is there in the version that is wanted, and where.
on_path() {
    found=$(PATH=$PATH$folders && command -v "$program") || return 1
    case $("$found" --version 2>/dev/null) in *"$version"*) ;; *) return 1 ;; esac
}

# pulled: whether a registry had the image. One that did not answer is not asked again.
pulled() {
    case $image in */*.*/* | *.*/*) registry=${image%%/*} ;; *) registry=default ;; esac
    case " $silent " in *" $registry "*) return 1 ;; esac
    docker pull --quiet "$image" >"$work/pull.log" 2>&1 && return 0
    grep -qiE 'not found|denied|unknown|unauthorized' "$work/pull.log" || silent="$silent $registry"
    return 1
}

# Whether this could install packages.
can_install() {
    [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null 2>&1
}

# is_program NAME: whether that is a package of programs that the tests of single crates start from the PATH, and not an image.
is_program() {
    case $1 in faketime | openssl | pgbouncer | postgresql | redis-server) return 0 ;; esac
    return 1
}

# lacks PACKAGE: whether a program of it is missing. Debian keeps the programs of each version of PostgreSQL in a folder of their own, and
# pgbouncer where root alone looks.
lacks() (
    PATH=$PATH:/usr/sbin
    for folder in /usr/lib/postgresql/*/bin; do PATH=$PATH:$folder; done
    [ "$1" != postgresql ] || set -- initdb pg_basebackup pg_dump postgres
    for program; do command -v "$program" >/dev/null 2>&1 || exit 0; done
    exit 1
)

# Whether the engine answers, within seconds where that can be bounded.
docker_answers() {
    command -v docker >/dev/null 2>&1 || return 1
    if command -v timeout >/dev/null 2>&1; then timeout 8 docker version; else docker version; fi >/dev/null 2>&1
}

# has_image PACKAGE: whether its programs can be taken out of an image, which sets what server() does.
has_image() {
    case $1 in
    redis-server) server redis ;;
    postgresql) server postgres ;;
    *) return 1 ;;
    esac
    # Beside what is unpacked for chroot.
    root=$root-programs
    allowed container && docker_answers
}

# take PACKAGE: the programs of its image, in a folder whose programs/ is for the PATH: scripts that start each with the libraries of the image.
take() {
    has_image "$1" || return 1
    [ ! -e "$root/programs" ] || return 0
    say "Taking the programs of $1 out of $image."
    docker image inspect "$image" >/dev/null 2>&1 || pulled || die "$image is not here, and no registry has it."
    container=$(docker create "$image")
    docker export "$container" >"$work/root.tar"
    docker rm "$container" >/dev/null
    mkdir -p "$roots"
    unpacked=$(mktemp -d "$roots/.unpacking.XXXXXX")
    tar -C "$unpacked" --no-same-owner --exclude='dev/*' -xf "$work/root.tar"
    folder=usr/bin
    [ "$1" != postgresql ] || folder=usr/lib/postgresql/$major/bin
    [ -e "$unpacked/$folder/$program" ] || folder=usr/local/bin
    # PostgreSQL finds what belongs to it from where its programs are, so the scripts take their place.
    mv "$unpacked/$folder" "$unpacked/$folder.real"
    mkdir "$unpacked/$folder"
    for real in "$unpacked/$folder.real"/*; do
        name=${real##*/}
        cat >"$unpacked/$folder/$name" <<END
#!/bin/sh
for loader in '$root'/usr/lib/*-linux-gnu/ld-linux*.so.*; do
    exec "\$loader" --argv0 '$root/$folder/$name' --library-path "\${loader%/*}" '$root/$folder.real/$name' "\$@"
done
END
        chmod 755 "$unpacked/$folder/$name"
    done
    mkdir "$unpacked/programs"
    for name in "$program" initdb pg_basebackup pg_dump; do
        [ ! -e "$unpacked/$folder/$name" ] || printf '#!/bin/sh\nexec %s "$@"\n' "'$root/$folder/$name'" >"$unpacked/programs/$name"
    done
    chmod 755 "$unpacked/programs"/*
    mv "$unpacked" "$root"
    unpacked=
}

# install PACKAGE...: those that are missing, from Debian's packages, or else out of an image.
install() {
    packages=
    for package; do
        lacks "$package" || continue
        can_install || ! take "$package" || continue
        packages="$packages $package"
    done
    [ -n "$packages" ] || return 0
    can_install || die "Missing on the PATH:$packages. Install it (Debian, Ubuntu: apt-get install$packages)."
    say "Installing$packages."
    # Or else the package makes a database of its own.
    no_cluster=/etc/postgresql-common/createcluster.d/fencelock-tests.conf
    mkdir -p "${no_cluster%/*}"
    echo "create_main_cluster = false" >"$no_cluster"
    status=0
    # The run level keeps the packages from starting services: the tests start what they need.
    # shellcheck disable=SC2086 # several words
    {
        apt-get update && RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install --no-install-recommends --yes $packages
    } >"$work/apt.log" 2>&1 </dev/null || status=$?
    rm -f "$no_cluster"
    [ "$status" -eq 0 ] || { cat "$work/apt.log"; die "These could not be installed:$packages."; }
}

# check NAME...: what could not be got here.
check() {
    missing=
    docker=no
    ! allowed container || ! docker_answers || docker=yes
    for name; do
        ! can_install || continue
        if is_program "$name"; then
            ! lacks "$name" || { [ "$docker" = yes ] && has_image "$name"; } || missing="$missing
  $name: not on the PATH, and only root can install it (Debian, Ubuntu: apt-get install $name)"
            continue
        fi
        server "$name"
        # An image is here, or is pulled.
        [ -z "$url" ] && [ "$docker" = no ] || continue
        ! allowed path || ! on_path || continue
        missing="$missing
  $image: there is no container engine that answers, and $program of that version is not on the PATH"
    done
    [ -z "$missing" ] || die "The tests need servers, and these could not be got here:$missing" \
        "Start the container engine (Docker), or run this as root where there is apt-get, or install what is named above, or name servers that" \
        "run already: FENCELOCK_TEST_REDIS_URL and the like, see CONTRIBUTING.md."
}

# May be called often; looks once.
needs_builder() {
    [ -z "${builder:-}" ] || return 0
    if ! command -v mmdebstrap >/dev/null 2>&1 || ! [ -e "$keyring" ]; then
        can_install ||
            die "$image is not here, no registry has it, and making it takes mmdebstrap and debian-archive-keyring." \
                "Install these, or run this as root where there is apt-get, or start a server by hand and name it:" \
                "see FENCELOCK_TEST_..._URL in CONTRIBUTING.md."
        say "Installing mmdebstrap."
        {
            apt-get update && apt-get install --yes --no-install-recommends mmdebstrap debian-archive-keyring
        } >"$work/apt.log" 2>&1 </dev/null || { cat "$work/apt.log"; die "mmdebstrap could not be installed."; }
    fi
    builder=yes
}

# build: the root file system as $work/root.tar.
build() {
    set -- --variant=minbase --keyring="$keyring" --include="$package" \
        --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
        --dpkgopt='path-exclude=/usr/share/locale/*' \
        --customize-hook="mkdir -p \"\$1$folder\" && chroot \"\$1\" chown $user: $folder"
    # Otherwise the package makes a database of its own.
    [ "$program" != postgres ] || set -- "$@" --essential-hook='mkdir -p "$1/etc/postgresql-common" &&
        echo "create_main_cluster = false" >"$1/etc/postgresql-common/createcluster.conf"'
    [ -z "$entrypoint" ] || set -- "$@" \
        --customize-hook="upload $entrypoint /usr/local/bin/docker-entrypoint.sh" \
        --customize-hook='chmod 755 "$1/usr/local/bin/docker-entrypoint.sh"'
    # Made once, as that takes longer than most tests. Where dynamic shared memory comes from is looked up here and not there.
    [ -z "$entrypoint" ] || set -- "$@" \
        --customize-hook="chroot \"\$1\" setpriv --reuid=postgres --regid=postgres --clear-groups \
            env PATH=/usr/lib/postgresql/$major/bin:/usr/bin:/bin \
            initdb --pgdata=/tmp/made --username=postgres --auth=trust --no-sync" \
        --customize-hook='sed -i "s/^dynamic_shared_memory_type = [a-z]*/dynamic_shared_memory_type = posix/" \
            "$1/tmp/made/postgresql.conf"' \
        --customize-hook='mkdir -p "$1/usr/local/share/postgresql" &&
            tar -C "$1/tmp/made" -cf "$1/usr/local/share/postgresql/made.tar" . && rm -r "$1/tmp/made"'
    mmdebstrap "$@" "$suite" "$work/root.tar" >"$work/build.log" 2>&1 </dev/null ||
        { cat "$work/build.log"; die "$image could not be made from Debian packages."; }
}

import() {
    set -- --message "$package of Debian $suite" --change "WORKDIR $folder"
    case $package in
    # Its entrypoint begins as root and goes on as somebody else.
    postgresql-*)
        set -- "$@" --change 'ENTRYPOINT ["docker-entrypoint.sh"]' --change 'CMD ["postgres"]' \
            --change "ENV PGDATA=$folder PATH=/usr/lib/postgresql/$major/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        ;;
    etcd-server) set -- "$@" --change "USER $user" --change 'CMD ["etcd"]' ;;
    # Without the option it would talk to nobody outside the container.
    *) set -- "$@" --change "USER $user" --change "CMD [\"$package\", \"--protected-mode\", \"no\"]" ;;
    esac
    docker import "$@" "$work/root.tar" "$image" >/dev/null
}

unpack() {
    mkdir -p "$roots"
    unpacked=$(mktemp -d "$roots/.unpacking.XXXXXX")
    tar -C "$unpacked" --numeric-owner -xpf "$work/root.tar"
    chmod 755 "$unpacked"
    # Somebody else may have been faster.
    if [ -e "$root" ]; then rm -rf "$unpacked"; else mv "$unpacked" "$root"; fi
    unpacked=
}

checks=no
[ "${1:-}" != check ] || { checks=yes; shift; }
[ $# -gt 0 ] || set -- redis valkey redis70 postgres postgres15 etcd redis-server postgresql pgbouncer faketime openssl
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
roots=${FENCELOCK_TEST_ROOTS:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/fencelock/roots}
silent=
unpacked=
work=$(mktemp -d)
trap 'rm -rf "$work" ${unpacked:+"$unpacked"}' EXIT
trap 'exit 130' HUP INT TERM

[ "$checks" = no ] || { check "$@"; exit; }

way=
for name; do is_program "$name" || way=root; done
[ -z "$way" ] || ! engine || way=image
missing=
wanted=

for name; do
    if is_program "$name"; then
        wanted="$wanted $name"
        continue
    fi
    server "$name"
    began=$(date +%s)
    if [ -n "$url" ]; then
        say "$image: not needed, the environment names a server"
        continue
    fi
    if [ $way = image ]; then
        if docker image inspect "$image" >/dev/null 2>&1; then
            say "$image: here"
            continue
        fi
        if pulled; then
            say "$image: pulled ($(($(date +%s) - began)) s)"
            continue
        fi
    elif allowed chroot && [ "$(id -u)" -eq 0 ] && [ -d "$root" ]; then
        say "$image: here, in $root"
        continue
    elif allowed path && on_path; then
        say "$image: not needed, $found is of that version"
        continue
    elif ! allowed chroot || [ "$(id -u)" -ne 0 ]; then
        say "$image: missing; $program of that version is not on the PATH"
        missing="$missing $program"
        continue
    fi
    needs_builder
    build
    if [ $way = image ]; then import; else unpack; fi
    say "$image: made from $package of Debian $suite ($(($(date +%s) - began)) s)"
done

# shellcheck disable=SC2086 # several words
install $wanted

[ -z "$missing" ] ||
    die "There is no container engine that answers, and without one servers run under chroot, which takes root, or from" \
        "the PATH. Start the engine, or run this as root, or install:$missing. Or name servers that run already: see" \
        "FENCELOCK_TEST_..._URL in CONTRIBUTING.md."

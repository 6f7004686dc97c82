#!/bin/sh
# Gets the servers that the tests run against, under the names that the tests ask for.
#
#   scripts/servers.sh [NAME]...         images: redis, redis70, valkey, postgres, postgres15, etcd;
#                                        programs: redis-server, postgresql, pgbouncer, faketime, openssl; all of them by default
#   scripts/servers.sh check [NAME]...   says within seconds what is missing and could not be got, and gets nothing
#
# With a container engine: images. What is there stays; what a registry has is pulled; the rest is made from Debian packages, which takes
# root and apt-get. Without an engine: servers on the PATH in the version that is wanted; root installs them where apt-get has that version.
# Nothing is got for a server that FENCELOCK_TEST_..._URL names.
set -eu
cd "$(dirname "$0")/.."

# say LINE...: unless this only checks.
say() { [ $checks = yes ] || printf '%s\n' "$@"; }

die() {
    printf '%s\n' "$@" >&2
    exit 1
}

# allowed WAY: whether the tests may use it.
allowed() { [ "${FENCELOCK_TEST_SERVERS:-$1}" = "$1" ]; }

has() { command -v "$1" >/dev/null 2>&1; }

can_install() { [ "$(id -u)" -eq 0 ] && has apt-get; }

# apt PACKAGE...: installs them, without services and databases of their own: the tests start what they need.
apt() {
    say "Installing $*."
    no_cluster=/etc/postgresql-common/createcluster.d/fencelock-tests.conf
    mkdir -p "${no_cluster%/*}"
    echo "create_main_cluster = false" >"$no_cluster"
    { apt-get update && RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install --no-install-recommends --yes "$@"; } \
        >"$work/apt.log" 2>&1 </dev/null && status=0 || status=$?
    rm -f "$no_cluster"
    [ "$status" -eq 0 ] || { cat "$work/apt.log"; die "These could not be installed: $*."; }
}

# about NAME: sets what is known of it. Images from Debian take the same arguments as the official ones.
about() {
    case $1 in
    redis) set -- REDIS redis:8 trixie redis-server 'Redis server v=8.' ;;
    redis70) set -- REDIS70 redis:7.0 bookworm redis-server 'Redis server v=7.0.' ;;
    valkey) set -- VALKEY valkey/valkey:8.1 trixie valkey-server 'Valkey server v=8.1.' ;;
    postgres) set -- POSTGRES postgres:17 trixie postgresql-17 'postgres (PostgreSQL) 17.' ;;
    postgres15) set -- POSTGRES15 postgres:15 bookworm postgresql-15 'postgres (PostgreSQL) 15.' ;;
    etcd) set -- ETCD quay.io/coreos/etcd:v3.5.16 trixie etcd-server 'etcd Version: 3.5.' ;;
    *) die "$1 is no server that the tests know: redis, redis70, valkey, postgres, postgres15, etcd." ;;
    esac
    image='' url=''
    eval "image=\${FENCELOCK_TEST_$1_IMAGE:-$2} url=\${FENCELOCK_TEST_$1_URL:-}"
    suite=$3 package=$4 version=$5 server=$4 user=${4%-server} folder=/data bin=/usr/bin
    case $4 in
    postgresql-*) server=postgres user=postgres folder=/var/lib/postgresql/data bin=/usr/lib/postgresql/${4#*-}/bin ;;
    etcd-server) server=etcd folder=/var/lib/etcd ;;
    esac
    root=$roots/$(echo "$image" | tr '/:' '--')-programs
}

# Whether the engine answers, within seconds where that can be bounded.
answers() {
    allowed container && has docker || return 1
    if has timeout; then timeout 8 docker version; else docker version; fi >/dev/null 2>&1
}

# The same, after it was started if that is all it lacks. One that is elsewhere, or on its way, is not started.
engine() {
    ! answers || return 0
    [ $checks = no ] && allowed container && [ -z "${DOCKER_HOST:-}" ] && [ "$(id -u)" -eq 0 ] && has dockerd || return 1
    log=${TMPDIR:-/tmp}/fencelock-dockerd.log
    if ! kill -0 "$(cat /var/run/docker.pid 2>/dev/null)" 2>/dev/null; then
        say "Starting the container engine; it writes to $log."
        nohup dockerd >"$log" 2>&1 </dev/null &
    fi
    for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
        ! answers || return 0
        sleep 1
    done
    say "The container engine does not answer: see $log."
    return 1
}

# on_path: whether the program is there in the version that is wanted.
on_path() {
    case $(PATH=$PATH:$bin "$server" --version 2>/dev/null) in *"$version"*) ;; *) return 1 ;; esac
}

# here: whether the engine has the image, or can pull it. A registry that did not answer is not asked again.
here() {
    ! docker image inspect "$image" >/dev/null 2>&1 || return 0
    case ${image%%/*} in *.*) registry=${image%%/*} ;; *) registry=default ;; esac
    case $silent in *" $registry "*) return 1 ;; esac
    ! docker pull --quiet "$image" >"$work/pull.log" 2>&1 || return 0
    grep -qiE 'not found|denied|unknown|unauthorized' "$work/pull.log" || silent="$silent $registry "
    return 1
}

# lacks PACKAGE: whether a program of it is missing. Debian keeps the programs of each PostgreSQL in a folder of their own, and pgbouncer
# where root alone looks.
lacks() (
    PATH=$PATH:/usr/sbin
    for folder in /usr/lib/postgresql/*/bin; do PATH=$PATH:$folder; done
    [ "$1" != postgresql ] || set -- initdb pg_basebackup pg_dump postgres
    for program; do has "$program" || exit 0; done
    exit 1
)

# in_image PACKAGE: whether its programs can be taken out of an image.
in_image() {
    case $1 in
    redis-server) about redis ;;
    postgresql) about postgres ;;
    *) return 1 ;;
    esac
    answers
}

# take_out PROGRAM...: the file system of the image in $root, with these programs for the PATH in $root/programs.
take_out() {
    container=$(docker create "$image")
    docker export "$container" >"$work/root.tar"
    docker rm "$container" >/dev/null
    mkdir -p "$roots"
    unpacked=$(mktemp -d "$roots/.unpacking.XXXXXX")
    # Only root can make devices.
    tar -C "$unpacked" --numeric-owner --exclude='dev/*' -xpf "$work/root.tar"
    chmod 755 "$unpacked"
    (
        cd "$unpacked"
        wrap "$@"
    )
    # Another run may have been faster.
    if [ -e "$root" ]; then rm -rf "$unpacked"; else mv "$unpacked" "$root"; fi
    unpacked=
}

# wrap PROGRAM...: in place of the programs, scripts that start each with the libraries of its image; in programs/, for the PATH, the named
# ones. PostgreSQL finds what belongs to it from where its programs are.
wrap() {
    folder=${bin#/}
    [ -e "$folder/$1" ] || folder=usr/local/bin
    mv "$folder" "$folder.real"
    mkdir "$folder" programs
    for real in "$folder.real"/*; do
        name=${real##*/}
        cat >"$folder/$name" <<END
#!/bin/sh
for loader in '$root'/usr/lib/*-linux-gnu/ld-linux*.so.*; do
    exec "\$loader" --argv0 '$root/$folder/$name' --library-path "\${loader%/*}" '$root/$real' "\$@"
done
END
        case " $* " in *" $name "*) printf '#!/bin/sh\nexec %s "$@"\n' "'$root/$folder/$name'" >"programs/$name" ;; esac
    done
    chmod 755 "$folder"/* programs/*
}

# build: the image from Debian packages.
build() {
    keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    if ! has mmdebstrap || [ ! -e "$keyring" ]; then
        can_install ||
            die "$image is not here, no registry has it, and making it takes mmdebstrap and debian-archive-keyring: install these," \
                "or name a server that runs already, see FENCELOCK_TEST_..._URL in CONTRIBUTING.md."
        apt mmdebstrap debian-archive-keyring
    fi
    set -- --variant=minbase --keyring="$keyring" --include="$package,libeatmydata1" --dpkgopt='path-exclude=/usr/share/doc/*' \
        --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
        --customize-hook="mkdir -p \"\$1$folder\" && chroot \"\$1\" chown $user: $folder"
    # The database is made here, as that takes longer than most tests; where dynamic shared memory comes from would be looked up here and
    # not where it runs. Otherwise the package would make a database of its own.
    [ "$server" != postgres ] || set -- "$@" \
        --essential-hook="mkdir -p \"\$1/etc/postgresql-common\" &&
            echo 'create_main_cluster = false' >\"\$1/etc/postgresql-common/createcluster.conf\"" \
        --customize-hook="chroot \"\$1\" setpriv --reuid=postgres --regid=postgres --clear-groups \
            $bin/initdb --pgdata=$folder --username=postgres --auth=trust --no-sync" \
        --customize-hook="cd \"\$1$folder\" && echo 'host all all all trust' >>pg_hba.conf &&
            printf '%s\n' \"listen_addresses = '*'\" \"unix_socket_directories = '/tmp'\" dynamic_shared_memory_type=posix >>postgresql.conf"
    mmdebstrap "$@" "$suite" "$work/root.tar" >"$work/build.log" 2>&1 </dev/null ||
        { cat "$work/build.log"; die "$image could not be made from Debian packages."; }
    # Tests end processes, not the machine: what a server has written needs no disk, and one that is busy delays nothing.
    # Without the option, Redis would talk to nobody outside the container.
    case $folder in /data) command="[\"$server\", \"--protected-mode\", \"no\"]" ;; *) command="[\"$server\"]" ;; esac
    docker import --message "$package of Debian $suite" --change "WORKDIR $folder" --change "USER $user" --change "CMD $command" \
        --change "ENV PGDATA=$folder LD_PRELOAD=libeatmydata.so PATH=$bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" \
        "$work/root.tar" "$image" >/dev/null
}

# get NAME: an image, or a server on the PATH. With $checks: only whether it could be got.
get() {
    about "$1"
    if [ -n "$url" ]; then
        say "$image: not needed, the environment names a server"
    elif [ $way = image ]; then
        how=here
        if [ $checks = no ] && ! here; then
            build
            how="made from $package of Debian $suite"
        fi
        say "$image: $how"
    elif allowed path && on_path; then
        say "$image: not needed, $server on the PATH is of that version"
    elif allowed path && can_install && { [ $checks = yes ] || { apt "$package" && on_path; }; }; then
        say "$image: not needed, $package is installed"
    else
        missing="$missing
  $image: there is no container engine that answers, and $server of that version is not on the PATH"
    fi
}

# get_program PACKAGE: notes what is to be installed, or takes it out of an image.
get_program() {
    if ! lacks "$1"; then
        return
    elif can_install; then
        packages="$packages $1"
    elif ! in_image "$1"; then
        missing="$missing
  $1: not on the PATH, and only root can install it (Debian, Ubuntu: apt-get install $1)"
    elif [ $checks = no ] && [ ! -e "$root/programs" ]; then
        say "Taking the programs of $1 out of $image."
        here || die "$image is not here, and no registry has it."
        take_out "$server" initdb pg_basebackup pg_dump
    fi
}

roots=${FENCELOCK_TEST_ROOTS:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/fencelock/roots}
silent='' unpacked='' missing='' packages='' images='' programs='' checks=no way=path
work=$(mktemp -d)
trap 'rm -rf "$work" ${unpacked:+"$unpacked"}' EXIT
trap 'exit 130' HUP INT TERM

[ "${1:-}" != check ] || { checks=yes; shift; }
[ $# -gt 0 ] || set -- redis valkey redis70 postgres postgres15 etcd redis-server postgresql pgbouncer faketime openssl
for name; do
    case $name in
    redis-server | postgresql | pgbouncer | faketime | openssl) programs="$programs $name" ;;
    *) images="$images $name" ;;
    esac
done
# There is nothing that root could not get.
if [ $checks = yes ] && can_install; then images=; fi
[ -z "$images" ] || ! engine || way=image
for name in $images; do get "$name"; done
for name in $programs; do get_program "$name"; done
[ -z "$missing" ] ||
    die "The tests need servers, and these could not be got here:$missing" \
        "Start the container engine (Docker), or run this as root where there is apt-get, or install what is named above, or name servers that" \
        "run already: FENCELOCK_TEST_REDIS_URL and the like, see CONTRIBUTING.md."
# shellcheck disable=SC2086 # several words
case $checks$packages in
yes | no) ;;
yes*) echo "Packages that apt-get will install:$packages." ;;
*) apt $packages ;;
esac

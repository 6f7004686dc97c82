#!/bin/sh
# Tells where programs of servers are kept that are taken out of images and packages: servers that root starts run as another user, who
# may not look into the home of root.
set -eu
if [ "$(id -u)" -eq 0 ]; then echo /var/cache/fencelock; else echo "${XDG_CACHE_HOME:-$HOME/.cache}/fencelock/roots"; fi

#!/usr/bin/env bash
# Runs a command in a root file system, as a container would: own mounts and processes, the host's network.
#   chroot.sh ROOT USER COMMAND [WORD...]      needs root; BIND="PATH ..." shows these folders inside, read-only
set -euo pipefail
root=$(cd "$1" && pwd) user=$2
shift 2
cp -L /etc/resolv.conf "$root/etc/resolv.conf"
# shellcheck disable=SC2016 # expanded inside
exec unshare --mount --pid --fork --kill-child bash -euc '
  root=$1 user=$2
  shift 2
  mount --make-rprivate /
  mount -t proc proc "$root/proc"
  mount --rbind /dev "$root/dev"
  mount -t tmpfs -o size=2g tmpfs "$root/dev/shm"
  for path in ${BIND:-}; do
    mkdir -p "$root$path"
    mount --rbind -o ro "$path" "$root$path"
  done
  exec chroot "$root" setpriv --reuid "$user" --regid "$user" --clear-groups --no-new-privs "$@"
' chroot.sh "$root" "$user" "$@"

#!/usr/bin/env bash
# Several hosts on one machine, for tests of what crosses a network: each has network, PID, mount and UTS namespaces of its
# own, and its own sshd, home directory, /tmp/ray and /dev/shm. Nothing outside the namespaces is changed.
#
#   fake_hosts.sh up TAG COUNT DIR [SHARE...]   hosts TAG-0 .. at 10.88.0.10 ..; the operator's namespace TAG-op at 10.88.0.1
#   fake_hosts.sh down TAG DIR
#
# SHARE: folders below the home directory that every host sees too (an interpreter, a checkout). Needs root, iproute2,
# openssh-server. DIR/key opens every host. PID namespaces matter: stopping Ray on a host must not see its neighbours.
set -euo pipefail
net=10.88.0

up() {
  local tag=$1 count=$2 base share i dir
  base=$(mkdir -p "$3" && cd "$3" && pwd)
  shift 3
  mkdir -p /run/sshd
  ip netns add "$tag-op"
  ip -n "$tag-op" link add br0 type bridge
  ip -n "$tag-op" link set br0 up
  ip -n "$tag-op" link set lo up
  ip -n "$tag-op" addr add $net.1/24 dev br0
  ssh-keygen -q -t ed25519 -N '' -f "$base/key"
  ssh-keygen -q -t ed25519 -N '' -f "$base/host_key"
  for i in $(seq 0 $((count - 1))); do
    dir=$base/host$i
    mkdir -p "$dir/home/.ssh" "$dir/ray"
    chmod 700 "$dir/home" "$dir/home/.ssh"
    install -m 600 "$base/key.pub" "$dir/home/.ssh/authorized_keys"
    ip netns add "$tag-$i"
    ip -n "$tag-$i" link add eth0 type veth peer name "host$i" netns "$tag-op"
    ip -n "$tag-op" link set "host$i" master br0 up
    ip -n "$tag-$i" addr add $net.$((10 + i))/24 dev eth0
    ip -n "$tag-$i" link set eth0 up
    ip -n "$tag-$i" link set lo up
    printf '127.0.0.1 localhost\n127.0.1.1 %s\n' "$tag-$i" > "$dir/hosts" # as Debian writes it: a trap for gloo
    printf '%s\n' "Port 22" "ListenAddress 0.0.0.0" "HostKey $base/host_key" "PermitRootLogin prohibit-password" \
      "PasswordAuthentication no" "UsePAM no" "PidFile none" "StrictModes no" "MaxStartups 100" > "$dir/sshd_config"
    {
      echo "set -e; hostname $tag-$i; mount --bind $dir/hosts /etc/hosts"
      echo "mkdir -p /tmp/ray; mount --bind $dir/ray /tmp/ray; mount -t tmpfs -o size=4g tmpfs /dev/shm"
      for share in "$@"; do
        case $share in "$HOME"/*) echo "mkdir -p $dir/home${share#"$HOME"}; mount --bind $share $dir/home${share#"$HOME"}" ;; esac
      done
      echo "mount --rbind $dir/home $HOME; cd /; exec /usr/sbin/sshd -D -e -f $dir/sshd_config"
    } > "$dir/init.sh"
    setsid ip netns exec "$tag-$i" unshare --fork --pid --mount --uts --mount-proc --kill-child bash "$dir/init.sh" \
      > "$dir/sshd.log" 2>&1 < /dev/null &
    echo $! > "$dir/pid"
  done
  for i in $(seq 0 $((count - 1))); do
    for _ in $(seq 900); do grep -q "Server listening" "$base/host$i/sshd.log" && continue 2; sleep 0.1; done
    echo "sshd of host $i did not start:" >&2
    cat "$base/host$i/sshd.log" >&2
    return 1
  done
}

down() {
  local tag=$1 base=$2 file namespace group
  for file in "$base"/host*/pid; do
    [ -f "$file" ] || continue
    group=$(cat "$file")
    kill -KILL -- "-$group" 2> /dev/null || true
    for _ in $(seq 300); do kill -0 -- "-$group" 2> /dev/null || break; sleep 0.1; done
    rm -f "$file"
  done
  for namespace in $(ip netns list | awk '{print $1}'); do
    case $namespace in "$tag"-op | "$tag"-[0-9]*) ip netns del "$namespace" ;; esac
  done
}

case ${1:-} in
  up) shift; up "$@" ;;
  down) shift; down "$@" ;;
  *) sed -n 2,10p "$0"; exit 2 ;;
esac

#!/bin/sh
# The steps of both images, so that a Dockerfile, a chroot and a bare Debian 12 host run the same ones.
#   build.sh system cpu|cuda   packages of the distribution                    (root)
#   build.sh python cpu|cuda   /opt/epserve: locked requirements, then the project in the current folder
#   build.sh user              the user that the service runs as               (root)
#   build.sh check             what was built answers
set -eu

system() {
  # cuda: Triton compiles its launchers with a C compiler; NVSHMEM and NCCL open InfiniBand through libibverbs.
  extra=
  [ "$1" = cuda ] && extra="gcc libc6-dev python3-dev libibverbs1 ibverbs-providers libnuma1"
  apt-get -o Acquire::Retries=3 update -qq
  # shellcheck disable=SC2086 # a list
  DEBIAN_FRONTEND=noninteractive apt-get -o Acquire::Retries=3 install -y -qq --no-install-recommends \
    ca-certificates python3 python3-venv $extra
  rm -rf /var/lib/apt/lists/*
}

python() {
  python3 -m venv /opt/epserve
  pip="/opt/epserve/bin/pip --no-cache-dir --disable-pip-version-check install -q --no-compile"
  # PyTorch publishes its CPU wheels on an index of its own; the hash in the file fixes which one it is.
  links=
  [ "$1" = cpu ] && links="--find-links ${TORCH_LINKS:-https://download.pytorch.org/whl/cpu/torch/}"
  # shellcheck disable=SC2086 # lists
  $pip --require-hashes $links -r "requirements/$1.txt"
  $pip --no-deps .
  # Parts of Ray that a Python service never loads: its Java archive, C++ headers, web pages, RLlib. About 100 MB.
  site=$(/opt/epserve/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  rm -rf "$site/ray/jars" "$site/ray/cpp" "$site/ray/dashboard/client" "$site/ray/rllib" "$site/ray/llm"
}

user() {
  useradd --uid 10001 --create-home --shell /usr/sbin/nologin epserve
  install -d -o epserve -g epserve /models /etc/epserve
}

check() {
  cd /
  /opt/epserve/bin/epserve --version
  /opt/epserve/bin/python -c 'import epserve.all2all, epserve.experts, ray, torch; print("torch", torch.__version__, "ray", ray.__version__)'
  /opt/epserve/bin/python -m epserve.probe --help > /dev/null
}

case ${1:-} in
  system | python | user | check) step=$1; shift; "$step" "$@" ;;
  *) sed -n 2,6p "$0"; exit 2 ;;
esac

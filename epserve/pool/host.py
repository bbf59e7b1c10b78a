"""Checks of this machine before a Ray of our own starts on it, which takes seconds to half a minute."""

from __future__ import annotations

import logging
import os
import shutil

import ray
import torch

from epserve.config import Config
from epserve.errors import ConfigError

from .own_ray import temporary_folder
from .ray_cluster import OBJECT_STORE_BYTES

log = logging.getLogger(__name__)

SHM = "/dev/shm"
MIB = 1 << 20
SOCKET_PATH_BYTES = 107  # most bytes of a Unix socket's path on Linux
RAY_SOCKET = "/epserve-12345678/ray/session_2026-12-31_23-59-59_999999_{}/sockets/plasma_store"
"""The longest path that Ray makes below its folder for temporary files, with the number of the process that starts it."""


def check_host(config: Config, device: str) -> None:
    """Raises ConfigError for too few GPUs or a long path of temporary files, and warns of little shared memory.

    It takes milliseconds. Clusters that are joined are not checked, since their machines are elsewhere.
    """
    if config.cluster.address != "local" or ray.is_initialized():
        return
    if device == "cuda":
        _check_gpus(config)
    _check_sockets()
    if os.path.isdir(SHM):
        _check_shared_memory(shutil.disk_usage(SHM).free)


def _check_gpus(config: Config) -> None:
    engine, each = config.engine, config.cluster.gpus_per_rank
    processes = engine.ranks + engine.spares
    sharing = config.cluster.ranks_per_gpu
    have, wanted = torch.cuda.device_count(), max(processes * each if sharing == 1 else -(-processes // sharing), 1)
    if wanted <= have + 1e-6:
        return
    spares = f" and {engine.spares} spares" if engine.spares else ""
    why = "" if torch.version.cuda else " (this torch has no CUDA)"
    remedy = "set engine.device: cpu, or" if not have else "lower engine.ranks or cluster.gpus_per_rank, or"
    raise ConfigError(
        f"engine.device cuda: {engine.ranks} ranks{spares} need {wanted:g} GPUs, this machine has {have}{why}; {remedy} join a"
        " cluster with more by cluster.address"
    )


def _check_sockets() -> None:
    setting, folder = temporary_folder()
    below = RAY_SOCKET.format(os.getpid())
    room, have = SOCKET_PATH_BYTES - len(below), len(os.fsencode(folder))
    if have > room:
        raise ConfigError(
            f"{setting} {folder}: {have} characters, and Ray's sockets below it can have paths of {SOCKET_PATH_BYTES} at"
            f" most; set RAY_TMPDIR to a folder whose path has at most {room}, such as /tmp"
        )


def _check_shared_memory(free: int) -> None:
    """Warns when Ray will use /tmp, since its own warning is off. The memory between front end and ranks is not in /dev/shm."""
    if free < OBJECT_STORE_BYTES:
        log.warning(
            "%s has %.1f MiB free, Ray's object store takes %d MiB of it: it goes to /tmp instead, which is slower."
            " NCCL and clients' regions (server.regions) need room there too: start the container with --shm-size 1g",
            SHM, free / MIB, OBJECT_STORE_BYTES // MIB,
        )  # fmt: skip

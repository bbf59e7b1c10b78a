"""The Ray cluster: an own one that ends with this process, or a running one that the service joins and leaves unchanged."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.job_config import JobConfig
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from epserve.config import Config
from epserve.errors import ConfigError, NotReady
from epserve.process import logs, working_folder
from epserve.process.ray_settings import FOR_US_ALONE, OWN_SIGNALS
from epserve.rank.reports import RankFacts

from .own_ray import OwnRay, on_loopback

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
PROBE_TIMEOUT_S = 2.0
POLL_S = 1.0
OBJECT_STORE_BYTES = 100 << 20  # activations have their own path. Ray's minimum is 75 MiB
OTHER_VERSION = "Version mismatch"
SHOWN_CHARACTERS = 600
LOOPBACK = ("127.0.0.1", "localhost", "::1")
SPARE_CPUS = 2  # for actors that ask for no CPU, so that Ray's scheduler never calls the node full


class _WithoutFolders(JobConfig):
    """Ray adds the working folder to what the workers of a job import from. A file `torch.py` there would end each rank."""

    @property
    def _py_driver_sys_path(self) -> list[str]:
        return []

    @_py_driver_sys_path.setter
    def _py_driver_sys_path(self, folders: list[str]) -> None: ...


@dataclass(slots=True)
class Cluster:
    """`joined`: this process connected and disconnects. `own`: it also started the cluster and removes its files."""

    joined: bool
    namespace: str
    control: str = ""
    """host:port of Ray's control service."""
    own: OwnRay | None = None

    @classmethod
    def connect(cls, config: Config) -> Cluster:
        """Starts or joins a cluster, and blocks for some seconds. Raises ConfigError within 30 s for an address without one."""
        address = config.cluster.address
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if FOR_US_ALONE:
            os.environ.pop(OWN_SIGNALS, None)
        _plain_excepthook()
        logs.adopt("ray")
        namespace = f"epserve-{secrets.token_hex(4)}"
        if ray.is_initialized():
            return cls(joined=False, namespace=namespace, control=_control())
        common: dict[str, Any] = {
            "namespace": namespace,
            "logging_level": logging.ERROR,
            "log_to_driver": False,
            "configure_logging": False,
        }
        if working_folder.is_left_out():
            common["job_config"] = _WithoutFolders()
        if address == "local":
            cpus = int((config.engine.ranks + config.engine.spares) * config.cluster.cpus_per_rank) + SPARE_CPUS
            try:
                own = OwnRay()
                with _quiet():
                    own.start(
                        num_cpus=max(cpus, os.cpu_count() or 1),
                        include_dashboard=False,
                        object_store_memory=OBJECT_STORE_BYTES,
                        **common,
                    )
            except ConfigError:
                raise
            except Exception as error:
                log.debug("Ray did not start", exc_info=True)
                raise ConfigError(f"Ray did not start on this machine: {_one_line(error)}") from None
            return cls(joined=True, namespace=namespace, control=_control(), own=own)
        only_here = _probe(address)
        try:
            with _quiet(), on_loopback() if only_here else contextlib.nullcontext():
                ray.init(address=address, **common)
        except Exception as error:  # Ray raises a different class for each stage of connecting
            raise ConfigError(
                f"no Ray cluster answers at {address!r}: {_one_line(error)}{_hint(address, error)}"
            ) from None
        return cls(joined=True, namespace=namespace, control=_control())

    def answers(self) -> bool:
        """Returns whether Ray's control service answers. Blocks for up to two seconds.

        NOTE: once it is gone, every call of Ray blocks, and after 60 s Ray ends the calling process. A signal to the whole
        process group (`timeout`, a service manager) ends the control service before this process.
        """
        host, _, port = self.control.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_TIMEOUT_S).close()
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Leaves or ends the cluster. Blocks for about a second, or for ten if the control service is gone."""
        if self.joined and ray.is_initialized():
            with _quiet():
                ray.shutdown()
        if self.own is not None:
            self.own.close()
        self.joined, self.own = False, None


@dataclass(frozen=True, slots=True)
class Place:
    """One bundle of a placement group: room for one rank. `last`: the last process in it."""

    group: PlacementGroup
    bundle: int
    last: RankFacts | None = None


class Gang:
    """Reserves a bundle for each rank and spare in one placement group: all of them start, or none.

    It makes more groups when the number of ranks grows.
    """

    def __init__(self, config: Config, device: str):
        self._config, self._device = config, device
        self._groups: list[PlacementGroup] = []
        self._free: list[Place] = []
        self._given_up = threading.Event()

    @property
    def bundle(self) -> dict[str, float]:
        cluster = self._config.cluster
        bundle = {"CPU": max(cluster.cpus_per_rank, 0.001)}  # Ray refuses an empty bundle
        if self._device == "cuda":
            bundle["GPU"] = cluster.gpus_per_rank
        return bundle

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> Place:
        return self._free.pop(0)

    def take_again(self, nodes: Collection[str]) -> tuple[Place, RankFacts] | None:
        """Takes a free place whose last process was on one of these nodes, given by id. Returns that process too.

        On a GPU host the place counts only if the process's GPU is known.
        """
        for index, place in enumerate(self._free):
            last = place.last
            if last is not None and last.node_id in nodes and (last.visible or self._device == "cpu"):
                return self._free.pop(index), last
        return None

    def give(self, place: Place, last: RankFacts | None = None) -> None:
        """Takes a place back. last: the process that leaves it. None: the node of the place is not known."""
        self._free.append(replace(place, last=last))

    def reserve(self, more: int) -> None:
        """Blocks until there is a place for `more` ranks. Raises ConfigError when the cluster cannot hold them."""
        config, bundle = self._config, self.bundle
        ranks, have = len(self._places()) + more, ray.cluster_resources()
        short = [
            f"{ranks} ranks need {ranks * amount:g} {name}, the cluster has {have.get(name, 0):g}"
            for name, amount in bundle.items()
            if ranks * amount > have.get(name, 0) + 1e-6
        ]
        if short:
            remedy = "add nodes or lower engine.ranks"
            if "GPU" in bundle and not have.get("GPU"):
                remedy = "add nodes with GPUs, or set engine.device: cpu"
            raise ConfigError(f"the Ray cluster is too small: {'; '.join(short)}; {remedy}")
        group = placement_group([bundle] * more, strategy=config.cluster.placement)
        self._groups.append(group)
        end = time.monotonic() + config.cluster.start_timeout_s
        while not group.wait(max(min(POLL_S, end - time.monotonic()), 0)):
            if self._given_up.is_set():
                raise NotReady("stopped while the ranks waited for a place")
            if time.monotonic() < end:
                continue
            self._groups.remove(group)
            free = {name: ray.available_resources().get(name, 0) for name in bundle}
            remove_placement_group(group)
            raise ConfigError(
                f"no place for {more} ranks of {bundle} with placement {config.cluster.placement} on"
                f" {len(ray.nodes())} nodes within {config.cluster.start_timeout_s:g} s; free now: {free}"
            )
        self._free += [Place(group, bundle) for bundle in range(more)]

    def _places(self) -> list[Place]:
        return [Place(group, bundle) for group in self._groups for bundle in range(group.bundle_count)]

    def give_up(self) -> None:
        """Makes `reserve` end within a second."""
        self._given_up.set()

    def release(self) -> None:
        for group in self._groups if ray.is_initialized() else ():
            remove_placement_group(group)
        self._groups.clear()
        self._free.clear()


def _probe(address: str) -> bool:
    """Returns whether the cluster listens on loopback only. Raises ConfigError when no process listens.

    A port without a listener costs Ray 20 s and a page of log. A plain connection fails at once.
    """
    if address == "auto":
        return False
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"cluster.address {address!r} is not 'local', 'auto' or host:port")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ConfigError(f"no Ray cluster answers at {address!r}: {error}{_hint(address, error)}") from None
    if host not in LOOPBACK:
        return False
    try:  # Ray takes this address instead of a loopback one
        socket.create_connection((ray.util.get_node_ip_address(), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError:
        return True
    return False


def _plain_excepthook() -> None:
    """Makes Python print uncaught exceptions, and do no more.

    NOTE: Ray's hook first reports them to its control service. With Ray 2.60 that call does not return. After 60 s Ray ends
    the process with "Failed to connect to GCS", and the exception itself is never shown.
    """
    if sys.excepthook.__module__.startswith("ray."):
        sys.excepthook = sys.__excepthook__


def _control() -> str:
    return ray.get_runtime_context().gcs_address


def _hint(address: str, error: Exception) -> str:
    if OTHER_VERSION in str(error):
        return "; start epserve with the cluster's versions of Ray and Python, or the cluster with these"
    if os.environ.get("RAY_AUTH_MODE") is None and address != "auto":
        return "; does it run, and does it ask for a token (RAY_AUTH_MODE=token, ~/.ray/auth_token)?"
    return "; does it run there (`ray status`)?"


def _one_line(error: Exception) -> str:
    """Returns Ray's whole message in one line. Its first line alone often ends in a colon."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]} ..."


@contextlib.contextmanager
def _quiet():
    """Silences Ray's logger, on which it announces itself under any settings."""
    logger = logging.getLogger("ray")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)

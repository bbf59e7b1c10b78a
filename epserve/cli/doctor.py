"""`epserve doctor`: installed packages, usable backends with reasons, ports, GPUs, and known traps of a machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import socket
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

PACKAGES = ("torch", "ray", "grpcio", "protobuf", "numpy", "safetensors", "triton", "transformers", "nvshmem4py-cu13")
SHM_BYTES = 1 << 30  # Ray's object store, NCCL's buffers and the regions of clients live in /dev/shm


class Verdict(Enum):
    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    what: str
    verdict: Verdict
    detail: str
    remedy: str = ""


def examine(port: int | None = None, host: str = "127.0.0.1", model: Path | None = None) -> list[Finding]:
    """Runs all checks in about two seconds. Starts nothing. With `model` it tells how one rank here would serve the model."""
    findings = [_python(), *_packages(), *_gpus(), *_reach(), *_backends(), *_machine()]
    if port is not None:
        findings.append(check_port(host, port))
    if model is not None:
        findings += _layers(model)
    return findings


def _layers(model: Path) -> list[Finding]:
    """Returns the storage of each group of the model's layers, and the way in which it would be served."""
    from epserve.config import parse_config
    from epserve.errors import EpserveError
    from epserve.models import open_checkpoint
    from epserve.rank.setup import plan as rank_plan

    try:
        config = parse_config({"model": {"path": str(model)}})
        info, device = open_checkpoint(model).info, rank_plan.resolve_device("auto")
        groups = rank_plan.plan_ranks(config, info, device=device).groups
    except EpserveError as error:
        return [Finding(what="model", verdict=Verdict.PROBLEM, detail=str(error))]
    return [
        Finding(what="model", verdict=Verdict.NOTE if group.why else Verdict.OK, detail=group.describe())
        for group in groups
    ]


def _python() -> Finding:
    return Finding(what="python", verdict=Verdict.OK, detail=f"{platform.python_version()} on {platform.platform()}")


def _packages() -> list[Finding]:
    required = {"torch", "ray", "grpcio", "protobuf", "numpy", "safetensors"}
    findings = []
    for name in PACKAGES:
        try:
            findings.append(Finding(what=name, verdict=Verdict.OK, detail=importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            verdict = Verdict.PROBLEM if name in required else Verdict.NOTE
            remedy = f"pip install {name}" + ("" if name in required else " (optional)")
            findings.append(Finding(what=name, verdict=verdict, detail="not installed", remedy=remedy))
    return findings


def _gpus() -> list[Finding]:
    import torch

    if not torch.cuda.is_available():
        why = (
            "this torch has no CUDA"
            if torch.version.cuda is None
            else "torch sees no GPU (driver, CUDA_VISIBLE_DEVICES)"
        )
        return [Finding(what="gpus", verdict=Verdict.NOTE, detail=f"none: {why}; ranks run on the CPU")]
    findings, uuids = [], set()
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        uuids.add(str(properties.uuid))
        size = properties.total_memory / 2**30
        text = f"{properties.name}, {size:.0f} GiB, sm_{properties.major}{properties.minor}, {properties.uuid}"
        findings.append(Finding(what=f"gpu {index}", verdict=Verdict.OK, detail=text))
    if len(uuids) < len(findings):
        findings.append(Finding(what="gpus", verdict=Verdict.PROBLEM, detail="the same GPU is listed twice",
                                remedy="check CUDA_VISIBLE_DEVICES"))  # fmt: skip
    return findings


def _reach() -> list[Finding]:
    """Returns how this host's ranks reach those of other hosts, which decides the all-to-all between them."""
    import torch

    from epserve.rank.setup import whereabouts

    uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    domains = {domain for uuid in uuids if (domain := whereabouts.nvlink_domain(uuid))}
    devices = whereabouts.rdma_devices()
    nvlink = f"NVLink domain {', '.join(sorted(domains))}" if domains else "NVLink ends at this host" if uuids else ""
    rdma = f"RDMA by {', '.join(devices)}" if devices else "no RDMA device that is active and may be opened"
    return [Finding(what="other hosts", verdict=Verdict.OK, detail="; ".join(filter(None, (nvlink, rdma))))]


def _backends() -> list[Finding]:
    from epserve import all2all, experts

    findings = []
    for kind, registry in (("all-to-all", all2all.REGISTRY), ("experts", experts.REGISTRY)):
        for name in registry.names():
            missing = registry.get(name).unavailable()  # type: ignore[attr-defined]
            verdict = Verdict.NOTE if missing else Verdict.OK
            findings.append(Finding(what=f"{kind} {name}", verdict=verdict, detail=missing or "usable"))
    return findings


def _machine() -> list[Finding]:
    findings = []
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = "nothing"
    if address.startswith("127.0.1."):
        findings.append(Finding(
            what="host name", verdict=Verdict.NOTE,
            detail=f"{name} resolves to {address}: gloo between hosts would bind there and never connect",
            remedy=f"map {name} to this host's own address in /etc/hosts when ranks run on several hosts"))  # fmt: skip
    shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    if shm is not None:
        verdict = Verdict.OK if shm.free >= SHM_BYTES else Verdict.NOTE
        remedy = "" if verdict is Verdict.OK else "start the container with a larger --shm-size"
        text = f"{_size(shm.free)} free of {_size(shm.total)}"
        findings.append(Finding(what="/dev/shm", verdict=verdict, detail=text, remedy=remedy))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    verdict = Verdict.OK if soft >= 4096 else Verdict.NOTE
    findings.append(Finding(what="open files", verdict=verdict, detail=f"limit {soft}",
                            remedy="" if soft >= 4096 else "ulimit -n 65536"))  # fmt: skip
    return findings


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 1 << 30 else f"{nbytes / 2**20:.1f} MiB"


def check_port(host: str, port: int) -> Finding:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return Finding(what=f"port {port}", verdict=Verdict.PROBLEM, detail=f"{host}:{port}: {error.strerror}",
                           remedy="choose another server.port, or 0, and an address of this machine")  # fmt: skip
    return Finding(what=f"port {port}", verdict=Verdict.OK, detail=f"{host}:{port} is free")

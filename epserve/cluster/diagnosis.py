"""Finds the reasons why a node cannot join or serve: pure functions over the reports of `node.probe` and Ray."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from epserve.config import Config
from epserve.errors import ClusterError

from .file import ClusterFile
from .ssh import Ssh, Unreachable, each

GIB = 1 << 30


def probe(ssh: Ssh, host: str, gcs: str, paths: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the facts of `node.probe` and `skew`, the node's clock error in seconds (0 within the time of the call itself)."""
    before = time.time()
    fact = ssh.call(host, "probe", gcs=gcs, paths=list(paths))
    early, late = fact["time"] - time.time(), fact["time"] - before
    fact["skew"] = early if early > 0 else late if late < 0 else 0.0
    return fact


def check_nodes(facts: Mapping[str, dict[str, Any]], file: ClusterFile) -> list[str]:
    """Returns every reason against these nodes, one line each. Versions that are not installed yet are no reason."""
    problems, settings = [], file.settings
    head = facts.get(file.head_ip, {})
    for host, fact in facts.items():
        skew = fact["skew"]
        checks = [
            (fact["rsync"], "rsync is missing; `ray up` copies files with it (apt-get install rsync)"),
            (not fact["port_taken_by"], f"port {file.port} is taken by {fact['port_taken_by']}"),
            (fact["disk_free"] >= settings.min_free_disk_gib * GIB,
             f"/tmp has {fact['disk_free'] / GIB:.1f} GiB free, metadata.epserve.min_free_disk_gib asks for"
             f" {settings.min_free_disk_gib:g}"),
            (abs(skew) <= settings.max_clock_skew_s,
             f"its clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} this machine's; set up NTP there"),
            (not fact["missing"], f"{', '.join(fact['missing'])} does not exist; every rank reads the checkpoint there"),
        ]  # fmt: skip
        problems += [f"{host}: {text}" for good, text in checks if not good]
        problems += [f"{host}: {text}" for text in version_skew(fact, head)]
    return problems


def version_skew(fact: Mapping[str, Any], head: Mapping[str, Any]) -> list[str]:
    """Returns the versions that differ from the head's.

    Ray refuses a node with another Ray or Python minor version. Another torch or epserve fails later and with worse messages.
    """
    if not head or not fact["packages"]["ray"] or not head["packages"]["ray"]:
        return []
    pairs = [("Python", _minor(fact["python"]), _minor(head["python"]))]
    pairs += [(name, version, head["packages"][name]) for name, version in fact["packages"].items()]
    return [f"{name} {mine or '(none)'}, but {theirs or '(none)'} on the head; every node needs the same"
            for name, mine, theirs in pairs if mine != theirs]  # fmt: skip


def why_missing(ssh: Ssh, file: ClusterFile, missing: Sequence[str]) -> tuple[list[str], bool]:
    """Looks at the nodes that did not join. Returns a reason for each, and whether waiting longer cannot help."""
    if not missing:
        return ["fewer instances came up than the file asks for; see `ray monitor FILE`"], False
    gcs = f"{file.head_ip}:{file.port}"
    facts = each((file.head_ip, *missing), lambda host: probe(ssh, host, gcs))
    head = facts.pop(file.head_ip)
    reasons, hopeless = [], False
    for host, fact in facts.items():
        if isinstance(fact, ClusterError):
            reasons.append(str(fact))
            hopeless |= isinstance(fact, Unreachable)
            continue
        skew = version_skew(fact, head) if isinstance(head, dict) else []
        if skew:  # the node's setup commands may still be installing, so the wait goes on
            reasons += [f"{host}: {text}" for text in skew]
        elif fact["ray"]:
            reasons.append(f"{host}: its Ray runs but the head does not see it; is {gcs} reachable from there?")
        elif not fact["packages"]["ray"]:
            reasons.append(f"{host}: Ray is not installed, or not on the PATH that ~/.bashrc sets; see setup_commands")
        else:
            reasons.append(f"{host}: Ray is not running there; on the head see /tmp/ray/session_latest/logs/monitor.*")
    return reasons, hopeless


def check_resources(service: Config, nodes: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises ClusterError when the ranks cannot fit on these nodes. The message names each node's resources."""
    engine, cluster = service.engine, service.cluster
    cuda = engine.device == "cuda" or (engine.device == "auto" and any(node["gpus"] for node in nodes.values()))
    kinds = [("cpus", "CPUs", cluster.cpus_per_rank)] + [("gpus", "GPUs", cluster.gpus_per_rank)] * cuda
    offers = {host: min(int(node[kind] / each_rank + 1e-6) for kind, _, each_rank in kinds if each_rank)
              for host, node in nodes.items()}  # fmt: skip
    room = sum(offers.values())
    if cluster.placement == "STRICT_SPREAD":
        room = sum(1 for offer in offers.values() if offer)
    elif cluster.placement == "STRICT_PACK":
        room = max(offers.values(), default=0)
    if room < engine.ranks:
        needs = ", ".join(f"{each_rank:g} {name}" for _, name, each_rank in kinds)
        listed = "".join(
            f"\n  - {host}: {', '.join(f'{node[kind]:g} {name}' for kind, name, _ in kinds)}"
            for host, node in nodes.items()
        )
        raise ClusterError(
            f"the service asks for {engine.ranks} ranks ({needs} each, placement {cluster.placement}),"
            f" but these nodes have room for {room}:{listed}"
        )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])

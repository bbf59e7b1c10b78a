"""Reads and checks a Ray cluster file: against Ray's own schema, and for settings that `ray up` would accept and then ignore.

Our own settings stand under `metadata.epserve`, a field that Ray leaves alone, so that plain `ray up FILE` works too.
"""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from epserve.config import read_mapping
from epserve.errors import ConfigError

TOKEN = "~/.ray/auth_token"  # the place where Ray looks for the token on a node


class Settings(BaseModel):
    """Holds `metadata.epserve` of a cluster file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    service: Path | None = None
    """The service's configuration on this machine, relative to the cluster file. None: only Ray is started."""
    up_timeout_s: Annotated[float, Field(gt=0)] = 900.0
    """Seconds that `ray up` may take: instances, file mounts, setup commands of the head."""
    join_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """Seconds that the workers may take after that, with their setup commands."""
    min_free_disk_gib: Annotated[float, Field(ge=0)] = 5.0
    """Free space that /tmp of each node needs for Ray's logs and spilled objects."""
    max_clock_skew_s: Annotated[float, Field(gt=0)] = 5.0
    """Largest clock difference in seconds between a node and this machine. Above it tokens, certificates and deadlines fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFile:
    path: Path
    name: str
    provider: str
    head_ip: str
    """The head's address with provider local. It is empty with other providers, as the cloud decides."""
    worker_ips: tuple[str, ...]
    num_nodes: int
    port: int
    ssh_user: str
    ssh_key: Path
    ssh_proxy: str
    token_file: Path | None
    settings: Settings

    @property
    def local(self) -> bool:
        return self.provider == "local"

    @property
    def nodes(self) -> tuple[str, ...]:
        return (self.head_ip, *self.worker_ips)

    @property
    def service(self) -> Path | None:
        configured = self.settings.service
        return None if configured is None else (self.path.parent / configured.expanduser()).resolve()


def load_cluster_file(path: str | Path) -> ClusterFile:
    """Reads a cluster file without touching the network. Raises ConfigError with every problem."""
    path = Path(path).resolve()
    data = read_mapping(path, "cluster file")
    problems = schema_problems(data) or _problems(data)
    if problems:
        raise ConfigError(f"{path}:" + "".join(f"\n  - {problem}" for problem in problems))
    provider, auth = data["provider"], data["auth"]
    local = provider["type"] == "local"
    workers = tuple(provider.get("worker_ips", ())) if local else ()
    token = data.get("file_mounts", {}).get(TOKEN)
    return ClusterFile(
        path=path,
        name=data["cluster_name"],
        provider=provider["type"],
        head_ip=provider["head_ip"] if local else "",
        worker_ips=workers,
        num_nodes=1 + (len(workers) if local else _min_workers(data)),
        port=_port(data),
        ssh_user=auth["ssh_user"],
        ssh_key=_at(auth["ssh_private_key"]),
        ssh_proxy=auth.get("ssh_proxy_command", ""),
        token_file=_at(token) if token else None,
        settings=_settings(data, path),
    )


def schema_problems(data: Any) -> list[str]:
    """Returns the problems that Ray's own schema finds in a cluster file, one line each."""
    import jsonschema

    spec = importlib.util.find_spec("ray")  # finds Ray without importing it, which takes a second
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("Ray is not installed here: pip install ray")
    schema = Path(next(iter(spec.submodule_search_locations))) / "autoscaler" / "ray-schema.json"
    if isinstance(data, dict) and isinstance(data.get("provider"), dict) and data["provider"].get("type") == "local":
        data = {key: value for key, value in data.items() if key != "min_workers"}  # Ray removes it before its check
    validator = jsonschema.Draft7Validator(json.loads(schema.read_text(encoding="utf-8")))
    errors = sorted(validator.iter_errors(data), key=lambda error: [str(part) for part in error.absolute_path])
    return [f"{'.'.join(str(part) for part in error.absolute_path) or 'file'}: {error.message}" for error in errors]


def _problems(data: dict[str, Any]) -> list[str]:
    """Returns problems that the schema lets through."""
    problems = []
    provider, auth = data["provider"], data.get("auth", {})
    for key in ("ssh_user", "ssh_private_key"):
        if key not in auth:
            problems.append(f"auth.{key}: needed, to reach the nodes")
    if provider["type"] == "local":
        head, workers = provider.get("head_ip"), provider.get("worker_ips", [])
        if not head:
            problems.append("provider.head_ip: needed with provider local")
        every = [head, *workers]
        for address in sorted({str(address) for address in every if every.count(address) > 1}):
            problems.append(f"provider: {address} is listed twice; Ray knows a node by its address")
        wanted = len(workers)
        for key in ("min_workers", "max_workers"):
            if data.get(key, wanted) != wanted:
                problems.append(
                    f"{key}: {data[key]}, but worker_ips lists {wanted}: {key} must be {wanted} or left out"
                )
    elif _min_workers(data) == 0 and "head_node_type" not in data:
        problems.append("available_node_types: no node type is asked for")
    if TOKEN not in data.get("file_mounts", {}) and "RAY_AUTH_MODE=disabled" not in yaml.safe_dump(data, width=10**6):
        problems.append(
            f"file_mounts: {TOKEN} is missing, and a Ray cluster without a token runs any code that its network sends;"
            " mount a token, or write RAY_AUTH_MODE=disabled into the setup commands"
        )
    return problems


def _min_workers(data: dict[str, Any]) -> int:
    head = data.get("head_node_type")
    kinds = data.get("available_node_types", {}).items()
    return sum(kind.get("min_workers", 0) for name, kind in kinds if name != head)


def _port(data: dict[str, Any]) -> int:
    found = re.search(r"--port[= ](\d+)", " ".join(data.get("head_start_ray_commands", [])))
    return int(found.group(1)) if found else 6379


def _at(value: str) -> Path:
    """Returns the path as Ray takes it, relative to the working directory."""
    return Path(value).expanduser().resolve()


def _settings(data: dict[str, Any], path: Path) -> Settings:
    try:
        return Settings.model_validate(data.get("metadata", {}).get("epserve", {}))
    except ValidationError as error:
        lines = "".join(
            f"\n  - metadata.epserve.{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()
        )
        raise ConfigError(f"{path}:{lines}\n  known keys: {', '.join(Settings.model_fields)}") from None

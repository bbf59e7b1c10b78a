"""The configuration of a service: frozen data, read from one YAML file and checked at the door.

Unknown keys are errors with a suggestion. Nothing here imports torch, Ray or gRPC.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from .errors import ConfigError

MIB = 1 << 20
GPU_PART = 1e-4
"""Ray keeps resources as whole multiples of this."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Pydantic takes true for 1, and YAML takes yes, on and no for switches."""
        wants = cls.model_fields[str(info.field_name)].annotation
        items = value if isinstance(value, list | tuple) else [value]
        if wants is not bool and any(isinstance(item, bool) for item in items):
            raise ValueError("true, false, yes, no, on and off are switches; this key takes another kind of value")
        return value


class ModelConfig(_Section):
    path: Path
    """Folder with config.json and safetensors, or a GGUF file or a folder with one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of activations and unquantised weights; auto: the checkpoint's own."""
    layers: tuple[int, ...] = ()
    """Which MoE layers to serve; empty: all."""


class EngineConfig(_Section):
    """What each rank runs."""

    ranks: Annotated[int, Field(ge=1, le=1024)] = 1
    """Expert-parallel ranks: one process each, one GPU each on GPU hosts."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where torch sees a GPU, else cpu."""
    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    """So many ranks share each expert by slices of its intermediate size; `ranks` counts all of them."""
    all2all: str = "auto"
    """Name of an all-to-all backend (`epserve compat` lists them), auto, or measured: each step then takes the one of
    `all2all_candidates` that was fastest for its number of tokens at start-up."""
    all2all_candidates: tuple[str, ...] = ()
    """With all2all measured: which backends; empty: those that can run here."""
    all2all_budget_mib: Annotated[int, Field(ge=0)] = 0
    """With all2all measured: most memory of all candidates' buffers and the workspaces that they share, on each rank; 0: no
    limit of its own."""
    low_latency_max_tokens: Annotated[int, Field(ge=1)] = 128
    """With all2all measured: cap of candidates that keep a block of rows for each expert, whose buffers grow with it."""
    batches_in_flight: Annotated[int, Field(ge=1, le=2)] = 1
    """2: a step runs as two halves, and one's communication hides behind the other's experts."""
    overlap_min_tokens: Annotated[int, Field(ge=2)] = 512
    """With two batches in flight: steps whose busiest rank has fewer tokens are not cut in halves."""
    cuda_graph_tokens: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Sizes for which steps are captured as CUDA graphs at warm-up: tokens of the busiest rank, ascending, such as
    [1, 8, 32, 128]. A step is padded to the next one; larger steps, and all steps on the CPU, run eagerly. Empty: none."""
    experts: str = "auto"
    """Name of an experts backend, or auto: of those that fit, each rank takes the one that was fastest there for the rows that
    it has. With combine_order slot auto takes the first that fits, as a name does."""
    experts_timing_s: Annotated[float, Field(ge=0)] = 3.0
    """With experts auto: most seconds that each rank spends on timing at its start; 0: none, the first that fits serves. What
    has been measured before is read from the file of times, which `epserve tune` fills without a start."""
    experts_times: Path | None = Path("~/.cache/epserve/experts.json")
    """File of measured times, on each rank's host; null: none, each start measures."""
    experts_tiles: Literal["auto", "shipped"] | Path = "auto"
    """Tiles of the Triton kernels. auto: those that `epserve tune` measured on the rank's host, else the shipped ones; shipped:
    never the host's own. A file, on each rank's host: its table in place of the host's own; it must be right."""
    experts_tiles_folder: Path = Path("~/.cache/epserve/tiles")
    """Tables that `epserve tune` writes, on each rank's host. Those of another GPU, driver or version are left aside."""
    experts_tiles_timing_s: Annotated[float, Field(ge=0)] = 0.0
    """Most seconds that each rank spends at its start on timing a few tiles for what no table of its host has; 0: none. Needs
    experts_tiles auto."""
    cpu_threads: Annotated[int, Field(ge=1)] | None = None
    """Most threads that a rank on a CPU computes with. null: its fair share of its host's cores, and no more than OMP_NUM_THREADS
    where the service's environment sets that. Above the share the rank takes the share and says so."""
    max_tokens_per_rank: Annotated[int, Field(ge=1, le=1 << 20)] = 1024
    """Cap of one round on each rank; buffers and workspaces are sized by it. Longer batches run in several rounds."""
    combine_order: Literal["rank", "slot"] = "rank"
    """rank: partial sums of each rank are added, fewest bytes; last bits may change when experts move. slot: the same bits for
    any number of ranks and wherever the experts are, at the price of more bytes and of the all-to-alls that cannot do it."""
    dispatch_quantised: bool = True
    """Send rows in fp8 where the checkpoint and the backend both allow it."""
    experts_per_rank: tuple[int, ...] = ()
    """Physical experts on each rank; empty: as even as it gets."""
    redundant_experts: Annotated[int, Field(ge=0)] = 0
    """Slots beyond one for each expert of a layer: copies of busy experts. As many as the model has experts: each has two
    copies on two ranks, and the loss of one rank is bridged without a spare."""
    spares: Annotated[int, Field(ge=0)] = 0
    """Started processes, one GPU each on GPU hosts, that take over from ranks that die or hang."""
    spare_weights: Literal["checkpoint", "host"] = "checkpoint"
    """Where a spare gets its experts: read when it takes over, or from copies of all experts that it keeps in host memory."""
    standbys: Annotated[int, Field(ge=0, le=64)] = 1
    """Processes on each node that have imported what a rank needs and hold neither weights nor a GPU: a new rank on that node
    starts from one, seconds sooner. They cost host memory (the recovery page has the number)."""
    when_experts_missing: Literal["wait", "refuse", "serve_without"] = "wait"
    """While a rank without spare or copies is replaced: all requests wait until their deadline; or the other ranks go on,
    and requests get UNAVAILABLE whose tokens need experts that are on no rank (refuse), or are answered without those
    experts, which the reply then names (serve_without)."""
    rebalance_every_s: Annotated[float, Field(ge=0)] = 0.0
    """Look at the load of experts so often and move them where that pays; 0: only when asked."""
    rebalance_above: Annotated[float, Field(ge=1)] = 1.2
    """The timer moves a layer's experts where the busiest rank has more than this times the mean."""

    @model_validator(mode="after")
    def _fits_together(self):
        if self.all2all_candidates and self.all2all != "measured":
            raise ValueError(f"all2all_candidates are for all2all measured, all2all is {self.all2all}")
        if self.experts_tiles_timing_s and self.experts_tiles != "auto":
            raise ValueError(
                f"experts_tiles_timing_s {self.experts_tiles_timing_s:g} is for experts_tiles auto, which is"
                f" {str(self.experts_tiles)!r}; set one of them to its default"
            )
        if list(self.cuda_graph_tokens) != sorted(set(self.cuda_graph_tokens)):
            raise ValueError(f"cuda_graph_tokens must be ascending and distinct, got {list(self.cuda_graph_tokens)}")
        if self.ranks % self.tensor_parallel:
            raise ValueError(f"ranks {self.ranks} do not divide by tensor_parallel {self.tensor_parallel}")
        if self.tensor_parallel > 1 and self.cuda_graph_tokens:
            raise ValueError(
                "cuda_graph_tokens: steps of ranks that share experts run eagerly, so tensor_parallel must be 1"
            )
        if self.tensor_parallel > 1 and self.combine_order == "slot":
            raise ValueError("combine_order slot: slices of an expert are added by rank, so tensor_parallel must be 1")
        return self


class ClusterConfig(_Section):
    """Where Ray runs."""

    address: str = "local"
    """local: start a Ray of our own and stop it afterwards; auto or host:port: join a running cluster."""
    cpus_per_rank: Annotated[float, Field(ge=0)] = 0.1
    """Ray CPUs reserved for each rank."""
    gpus_per_rank: Annotated[float, Field(ge=0)] = 1.0
    """GPUs that Ray sets aside for each rank, with device cuda. Below 1 ranks share a GPU (0.5: two on each), which is for
    trials on a machine with few GPUs, not for speed; spares count too."""
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """Strategy of the placement group: PACK onto few hosts or SPREAD over many; STRICT_ makes it a condition."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """How long all ranks together may take to load and to run their first step."""
    data_path: Literal["auto", "shared_memory", "sockets"] = "auto"
    """How activations reach the ranks. auto: through shared memory on the front end's host, over sockets elsewhere.
    sockets: always; shared_memory: always, and a rank on another host is an error."""
    shared_memory_bytes: Annotated[int, Field(ge=MIB)] = 1024 * MIB
    """Most shared memory for activations on their way to the ranks and back. What finds no room goes over the sockets.
    Ranks on GPUs pin all of it."""

    @model_validator(mode="after")
    def _parts_of_gpus(self):
        each = self.gpus_per_rank
        if each > 1 and each != int(each):
            raise ValueError(
                f"gpus_per_rank {each:g}: above 1 it must be a whole number; 1 gives each rank a GPU of its own"
            )
        if 0 < each < GPU_PART:
            raise ValueError(
                f"gpus_per_rank {each:g}: Ray counts GPUs in parts of {GPU_PART:g}, the least that it sets aside"
            )
        return self

    @property
    def ranks_per_gpu(self) -> int:
        """The most ranks and spares that may find themselves on one GPU."""
        return max(int(1 / self.gpus_per_rank + 1e-6), 1) if self.gpus_per_rank else 1


class SchedulerConfig(_Section):
    """How requests become steps."""

    max_queued_tokens: Annotated[int, Field(ge=1)] = 65536
    """Per layer. Above it callers get RESOURCE_EXHAUSTED with a retry delay: the newcomer, or who holds most of the queue."""
    max_step_tokens: Annotated[int, Field(ge=1)] = 16384
    """Most tokens that are joined into one step, over all ranks."""
    join_wait_ms: Annotated[float, Field(ge=0, le=1000)] = 1.0
    """How long a step may wait for more requests while the ranks are idle and several clients are at work."""
    join_wait_share: Annotated[float, Field(ge=0, le=1)] = 0.1
    """That wait is never longer than this share of the mean time of recent steps."""
    heartbeat_s: Annotated[float, Field(gt=0)] = 10.0
    """A rank that is silent for so long counts as hung: its process is killed and replaced. Lower is quicker, and on a
    crowded machine riskier."""
    step_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """A step that takes longer counts as hung: its ranks are replaced."""
    default_deadline_s: Annotated[float, Field(gt=0)] = 60.0
    """For callers that send none."""
    drain_timeout_s: Annotated[float, Field(ge=0)] = 20.0
    """How long SIGTERM waits for accepted requests."""


class ServerConfig(_Section):
    host: str = "127.0.0.1"
    """Address to listen on; loopback unless told otherwise."""
    port: Annotated[int, Field(ge=0, le=65535)] = 50051
    """0: the system picks one; it is printed and in the ready file."""
    front_ends: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes on this host that serve clients, this one included, which orders the steps of all. Each further one listens
    on the next port (and the next metrics_port); port 0: the system picks one for each."""
    join_port: Annotated[int | None, Field(ge=0, le=65535)] = None
    """Set: front ends on other hosts can join here (`epserve front-end --join HOST:PORT`), on `host`. Not encrypted, as the
    paths to the ranks: for the cluster's own network. 0: the system picks one; it is in the log and the ready file."""
    join_secret_file: Path | None = None
    """File with a secret of at least 16 characters that joining front ends must know; needed with join_port."""
    max_message_bytes: Annotated[int, Field(ge=1024)] = 256 * MIB
    """Largest gRPC message, and largest framed request."""
    max_tokens_per_request: Annotated[int, Field(ge=1)] = 16384
    """Longer requests get OUT_OF_RANGE."""
    max_concurrent_streams: Annotated[int, Field(ge=1)] = 1024
    """For each client connection."""
    max_in_flight_per_stream: Annotated[int, Field(ge=1)] = 64
    """Calls of one ForwardStream that run at once; then nothing more is read from that client."""
    max_priority: Literal["low", "normal", "high"] = "normal"
    """Highest priority that a request may ask for, unless its client's line in the tokens file says otherwise."""
    max_buffered_bytes: Annotated[int, Field(ge=1024)] = 1024 * MIB
    """Bytes of all requests that are here at once and of their replies, until these are sent; above it callers get
    RESOURCE_EXHAUSTED. As many bytes may be here of messages that are not whole; above it connections lose their calls."""
    unix_socket: Path | None = None
    """Set: also listen on a Unix-domain socket of this path, which only the server's own user can open. Never with TLS."""
    inference_protocol: bool = True
    """Serve the Open Inference Protocol (KServe v2) too: a layer is a model."""
    regions: bool = True
    """Let clients on this host register shared-memory regions."""
    cuda_regions: bool = True
    """Let them register memory of GPUs too (CUDA IPC), of GPUs on which ranks of this host compute; with `regions` only."""
    max_region_bytes: Annotated[int, Field(ge=1)] = 16384 * MIB
    """Largest region that a client may register. It costs the server a file descriptor, no memory."""
    region_lease_s: Annotated[float, Field(gt=0)] = 600.0
    """A region that was registered over the Open Inference Protocol is forgotten when it was not used for so long."""
    tls_cert: Path | None = None
    """PEM file of the server certificate; set with tls_key to turn TLS on."""
    tls_key: Path | None = None
    """PEM file of its private key."""
    tls_client_ca: Path | None = None
    """Set: clients must present a certificate that this authority signed."""
    tokens_file: Path | None = None
    """One bearer token a line, perhaps with a name and limits; set: every call needs `authorization: Bearer TOKEN`.
    Read again on SIGHUP and when it changes."""
    metrics_port: Annotated[int | None, Field(ge=0, le=65535)] = None
    """Set: Prometheus metrics, the status page and /healthz over HTTP on this port of `host`, with the same TLS and tokens.
    0: the system picks one."""
    metrics_expert_series: Annotated[int, Field(ge=1, le=65536)] = 64
    """Most Prometheus series of tokens by expert; with more experts, neighbours share one."""
    otlp_endpoint: str = ""
    """Set: OpenTelemetry traces go to this OTLP/gRPC collector, such as http://127.0.0.1:4317. Needs the extra `tracing`."""
    trace_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the calls that are traced, of those whose client has not decided."""
    log_format: Literal["text", "json"] = "text"
    """Of the service's log on stderr and of the ranks' in Ray's log folder; json: one object a line, with request ids."""
    reflection: bool = True
    """Serve the gRPC reflection service, which lists methods and messages."""
    allow_insecure: bool = False
    """Needed to listen beyond loopback without TLS."""

    @model_validator(mode="after")
    def _secure(self):
        if (self.tls_cert is None) != (self.tls_key is None):
            there, missing = ("tls_cert", "tls_key") if self.tls_key is None else ("tls_key", "tls_cert")
            raise ValueError(f"{missing} is missing: tls_cert and tls_key come together, and {there} is set")
        loopback = self.host in ("localhost", "::1") or self.host.startswith("127.")
        if not loopback and self.tls_cert is None and not self.allow_insecure:
            raise ValueError(f"host {self.host} is reachable from outside: set tls_cert and tls_key, or allow_insecure")
        if (self.join_port is None) != (self.join_secret_file is None):
            there, missing = "join_port", "join_secret_file"
            if self.join_port is None:
                there, missing = missing, there
            raise ValueError(f"{missing} is missing: join_port and join_secret_file come together, and {there} is set")
        ports, metrics = set(self.ports), set(self.all_metrics_ports)
        taken = (ports & metrics | (ports | metrics) & {self.join_port}) - {0}
        if taken or any(port > 65535 for port in ports | metrics):
            raise ValueError(
                f"port, metrics_port and join_port: {self.front_ends} front ends would use"
                f" {sorted(ports | metrics)}, of which {sorted(taken) or 'some'} clash or are above 65535; set them further apart"
            )
        return self

    @property
    def ports(self) -> tuple[int, ...]:
        """Of each front end on this host."""
        return tuple(self.port and self.port + number for number in range(self.front_ends))

    @property
    def all_metrics_ports(self) -> tuple[int, ...]:
        """Of each front end on this host; empty without metrics."""
        first = self.metrics_port
        return () if first is None else tuple(first and first + number for number in range(self.front_ends))


class Config(_Section):
    model: ModelConfig
    engine: EngineConfig = EngineConfig()
    cluster: ClusterConfig = ClusterConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    server: ServerConfig = ServerConfig()


def load_config(path: str | Path, overrides: dict[str, Any] | None = None) -> Config:
    """Read a YAML file; `overrides` maps dotted keys ("server.port") to values. Raises ConfigError, one clear message."""
    return parse_config(_overridden(read_mapping(Path(path), "configuration file"), overrides), str(path))


def load_front_end(
    path: str | Path | None, overrides: dict[str, Any] | None = None
) -> tuple[ServerConfig, SchedulerConfig]:
    """Of a front end that joins: what it serves, and its default deadline and drain. As `load_config`; the service's own
    file will do, whose other sections do not count. What is for the process that it joins is left out."""
    data = _overridden(read_mapping(Path(path), "configuration file") if path is not None else {}, overrides)
    sections = {name: data[name] for name in data if name not in ("engine", "cluster", "model")}
    config = parse_config({**sections, "model": {"path": "."}}, str(path or "command line"))
    own = {"front_ends": 1, "join_port": None, "join_secret_file": None}
    return config.server.model_copy(update=own), config.scheduler


class _NoDuplicates(yaml.SafeLoader):
    """YAML's own loader takes the last of two equal keys, and what the first said is lost without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                first = lines[key.value]
                raise ConfigError(
                    f"line {line}: the key {key.value!r} is in line {first} already; leave one of them out"
                )
            lines[key.value] = line
        return super().construct_mapping(node, deep)


def read_mapping(path: Path, what: str) -> dict[str, Any]:
    """A YAML file's mapping; `what` it is, for messages. Raises ConfigError, for two equal keys as well."""
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _NoDuplicates)
    except FileNotFoundError:
        raise ConfigError(f"{what} {path} does not exist") from None
    except ConfigError as error:
        raise ConfigError(f"{what} {path}, {error}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{what} {path} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{what} {path} must hold a mapping, not {type(data).__name__}")
    return data


def _overridden(data: dict[str, Any], overrides: dict[str, Any] | None) -> dict[str, Any]:
    """Raises ConfigError for a key below what is no section."""
    for dotted, value in (overrides or {}).items():
        *sections, key = dotted.split(".")
        target = data
        for section in sections:
            if target.get(section) is None:  # not there, or all of its keys are commented out
                target[section] = {}
            if not isinstance(target[section], dict):
                raise ConfigError(f"{dotted}: {section} is {target[section]!r}, which is no section and has no keys")
            target = target[section]
        target[key] = value
    return data


def read_token(path: Path) -> str:
    """The first word of a client's token file. Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8").split()[0]
    except IndexError:
        raise ConfigError(f"token file {path} is empty") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"token file {path} cannot be read: {error}") from None


def read_secret(path: Path) -> bytes:
    """What front ends know that may join. Raises ConfigError."""
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"server.join_secret_file: cannot read {path}: {error.strerror}") from None
    if len(secret) < 16:
        text = f"server.join_secret_file: {path} holds {len(secret)} characters, at least 16 are needed"
        raise ConfigError(f"{text}; openssl rand -hex 32 makes some")
    return secret


def parse_config(data: dict[str, Any], source: str = "configuration") -> Config:
    """Raises ConfigError that lists every wrong key with what is allowed."""
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        problems = "".join(f"\n  - {_explain(item)}" for item in error.errors())
        keys = [".".join(map(str, item["loc"][:2])) for item in error.errors() if item["type"] != "extra_forbidden"]
        more = f"\n(epserve config --explain {keys[0]}: what it takes and means)" if keys and keys[0] else ""
        raise ConfigError(f"{source}:{problems}{more}") from None


def _explain(item) -> str:
    where = ".".join(str(part) for part in item["loc"])
    absent = item["type"] == "missing" or item["input"] is None
    if absent and item["loc"] in (("model",), ("model", "path")):
        return "model.path: missing; it names the folder with config.json and safetensors"
    if item["type"] == "model_type":
        remedy = "" if where == "model" else "; leave it out for the defaults"
        return f"{where}: must hold keys and their values, got {item['input']!r}{remedy}"
    if item["type"] != "extra_forbidden":
        shown = "" if item["type"] == "missing" or isinstance(item["input"], dict) else f" (got {item['input']!r})"
        return f"{where or 'configuration'}: {item['msg'].removeprefix('Value error, ')}{shown}"
    section: type[BaseModel] = Config
    for part in item["loc"][:-1]:
        section = section.model_fields[part].annotation  # type: ignore[assignment]
    close = difflib.get_close_matches(str(item["loc"][-1]), section.model_fields, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    # The right word in the wrong section is nearer than any other word.
    for name, field in Config.model_fields.items():
        if len(item["loc"]) == 2 and item["loc"][1] in field.annotation.model_fields:  # type: ignore[union-attr]
            hint = f"; did you mean '{name}.{item['loc'][1]}'?"
    return f"{where}: unknown key{hint} (known: {', '.join(section.model_fields)})"

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
"""Ray keeps resources as whole multiples of this part."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Rejects switches given for numbers. Pydantic takes true for 1, and YAML takes yes, on and no for switches."""
        wants = cls.model_fields[str(info.field_name)].annotation
        items = value if isinstance(value, list | tuple) else [value]
        if wants is not bool and any(isinstance(item, bool) for item in items):
            raise ValueError("true, false, yes, no, on and off are switches; this key takes another kind of value")
        return value


class ModelConfig(_Section):
    path: Path
    """Folder with config.json and safetensors, or a GGUF file or a folder with one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of activations and unquantised weights. auto: the checkpoint's own."""
    layers: tuple[int, ...] = ()
    """Numbers of the MoE layers to serve. Empty: all."""


class EngineConfig(_Section):
    """What each rank runs."""

    ranks: Annotated[int, Field(ge=1, le=1024)] = 1
    """Expert-parallel ranks: one process each, one GPU each on GPU hosts."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where torch sees a GPU, else cpu."""
    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    """Number of ranks that share each expert by slices of its intermediate size. `ranks` counts all of them."""
    all2all: str = "auto"
    """Name of an all-to-all backend (`epserve compat` lists them), auto, or measured: each step then takes the one of
    `all2all_candidates` that was fastest for its number of tokens at start-up."""
    all2all_candidates: tuple[str, ...] = ()
    """With all2all measured: names of the backends to measure. Empty: all backends that can run here."""
    all2all_budget_mib: Annotated[int, Field(ge=0)] = 0
    """With all2all measured: most memory on each rank for all candidates' buffers and the workspaces that they share. 0: no
    separate limit."""
    low_latency_max_tokens: Annotated[int, Field(ge=1)] = 128
    """With all2all measured: cap of tokens for candidates that keep a block of rows for each expert. Their buffers grow with
    it."""
    batches_in_flight: Annotated[int, Field(ge=1, le=2)] = 1
    """2: a step runs as two halves, and one's communication hides behind the other's experts."""
    overlap_min_tokens: Annotated[int, Field(ge=2)] = 512
    """With two batches in flight: steps whose busiest rank has fewer tokens are not cut in halves."""
    cuda_graph_tokens: Literal["auto"] | tuple[Annotated[int, Field(ge=1)], ...] = "auto"
    """Sizes for which whole steps are captured as CUDA graphs at warm-up: tokens of the busiest rank, ascending, such as
    [1, 8, 32, 128]. A step is padded to the next size. Larger steps, and all steps on the CPU, run eagerly. auto: sizes up to
    512 if the backends can be captured, each kept if the ranks measure that it is faster. Empty: none."""
    experts: str = "auto"
    """Name of an experts backend, or auto: each rank takes, among the backends that fit, the one that was fastest there for
    its number of rows. With combine_order slot, auto takes the first backend that fits, for all numbers of rows."""
    experts_timing_s: Annotated[float, Field(ge=0)] = 3.0
    """With experts auto: most seconds that each rank spends on timing at its start. 0: no timing, the first backend that fits
    serves. Earlier measurements come from the file of times, which `epserve tune` fills without a start."""
    experts_times: Path | None = Path("~/.cache/epserve/experts.json")
    """File of measured times, on each rank's host. null: no file, each start measures."""
    experts_tiles: Literal["auto", "shipped"] | Path = "auto"
    """Tiles of the Triton kernels. auto: the tiles that `epserve tune` measured on the rank's host, else the shipped ones.
    shipped: never the host's own. A file on each rank's host: its table replaces the host's own and must be valid."""
    experts_tiles_folder: Path = Path("~/.cache/epserve/tiles")
    """Folder of the tables that `epserve tune` writes, on each rank's host. Ranks ignore tables of another GPU, driver or
    version."""
    experts_tiles_timing_s: Annotated[float, Field(ge=0)] = 0.0
    """Most seconds that each rank spends at its start on timing a few tiles for shapes that no table of its host has. 0: none.
    Needs experts_tiles auto."""
    cpu_threads: Annotated[int, Field(ge=1)] | None = None
    """Most threads that a rank on a CPU computes with. null: its fair share of its host's cores, and no more than OMP_NUM_THREADS
    if the service's environment sets it. Above the share the rank takes the share and says so."""
    max_tokens_per_rank: Annotated[int, Field(ge=1, le=1 << 20)] = 1024
    """Cap of tokens of one round on each rank. It sizes buffers and workspaces. Longer batches run in several rounds."""
    combine_order: Literal["rank", "slot"] = "rank"
    """rank: adds the partial sums of each rank, which sends the fewest bytes. The last bits may change when experts move.
    slot: gives the same bits for any number of ranks and any placement. It sends more bytes, and some all-to-alls cannot do
    it."""
    dispatch_quantised: bool = True
    """Send rows in fp8 where the checkpoint and the backend both allow it."""
    experts_per_rank: tuple[int, ...] = ()
    """Physical experts on each rank. Empty: as even as possible."""
    redundant_experts: Annotated[int, Field(ge=0)] = 0
    """Slots beyond one for each expert of a layer. They hold copies of busy experts. With as many slots as the model has
    experts, each expert has two copies on two ranks, and the service survives the loss of one rank without a spare."""
    spares: Annotated[int, Field(ge=0)] = 0
    """Started processes, one GPU each on GPU hosts, that take over from ranks that die or hang."""
    spare_weights: Literal["checkpoint", "host"] = "checkpoint"
    """Source of a spare's experts. checkpoint: it reads them when it takes over. host: it keeps copies of all experts in host
    memory."""
    standbys: Annotated[int, Field(ge=0, le=64)] = 1
    """Processes on each node that have imported a rank's modules and hold neither weights nor a GPU. A new rank on that node
    starts from one, seconds sooner. They cost host memory (the recovery page has the number)."""
    when_experts_missing: Literal["wait", "refuse", "serve_without"] = "wait"
    """Behaviour while a rank without spare or copies is replaced. wait: all requests wait until their deadline. refuse: the
    other ranks go on, and requests whose tokens need experts that are on no rank get UNAVAILABLE. serve_without: the other
    ranks go on and answer without those experts, which the reply then names."""
    rebalance_every_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds between two looks at the load of experts, which move experts when that pays. 0: only on request."""
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
        sizes = () if self.cuda_graph_tokens == "auto" else self.cuda_graph_tokens
        if list(sizes) != sorted(set(sizes)):
            raise ValueError(f"cuda_graph_tokens must be ascending and distinct, got {list(sizes)}")
        if self.ranks % self.tensor_parallel:
            raise ValueError(f"ranks {self.ranks} do not divide by tensor_parallel {self.tensor_parallel}")
        if self.tensor_parallel > 1 and sizes:
            raise ValueError(
                "cuda_graph_tokens: steps of ranks that share experts run eagerly, so tensor_parallel must be 1"
            )
        if self.tensor_parallel > 1 and self.combine_order == "slot":
            raise ValueError("combine_order slot: slices of an expert are added by rank, so tensor_parallel must be 1")
        return self


class ClusterConfig(_Section):
    """Where Ray runs."""

    address: str = "local"
    """local: the service starts its own Ray and stops it afterwards. auto or host:port: it joins a running cluster."""
    cpus_per_rank: Annotated[float, Field(ge=0)] = 0.1
    """Ray CPUs reserved for each rank."""
    gpus_per_rank: Annotated[float, Field(ge=0)] = 1.0
    """GPUs that Ray sets aside for each rank and each spare, with device cuda. Below 1 ranks share a GPU (0.5: two on each),
    which is for trials on a machine with few GPUs, not for speed."""
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """Strategy of the placement group: PACK onto few hosts or SPREAD over many. STRICT_ makes it a condition."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """Most seconds that all ranks together may take to load and to run their first step."""
    data_path: Literal["auto", "shared_memory", "sockets"] = "auto"
    """Path of activations to the ranks. auto: shared memory on the front end's host, sockets elsewhere. sockets: always
    sockets. shared_memory: always shared memory, and a rank on another host is an error."""
    shared_memory_bytes: Annotated[int, Field(ge=MIB)] = 1024 * MIB
    """Most shared memory for activations on their way to the ranks and back. Activations that find no room go over the
    sockets. Ranks on GPUs pin all of it."""

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
        """Returns the most ranks and spares that may share one GPU."""
        return max(int(1 / self.gpus_per_rank + 1e-6), 1) if self.gpus_per_rank else 1


class SchedulerConfig(_Section):
    """How requests become steps."""

    max_queued_tokens: Annotated[int, Field(ge=1)] = 65536
    """Most queued tokens of each layer. Above it a caller gets RESOURCE_EXHAUSTED with a retry delay: the newcomer, or the
    client that holds most of the queue."""
    max_step_tokens: Annotated[int, Field(ge=1)] = 16384
    """Most tokens that are joined into one step, over all ranks."""
    join_wait_ms: Annotated[float, Field(ge=0, le=1000)] = 1.0
    """Most milliseconds that a step waits for more requests while the ranks are idle and several clients are at work."""
    join_wait_share: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Longest wait of join_wait_ms as a share of the mean time of recent steps."""
    heartbeat_s: Annotated[float, Field(gt=0)] = 10.0
    """A rank that is silent for this many seconds counts as hung: its process is killed and replaced. A lower value reacts
    sooner, and is riskier on a crowded machine."""
    step_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """A step that takes longer than this many seconds counts as hung: its ranks are replaced."""
    default_deadline_s: Annotated[float, Field(gt=0)] = 60.0
    """Deadline in seconds for callers that send none."""
    drain_timeout_s: Annotated[float, Field(ge=0)] = 20.0
    """Most seconds that SIGTERM waits for accepted requests."""


class ServerConfig(_Section):
    host: str = "127.0.0.1"
    """Address to listen on. The default is loopback."""
    port: Annotated[int, Field(ge=0, le=65535)] = 50051
    """Port of the gRPC server. 0: the system picks one, which the log and the ready file name."""
    front_ends: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes on this host that serve clients. The first one orders the steps of all. Each further one listens on the next
    port (and the next metrics_port). Port 0: the system picks one for each."""
    join_port: Annotated[int | None, Field(ge=0, le=65535)] = None
    """Set: front ends on other hosts can join at this port of `host` (`epserve front-end --join HOST:PORT`). The connection is
    not encrypted, like the paths to the ranks, so keep it inside the cluster's network. 0: the system picks a port, which the
    log and the ready file name."""
    join_secret_file: Path | None = None
    """File with a secret of at least 16 characters that joining front ends must know. Required with join_port."""
    max_message_bytes: Annotated[int, Field(ge=1024)] = 256 * MIB
    """Largest gRPC message, and largest framed request."""
    max_tokens_per_request: Annotated[int, Field(ge=1)] = 16384
    """Longer requests get OUT_OF_RANGE."""
    max_concurrent_streams: Annotated[int, Field(ge=1)] = 1024
    """Most concurrent streams of each client connection."""
    max_in_flight_per_stream: Annotated[int, Field(ge=1)] = 64
    """Most calls of one ForwardStream that run at once. At the limit the server reads nothing more from that client."""
    max_priority: Literal["low", "normal", "high"] = "normal"
    """Highest priority that a request may ask for, unless its client's line in the tokens file says otherwise."""
    max_buffered_bytes: Annotated[int, Field(ge=1024)] = 1024 * MIB
    """Most bytes of all requests that the server holds at once and of their replies until they are sent. Above it callers get
    RESOURCE_EXHAUSTED. Incomplete messages may hold as many bytes again. Above that connections lose their calls."""
    unix_socket: Path | None = None
    """Set: the server also listens on a Unix-domain socket of this path, which only its own user can open. Never with TLS."""
    inference_protocol: bool = True
    """Serve the Open Inference Protocol (KServe v2) too. A layer is a model there."""
    regions: bool = True
    """Let clients on this host register shared-memory regions."""
    cuda_regions: bool = True
    """Let clients on this host register GPU memory too (CUDA IPC), on GPUs where ranks of this host compute. Works only with
    `regions`."""
    lanes: Annotated[int, Field(ge=0, le=1024)] = 256
    """Most lanes that clients on this host may have open at once (calls through shared memory, without messages). 0: none."""
    gpu_lanes: bool = False
    """Let clients on this host open lanes whose rows lie on the GPU of a rank. Experimental: it has run with made-up GPUs only,
    and on no real one yet. It is quick with one rank, CUDA graphs, and a C compiler on the rank's host."""
    gpu_lane_hot_ms: Annotated[float, Field(ge=0, le=1000)] = 5.0
    """How long the rank's thread for lanes on the GPU looks for calls without a pause after each call. It takes one core
    meanwhile."""
    gpu_lane_nap_us: Annotated[int, Field(ge=1, le=1000)] = 50
    """The first pauses of that thread afterwards. They grow to 1,000 us while no call comes."""
    max_region_bytes: Annotated[int, Field(ge=1)] = 16384 * MIB
    """Largest region that a client may register, and largest memory of a lane. A region costs the server a file descriptor, no
    memory."""
    region_lease_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds without use after which the server forgets a region that was registered over the Open Inference Protocol."""
    tls_cert: Path | None = None
    """PEM file of the server certificate. Set it with tls_key to turn TLS on."""
    tls_key: Path | None = None
    """PEM file of the certificate's private key."""
    tls_client_ca: Path | None = None
    """Set: clients must present a certificate that this authority signed."""
    tokens_file: Path | None = None
    """File with one bearer token a line, optionally with a name and limits. Set: every call needs
    `authorization: Bearer TOKEN`. The server reads it again on SIGHUP and when it changes."""
    metrics_port: Annotated[int | None, Field(ge=0, le=65535)] = None
    """Set: Prometheus metrics, the status page and /healthz over HTTP on this port of `host`, with the same TLS and tokens.
    0: the system picks one."""
    metrics_expert_series: Annotated[int, Field(ge=1, le=65536)] = 64
    """Most Prometheus series of tokens by expert. With more experts, neighbours share a series."""
    otlp_endpoint: str = ""
    """Set: OpenTelemetry traces go to this OTLP/gRPC collector, such as http://127.0.0.1:4317. Needs the extra `tracing`."""
    trace_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of calls that are traced, among the calls whose client has not decided."""
    log_format: Literal["text", "json"] = "text"
    """Format of the service's log on stderr and of the ranks' logs in Ray's log folder. json: one object a line, with request
    ids."""
    reflection: bool = True
    """Serve the gRPC reflection service, which lists methods and messages."""
    allow_insecure: bool = False
    """Permission to listen beyond loopback without TLS."""

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
        """Returns the port of each front end on this host."""
        return tuple(self.port and self.port + number for number in range(self.front_ends))

    @property
    def all_metrics_ports(self) -> tuple[int, ...]:
        """Returns the metrics port of each front end on this host. Empty without metrics."""
        first = self.metrics_port
        return () if first is None else tuple(first and first + number for number in range(self.front_ends))


class Config(_Section):
    model: ModelConfig
    engine: EngineConfig = EngineConfig()
    cluster: ClusterConfig = ClusterConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    server: ServerConfig = ServerConfig()


def load_config(path: str | Path, overrides: dict[str, Any] | None = None) -> Config:
    """Reads a YAML file. `overrides` maps dotted keys ("server.port") to values. Raises ConfigError with one message."""
    return parse_config(with_overrides(read_mapping(Path(path), "configuration file"), overrides), str(path))


def load_front_end(
    path: str | Path | None, overrides: dict[str, Any] | None = None
) -> tuple[ServerConfig, SchedulerConfig]:
    """Returns the configuration of a front end that joins: its server, and its default deadline and drain.

    It reads a file as `load_config` does. The service's own file will do, since the sections engine, cluster and model are
    ignored. The keys front_ends, join_port and join_secret_file of that file are reset to their defaults.
    """
    data = with_overrides(read_mapping(Path(path), "configuration file") if path is not None else {}, overrides)
    sections = {name: data[name] for name in data if name not in ("engine", "cluster", "model")}
    config = parse_config({**sections, "model": {"path": "."}}, str(path or "command line"))
    own = {"front_ends": 1, "join_port": None, "join_secret_file": None}
    return config.server.model_copy(update=own), config.scheduler


class _NoDuplicates(yaml.SafeLoader):
    """Rejects equal keys. YAML's own loader takes the last of two equal keys and drops the first in silence."""

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
    """Returns a YAML file's mapping. `what` names the file in messages. Raises ConfigError, for two equal keys as well."""
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


def with_overrides(data: dict[str, Any], overrides: dict[str, Any] | None) -> dict[str, Any]:
    """Returns `data` with the overrides set. Raises ConfigError for a key below a value that is not a section."""
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
    """Returns the first word of a client's token file. Raises ConfigError when it is empty or unreadable."""
    try:
        return path.read_text(encoding="utf-8").split()[0]
    except IndexError:
        raise ConfigError(f"token file {path} is empty") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"token file {path} cannot be read: {error}") from None


def read_secret(path: Path) -> bytes:
    """Returns the secret that joining front ends must know. Raises ConfigError when it is unreadable or too short."""
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"server.join_secret_file: cannot read {path}: {error.strerror}") from None
    if len(secret) < 16:
        text = f"server.join_secret_file: {path} holds {len(secret)} characters, at least 16 are needed"
        raise ConfigError(f"{text}; openssl rand -hex 32 makes some")
    return secret


def parse_config(data: dict[str, Any], source: str = "configuration") -> Config:
    """Checks a configuration. Raises ConfigError that lists every wrong key with its allowed values."""
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
    # The right key in the wrong section is nearer than any other key.
    for name, field in Config.model_fields.items():
        if len(item["loc"]) == 2 and item["loc"][1] in field.annotation.model_fields:  # type: ignore[union-attr]
            hint = f"; did you mean '{name}.{item['loc'][1]}'?"
    return f"{where}: unknown key{hint} (known: {', '.join(section.model_fields)})"

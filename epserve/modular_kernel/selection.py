"""Measured selection: which experts backend serves which batch size is decided by timing the candidates on this device.

Buckets are powers of four of tokens. Results are kept in a file under a key that holds everything a time depends on: device,
driver, torch and Triton versions, shape and quantisation. A later start with the same key measures nothing.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from epserve.errors import ConfigError

from .capability import LayerSpec
from .contracts import FusedMoEExpertsModular, Prepared
from .handles import DispatchHandle, HandleBook
from .types import ExpertWeights, Routing
from .workspace import Workspace, Workspaces, WorkspaceShapes

LOG = logging.getLogger("epserve.selection")
BUCKETS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
REPEATS = 5

Timer = Callable[[Callable[[], object]], float]
"""Seconds that one call takes on the device."""


class MeasuredExperts(FusedMoEExpertsModular):
    """Several experts objects of Standard format behind one: `apply` takes the one that was fastest for the batch's bucket.

    All candidates must leave the same thing to finalize. Before `warm_up` the first one serves everything. `overrides` maps
    a bucket to a candidate's name and is not measured.
    """

    def __init__(
        self,
        spec: LayerSpec,
        candidates: Mapping[str, FusedMoEExpertsModular],
        *,
        cache: Path | None = None,
        overrides: Mapping[int, str] | None = None,
        timer: Timer | None = None,
    ):
        super().__init__(spec)
        if not candidates:
            raise ConfigError("measured selection needs at least one experts backend")
        left = {name: type(c.finalize_weight_and_reduce_impl()).__name__ for name, c in candidates.items()}
        if len(set(left.values())) > 1:
            raise ConfigError(f"candidates leave different work to finalize: {left}")
        for bucket, name in (overrides or {}).items():
            if bucket not in BUCKETS or name not in candidates:
                raise ConfigError(f"override {bucket}: {name!r}; buckets {BUCKETS}, candidates {', '.join(candidates)}")
        self.candidates, self.cache, self.overrides = dict(candidates), cache, dict(overrides or {})
        self.capability = next(iter(candidates.values())).capability  # type: ignore[misc]
        self.times: dict[int, dict[str, float]] = {}
        """Bucket -> candidate -> seconds."""
        self._timer = timer or _time

    def choice(self, num_tokens: int) -> str:
        bucket = bucket_of(num_tokens)
        if bucket in self.overrides:
            return self.overrides[bucket]
        times = self.times.get(bucket)
        return min(times, key=lambda name: times[name]) if times else next(iter(self.candidates))

    def explain(self) -> dict[int, str]:
        """For the log and `GetStatus`: a sentence a bucket."""
        lines = {}
        for bucket in sorted(set(self.times) | set(self.overrides)):
            seen = sorted(self.times.get(bucket, {}).items(), key=lambda item: item[1])
            text = ", ".join(f"{name} {seconds * 1e6:.0f} us" for name, seconds in seen)
            why = "set by hand" if bucket in self.overrides else "fastest"
            lines[bucket] = f"{self.choice(bucket)} ({why}{': ' + text if text else ''})"
        return lines

    def prepare_weights(self, weights: ExpertWeights) -> ExpertWeights:
        for candidate in self.candidates.values():
            weights = candidate.prepare_weights(weights)
        return weights

    def workspace_shapes(self, num_rows, top_k, num_experts, capacity=0):
        """Bytes: enough for whichever candidate serves."""
        all_shapes = [c.workspace_shapes(num_rows, top_k, num_experts, capacity) for c in self.candidates.values()]
        first = all_shapes[0]
        return WorkspaceShapes(
            workspace13=(max(_nbytes(s.workspace13, s.dtype) for s in all_shapes),),
            workspace2=(max(_nbytes(s.workspace2, s.dtype) for s in all_shapes),),
            output=first.output, dtype=torch.uint8, output_dtype=first.output_dtype,
        )  # fmt: skip

    def finalize_weight_and_reduce_impl(self):
        return next(iter(self.candidates.values())).finalize_weight_and_reduce_impl()

    def apply(self, output, prepared, *, weights, workspace):
        chosen = self.candidates[self.choice(prepared.x.shape[0])]
        return self._run(chosen, output, prepared, weights, workspace)

    def warm_up(self, weights: ExpertWeights, max_rows: int) -> None:
        """Warm every candidate up, then time them, or read what an earlier start measured under the same key."""
        for candidate in self.candidates.values():
            candidate.warm_up(weights, max_rows)
        key = self.key(weights)
        stored = _read(self.cache).get(key, {})
        self.times = {int(bucket): times for bucket, times in stored.items() if set(times) == set(self.candidates)}
        wanted = [bucket for bucket in BUCKETS if bucket <= max_rows and bucket not in self.overrides]
        missing = [bucket for bucket in wanted if bucket not in self.times] if len(self.candidates) > 1 else []
        spaces = Workspaces(weights.w13_eNK.device)
        for bucket in missing:
            self.times[bucket] = self._measure(bucket, weights, spaces)
        if missing and self.cache is not None:
            _write(self.cache, key, self.times)
        for bucket, line in self.explain().items():
            LOG.info("%d tokens: %s", bucket, line)

    def key(self, weights: ExpertWeights) -> str:
        s, device = self.spec.shape, weights.w13_eNK.device
        where = "cpu"
        if device.type == "cuda":
            driver = torch._C._cuda_getDriverVersion()  # type: ignore[attr-defined]
            where = f"{torch.cuda.get_device_name(device)} driver {driver}"
        layer = f"K{s.hidden} N{s.intermediate} e{weights.num_experts} E{s.num_experts} t{s.top_k} {s.dtype}"
        return f"{where} | torch {torch.__version__} triton {_version('triton')} | {layer} {self.spec.quant.scheme}"

    def _measure(self, bucket: int, weights: ExpertWeights, spaces: Workspaces) -> dict[str, float]:
        prepared = _example(self.spec, bucket, weights)
        workspace = spaces.carve(self.workspace_shapes(bucket, self.spec.shape.top_k, weights.num_experts))
        times = {}
        for name, candidate in self.candidates.items():

            def run(candidate=candidate):
                return self._run(candidate, workspace.output, prepared, weights, workspace)

            run()
            times[name] = statistics.median(self._timer(run) for _ in range(REPEATS))
        return times

    def _run(self, candidate, output, prepared: Prepared, weights: ExpertWeights, workspace: Workspace):
        num_rows, top_k = prepared.x.shape[0], self.spec.shape.top_k
        if prepared.routing is not None:
            top_k = prepared.routing.ids_Mt.shape[1]
        shapes = candidate.workspace_shapes(num_rows, top_k, weights.num_experts)
        parts = [
            region[: _nbytes(shape, shapes.dtype)].view(shapes.dtype).view(shape)
            for region, shape in (
                (workspace.workspace13, shapes.workspace13),
                (workspace.workspace2, shapes.workspace2),
            )
        ]
        own = Workspace(workspace13=parts[0], workspace2=parts[1], output=output)
        return candidate.apply(output, prepared, weights=weights, workspace=own)


def bucket_of(num_tokens: int) -> int:
    """The bucket that is nearest on a logarithmic scale: 2 -> 1, 3 -> 4, 33 -> 64."""
    return next((bucket for bucket in BUCKETS if num_tokens <= 2 * bucket), BUCKETS[-1])


def _example(spec: LayerSpec, num_rows: int, weights: ExpertWeights) -> Prepared:
    """Random rows whose slots are spread as even routing over all experts would: the share of this rank is local."""
    device, t = weights.w13_eNK.device, spec.shape.top_k
    generator = torch.Generator().manual_seed(num_rows)
    scores = torch.rand((num_rows, spec.shape.num_experts), generator=generator)
    ids = scores.topk(t, 1).indices.int()
    ids = torch.where(ids < weights.num_experts, ids, -1).to(device)
    routing = Routing(ids_Mt=ids, weights_Mt=torch.full((num_rows, t), 1.0 / t, device=device))
    x = torch.randn((num_rows, spec.shape.hidden), generator=generator).to(spec.shape.dtype).to(device)
    return Prepared(x=x, routing=routing, handle=DispatchHandle(HandleBook("measured selection"), None))


def _time(run: Callable[[], object]) -> float:
    if not torch.cuda.is_available():
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _read(cache: Path | None) -> dict:
    if cache is None or not cache.exists():
        return {}
    try:
        found = json.loads(cache.read_text())
    except (OSError, ValueError) as error:
        LOG.warning("%s cannot be read and is measured again: %s", cache, error)
        return {}
    return found if isinstance(found, dict) else {}


def _write(cache: Path, key: str, times: dict[int, dict[str, float]]) -> None:
    """Whole files only: several ranks may write, and a reader never sees half of one."""
    content = _read(cache) | {key: {str(bucket): seconds for bucket, seconds in times.items()}}
    cache.parent.mkdir(parents=True, exist_ok=True)
    fresh = cache.with_suffix(f".{time.time_ns()}.new")
    fresh.write_text(json.dumps(content, indent=1))
    fresh.replace(cache)

"""Selects the experts backend for each size of batches by timing the candidates on this device.

Buckets are powers of four of rows, and so of tokens an expert, since a layer's experts are fixed. Times are kept in a file
under a key that holds everything they depend on: device, driver, library versions, shape and quantisation. A later start with
the same key measures nothing. The choice is each rank's own: all candidates' results have one form, so ranks that choose
differently still speak the same all-to-all.
"""

from __future__ import annotations

import functools
import logging
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from epserve.errors import ConfigError
from epserve.modular_kernel.capability import LayerSpec
from epserve.modular_kernel.contracts import FusedMoEExpertsModular, Prepared
from epserve.modular_kernel.handles import DispatchHandle, HandleBook
from epserve.modular_kernel.reduce import TopKWeightAndReduceContiguous
from epserve.modular_kernel.types import ExpertWeights, FusedMoEActivationFormat, Routing
from epserve.modular_kernel.workspace import Workspace, Workspaces, WorkspaceShapes

from .buckets import BUCKETS, bucket_of
from .known_times import KnownTable, KnownTimes
from .summed import SummedExperts, nbytes, view
from .timers import Timer, time_call, time_graph
from .times_cache import TimesCache, key_of

LOG = logging.getLogger("epserve.selection")
REPEATS = 5
MARGIN = 1.05
"""A candidate later in the order of preference must be faster by this factor: noise must not decide."""
APART = 0.15
"""A candidate whose result is further than this from the first candidate's (relative L2 distance) counts as broken. Two correct
results in e4m3 differ by about 0.05."""

TOO_LONG = ""
"""Stands for a candidate's name where the budget was spent before the bucket. The same budget does not measure it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """Configures the measurement.

    Args:
        budget_s: the seconds that timing may take, without compiling. 0: nothing is timed.
        cache: the file of times. None: there is none.
        again: buckets are measured even if the file has them.
        overrides: bucket -> candidate. These buckets are not measured.
        known: the times that the process knows beside the file. If they have times of the same kin, nothing is timed.
    """

    budget_s: float = 3.0
    cache: Path | None = None
    again: bool = False
    overrides: Mapping[int, str] = field(default_factory=dict, hash=False)
    known: KnownTimes | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Records that `backend` computes batches of about `rows` rows. The last choice computes all larger batches, too.

    `seconds`: the measured times.
    """

    rows: int
    backend: str
    seconds: Mapping[str, float]


class MeasuredExperts(FusedMoEExpertsModular):
    """Joins several experts objects of Standard format: `apply` takes the one that was fastest for the batch's bucket.

    It keeps no state of a batch: several may be in flight, each in its own workspace. Before `warm_up` the first candidate
    serves everything. The order is the order of preference.
    """

    FORMAT = FusedMoEActivationFormat.Standard

    def __init__(
        self,
        spec: LayerSpec,
        candidates: Mapping[str, FusedMoEExpertsModular],
        *,
        measuring: Measuring | None = None,
        every_row: bool = True,
        timer: Timer | None = None,
    ):
        """every_row: prepare delivers rows without a local slot, too (as a gather does). False: only rows with a local slot."""
        super().__init__(spec)
        if not candidates:
            raise ConfigError("measured selection needs at least one experts backend")
        self.measuring = measuring or Measuring()
        for name, candidate in candidates.items():
            if self.FORMAT not in candidate.activation_formats():
                raise ConfigError(
                    f"measured selection is for {self.FORMAT.name} format here, which {name!r} does not take"
                )
            if every_row and spec.layout.num_ranks > 1 and not candidate.supports_expert_map():
                raise ConfigError(
                    f"measured selection gets rows of other ranks' experts here, which {name!r} cannot skip"
                )
        for bucket, name in self.measuring.overrides.items():
            if bucket not in BUCKETS or name not in candidates:
                raise ConfigError(f"override {bucket}: {name!r}; buckets {BUCKETS}, candidates {', '.join(candidates)}")
        self.candidates = _alike(candidates)
        self.capability = next(iter(candidates.values())).capability  # type: ignore[misc]
        self.every_row = every_row
        self.times: dict[int, dict[str, float]] = {}
        """Maps bucket -> candidate -> seconds."""
        self.left_out: dict[str, str] = {}
        """Maps each excluded candidate to the reason."""
        self.carried: KnownTable | None = None
        """The table that the times came from, if they were measured for other numbers of experts."""
        self._timer = timer or (time_graph if spec.cuda_graph else time_call)
        self._per_row = 0.0
        self._warm_rows = -1
        self._first_from: int | None = None
        self._chosen: dict[int, str] = {}

    def choice(self, num_rows: int) -> str:
        """Returns the candidate by the bucket's times, or by those of the largest smaller bucket with times."""
        bucket = self._bucket_of(num_rows)
        if bucket not in self._chosen:
            self._chosen[bucket] = self._choose(bucket)
        return self._chosen[bucket]

    def _choose(self, bucket: int) -> str:
        if bucket in self.measuring.overrides:
            return self.measuring.overrides[bucket]
        known = [each for each, times in self.times.items() if each <= bucket and TOO_LONG not in times]
        if self._first_from is not None and bucket >= self._first_from:
            known = []
        times = self.times[max(known)] if known else {}
        able = [name for name in self.candidates if name not in self.left_out]
        best = min((times[name] for name in able if name in times), default=None)
        return next((name for name in able if best is not None and times.get(name, best * 2) <= best * MARGIN), able[0])

    def choices(self) -> tuple[Choice, ...]:
        """Returns one choice for each bucket that was measured or set, in ascending order."""
        known = {each for each, times in self.times.items() if TOO_LONG not in times}
        buckets = sorted(known | set(self.measuring.overrides))
        return tuple(Choice(rows=each, backend=self.choice(each), seconds=self.times.get(each, {})) for each in buckets)

    def explain(self) -> list[str]:
        """Returns a sentence for each bucket and for each excluded candidate, for the log and `GetStatus`."""
        lines = []
        for each in self.choices():
            bucket, chosen = each.rows, each.backend
            seen = sorted(each.seconds.items(), key=lambda item: item[1])
            text = ", ".join(f"{name} {seconds * 1e6:.0f} us" for name, seconds in seen)
            why = "set by hand" if bucket in self.measuring.overrides else "fastest"
            if why == "fastest" and seen and seen[0][0] != chosen:
                why = f"preferred, within {100 * (MARGIN - 1):.0f} % of the fastest"
            lines.append(f"experts for {self._describe(bucket)}: {chosen} ({why}{': ' + text if text else ''})")
        unknown = sorted(each for each, times in self.times.items() if TOO_LONG in times)
        if unknown:
            limit = max(self.times[each][TOO_LONG] for each in unknown)
            lines.append(f"experts for {self._untimed(unknown[0], limit)}")
        if self.carried is not None:
            lines.append(
                f"experts: chosen by times that were measured with {self.carried.num_experts} experts on a rank, before the"
                " number of ranks changed"
            )
        lines += [f"experts {name} left out: {reason}" for name, reason in self.left_out.items()]
        return lines + [line for candidate in self.candidates.values() for line in candidate.explain()]

    def prepare_weights(self, weights: ExpertWeights) -> ExpertWeights:
        for candidate in self.candidates.values():
            weights = candidate.prepare_weights(weights)
        return weights

    def workspace_shapes(self, num_rows, top_k, num_experts, capacity=0):
        """Returns sizes in bytes that are enough for every candidate."""
        able = [each for name, each in self.candidates.items() if name not in self.left_out]
        all_shapes = [each.workspace_shapes(num_rows, top_k, num_experts, capacity) for each in able]
        first = all_shapes[0]
        return WorkspaceShapes(
            workspace13=(max(nbytes(s.workspace13, s.dtype) for s in all_shapes),),
            workspace2=(max(nbytes(s.workspace2, s.dtype) for s in all_shapes),),
            output=first.output, dtype=torch.uint8, output_dtype=first.output_dtype,
        )  # fmt: skip

    def finalize_weight_and_reduce_impl(self):
        return next(iter(self.candidates.values())).finalize_weight_and_reduce_impl()

    def apply(self, output, prepared, *, weights, workspace):
        chosen = self.candidates[self.choice(self._size_of(prepared))]
        return self._run(chosen, output, prepared, weights, workspace)

    def tune(self, weights: ExpertWeights, max_rows: int) -> None:
        """Tunes each candidate's own variants. The candidates are timed against each other with them."""
        for candidate in self.candidates.values():
            candidate.tune(weights, max_rows)

    def warm_up(self, weights: ExpertWeights, max_rows: int) -> None:
        """Warms every candidate up, then times them, or reads the times of an earlier start under the same key. Not collective.

        A candidate that fails here is left out and serves nothing. If it is the first one or set by hand, its error is raised.
        A second call for no more rows does nothing: after a failure the object goes on in another group.
        """
        if max_rows <= self._warm_rows or weights.num_experts == 0:
            return
        needed = {next(iter(self.candidates)), *self.measuring.overrides.values()}
        for name, candidate in self.candidates.items():
            try:
                candidate.warm_up(weights, max_rows)
            except Exception as error:
                if name in needed:
                    raise
                self._leave_out(name, f"{type(error).__name__}: {error}".splitlines()[0][:200])
        self._per_row = self.spec.shape.top_k / self.spec.shape.num_experts
        cache = TimesCache(self.measuring.cache, self.key(weights))
        able = {name for name in self.candidates if name not in self.left_out}
        stored = {} if self.measuring.again else cache.read()
        budget = self.measuring.budget_s
        self.times = {bucket: times for bucket, times in stored.items()
                      if set(times) == able or times.get(TOO_LONG, -1.0) >= budget}  # fmt: skip
        wanted = [bucket for bucket in self._buckets(max_rows) if bucket not in self.measuring.overrides]
        missing = [bucket for bucket in wanted if bucket not in self.times] if len(able) > 1 else []
        if missing and budget > 0 and not self._carry(weights):
            self._measure(missing, weights)
            cache.write(self.times)
        self._warm_rows = max_rows
        self._chosen.clear()
        if weights.w13_eNK.device.type == "cuda":
            torch.cuda.empty_cache()  # frees the memory of the slower candidates

    def key(self, weights: ExpertWeights) -> str:
        chosen = [f"{name} {variant}" for name, each in self.candidates.items() if (variant := each.variant())]
        rows = "every row" if self.every_row else "local rows"
        return " | ".join([key_of(self.spec, weights, self.candidates), f"{rows}{self._graphs()}", *chosen])

    def table(self, weights: ExpertWeights) -> KnownTable | None:
        """Returns the times measured here or read from the file. None: there are none."""
        if self.carried is not None or not self.times:
            return None
        return KnownTable(
            key=self.key(weights), kin=self._kin(weights), num_experts=weights.num_experts, times=dict(self.times),
            left_out=dict(self.left_out),
        )  # fmt: skip

    def _graphs(self) -> str:
        return ", graphs" if self.spec.cuda_graph else ""

    def _kin(self, weights: ExpertWeights) -> str:
        """Returns the key without the rows that prepare delivers: a rank that is left alone has another all-to-all."""
        return f"{key_of(self.spec, weights, self.candidates, counts=False)} | {self.FORMAT.name}{self._graphs()}"

    def _carry(self, weights: ExpertWeights) -> bool:
        """Takes times that the process knows beside the file. Returns False if there are none."""
        known, key = self.measuring.known, self.key(weights)
        table = known.find(key, self._kin(weights), weights.num_experts) if known is not None else None
        if table is None or self.measuring.again:
            return False
        for name, reason in table.left_out.items():
            if name in self.candidates and name not in self.left_out:
                self._leave_out(name, reason)
        able = {name for name in self.candidates if name not in self.left_out}
        times = {bucket: dict(each) for bucket, each in table.times.items() if set(each) == able or TOO_LONG in each}
        if all(TOO_LONG in each for each in times.values()):
            return False
        self.times, self.carried = times, None if table.key == key else table
        return True

    def _bucket_of(self, size: int) -> int:
        return bucket_of(size)

    def _buckets(self, max_rows: int) -> list[int]:
        return [bucket for bucket in BUCKETS if bucket <= max_rows]

    def _size_of(self, prepared: Prepared) -> int:
        """Returns the size that the choice depends on."""
        return prepared.x.shape[0]

    def _describe(self, bucket: int) -> str:
        load = f" ({bucket * self._per_row:.3g} an expert)" if self._per_row else ""
        return f"about {bucket} rows{load}"

    def _untimed(self, bucket: int, limit: float) -> str:
        return f"{bucket} rows and more: as for fewer; {limit:g} s were spent on timing"

    def _examples(self, bucket: int, weights: ExpertWeights) -> list[Prepared]:
        sets = 4 if bucket <= 64 else 1  # a thin batch touches few experts, and several batches touch different ones
        return [example_batch(self.spec, bucket, weights, seed, self.every_row) for seed in range(sets)]

    def _shapes(self, experts: FusedMoEExpertsModular, prepared: Prepared, num_experts: int) -> WorkspaceShapes:
        top_k = self.spec.shape.top_k if prepared.routing is None else prepared.routing.ids_Mt.shape[1]
        return experts.workspace_shapes(prepared.x.shape[0], top_k, num_experts)

    def _real(self, y: torch.Tensor, prepared: Prepared) -> torch.Tensor:
        """Returns the defined part of a result, in float32."""
        return y.float()

    def _measure(self, buckets: list[int], weights: ExpertWeights) -> None:
        """Measures the buckets, the smallest first, as long as the budget lasts."""
        spaces, begin, limit = Workspaces(weights.w13_eNK.device), time.perf_counter(), self.measuring.budget_s
        for done, bucket in enumerate(buckets):
            known = [each for each, times in self.times.items() if each < bucket and TOO_LONG not in times]
            once = sum(self.times[max(known)].values()) * bucket / max(known) if known else 0.0
            if time.perf_counter() - begin + 2 * once > limit:  # at least one run to warm up and one to time
                self.times |= {each: {TOO_LONG: limit} for each in buckets[done:]}
                return
            try:
                self._measure_one(bucket, weights, spaces, begin + limit)
            except torch.OutOfMemoryError as error:  # the measurement needs a second workspace beside the kernel's own
                LOG.warning("experts for %d rows and more are not timed: %s", bucket, str(error).splitlines()[0])
                self._first_from = bucket  # the first candidate's memory is reserved in any case
                return

    def _measure_one(self, bucket: int, weights: ExpertWeights, spaces: Workspaces, deadline: float) -> None:
        """Times the candidates in turn, so that a machine that slows down slows all of them."""
        batches = self._examples(bucket, weights)
        workspace = spaces.carve(self._shapes(self, batches[0], weights.num_experts))
        able = [name for name in self.candidates if name not in self.left_out]

        def run(name: str, batch: Prepared) -> torch.Tensor:
            return self._run(self.candidates[name], workspace.output, batch, weights, workspace)

        want = self._real(run(able[0], batches[0]), batches[0]).clone()
        for name in able[1:]:
            try:
                got = self._real(run(name, batches[0]), batches[0])
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                self._leave_out(
                    name, f"for {self._describe(bucket)}: {type(error).__name__}: {error}".splitlines()[0][:200]
                )
                continue
            apart = float((got - want).norm() / want.norm().clamp(min=1e-30))
            if not apart <= APART:  # a NaN also counts as apart
                text = f"its result for {self._describe(bucket)} differs from that of {able[0]} by {apart:.2g} (relative L2)"
                self._leave_out(name, text)
        able = [name for name in able if name not in self.left_out]
        seen: dict[str, list[float]] = {name: [] for name in able}
        for repeat in range(REPEATS):
            if repeat and time.perf_counter() > deadline:
                break
            for name in able:
                batch = batches[repeat % len(batches)]
                seen[name].append(self._timer(functools.partial(run, name, batch)))
        self.times[bucket] = {name: statistics.median(values) for name, values in seen.items()}

    def _leave_out(self, name: str, reason: str) -> None:
        self.left_out[name] = reason
        self._chosen.clear()
        LOG.warning("experts %s left out: %s", name, reason)

    def _run(self, candidate, output, prepared: Prepared, weights: ExpertWeights, workspace: Workspace):
        shapes = self._shapes(candidate, prepared, weights.num_experts)
        own = Workspace(
            workspace13=view(workspace.workspace13, shapes.workspace13, shapes.dtype),
            workspace2=view(workspace.workspace2, shapes.workspace2, shapes.dtype),
            output=output,
        )
        return candidate.apply(output, prepared, weights=weights, workspace=own)


def _alike(candidates: Mapping[str, FusedMoEExpertsModular]) -> dict[str, FusedMoEExpertsModular]:
    """Makes all candidates leave the same work to finalize. If they differ, those that leave a row a slot get the sum added."""
    kinds = {name: type(each.finalize_weight_and_reduce_impl()) for name, each in candidates.items()}
    if len(set(kinds.values())) == 1:
        return dict(candidates)
    made = {name: SummedExperts(each) if kinds[name] is TopKWeightAndReduceContiguous else each
            for name, each in candidates.items()}  # fmt: skip
    left = {name: type(each.finalize_weight_and_reduce_impl()).__name__ for name, each in made.items()}
    if len(set(left.values())) > 1:
        raise ConfigError(f"candidates leave different work to finalize: {left}")
    return made


def example_batch(spec: LayerSpec, num_rows: int, weights: ExpertWeights, seed: int, every_row: bool) -> Prepared:
    """Returns random rows whose slots are spread as by even routing over all experts."""
    device, e, t = weights.w13_eNK.device, weights.num_experts, min(spec.shape.top_k, spec.shape.num_experts)
    generator = torch.Generator().manual_seed(1000 * num_rows + seed)
    ids = torch.rand((num_rows, spec.shape.num_experts), generator=generator).topk(t, 1).indices.int()
    local = (ids < e).any(1)
    if not every_row and not bool(local.all()):
        (held,) = local.nonzero(as_tuple=True)
        if len(held):
            other = held[torch.randint(len(held), (num_rows,), generator=generator)]
            ids = ids[torch.where(local, torch.arange(num_rows), other)]
        else:
            ids[:, 0] = torch.randint(e, (num_rows,), generator=generator).int()
    ids = torch.where(ids < e, ids, -1).contiguous().to(device)
    routing = Routing(ids_Mt=ids, weights_Mt=torch.full((num_rows, t), 1.0 / t, device=device))
    there = torch.Generator(device).manual_seed(seed)  # the rows are many, so the device draws them
    x = torch.randn((num_rows, spec.shape.hidden), generator=there, device=device).to(spec.shape.dtype)
    return Prepared(x=x, routing=routing, handle=DispatchHandle(HandleBook("measured selection"), None))

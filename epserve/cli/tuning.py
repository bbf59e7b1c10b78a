"""`epserve tune`: times tiles and experts backends for a configuration on this machine and keeps the fastest.

A start then need not measure. Nothing is collective: ranks with equally many experts have equal times, so this process
measures one rank of each kind, one after the other, on its own weights of the first served layer.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from epserve.config import Config
from epserve.errors import ConfigError
from epserve.models import open_checkpoint
from epserve.modular_kernel import RankContext
from epserve.modular_kernel.measured.selection import Choice
from epserve.rank.setup import cores
from epserve.rank.setup import plan as rank_plan
from epserve.rank.worker import Worker

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """Measurements of one kind of rank and one group of like layers.

    Args:
        ranks: the ranks that hold this number of experts.
        scheme: how the group's experts are served, see `QuantConfig`.
        choices: choices of whole backends. Empty: only one backend fits, or the files have no times.
        lines: what the rank would log of the group.
        passed_over: the backends before the first choice that cannot serve it, with their reasons.
    """

    ranks: tuple[int, ...]
    num_experts: int
    scheme: str
    choices: tuple[Choice, ...]
    lines: tuple[str, ...]
    passed_over: tuple[str, ...]


def tune(config: Config, *, again: bool = False) -> Iterator[Tuned]:
    """Yields a result for each number of experts that ranks hold and each group of layers, after the files have its times.

    For each result tiles take `engine.experts_tiles_timing_s` at most, and backends `engine.experts_timing_s`. With 0 for both
    nothing is measured or written: the results are what the files have. With `again` it also measures again what they have.

    Raises:
        ConfigError: before it measures, when there is nothing to measure or the result cannot be kept.
        CheckpointError, Incompatible: the model cannot be served.
    """
    device = _device(config)
    info = open_checkpoint(config.model.path, config.model.dtype).info
    plan = rank_plan.plan_ranks(config, info, device=device.type)
    if not any(path.chosen.rivals for path in plan.paths) and not _tiles(config, plan):
        raise ConfigError(_nothing(config, plan))
    if config.engine.experts_timing_s or _tiles(config, plan):
        _check_written(config, tiles=_tiles(config, plan))
    # One layer of each group is enough: the others have the same shape and scheme.
    layers = tuple(sorted(group.layers[0] for group in plan.groups))
    only = config.model_copy(update={"model": config.model.model_copy(update={"layers": layers})})
    layout, num_ranks = plan.spec.layout, config.engine.ranks
    held = {rank: layout.counts[rank // layout.slices] for rank in range(num_ranks)}
    for num_experts in sorted(set(held.values()) - {0}):
        ranks = tuple(rank for rank, count in held.items() if count == num_experts)
        worker = Worker(only, RankContext(rank=ranks[0], world_size=num_ranks, device=device))
        worker.load()
        worker.time_experts(again=again)
        for kernels in worker.kernels.groups:
            plan_of = kernels.first.plan
            yield Tuned(
                ranks=ranks, num_experts=num_experts, scheme=plan_of.spec.quant.scheme, choices=kernels.experts_choices(),
                lines=tuple(kernels.notes()), passed_over=plan_of.chosen.passed_over,
            )  # fmt: skip


def why_no_tiles(config: Config) -> str | None:
    """Returns the reason, for people, why tiles are not tuned here. None: they are tuned."""
    engine = config.engine
    device = rank_plan.resolve_device(engine.device)
    if device != "cuda":
        return f"tiles belong to the Triton kernels, which need a GPU; on {device} there are backends to time, no tiles"
    plan = rank_plan.plan_ranks(config, open_checkpoint(config.model.path, config.model.dtype).info, device=device)
    if not rank_plan.tunes(plan.paths):
        return f"tiles belong to the Triton kernels, which are not among the experts backends here ({plan.chosen.names[1]})"
    if engine.experts_tiles != "auto":
        return f"engine.experts_tiles is {str(engine.experts_tiles)!r}: tiles that were tuned here would not be read"
    return None if engine.experts_tiles_timing_s > 0 else "no time was given to them"


def _tiles(config: Config, plan: rank_plan.RankPlan) -> bool:
    timed = config.engine.experts_tiles == "auto" and config.engine.experts_tiles_timing_s > 0
    return timed and plan.spec.device == "cuda" and rank_plan.tunes(plan.paths)


def _check_written(config: Config, *, tiles: bool) -> None:
    """Raises ConfigError when times cannot be stored. A service's start goes on without them, but tuning has no other use."""
    engine = config.engine
    kept = [("engine.experts_times", engine.experts_times, "times")] if engine.experts_times is not None else []
    kept += [("engine.experts_tiles_folder", engine.experts_tiles_folder / "table", "tiles-folder")] if tiles else []
    for key, path, option in kept:
        try:
            file = path.expanduser()
            file.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=file.parent).close()
            if file.exists():
                file.open("r+b").close()
        except (OSError, RuntimeError) as error:  # RuntimeError: no such home directory
            why = error.strerror if isinstance(error, OSError) else error
            shown = path.parent if option == "tiles-folder" else path
            raise ConfigError(f"{key}: {shown} cannot be written: {why}; name another place with --{option}") from None


def _device(config: Config) -> torch.device:
    kind = rank_plan.resolve_device(config.engine.device)
    if kind != "cuda":
        # A rank has this many threads when all ranks are on this machine.
        most = cores.most_threads(config.engine.cpu_threads)
        torch.set_num_threads(cores.share_of(cores.this_host(), 0, config.engine.ranks, most).threads)
        return torch.device(kind)
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


def _nothing(config: Config, plan: rank_plan.RankPlan) -> str:
    engine, chosen = config.engine, plan.chosen
    if engine.experts != "auto":
        return f"engine.experts is {engine.experts!r}: a named backend is not measured; set it to auto"
    if engine.combine_order == "slot":
        return "engine.combine_order slot promises the same bits everywhere: the first experts backend that fits serves"
    return (
        f"only {chosen.experts!r} fits this layer on {plan.spec.device} and can run here: there is nothing to measure"
    )

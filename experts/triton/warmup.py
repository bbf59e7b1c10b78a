"""Start-up of the Triton experts: it names the machine, and compiles and loads every kernel variant before the first request."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import torch
import triton

from epserve.modular_kernel import DispatchHandle, ExpertWeights, HandleBook, Prepared, Routing, Workspaces
from epserve.modular_kernel.measured.buckets import BUCKETS

from .compiles import COUNTER
from .launch import DIRECT_SLOTS, SMALL_SORT


def unavailable() -> str | None:
    if triton.knobs.runtime.interpret:
        return None
    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.version.hip is None and torch.cuda.get_device_capability() < (8, 0):
        return f"compute capability {torch.cuda.get_device_capability()} is below 8.0"
    return None


def current_device(kind: str) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def sizes_to_warm(max_rows: int, top_k: int) -> list[int]:
    """Returns batch sizes on both sides of every threshold at which launches change. Launches are the same in between."""
    edges = {1, 64, max_rows} | {2 * bucket for bucket in BUCKETS} | set(BUCKETS)
    edges |= {slots // top_k for slots in (32, DIRECT_SLOTS, 256, SMALL_SORT)}
    return sorted({size for edge in edges for size in (edge, edge + 1) if 1 <= size <= max_rows})


def warm_up(experts, weights: ExpertWeights, max_rows: int, workspaces: Workspaces) -> None:
    """Runs `apply` at every size of `sizes_to_warm`."""
    COUNTER.install()
    top_k = experts.spec.shape.top_k
    launcher = experts.launcher()
    batches = [
        batch for size in sizes_to_warm(max_rows, top_k) for batch in example_batches(experts.spec, size, weights)
    ]
    _compile_and_run(launcher, lambda: _apply_all(experts, weights, batches, workspaces))


def _compile_and_run(launcher, run_all: Callable[[], None]) -> None:
    """Runs `run_all` first only to collect its launches, and compiles them on all cores. The second run launches and loads."""
    with COUNTER.warming():
        if launcher.device.type == "cuda":
            cores = len(os.sched_getaffinity(0))
            launch, launcher.launch = launcher.launch, launcher.compile_only
            try:
                _compile_side_by_side(cores, run_all)
            finally:
                launcher.launch = launch
        run_all()
        if launcher.device.type == "cuda":
            torch.cuda.synchronize(launcher.device)


def _compile_side_by_side(cores: int, run_all: Callable[[], None]) -> None:
    def compile_all() -> None:
        with ThreadPoolExecutor(cores) as pool, triton.AsyncCompileMode(pool):
            run_all()

    # It runs in a context of its own: when a compile fails, Triton leaves the mode on, and no later warm-up could enter it.
    copy_context().run(compile_all)


def warm_up_batched(experts, weights: ExpertWeights, max_rows: int, workspaces: Workspaces) -> None:
    """Warms up both sets of tiles for a capacity of `max_rows`, with few and with many rows an expert. If rows may come
    quantised, it runs with their scales row by row and column by column, which is another variant."""
    COUNTER.install()
    launcher, spec, e = experts.launcher(), experts.spec, weights.num_experts
    device, book = launcher.device, HandleBook("warm-up")
    x = torch.ones((e, max_rows, spec.shape.hidden), dtype=spec.shape.dtype, device=device)
    forms: list[tuple[torch.Tensor, torch.Tensor | None]] = [(x, None)]
    if spec.quant.dispatch_dtype is not None:
        groups, quantised = -(-spec.shape.hidden // 128), x.to(spec.quant.dispatch_dtype)
        columns = torch.ones((e, groups, max_rows), device=device).transpose(1, 2)
        forms += [(quantised, torch.ones((e, max_rows, groups), device=device)), (quantised, columns)]
    shapes = experts.workspace_shapes(0, spec.shape.top_k, e, max_rows)

    def run_all() -> None:
        for rows in (1, max_rows):
            counts = torch.full((e,), rows, dtype=torch.int32, device=device)
            for form, scale in forms:
                prepared = Prepared(x=form, scales=scale, expert_num_tokens=counts, handle=DispatchHandle(book, None))
                workspace = workspaces.carve(shapes)
                experts.apply(workspace.output, prepared, weights=weights, workspace=workspace)

    _compile_and_run(launcher, run_all)


def example_batches(spec, num_rows: int, weights: ExpertWeights) -> list[Prepared]:
    """Returns batches of random rows, spread over the experts: unquantised and, if the scheme dispatches so, quantised."""
    device, e, t, K = weights.w13_eNK.device, weights.num_experts, spec.shape.top_k, spec.shape.hidden
    ids = (torch.arange(num_rows * t, dtype=torch.int32, device=device) % e).view(num_rows, t)
    routing = Routing(ids_Mt=ids, weights_Mt=torch.full((num_rows, t), 1.0 / t, device=device))
    x = torch.ones((num_rows, K), dtype=spec.shape.dtype, device=device)
    book = HandleBook("warm-up")
    made = [Prepared(x=x, routing=routing, handle=DispatchHandle(book, None))]
    if spec.quant.dispatch_dtype is not None:
        scales = torch.ones((num_rows, -(-K // 128)), device=device)
        quantised = x.to(spec.quant.dispatch_dtype)
        made.append(Prepared(x=quantised, scales=scales, routing=routing, handle=DispatchHandle(book, None)))
    return made


def _apply_all(experts, weights, batches, workspaces: Workspaces) -> None:
    for prepared in batches:
        num_rows, top_k = prepared.routing.ids_Mt.shape
        workspace = workspaces.carve(experts.workspace_shapes(num_rows, top_k, weights.num_experts))
        experts.apply(workspace.output, prepared, weights=weights, workspace=workspace)

"""The walk of a batch, from the servicer to the kernel: followed by a profiler in a running service with two ranks.

The drawing in docs/design.md names the files of the walk. The test compares it with the calls that it sees.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import pytest
import torch

from epserve.client import AsyncClient
from epserve.config import ServerConfig
from epserve.pool import members
from epserve.rank.actor import RankActor
from epserve.server.server import Server
from tests.support.checkpoints import LAYER, write
from tests.support.recovering import running

ROOT = Path(__file__).parents[2]
MOST_FILES, MOST_RECORDS = 16, 8
FROM, TO = "ExpertsServicer.Forward", "FusedMoEModularKernel.forward"
ENDS = ("Scheduler.submit", "SocketLink.submit", TO)
"""The calls at which one stack ends: in the queue, at the socket to a rank, at the kernel."""
SENT = "PoolSteps._finish"
"""The first call after the step has gone to all ranks."""
BESIDE = {"Caller", "Times", "Answer", "LayerStep"}
"""Records made on the way that do not carry the batch: the caller, a clock, an answer for requests without rows, and the layer's
weights with their placement."""


class Walk:
    """Profiles one thread, from the call `starts` to the socket or the kernel.

    `stacks` has the files with a frame on a stack that ends, `sideways` the files of all functions that take rows or a record,
    `records` the dataclasses that are made. A private record does not leave its module and does not count.
    """

    def __init__(self, starts: str):
        self.starts, self.on = starts, False
        self.stacks, self.sideways, self.records = [], [], []

    def __call__(self, frame, event, _):
        code = frame.f_code
        if event != "call" or not (self.on or code.co_qualname == self.starts):
            return
        self.on = True
        arguments = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]
        if code.co_name == "__init__" and code.co_filename == "<string>":
            made = type(arguments[0])
            passed = made.__module__.startswith("epserve.") and not made.__name__.startswith("_")
            self.records += [made.__name__] if passed else []
        file = shown(code.co_filename)
        if file and any(map(carries, arguments)):
            self.sideways.append(file)
        if code.co_qualname in ENDS:
            stack = []
            while frame is not None and (not stack or frame.f_code.co_qualname not in (FROM, "StepServer._serve")):
                frame, stack = frame.f_back, [*stack, shown(frame.f_code.co_filename)]
            stack += [shown(frame.f_code.co_filename)] if frame is not None else []
            self.stacks += reversed([each for each in stack if each])
        if code.co_qualname in (SENT, TO):
            self.on, self.starts = False, ""


def shown(filename: str) -> str:
    path = Path(filename).resolve()
    inside = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in ("epserve", "all2all", "experts")
    return str(path.relative_to(ROOT)).removeprefix("epserve/") if inside else ""


def carries(value) -> bool:
    values = value if isinstance(value, list | tuple) else [value]
    return any(
        isinstance(each, torch.Tensor)
        or (
            dataclasses.is_dataclass(each)
            and type(each).__module__.startswith("epserve.")
            and type(each).__name__ in CARRIERS
        )
        for each in values
    )


CARRIERS = {"Received", "CheckedRequest", "Batch", "Item", "Piece", "StepPlan", "_Pending", "Routing"}


class WatchedRank(RankActor):
    walk: Walk | None = None

    def watch(self) -> None:
        WatchedRank.walk = Walk("StepServer._one")

    def walked(self):
        walk, WatchedRank.walk = self.walk, None
        return walk.stacks, walk.sideways, walk.records

    def _answer(self, *args):
        if self.walk is not None:
            sys.setprofile(self.walk)  # of this thread, which runs the steps
        return super()._answer(*args)


def drawn() -> tuple[list[str], set[str], set[str]]:
    """The drawing: files from top to bottom, files beside them, and records."""
    text = (ROOT / "docs/design.md").read_text().split("### The walk of a batch")[1].split("\n#")[0]
    rows = [row.split("|")[1:-1] for row in text.splitlines() if re.match(r"\| \d+ \|", row)]
    files = [re.findall(r"`([\w/]+\.py)`", row[1]) for row in rows]
    beside = {name for row in rows for name in re.findall(r"`([\w/]+\.py)`", row[3])}
    records = {name for row in rows for name in re.findall(r"`(\w+)`", row[2])}
    return [name for (name,) in files], beside, records


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_batch_walks_down_the_files_that_the_drawing_names(tmp_path, monkeypatch):
    monkeypatch.setattr(members, "RankActor", WatchedRank)
    path = write("deepseek_v3", tmp_path / "model", dtype=torch.float32)
    async with running(path, ranks=2, all2all="all_to_all") as engine:
        server = Server(engine, ServerConfig(port=0))
        await server.start()
        async with AsyncClient(server.address) as client:
            x = torch.randn(9, 64)
            await client.forward(LAYER, x)
            rank = engine._pool.members[1]
            assert (await rank.call(WatchedRank.watch, timeout=20)).failure is None
            await client.forward(LAYER, x)  # its thread has the profiler from now on
            front = Walk(FROM)
            sys.setprofile(front)
            try:
                await client.forward(LAYER, x)
            finally:
                sys.setprofile(None)
            walked = (await rank.call(WatchedRank.walked, timeout=20)).value
        await server.stop()
    stacks, sideways, records = walked
    files = list(dict.fromkeys([*front.stacks, *stacks]))
    beside = {*front.sideways, *sideways} - set(files)
    carriers = {"Received", *front.records, *records} - BESIDE
    assert drawn() == (files, beside, carriers)
    assert len(files) <= MOST_FILES and len(carriers) <= MOST_RECORDS

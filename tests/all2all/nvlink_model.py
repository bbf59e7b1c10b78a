"""The flag protocol of the NVLink all-to-all as a model, and a search through every order in which its parts can run.

Each rank runs a list of kernels one after the other; the programs of a kernel run at the same time. An operation is
`write` (half a row: rows are not written at once), `add` or `put` (a flag), `wait` (until flags have reached a value) or
`read` (which must find the value of its own step: anything else is a stale, torn or overwritten row).

Memory is sequentially consistent here. That a flag is not seen before what it announces is the kernels' part (release and
acquire at system scope), and the GPU stress run's to show.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARES = 4  # what a step adds to a dispatch flag, over all programs of the source
Op = tuple[str, object, int]


@dataclass(frozen=True)
class Protocol:
    """What the kernels do; each change makes a protocol that is wrong."""

    waits_for_rows: bool = True
    full_share_first: bool = False
    """True: one program adds the whole step's shares."""
    signals_after_experts: bool = True
    waits_for_sums: bool = True
    steps_counted: bool = True
    """False: a flag is compared with 1 in every step."""


def kernels_of(rank: int, ranks: int, schedule: list[tuple[str, int, int]], protocol: Protocol) -> list[list[list[Op]]]:
    """schedule: ("dispatch" or "combine", slot, step of that slot), the same on every rank."""
    found: list[list[list[Op]]] = []
    everyone = range(ranks)
    for phase, slot, step in schedule:
        if phase == "dispatch":
            target = (step if protocol.steps_counted else 1) * SHARES
            programs: list[list[Op]] = []
            for half in (0, 1):  # two programs, each with half of every row
                ops: list[Op] = [("write", ("row", to, slot, rank, half), step) for to in everyone]
                share = (SHARES - 1, 1)[half]
                if protocol.full_share_first:
                    share = (SHARES, 0)[half]
                ops += [("add", ("rows", to, slot, rank), share) for to in everyone]
                programs.append(ops)
            if protocol.waits_for_rows:
                programs[-1] += [("wait", ("rows", rank, slot, source), target) for source in everyone]
            found.append(programs)
            experts: list[Op] = [
                ("read", ("row", rank, slot, source, half), step) for source in everyone for half in (0, 1)
            ]
            experts += [("write", ("y", rank, slot, half), step) for half in (0, 1)]
            found.append([experts])
        else:
            target = step if protocol.steps_counted else 1
            signal: list[Op] = [("put", ("sums", to, slot, rank), step) for to in everyone]
            if not protocol.signals_after_experts:  # with the experts' kernel still running
                found[-1].append(signal)
                signal = []
            programs = []
            for half in (0, 1):
                ops = list(signal) if half == 0 else []
                if protocol.waits_for_sums:
                    ops += [("wait", ("sums", rank, slot, source), target) for source in everyone]
                ops += [("read", ("y", source, slot, half), step) for source in everyone]
                programs.append(ops)
            found.append(programs)
    return found


def alternating(steps: int) -> list[tuple[str, int, int]]:
    return [(phase, 0, step) for step in range(1, steps + 1) for phase in ("dispatch", "combine")]


def two_in_flight(steps: int) -> list[tuple[str, int, int]]:
    """Both batches are dispatched before the first is combined, and combined in turn in either order."""
    found: list[tuple[str, int, int]] = []
    for step in range(1, steps + 1):
        order = (0, 1) if step % 2 else (1, 0)
        found += [("dispatch", 0, step), ("dispatch", 1, step), *[("combine", slot, step) for slot in order]]
    return found


def search(ranks: int, schedule: list[tuple[str, int, int]], protocol: Protocol) -> tuple[int, str | None]:
    """(states seen, what went wrong or None). Wrong: a read of another step's value, or ranks that wait for ever."""
    kernels = [kernels_of(rank, ranks, schedule, protocol) for rank in range(ranks)]
    start = (tuple((0, (0,) * len(kernels[rank][0])) for rank in range(ranks)), frozenset())
    seen, stack = {start}, [start]
    while stack:
        places, frozen = stack.pop()
        memory = dict(frozen)
        moved = False
        for rank, (index, counters) in enumerate(places):
            if index == len(kernels[rank]):
                continue
            for program, counter in enumerate(counters):
                ops = kernels[rank][index][program]
                if counter == len(ops):
                    continue
                kind, where, value = ops[counter]
                found = memory.get(where, 0)
                if kind == "wait" and found < value:
                    continue
                if kind == "read" and found != value:
                    return len(seen), f"rank {rank} read step {found} at {where}, wants {value}"
                moved = True
                changed = frozen
                if kind in ("write", "put", "add"):
                    updated = dict(memory)
                    updated[where] = found + value if kind == "add" else value
                    changed = frozenset(updated.items())
                after = tuple(c + (p == program) for p, c in enumerate(counters))
                place = (index, after)
                if all(c == len(kernels[rank][index][p]) for p, c in enumerate(after)):
                    rest = kernels[rank][index + 1 :]
                    place = (index + 1, (0,) * len(rest[0]) if rest else ())
                state = ((*places[:rank], place, *places[rank + 1 :]), changed)
                if state not in seen:
                    seen.add(state)
                    stack.append(state)
        if not moved and any(index < len(kernels[rank]) for rank, (index, _) in enumerate(places)):
            return len(seen), f"nobody can go on at {places}"
    return len(seen), None

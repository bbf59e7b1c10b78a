"""What client and service share of a lane: the words of its page, and where the rows of its slots lie.

    0                 magic, slots
    64                beat: the service changes it about once a second
    128 + 128 s       bell of slot s, by the client:   number:32, mode:2, layer:14, tokens:16
    192 + 128 s       answer of slot s, by the service: number:32, status:32
    200 + 128 s       arrived:32, where the rows lie on a GPU: 0 by the client before a bell, 1 by the service afterwards
    4096 + 512 s      why the call of slot s failed: bytes:16, then a Failure message
    8192 + ...        slot behind slot: rows, results, ids, weights. Rows and results may lie on a GPU instead

`docs/data-paths.md` describes the protocol.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

MAGIC = 0x31454E414C  # "LANE1"
MAX_SLOTS = 8
MAX_TOKENS = (1 << 16) - 1
MAX_LAYER = (1 << 14) - 1
KEY_BYTES = 32
BEAT_AT = 64
ARRIVED_AT = 8
"""Behind an answer: a word that a GPU's stream can wait for, since it does not count."""
WHY_AT, WHY_BYTES = 4096, 512
ROWS_AT = WHY_AT + MAX_SLOTS * WHY_BYTES
ALIGNMENT, PAGE = 256, 4096

BLOCK, ROUTED = 0, 1
MODES = {BLOCK: "block", ROUTED: "routed"}
"""The service's gate chooses experts, or ids and weights come with the rows."""

OK = 0
BAD_HEADER, BAD_IDS, NOT_FINITE = 1, 2, 4
"""The call was refused. The lane goes on."""
ABORTED, RANK_LOST, TIMED_OUT, CLOSED = 8, 16, 32, 64
"""RANK_LOST and TIMED_OUT: this call failed, and may be sent again. ABORTED and CLOSED: the lane has ended."""
OVERLOADED, FAILED = 128, 256
"""OVERLOADED: a limit was reached, send again later. FAILED: `why` has the reason."""
ENDED = ABORTED | CLOSED


def bell_at(slot: int) -> int:
    return 128 + 128 * slot


def answer_at(slot: int) -> int:
    return 192 + 128 * slot


def why_at(slot: int) -> int:
    return WHY_AT + WHY_BYTES * slot


def header(*, mode: int, layer: int, tokens: int) -> int:
    """Returns the lower half of a bell."""
    return mode << 30 | layer << 16 | tokens


def parts(word: int) -> tuple[int, int, int, int]:
    """Returns number, mode, layer and tokens of a bell."""
    return word >> 32, word >> 30 & 3, word >> 16 & MAX_LAYER, word & MAX_TOKENS


@dataclass(frozen=True, slots=False, kw_only=True)
class Layout:
    """The memory of a lane: `slots` times `cap` rows of `hidden` values of `itemsize` bytes, and `top_k` ids and weights.

    on_gpu: rows and results lie in memory of a GPU, from its start. Words, ids and weights are in the shared memory.
    """

    slots: int
    cap: int
    hidden: int
    top_k: int
    itemsize: int
    on_gpu: bool = False

    @cached_property
    def _rows(self) -> dict[str, tuple[int, int]]:
        """Returns offset and bytes of the parts of a slot that lie where its rows do."""
        rows, routing = self.cap * self.hidden * self.itemsize, 4 * self.cap * self.top_k
        sizes = {"x": rows, "y": rows}
        return _placed(sizes if self.on_gpu else {**sizes, "ids": routing, "weights": routing})

    @cached_property
    def _routing(self) -> dict[str, tuple[int, int]]:
        routing = 4 * self.cap * self.top_k
        return _placed({"ids": routing, "weights": routing}) if self.on_gpu else self._rows

    @property
    def slot_bytes(self) -> int:
        """Returns the bytes from one slot's rows to the next one's."""
        return self._rows["end"][0]

    @property
    def routing_bytes(self) -> int:
        """Returns the bytes from one slot's ids to the next one's."""
        return self._routing["end"][0]

    @property
    def gpu_bytes(self) -> int:
        """Returns the bytes on a GPU."""
        return self.slots * self.slot_bytes if self.on_gpu else 0

    @property
    def shared(self) -> int:
        """Returns the bytes of the memory with the words. They are whole pages where a GPU reads them."""
        end = ROWS_AT + self.slots * self.routing_bytes
        return -(-end // PAGE) * PAGE if self.on_gpu else end

    @property
    def total(self) -> int:
        return self.shared + self.gpu_bytes

    def part(self, slot: int, name: str) -> tuple[int, int]:
        """Returns offset and bytes of a slot's "x", "y", "ids" or "weights", in the memory where they lie."""
        if not self.on_gpu or name in self._routing:
            offset, size = self._routing[name]
            return ROWS_AT + slot * self.routing_bytes + offset, size
        offset, size = self._rows[name]
        return slot * self.slot_bytes + offset, size


def _placed(sizes: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Returns the offset of each part behind the ones before it, its bytes, and the "end" of all."""
    found, end = {}, 0
    for name, size in sizes.items():
        found[name] = end, size
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return {**found, "end": (end, 0)}

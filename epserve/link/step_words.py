"""A step by words of shared memory: the quick way between the engine and a rank of its host.

    64       step word, by the engine: number
    72       the number of the step:   64 bits
    128      answer word, by the rank:  number
    4096     the header of the step:    bytes:32, JSON
    32768    the header of the answer:  likewise

The header of a step says all but its number, so that steps which differ in nothing else are written and read once. All tensors
lie in the arena. The rank's step thread waits for its socket and for an eventfd, which the engine writes after
the word. The engine waits for the answer word. One step is under way at a time, and none on the socket meanwhile.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from typing import Any

from epserve.process import words

STEP_AT, NUMBER_AT, ANSWER_AT = 64, 72, 128
HEADER_AT, REPLY_AT, SIZE = 4096, 32768, 65536
MOST_BYTES = 28 << 10  # of a header; both places have more


def written(header: dict[str, Any]) -> bytes:
    """Returns a header as its bytes in the memory."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return len(text).to_bytes(4, "little") + text


def _get(memory: mmap.mmap, at: int) -> bytes:
    size = int.from_bytes(memory[at : at + 4], "little")
    return memory[at + 4 : at + 4 + min(size, MOST_BYTES)]


class StepWords:
    """The engine's side. Any thread may use it, one at a time."""

    def __init__(self) -> None:
        """Raises OSError where the system gives no such memory."""
        self.fd = words.sealed_memory("epserve-words", SIZE)
        self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._memory = words.map_sealed(os.dup(self.fd), SIZE)
        self._words = words.Words(self._memory)
        self._number = 0
        self._there = b""
        self._closed = False

    def ring(self, header: bytes, step: int) -> None:
        """Begins a step. header: from `written`."""
        if header is not self._there:
            self._memory[HEADER_AT : HEADER_AT + len(header)] = header
            self._there = header
        self._words.store(NUMBER_AT, step >> 32, step & 0xFFFFFFFF)
        self._number += 1
        self._words.store(STEP_AT, self._number)
        os.eventfd_write(self.bell, 1)

    def answered(self, until: float) -> bool:
        """Waits for the answer. Returns False when there is none at `until`, or after `lost`."""
        number = self._number & 0xFFFFFFFF
        while (seen := self._words.load(ANSWER_AT) >> 32) != number:
            if self._closed or time.monotonic() >= until:
                return False
            self._words.wait(ANSWER_AT, seen, until)
        return True

    def reply(self) -> dict[str, Any]:
        """Returns the header of the answer that `answered` saw."""
        return json.loads(_get(self._memory, REPLY_AT))

    def lost(self) -> None:
        """Wakes the thread that waits for an answer: none comes. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self._words.wake(ANSWER_AT)
            os.close(self.fd)
            os.close(self.bell)


class RankWords:
    """The rank's side."""

    def __init__(self, fd: int, bell: int):
        """Takes both descriptors over. Raises OSError, or ValueError where the memory is not sealed."""
        self.bell = bell
        try:
            self._memory = words.map_sealed(fd, SIZE)
        except BaseException:
            os.close(bell)
            raise
        self._words = words.Words(self._memory)
        self._number = self._words.load(ANSWER_AT) >> 32

    def take(self) -> tuple[bytes, int] | None:
        """Returns the header of a step that has been rung, JSON without its number, and the number. None: no step."""
        try:
            os.eventfd_read(self.bell)
        except BlockingIOError:
            return None
        number = self._words.load(STEP_AT) >> 32
        if number == self._number:
            return None
        self._number = number
        return _get(self._memory, HEADER_AT), self._words.load(NUMBER_AT)

    def answer(self, header: dict[str, Any]) -> None:
        text = written(header)
        self._memory[REPLY_AT : REPLY_AT + len(text)] = text
        self._words.store(ANSWER_AT, self._number)
        self._words.wake(ANSWER_AT)

    def close(self) -> None:
        os.close(self.bell)

"""The rank's end of the data path (transport.py): frames in, answers out, in one order."""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from . import wire
from .door import Door
from .greeting import HANDSHAKE_S
from .shm import Window
from .step_words import RankWords

log = logging.getLogger(__name__)

Reply = tuple[dict, list[torch.Tensor]]
"""A header, and the results to send."""
Later = Callable[[], Reply]
"""Waits for the device that computes a result, and returns it. It is called once, in another thread, and raises nothing."""
Answer = Callable[[dict, list[torch.Tensor], torch.Tensor | None], Reply | Later]
"""(header, tensors, memory for the result or None) -> the answer, now or later."""
Known = tuple[dict[str, Any], list[torch.Tensor], torch.Tensor]
"""A header by words that was read: itself, its tensors, the memory for the result."""
MOST_KNOWN = 256
MOST_LATER = 4  # most answers that are waited for. The engine has two steps under way.
WATCHED_S = 0.005
"""A result that comes within this time, with no frame behind it, is answered by the step thread. Another thread would have to
wake up for it."""


class Bells(Protocol):
    """Other work of the step thread, between frames: calls that clients ring for."""

    @property
    def fd(self) -> int:
        """Readable when a bell has rung."""
        ...

    def serve(self) -> bool:
        """Does a step of that work, if there is any. Returns whether there is more."""
        ...

    def leave(self) -> None:
        """The connection to the engine has ended."""
        ...


class Watched:
    """A result that comes later, of which `ready` tells whether it is there. Calling it waits, once. Neither raises."""

    def __init__(self, wait: Later, ready: Callable[[], bool]):
        self._wait, self.ready = wait, ready

    def __call__(self) -> Reply:
        return self._wait()


class StepServer:
    """The rank's end. One thread takes an engine's frames, another waits for results that come later.

    Answers go out in the order of the frames.
    """

    def __init__(self, answer: Answer, *, host: str = "", pin: bool = False, bells: Bells | None = None):
        """Listens from the start.

        Args:
            answer: answers a frame, in the step thread.
            host: address of a TCP socket. Empty: an abstract Unix socket.
            pin: pins received tensors, for copies to and from a GPU.
            bells: other work, which the thread does while it shares memory with an engine.
        """
        self._answer, self._pin, self._bells = answer, pin, bells
        self._greeted: queue.SimpleQueue[socket.socket | None] = queue.SimpleQueue()
        self._door = Door(self._greeted.put, protocol="steps", host=host)
        self.address = self._door.address
        self._thread = threading.Thread(target=self._serve, name="steps", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Takes no more connections. The present one goes on until its other side closes it."""
        self._door.close()
        self._greeted.put(None)

    def _serve(self) -> None:
        while (sock := self._greeted.get()) is not None:
            window: Window | None = None
            quick: RankWords | None = None
            answers = _Answers(sock)
            try:
                window, quick = self._map(sock)
                self._answer_all(sock, window, quick, answers)
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                log.debug("connection ended: %s", error)
            finally:
                if self._bells is not None:
                    self._bells.leave()
                answers.close()
                if quick is not None:
                    quick.close()
                if window is not None:
                    window.close()
                sock.close()  # comes last: the engine then knows that this process no longer touches its memory

    def _answer_all(
        self, sock: socket.socket, window: Window | None, quick: RankWords | None, answers: _Answers
    ) -> None:
        """Until the connection ends, which raises."""
        if quick is None or window is None:
            while True:
                self._one(sock, window, answers)
        waiting = select.poll()
        waiting.register(quick.bell, select.POLLIN)
        waiting.register(sock, select.POLLIN)
        known: dict[bytes, Known] = {}
        bells, more = self._bells, False
        if bells is not None:
            waiting.register(bells.fd, select.POLLIN)
        while True:
            for ready, _ in waiting.poll(0 if more else None):
                if ready == quick.bell:
                    self._one_rung(window, quick, known)
                elif ready == sock.fileno():
                    self._one(sock, window, answers)
            more = bells is not None and bells.serve()  # in turn with the engine's steps

    def _one_rung(self, window: Window, quick: RankWords, known: dict[bytes, Known]) -> None:
        """Answers a step by words. `known`: headers that were read before, of this window."""
        if (rung := quick.take()) is None:
            return
        text, step = rung
        if (found := known.get(text)) is None:
            if len(known) >= MOST_KNOWN:
                known.clear()
            found = known[text] = _read(text, window)
        header, tensors, out = found
        answer = self._answer({**header, "step": step, "text": text}, tensors, out)
        told, _ = answer() if callable(answer) else answer
        quick.answer(told)

    def _one(self, sock: socket.socket, window: Window | None, answers: _Answers) -> None:
        header, tensors = wire.receive(sock, window, pin=self._pin)
        out = None
        if window is not None and "out" in header:
            dtype, shape, at = header["out"]
            out = window.tensor(wire.DTYPES[dtype], tuple(shape), at)
        answers.add(self._answer(header, tensors, out))

    def _map(self, sock: socket.socket) -> tuple[Window | None, RankWords | None]:
        """Maps the engine's memory if it has sent some, and the words of quick steps. It runs in the step thread, which then
        has the device."""
        sock.settimeout(HANDSHAKE_S)
        header, descriptors = wire.receive_with_descriptors(sock, 3)
        size = int(header.get("arena", 0))
        window = Window(descriptors[0], size, pin=self._pin) if descriptors else None
        quick = RankWords(*descriptors[1:]) if len(descriptors) == 3 else None
        wire.send(sock, {})
        sock.settimeout(None)
        return window, quick


def _read(text: bytes, window: Window) -> Known:
    header = json.loads(text)
    tensors = [window.tensor(wire.DTYPES[dtype], tuple(shape), at) for dtype, shape, at in header["tensors"]]
    dtype, shape, at = header["out"]
    return header, tensors, window.tensor(wire.DTYPES[dtype], tuple(shape), at)


class _Answers:
    """Sends the answers of one connection in order.

    An answer that is ready is sent at once when none is before it. A thread sends the others.
    """

    def __init__(self, sock: socket.socket):
        self._sock = sock
        self._frames = select.poll()
        self._frames.register(sock, select.POLLIN)
        self._queue: queue.Queue[Reply | Later | None] = queue.Queue(MOST_LATER)
        self._thread: threading.Thread | None = None

    def add(self, answer: Reply | Later) -> None:
        """Sends or queues an answer. Raises OSError when the connection has ended."""
        if self._queue.unfinished_tasks == 0 and self._comes_at_once(answer):
            wire.send(self._sock, *(answer() if callable(answer) else answer))
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._send, name="answers", daemon=True)
            self._thread.start()
        self._queue.put(answer)

    def _comes_at_once(self, answer: Reply | Later) -> bool:
        """Waits until the result is there, the next frame comes, or WATCHED_S have passed."""
        if not isinstance(answer, Watched):
            return not callable(answer)
        end = time.monotonic() + WATCHED_S
        while not answer.ready():
            if self._frames.poll(0) or time.monotonic() > end:
                return False
        return True

    def close(self) -> None:
        """Returns when no answer is waited for any more."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()

    def _send(self) -> None:
        ended = False
        while (answer := self._queue.get()) is not None:
            reply = answer() if callable(answer) else answer
            try:
                if not ended:
                    wire.send(self._sock, *reply)
            except OSError as error:
                log.debug("connection ended: %s", error)
                ended = True  # the other answers still have to end
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)  # the other thread leaves its loop
            del answer, reply  # otherwise this frame would keep the last step's tensors while it waits
            self._queue.task_done()

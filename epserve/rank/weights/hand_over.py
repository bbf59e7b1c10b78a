"""Moves experts from rank to rank, beside the steps: the new rank of an expert takes it from a rank that holds it.

Each pair of ranks has its own connection, and never uses the steps' process group. An expert is one unit: its rows of every
tensor (weights, biases, scales), in chunks with a checksum each. The receiving rank derives prepared tensors anew. Experts
that no rank hands over in time come from the checkpoint. A new rank without a checkpoint (newcomers.py) also asks for the
tensors that all ranks hold of a layer: gate, shared experts, scales of activations.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from epserve.link import wire
from epserve.link.door import Door, LinkAddress
from epserve.models import LayerWeights
from epserve.modular_kernel import ExpertWeights
from epserve.rank.placement import Placement
from epserve.rank.step import LayerSource

from .copies import LAYER_WIDE

log = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20  # at a time in host memory, and on the bus between two kernels of a step: about a millisecond
SHARE = {"cpu": 0.05, "cuda": 0.5}
"""Share of one core that copying may take at each end. The rest is pauses. On CPU ranks the steps lose this share."""
PEER_TIMEOUT_S = 5.0  # for each chunk. After it the rank reads the checkpoint and does not ask the peer again

Held = Callable[[int], tuple[Placement, tuple[int, ...], LayerWeights]]
"""Layer -> its present placement, the logical experts of this rank's slots, and their weights."""


class ExpertServer:
    """Serves a rank's experts, with a thread for each peer that asks. `held` must be safe to call from threads."""

    def __init__(self, held: Held, *, host: str = ""):
        """`host` is the address to listen on over TCP. Empty: an abstract Unix socket."""
        self._held = held
        self._door = Door(self._serve, protocol="experts", host=host)
        self.address = self._door.address

    def close(self) -> None:
        self._door.close()

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            try:
                sock.settimeout(None)  # a peer may ask at any time, and closes at the end
                copier = _Copier()
                while True:
                    self._send(sock, wire.receive_header(sock), copier)
            except (OSError, ValueError, KeyError, TypeError) as error:
                log.debug("connection of a peer ended: %s", error)

    def _send(self, sock: socket.socket, asked: dict[str, Any], copier: _Copier) -> None:
        placement, experts, weights = self._held(asked["layer"])
        copier.hurries = bool(asked.get("hurry"))
        told: dict[str, Any] = {}
        if "expert" not in asked:
            parts = common_tensors(weights)
            told["of_an_expert"] = {
                name: [str(each.dtype), list(each.shape[1:])] for name, each in _by_expert(weights.experts).items()
            }
        elif asked.get("version", placement.version) != placement.version or asked["expert"] not in experts:
            wire.send(sock, {"missing": f"version {placement.version} with experts {experts}"})
            return
        else:
            parts = expert_tensors(weights.experts, experts.index(asked["expert"]))
        wire.send(sock, {"tensors_of": _described(parts), **told})
        for name, part in parts.items():
            for chunk in _chunks(part):
                with copier.paced(chunk.device):
                    there = copier.to_host(chunk)
                    wire.send(sock, {"name": name, "crc": zlib.crc32(wire.as_bytes(there))}, [there])


class PeerSource(LayerSource):
    """Collects experts of a layer for a rank that already serves it: its own, then those of peers, then the checkpoint's.

    `holders` maps logical experts to addresses of ranks that hand them out. Gate and shared experts, which all ranks hold,
    stay unchanged. `came_from` counts "here", "peer" and "checkpoint".
    """

    def __init__(self, held: Held, holders: Mapping[int, Sequence[LinkAddress]], fallback: LayerSource):
        self._held, self._holders, self._fallback = held, holders, fallback
        self._peers = Peers()
        self.came_from: Counter[str] = Counter()

    def load_layer(self, layer: int, experts: Sequence[int], device: torch.device) -> LayerWeights:
        """Returns the layer's experts. The fallback's errors pass through for an expert that no rank gives."""
        _, _, weights = self._held(layer)
        made = _like(weights.experts, len(experts), device)
        with self._peers:
            lacking = [slot for slot, expert in enumerate(experts) if not self._fill(made, slot, expert, layer)]
        if lacking:
            read = self._fallback.load_layer(layer, [experts[slot] for slot in lacking], device).experts
            for source, slot in enumerate(lacking):
                for target, part in _pairs(made, slot, expert_tensors(read, source)):
                    target.copy_(part)
            self.came_from["checkpoint"] += len(lacking)
        return replace(weights, experts=made)

    def _fill(self, made: ExpertWeights, slot: int, expert: int, layer: int) -> bool:
        placement, present, weights = self._held(layer)
        if expert in present:
            for target, part in _pairs(made, slot, expert_tensors(weights.experts, present.index(expert))):
                self._peers.copier.within(target, part)
            self.came_from["here"] += 1
            return True
        asked = {"layer": layer, "version": placement.version, "expert": expert}
        if not self._peers.fetch(self._holders.get(expert, ()), asked, lambda _: expert_tensors(made, slot)):
            return False
        self.came_from["peer"] += 1
        return True


class Peers:
    """Connections to ranks that hand out experts. A rank that failed is not asked again. For one thread.

    It is a context manager, which closes the connections at its end.
    """

    def __init__(self, *, hurry: bool = False):
        """`hurry` copies without pauses, for times when no step runs."""
        self._hurry = hurry
        self._socks: dict[LinkAddress, socket.socket | None] = {}
        self.copier = _Copier()
        self.copier.hurries = hurry

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, *exc_info) -> None:
        for sock in self._socks.values():
            if sock is not None:
                sock.close()
        self._socks.clear()

    def fetch(
        self,
        addresses: Sequence[LinkAddress],
        asked: dict[str, Any],
        targets_of: Callable[[dict[str, Any]], Mapping[str, torch.Tensor]],
    ) -> bool:
        """Fetches tensors from the first rank that gives them.

        Args:
            addresses: ranks to ask, in order.
            asked: the request.
            targets_of: the answer's header -> the tensors to fill.

        Returns:
            False when no rank gave them.
        """
        what = f"expert {asked['expert']}" if "expert" in asked else "what all ranks hold"
        for address in addresses:
            sock = self._connected(address)
            if sock is None:
                continue
            try:
                self._receive(sock, asked | {"hurry": self._hurry}, targets_of)
            except (OSError, ValueError, KeyError) as error:
                log.warning("%s of layer %d from a peer: %s; trying elsewhere", what, asked["layer"], error)
                sock.close()
                self._socks[address] = None
                continue
            return True
        return False

    def _connected(self, address: LinkAddress) -> socket.socket | None:
        if address not in self._socks:
            self._socks[address] = None
            try:
                sock = address.connect(PEER_TIMEOUT_S)
                sock.settimeout(PEER_TIMEOUT_S)
                self._socks[address] = sock
            except (OSError, ValueError) as error:
                log.warning("a peer that holds experts does not answer: %s", error)
        return self._socks[address]

    def _receive(self, sock: socket.socket, asked: dict[str, Any], targets_of) -> None:
        wire.send(sock, asked)
        answer = wire.receive_header(sock)
        if "missing" in answer:
            raise KeyError(f"it has {answer['missing']}")
        wanted = targets_of(answer)
        if answer["tensors_of"] != _described(wanted):
            raise ValueError(f"it holds {answer['tensors_of']}, this rank {_described(wanted)}")
        for name, target in wanted.items():
            for room in _chunks(target):
                with self.copier.paced(room.device):
                    header = wire.receive_header(sock)
                    if header["name"] != name or header["tensors"] != [wire.describe(room)]:
                        raise ValueError(
                            f"{header['tensors']} of {header['name']}, expected {room.numel()} bytes of {name}"
                        )
                    with self.copier.from_host(room) as landing:
                        wire.receive_exactly(sock, wire.as_bytes(landing))
                        if zlib.crc32(wire.as_bytes(landing)) != header["crc"]:
                            raise ValueError(f"a chunk of {name} is damaged")


class _Copier:
    """Copies chunks between host and device, on its own stream, with pauses. For one thread."""

    def __init__(self):
        self.hurries = False
        self._stream: Any = None
        self._pinned: torch.Tensor | None = None

    @contextlib.contextmanager
    def paced(self, device: torch.device) -> Iterator[None]:
        """Pauses after the block in proportion to its processor time. Waiting for the other end costs no processor time."""
        start = time.thread_time()
        yield
        if not self.hurries:
            time.sleep((time.thread_time() - start) * (1 / SHARE[device.type] - 1))

    def to_host(self, chunk: torch.Tensor) -> torch.Tensor:
        """Returns the chunk's bytes in host memory. They are valid until the next call."""
        if chunk.device.type != "cuda":
            return chunk
        there = self._staging(chunk.numel())
        # NOTE: held weights are complete, so no wait is needed. Waiting for the current stream could last for ever: the stream
        # may itself wait, in a collective, for the rank that asks.
        with self._on_stream(chunk.device, after=False):
            there.copy_(chunk, non_blocking=True)
        return there

    @contextlib.contextmanager
    def from_host(self, room: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yields host memory to fill. Its bytes are in `room` afterwards."""
        if room.device.type != "cuda":
            yield room
            return
        landing = self._staging(room.numel())
        yield landing
        with self._on_stream(room.device):
            room.copy_(landing, non_blocking=True)

    def within(self, target: torch.Tensor, part: torch.Tensor) -> None:
        for room, chunk in zip(_chunks(target), _chunks(part), strict=True):
            with self.paced(room.device), self._on_stream(room.device):
                room.copy_(chunk)

    def _staging(self, nbytes: int) -> torch.Tensor:
        if self._pinned is None or self._pinned.numel() < nbytes:
            self._pinned = torch.empty(max(nbytes, CHUNK_BYTES), dtype=torch.uint8, pin_memory=True)
        return self._pinned[:nbytes]

    @contextlib.contextmanager
    def _on_stream(self, device: torch.device, *, after: bool = True) -> Iterator[None]:
        """`after` orders the copies after the current stream's work, since the memory's last user may still use it."""
        if device.type != "cuda":
            yield
            return
        self._stream = self._stream or torch.cuda.Stream(device)
        if after:
            self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()


def expert_tensors(weights: ExpertWeights, slot: int) -> dict[str, torch.Tensor]:
    """Returns all tensors of one expert as plain rows: views, or copies of packed matrices."""
    parts = {name: tensor[slot] for name, tensor in _by_expert(weights).items()}
    if weights.packing is not None:
        parts["w13_eNK"], parts["w2_eKN"] = weights.matrices(slot)
    return parts


def common_tensors(weights: LayerWeights) -> dict[str, torch.Tensor]:
    """Returns the tensors of a layer that every rank holds, by dotted names: "gate.weight_EK", "shared.w2_KS", "experts.a1"."""
    parts: dict[str, Any] = {"gate": weights.gate, "shared": weights.shared}
    found = {
        f"{part}.{each.name}": tensor
        for part, held in parts.items()
        if held is not None
        for each in fields(held)
        if isinstance(tensor := getattr(held, each.name), torch.Tensor)
    }
    tensors = weights.experts.tensors().items()
    return found | {f"experts.{name}": tensor for name, tensor in tensors if name in LAYER_WIDE}


def _described(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[Any]]:
    return {name: [str(each.dtype), list(each.shape)] for name, each in tensors.items()}


def _by_expert(weights: ExpertWeights) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in weights.tensors().items() if name not in LAYER_WIDE}


def _like(weights: ExpertWeights, num_experts: int, device: torch.device) -> ExpertWeights:
    """Returns tensors for another number of experts, with undefined contents. Layer-wide tensors stay the same."""
    made: dict[str, Any] = {
        name: torch.empty((num_experts, *each.shape[1:]), dtype=each.dtype, device=device)
        for name, each in _by_expert(weights).items()
    }
    return replace(weights, derived={}, packing=None, **made)


def _pairs(made: ExpertWeights, slot: int, parts: Mapping[str, torch.Tensor]):
    return [(target[slot], parts[name]) for name, target in _by_expert(made).items()]


def _chunks(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Yields the tensor's bytes, in order, as views of at most CHUNK_BYTES. A scalar is one chunk."""
    return tensor.reshape(-1).view(torch.uint8).split(CHUNK_BYTES)

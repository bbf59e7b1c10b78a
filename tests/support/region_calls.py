"""Shared-memory objects and raw calls with regions, for tests."""

import asyncio
import contextlib
import secrets
from pathlib import Path

import torch

from epserve.protocol import epserve_pb2 as pb

SHM = Path("/dev/shm")


@contextlib.contextmanager
def shared_memory():
    """A shared-memory object of 4096 bytes that start with 32 known ones: (key, proof, path)."""
    proof = secrets.token_bytes(32)
    path = SHM / f"test-{secrets.token_hex(8)}"
    path.write_bytes(proof.ljust(4096, b"\0"))
    try:
        yield path.name, proof, path
    finally:
        path.unlink(missing_ok=True)


def slice_(region: str, offset: int, size: int) -> pb.RegionSlice:
    return pb.RegionSlice(region=region, offset=offset, byte_size=size)


def held(stub, shm, size=4096, **changes):
    key, proof, _ = shm
    return stub.HoldRegion(pb.HoldRegionRequest(**{"key": key, "byte_size": size, "proof": proof, **changes}))


async def name_of(call) -> str:
    return (await asyncio.wait_for(call.read(), 30)).region


def request_in(region: str, x: torch.Tensor, path: Path, at: int = 512, layer: int = 1, **more) -> pb.ForwardRequest:
    """`x` is written to the object at `at`."""
    with open(path, "rb+") as file:
        file.seek(at)
        file.write(x.numpy().tobytes())
    tensor = pb.Tensor(dtype=pb.FP32, shape=x.shape, region=slice_(region, at, x.nbytes))
    return pb.ForwardRequest(layer=layer, hidden_states=tensor, **more)

"""Facts about a rank's device and process: memory, and kernels that were compiled late."""

from __future__ import annotations

import resource
import sys
from typing import Any

import torch

from epserve.models import LayerWeights


def free_bytes(device: torch.device) -> int:
    """Returns the bytes of the GPU, or of the host's memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def peak_bytes(device: torch.device) -> int:
    """Returns the most bytes that this process has held on the GPU, or in the host's memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def compile_counter() -> Any:
    """Returns Triton's compile counter if a backend of this process uses Triton, else None. It must not import Triton."""
    module = sys.modules.get("epserve.experts.triton.compiles")
    return module.COUNTER if module is not None else None


def held_bytes(layer: LayerWeights) -> int:
    """Returns the bytes of the layer's experts, padding behind their rows included."""
    return sum(max(tensor.nbytes, _reach(tensor)) for tensor in layer.experts.tensors().values())


def _reach(tensor: torch.Tensor) -> int:
    """Returns the bytes from the tensor's start to its end, zeros behind its rows included."""
    return tensor.shape[0] * tensor.stride(0) * tensor.element_size() if tensor.ndim else 0

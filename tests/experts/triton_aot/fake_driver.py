"""A CUDA driver that does nothing: launches go through Triton's real binder, specialisation key, hooks and compiler, on a
machine without a GPU.
"""

import torch
import triton
from triton.backends.compiler import GPUTarget


class _Utils:
    def load_binary(self, name, kernel, shared, device):
        return 1, 1, 0, 0, 1024  # module, function, registers, spills, threads

    def get_device_properties(self, device):
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "max_num_regs": 65536, "warpSize": 32}

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


class _Launcher:
    def __init__(self, source, metadata):
        self.name = metadata.name

    def __call__(self, *args):
        """Nothing runs."""


class FakeDriver:
    launcher_cls = _Launcher

    def __init__(self, capability: int):
        self.capability, self.utils = capability, _Utils()

    @classmethod
    def is_active(cls):
        return True

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return 0

    def set_current_device(self, device):
        pass

    def get_current_stream(self, device=None):
        return 0

    def get_device_capability(self, *args):
        return divmod(self.capability, 10)

    def get_active_torch_device(self):
        return torch.device("cpu")

    def map_python_to_cpp_type(self, name):
        return name


def install(capability: int) -> None:
    """For the whole process, from the next launch on."""
    triton.runtime.driver.set_active(FakeDriver(capability))

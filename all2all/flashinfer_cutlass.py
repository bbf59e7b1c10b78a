"""What FlashInfer's fused CUTLASS experts want around them: all ranks' rows, unquantised, and sums that are reduce-scattered.

Any other Standard backend may serve those experts too, and this one other experts: the pair is what the field knows by the name.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

from epserve.modular_kernel import All2AllManager, FusedMoEActivationFormat, PrepareFinalizeCapability

from .allgather_reducescatter import AllGatherReduceScatterPrepareAndFinalize


def unavailable() -> str | None:
    """Why FlashInfer cannot be used here, and what to do about it."""
    if find_spec("flashinfer") is None:
        return "the package flashinfer is not installed: pip install flashinfer-python"
    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.cuda.get_device_capability() < (9, 0):
        return f"compute capability {torch.cuda.get_device_capability()}, FlashInfer's CUTLASS experts need (9, 0)"
    try:
        from flashinfer import fused_moe
    except (ImportError, OSError) as error:  # a build for another torch or CUDA
        return f"flashinfer does not load with torch {torch.__version__}: {error}"
    return None if hasattr(fused_moe, "cutlass_fused_moe") else "the installed flashinfer has no cutlass_fused_moe"


class FlashInferCutlassMoEPrepareAndFinalize(AllGatherReduceScatterPrepareAndFinalize):
    """Rows travel in the model's dtype, since the library quantises them itself; it weights and adds a rank's slots."""

    capability = PrepareFinalizeCapability(
        activation_format=FusedMoEActivationFormat.Standard,
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        async_receive=True,
        combine_orders=frozenset({"rank"}),
    )

    def sends_quantised(self, quant) -> bool:
        return False


class FlashInferCutlassManager(All2AllManager):
    prepare_finalize = FlashInferCutlassMoEPrepareAndFinalize

    @classmethod
    def unavailable(cls) -> str | None:
        return unavailable()

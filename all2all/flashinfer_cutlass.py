"""All-to-all for FlashInfer's fused CUTLASS experts: gathers all ranks' rows unquantised and reduce-scatters the sums.

Any other Standard backend may serve those experts too, and this backend may serve other experts. The field knows the pair by
this name.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

from epserve.modular_kernel import All2AllManager, FusedMoEActivationFormat, PrepareFinalizeCapability

from .allgather_reducescatter import AllGatherReduceScatterPrepareAndFinalize


def unavailable() -> str | None:
    """Returns the reason why FlashInfer cannot be used here and the remedy, or None if it can."""
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
    """Sends rows in the model's dtype, because the library quantises them itself. The library weights and adds a rank's slots."""

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

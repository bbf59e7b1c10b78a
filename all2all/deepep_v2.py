"""DeepEP 2's `ElasticBuffer`: Standard format, over NVLink and RDMA, any number of ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

from epserve.errors import ConfigError
from epserve.modular_kernel import All2AllManager, LayerSpec, PrepareFinalizeOptions

from .deepep_ht import DeepEPHTPrepareAndFinalize, padded_hidden
from .transport import deepep_library as library

MIN_NCCL = (2, 30)  # its communicators come from NCCL's device API
ALIGN = 2 << 20  # of its buffers


class DeepEPV2PrepareAndFinalize(DeepEPHTPrepareAndFinalize):
    """Runs the high-throughput steps over the newer buffer, which computes the layout of a dispatch itself."""

    capability = dataclasses.replace(
        DeepEPHTPrepareAndFinalize.capability, rank_counts=frozenset(), max_hidden=None, reach="rdma"
    )
    configured = False

    def _send(self, sent, most, beside):
        received, ids, weights, handle, done = self.buffer.dispatch(
            sent.x,
            topk_idx=sent.ids_Mt,
            topk_weights=sent.weights_Mt,
            num_experts=self.sender.total,
            num_max_tokens_per_rank=self.options.max_tokens_per_rank,
            **self._timing(beside),
        )
        return received, ids, weights, handle, done

    def _send_home(self, y, handle, beside):
        combined, _, done = self.buffer.combine(y, handle, **self._timing(beside))
        return combined, done

    def _timing(self, beside: bool) -> dict[str, Any]:
        if not beside:
            return {}
        event = self.buffer.capture()
        return {"async_with_compute_stream": True, "previous_event": event, "allocate_on_comm_stream": True}

    def close(self) -> None:
        try:
            super().close()
        finally:
            library.destroy(self.buffer)


class DeepEPV2All2AllManager(All2AllManager):
    """Keeps one buffer for each configuration."""

    prepare_finalize = DeepEPV2PrepareAndFinalize

    @classmethod
    def unavailable(cls) -> str | None:
        missing = library.unavailable()
        if missing:
            return missing
        import deep_ep

        if not hasattr(deep_ep, "ElasticBuffer"):
            version = getattr(deep_ep, "__version__", "of unknown version")
            return f"the installed deep_ep ({version}) has no ElasticBuffer: it comes with DeepEP 2"
        nccl = library.nccl_version()
        if nccl[:2] < MIN_NCCL:
            return (
                f"NCCL {library.version_text(nccl)} is loaded, DeepEP 2 needs {library.version_text(MIN_NCCL)} or newer:"
                " load it before torch's own (LD_PRELOAD)"
            )
        return None

    @classmethod
    def buffer_bytes(cls, spec: LayerSpec, options: PrepareFinalizeOptions) -> int:
        """Estimates the bytes of rows from every rank and of as many rows home. The library's own sum needs its communicator."""
        rows = spec.layout.num_ranks * options.max_tokens_per_rank
        row = padded_hidden(spec) * spec.shape.dtype.itemsize + spec.shape.top_k * 12 + 64
        return -(-2 * rows * row // ALIGN) * ALIGN

    def make(self, spec: LayerSpec, options: PrepareFinalizeOptions) -> DeepEPV2PrepareAndFinalize:
        if options.max_tokens_per_rank * spec.layout.num_ranks >= 1 << 31:
            raise ConfigError(
                f"deepep_v2: max_tokens_per_rank {options.max_tokens_per_rank} is too large for int32 rows"
            )
        library.check_memory(self.ranks, self.buffer_bytes(spec, options), "deepep_v2")
        from deep_ep import ElasticBuffer

        buffer = ElasticBuffer(
            self.ranks.group,
            num_max_tokens_per_rank=options.max_tokens_per_rank,
            hidden=padded_hidden(spec),
            num_topk=spec.shape.top_k,
            explicitly_destroy=True,
        )
        return self.prepare_finalize(self.ranks, spec, options, buffer)

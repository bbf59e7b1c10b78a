"""What benchmarks/all2all.py measures: our backends through prepare and finalize, and the libraries' bare calls."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import triton

from epserve import all2all
from epserve.all2all.nvlink import NvlinkPrepareAndFinalize
from epserve.modular_kernel import (
    ExpertLayout,
    ExpertShape,
    LayerSpec,
    PrepareFinalizeOptions,
    QuantConfig,
    RankContext,
    Routing,
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)
from epserve.modular_kernel.quantization import dequantise_blocks, quantise_blocks
from tests.all2all.shared_files import SharedFiles

HIGH_THROUGHPUT_BYTES = 1 << 30  # DeepEP's NVLink buffer
LOW_LATENCY_TOKENS = 256  # per rank: the capacity that low-latency buffers are laid out for


@dataclass(frozen=True, kw_only=True)
class Case:
    rank: int
    world: int
    device: torch.device
    hidden: int
    experts: int  # over all ranks. Rank r holds experts r * experts/world and following
    topk: int
    max_tokens: int  # the most that a rank sends
    largest_hidden: int  # over the whole run, for what can be set up only once in a process
    largest_experts: int


class Candidate:
    """Runs one backend. It is made once per (hidden, experts), and `load` runs once per number of tokens."""

    graph = False  # prepare, and finalize with one state many times over, can be captured in a CUDA graph
    fp8 = False  # the rows dispatched are e4m3 with one fp32 scale per 128 columns
    paired = False  # finalize is good for one prepare: combine alone cannot be repeated
    row_per_expert = False  # True: a row is sent per selected expert. False: one per destination rank
    max_tokens: ClassVar[int | None] = None  # cases with more tokens per rank are left out

    def load(self, x, ids, weights) -> None:
        """Takes x (T, H) bf16, ids int32 and weights fp32 (T, topk). It is not timed."""
        self.x, self.ids, self.weights = x, ids, weights

    def prepare(self):
        """Dispatches. Returns a state with the rows that arrived: bf16 (..., H), or (e4m3 (..., H), fp32 scales (..., H/128))."""
        raise NotImplementedError

    def prepare_again(self):
        """A dispatch that no combine follows."""
        return self.prepare()

    def identity(self, state):
        """Returns the result of identity experts, bf16 and shaped like state.x. It is not timed."""
        return dequantise(state.x)

    def finalize(self, state, y):
        """Combine: (T, H) bf16 for the tokens that this rank sent."""
        raise NotImplementedError

    def rows(self, state) -> int:
        return (state.x if isinstance(state.x, torch.Tensor) else state.x[0]).shape[0]

    def expected(self, x, weights):
        return x.float() * weights.sum(1, keepdim=True)

    def destroy(self) -> None:
        """After the last number of tokens."""

    @classmethod
    def close(cls) -> None:
        """Frees everything after the last case. Collective."""

    @classmethod
    def unavailable(cls, device: str) -> str | None:
        """Why it cannot run on this machine's `device`."""
        return None


def dequantise(x):
    return x if isinstance(x, torch.Tensor) else dequantise_blocks(*x).bfloat16()


def scale_rows(x, weights, is_local):
    """Identity experts that weight and reduce: each row times the sum of its weights for this rank's experts."""
    return (dequantise(x).float() * torch.where(is_local, weights, 0.0).sum(-1, keepdim=True)).bfloat16()


def destinations(ids, case: Case):
    """Which ranks each token goes to: (T, world) bool."""
    mask = torch.zeros((ids.shape[0], case.world), dtype=torch.bool, device=ids.device)
    return mask.scatter_(1, (ids // (case.experts // case.world)).long(), True)


class Ours(Candidate):
    """A registered backend through the contract, with the numbers of tokens known, as the scheduler knows them."""

    name, paired = "", True
    options: ClassVar[dict[str, Any]] = {}
    known = True

    def __init__(self, group, case: Case):
        self.case = case
        ranks = RankContext(rank=case.rank, world_size=case.world, device=case.device, group=group)
        shape = ExpertShape(hidden=case.hidden, intermediate=128, num_experts=case.experts, top_k=case.topk)
        quant = QuantConfig(scheme="fp8_block") if self.fp8 else QuantConfig()
        layout = ExpertLayout.even(case.experts, case.world)
        self.spec = LayerSpec(shape=shape, layout=layout, device=case.device.type, quant=quant)
        self.manager = all2all.REGISTRY.get(self.name)(ranks)
        cap = min(case.max_tokens, self.max_tokens or case.max_tokens)
        self.pf = self.manager.get_handle(self.spec, PrepareFinalizeOptions(max_tokens_per_rank=cap, **self.options))

    def load(self, x, ids, weights):
        super().load(x, ids, weights)
        self.routing = Routing(ids_Mt=ids, weights_Mt=weights).with_ids(self.pf.topk_indices_dtype())
        self.counts = (x.shape[0],) * self.case.world if self.known else None
        self.out = torch.empty_like(x)

    def prepare(self):
        prepared = self.pf.prepare(self.x, self.routing, quant=self.spec.quant, tokens_per_rank=self.counts)
        x = prepared.x if prepared.scales is None else (prepared.x, prepared.scales)
        return SimpleNamespace(x=x, prepared=prepared)

    def prepare_again(self):
        state = self.prepare()
        self._forget()
        return state

    def _forget(self) -> None:
        self.pf.book.forget()

    def identity(self, state):
        routing, output = state.prepared.routing, state.prepared.output
        y = scale_rows(state.x, routing.weights_Mt, routing.ids_Mt >= 0)
        return y if output is None else output.copy_(y)

    reduce = TopKWeightAndReduceNoOP()

    def finalize(self, state, y):
        return self.pf.finalize(state.prepared.handle, y, reduce=self.reduce, out_MK=self.out)

    def destroy(self):
        self._forget()
        self.manager.destroy()

    @classmethod
    def unavailable(cls, device):
        manager = all2all.REGISTRY.get(cls.name)
        if device not in manager.prepare_finalize.capability.devices:
            return f"{cls.name} needs {' or '.join(sorted(manager.prepare_finalize.capability.devices))}"
        return manager.unavailable()


class Nvlink(Ours):
    name, graph = "nvlink", True
    pf: NvlinkPrepareAndFinalize

    @classmethod
    def unavailable(cls, device):
        return None if device == "cpu" and triton.knobs.runtime.interpret else super().unavailable(device)

    def __init__(self, group, case):
        if case.device.type == "cpu":  # in Triton's interpreter
            NvlinkPrepareAndFinalize.providers = (SharedFiles,)
        super().__init__(group, case)

    def _forget(self):
        super()._forget()
        self.pf.heap.reset()


class NvlinkFp8(Nvlink):
    fp8 = True


class NvlinkSpaced(Nvlink):
    """The numbers of tokens are not known: rows lie at multiples of the cap."""

    known = False


class NvlinkCopied(Nvlink):
    """The experts write elsewhere: partial sums are copied to where peers read them."""

    def identity(self, state):
        return super().identity(state).clone()


class NvlinkBatched(Nvlink):
    """A row crosses once for each rank and is laid out expert by expert there."""

    name, max_tokens = "nvlink_batched", LOW_LATENCY_TOKENS
    reduce = TopKWeightAndReduceDelegate()

    def identity(self, state):
        return dequantise(state.x)


class NvlinkBatchedFp8(NvlinkBatched):
    fp8 = True


class AllToAll(Ours):
    name = "all_to_all"


class AllToAllFp8(AllToAll):
    fp8 = True


class AllGatherReduceScatter(Ours):
    name = "allgather_reducescatter"


class AllGatherReduceScatterFp8(AllGatherReduceScatter):
    fp8 = True


class AllToAllBatched(Ours):
    """Sends a row to each expert. Its blocks are as large as the cap, so the cap is that of low latency."""

    name, row_per_expert, max_tokens = "all_to_all_batched", True, LOW_LATENCY_TOKENS
    reduce = TopKWeightAndReduceDelegate()

    def identity(self, state):
        return dequantise(state.x)


class AllToAllBatchedFp8(AllToAllBatched):
    fp8 = True


class Nvshmem(Ours):
    name, graph = "nvshmem", True


class HighThroughputV2(Ours):
    name = "deepep_v2"


class OursHighThroughput(Ours):
    name = "deepep_ht"


class OursHighThroughputFp8(OursHighThroughput):
    fp8 = True


class OursLowLatency(Ours):
    name, graph, row_per_expert, max_tokens = "deepep_ll", True, True, LOW_LATENCY_TOKENS
    reduce = TopKWeightAndReduceDelegate()

    def identity(self, state):
        return dequantise(state.x)

    def _forget(self):
        super()._forget()
        self.pf.shared.outstanding = 0


class OursLowLatencyFp8(OursLowLatency):
    fp8 = True


class BareHighThroughput(Candidate):
    """Runs DeepEP's normal kernels with get_dispatch_layout. Rows are quantised beforehand, and ids are int64 already."""

    buffer: ClassVar[Any] = None  # one in a process, for every case

    def __init__(self, group, case: Case):
        from deep_ep import Buffer

        self.case = case
        if BareHighThroughput.buffer is None:
            BareHighThroughput.buffer = Buffer(group, HIGH_THROUGHPUT_BYTES, 0, explicitly_destroy=True)

    @classmethod
    def unavailable(cls, device):
        return all2all.REGISTRY.get("deepep_ht").unavailable()

    def load(self, x, ids, weights):
        super().load(quantise_blocks(x) if self.fp8 else x, ids.long(), weights)

    def prepare(self):
        per_rank, _, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(self.ids, self.case.experts)
        x, ids, weights, _, handle, _ = self.buffer.dispatch(
            self.x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=self.ids,
            topk_weights=self.weights,
            async_finish=False,
        )
        return SimpleNamespace(x=x, ids=ids, weights=weights, handle=handle)

    def identity(self, state):
        return scale_rows(state.x, state.weights, state.ids >= 0)

    def finalize(self, state, y):
        return self.buffer.combine(y, state.handle, async_finish=False)[0]

    @classmethod
    def close(cls):
        torch.cuda.synchronize()
        BareHighThroughput.buffer.destroy()
        BareHighThroughput.buffer = None


class BareHighThroughputFp8(BareHighThroughput):
    fp8 = True


class BareLowLatency(Candidate):
    """DeepEP's low-latency kernels: combine applies the weights, fp8 is cast inside dispatch."""

    graph, row_per_expert, max_tokens = True, True, LOW_LATENCY_TOKENS
    buffer: ClassVar[Any] = None  # one in a process, sized for the largest case: NVSHMEM is set up once

    def __init__(self, group, case: Case):
        from deep_ep import Buffer

        self.case = case
        if BareLowLatency.buffer is None:
            hidden, experts = case.largest_hidden, case.largest_experts
            size = Buffer.get_low_latency_rdma_size_hint(LOW_LATENCY_TOKENS, hidden, case.world, experts)
            BareLowLatency.buffer = Buffer(
                group, 0, size, low_latency_mode=True, num_qps_per_rank=experts // case.world, explicitly_destroy=True
            )
        self.buffer.clean_low_latency_buffer(LOW_LATENCY_TOKENS, case.hidden, case.experts)  # its layout has changed

    @classmethod
    def unavailable(cls, device):
        return all2all.REGISTRY.get("deepep_ht").unavailable()

    def load(self, x, ids, weights):
        super().load(x, ids.long(), weights)

    def prepare(self):
        received, _, handle, _, _ = self.buffer.low_latency_dispatch(
            self.x, self.ids, LOW_LATENCY_TOKENS, self.case.experts, use_fp8=self.fp8
        )
        return SimpleNamespace(x=received, handle=handle)

    def finalize(self, state, y):
        return self.buffer.low_latency_combine(y, self.ids, self.weights, state.handle)[0]

    @classmethod
    def close(cls):
        torch.cuda.synchronize()
        BareLowLatency.buffer.destroy()
        BareLowLatency.buffer = None


class BareLowLatencyFp8(BareLowLatency):
    fp8 = True


class NcclAllToAll(Candidate):
    """Rows packed beforehand, one per (token, destination rank), returned packed: the least that NCCL takes."""

    graph = True

    def __init__(self, group, case: Case):
        self.group, self.case = group, case

    def load(self, x, ids, weights):
        mask = destinations(ids, self.case)
        self.tokens = torch.cat([mask[:, rank].nonzero()[:, 0] for rank in range(self.case.world)])
        sends = mask.sum(0)
        receives = torch.empty_like(sends)
        dist.all_to_all_single(receives, sends, group=self.group)
        self.packed, self.sends, self.receives = x[self.tokens], sends.tolist(), receives.tolist()

    def prepare(self):
        received = self.packed.new_empty((sum(self.receives), self.packed.shape[1]))
        dist.all_to_all_single(received, self.packed, self.receives, self.sends, group=self.group)
        return SimpleNamespace(x=received)

    def finalize(self, state, y):
        out = y.new_empty((sum(self.sends), y.shape[1]))
        dist.all_to_all_single(out, y, self.sends, self.receives, group=self.group)
        return out

    def expected(self, x, weights):
        return x[self.tokens].float()


class NcclAllGatherReduceScatter(Candidate):
    """Every token to every rank, and a reduce-scatter of the weighted sums: the fallback that needs no routing."""

    graph = True

    def __init__(self, group, case: Case):
        self.group, self.case = group, case

    def prepare(self):
        wholes = []
        for part in (self.x, self.ids, self.weights):
            wholes.append(part.new_empty((self.case.world * part.shape[0], part.shape[1])))
            dist.all_gather_into_tensor(wholes[-1], part, group=self.group)
        return SimpleNamespace(x=wholes[0], ids=wholes[1], weights=wholes[2])

    def identity(self, state):
        mine = state.ids // (self.case.experts // self.case.world) == self.case.rank
        return scale_rows(state.x, state.weights, mine)

    def finalize(self, state, y):
        out = y.new_empty((y.shape[0] // self.case.world, y.shape[1]))
        dist.reduce_scatter_tensor(out, y, group=self.group)
        return out


CANDIDATES: dict[str, type[Candidate]] = {
    "nvlink": Nvlink,
    "nvlink_fp8": NvlinkFp8,
    "nvlink_spaced": NvlinkSpaced,
    "nvlink_copied": NvlinkCopied,
    "nvlink_batched": NvlinkBatched,
    "nvlink_batched_fp8": NvlinkBatchedFp8,
    "nccl_a2a": NcclAllToAll,
    "nccl_ag_rs": NcclAllGatherReduceScatter,
    "deepep_ht_bf16": BareHighThroughput,
    "deepep_ht_fp8": BareHighThroughputFp8,
    "ours_deepep_ht_bf16": OursHighThroughput,
    "ours_deepep_ht_fp8": OursHighThroughputFp8,
    "deepep_ll_bf16": BareLowLatency,
    "deepep_ll_fp8": BareLowLatencyFp8,
    "ours_deepep_ll_bf16": OursLowLatency,
    "ours_deepep_ll_fp8": OursLowLatencyFp8,
    "all_to_all": AllToAll,
    "all_to_all_fp8": AllToAllFp8,
    "allgather_reducescatter": AllGatherReduceScatter,
    "allgather_reducescatter_fp8": AllGatherReduceScatterFp8,
    "all_to_all_batched": AllToAllBatched,
    "all_to_all_batched_fp8": AllToAllBatchedFp8,
    "deepep_v2": HighThroughputV2,
    "nvshmem": Nvshmem,  # last: DeepEP has its own NVSHMEM in the process
}

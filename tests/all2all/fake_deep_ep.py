"""A stand-in for the package `deep_ep` on CPU ranks: the same calls, checks and limits, over torch.distributed.

It is strict where the library is: dtypes, compiled hidden sizes, contiguity, the cap, two results at a time. Where the
library would read what it should not, this one returns NaN.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

HIDDEN_SIZES = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)


class Event:
    """Of a call that is done already; the work that it stands for must still be waited for."""

    waited = False

    def current_stream_wait(self) -> None:
        self.waited = True


class Config:
    def __init__(self, num_sms: int):
        self.num_sms = num_sms

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 4096 * num_ranks + hidden_bytes


class Buffer:
    living = 0

    def __init__(self, group, num_nvl_bytes=0, num_rdma_bytes=0, *, low_latency_mode=False, num_qps_per_rank=24,
                 allow_nvlink_for_low_latency_mode=True, explicitly_destroy=False):  # fmt: skip
        assert explicitly_destroy, "only an explicit destroy is collective in a known order"
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency, self.queues = low_latency_mode, num_qps_per_rank
        self._results: list[torch.Tensor] = []
        self._clean: tuple | None = None
        Buffer.living += 1

    def destroy(self) -> None:
        dist.barrier(self.group)
        Buffer.living -= 1

    num_sms = 20

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        assert new_num_sms % 2 == 0
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        assert num_ranks in (2, 4, 8)
        return Config(Buffer.num_sms)

    get_combine_config = get_dispatch_config

    @staticmethod
    def capture() -> Event:
        return Event()

    def _gather(self, value) -> list:
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    # High throughput

    def get_dispatch_layout(self, topk_idx, num_experts, previous_event=None, async_finish=False,
                            allocate_on_comm_stream=False):  # fmt: skip
        assert topk_idx.dtype == torch.int64 and topk_idx.is_contiguous() and num_experts % self.size == 0
        assert not allocate_on_comm_stream or (async_finish and previous_event is not None)
        owner = torch.where(topk_idx >= 0, topk_idx // (num_experts // self.size), -1)
        in_rank = torch.stack([(owner == rank).any(1) for rank in range(self.size)], 1)
        hits = topk_idx[topk_idx >= 0]
        per_expert = torch.bincount(hits, minlength=num_experts).int()
        return in_rank.sum(0).int(), None, per_expert, in_rank, Event()

    def dispatch(self, x, *, num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert, topk_idx, topk_weights,
                 num_worst_tokens=0, config=None, previous_event=None, async_finish=False,
                 allocate_on_comm_stream=False):  # fmt: skip
        rows, scales = x if isinstance(x, tuple) else (x, None)
        assert rows.is_contiguous() and rows.shape[1] * rows.element_size() % 32 == 0, "rows are moved in two halves"
        assert topk_weights.dtype == torch.float32 and torch.isfinite(topk_weights).all()
        assert num_tokens_per_rank.tolist() == is_token_in_rank.sum(0).tolist()
        local = num_tokens_per_expert.numel() // self.size
        everyone = self._gather((rows.view(torch.uint8), scales, topk_idx, topk_weights, is_token_in_rank))
        start, got, sources = self.rank * local, [], []
        for source, (their_rows, their_scales, ids, weights, in_rank) in enumerate(everyone):
            (token,) = in_rank[:, self.rank].nonzero(as_tuple=True)
            here = (ids[token] >= start) & (ids[token] < start + local)
            got.append((their_rows[token], None if their_scales is None else their_scales[token],
                        torch.where(here, ids[token] - start, -1), torch.where(here, weights[token], 0.0)))  # fmt: skip
            sources += [(source, int(t)) for t in token]
        received, their_scales, ids, weights = (
            None if parts[0] is None else torch.cat(parts) for parts in zip(*got, strict=True)
        )
        received = received.view(rows.dtype)
        if num_worst_tokens:
            behind = num_worst_tokens - ids.shape[0]
            assert behind >= 0, "more rows arrive than were said to"
            received = torch.cat([received, torch.full((behind, rows.shape[1]), float("nan")).to(rows.dtype)])
            ids = torch.cat([ids, ids.new_full((behind, ids.shape[1]), -1)])
            weights = torch.cat([weights, weights.new_full((behind, ids.shape[1]), float("nan"))])
            if scales is not None:
                their_scales = torch.cat([their_scales, their_scales.new_full((behind, scales.shape[1]), float("nan"))])
        out = received if scales is None else (received, their_scales)
        return out, ids, weights, [], (sources, rows.shape[0], received.shape[0]), Event()

    def combine(self, x, handle, config=None, previous_event=None, async_finish=False, allocate_on_comm_stream=False):
        sources, num_tokens, num_rows = handle
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape[0] == num_rows
        out = torch.zeros((num_tokens, x.shape[1]))
        for rows, their_sources in self._gather((x, sources)):
            for row, (source, token) in enumerate(their_sources):
                if source == self.rank:
                    out[token] += rows[row].float()
        return out.bfloat16(), None, Event()

    # Low latency

    @staticmethod
    def get_low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts) -> int:
        return num_max_dispatch_tokens_per_rank * hidden * num_experts * 2

    def clean_low_latency_buffer(self, *layout) -> None:
        dist.barrier(self.group)
        self._clean = layout

    def low_latency_dispatch(self, x, topk_idx, num_max, num_experts, *, use_fp8=True, async_finish=False,
                             return_recv_hook=False):  # fmt: skip
        assert not (async_finish and return_recv_hook), "one or the other"
        assert self.low_latency and self._clean == (num_max, x.shape[1], num_experts), "the buffer was not cleaned"
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape[1] in HIDDEN_SIZES and x.shape[0] <= num_max
        assert topk_idx.dtype == torch.int64 and topk_idx.shape[1] <= 11 and num_experts % self.size == 0
        assert (self.size * num_max) % 4 == 0 and num_experts // self.size <= self.queues
        everyone = self._gather((x, topk_idx))
        local = num_experts // self.size
        rows = torch.full((local, self.size * num_max, x.shape[1]), float("nan"), dtype=x.dtype)
        counts, places = torch.zeros(local, dtype=torch.int32), []
        for source, (their_x, ids) in enumerate(everyone):
            for token, row in enumerate(ids.tolist()):
                for expert in row:
                    if expert < 0 or expert // local != self.rank:
                        continue
                    slot = expert % local
                    rows[slot, counts[slot]] = their_x[token]
                    places.append((source, token, expert, slot, int(counts[slot])))
                    counts[slot] += 1
        self._results.append(rows)
        if len(self._results) > 2:  # there are two buffers in turn
            self._results.pop(0).fill_(float("nan"))
        handle = (places, topk_idx.shape[0], x.shape[1])
        if use_fp8:
            blocks = rows.float().nan_to_num().unflatten(-1, (-1, 128))
            scales = blocks.abs().amax(-1).clamp(min=1e-4) / 448
            received = (blocks / scales[..., None]).flatten(-2).to(torch.float8_e4m3fn)
            columns = scales.transpose(1, 2).contiguous().transpose(1, 2)  # the library's order
            return (received, columns), counts, handle, Event(), (lambda: None) if return_recv_hook else None
        return rows, counts, handle, Event(), (lambda: None) if return_recv_hook else None

    def low_latency_combine(self, x, topk_idx, topk_weights, handle, *, async_finish=False, return_recv_hook=False,
                            out=None):  # fmt: skip
        places, num_tokens, hidden = handle
        assert not (async_finish and return_recv_hook), "one or the other"
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape[2] == hidden
        assert topk_weights.dtype == torch.float32
        home = [(source, token, expert, x[slot, row]) for source, token, expert, slot, row in places]
        total = torch.zeros((num_tokens, hidden))
        for rows in self._gather(home):
            for source, token, expert, row in rows:
                if source == self.rank:
                    (slot,) = (topk_idx[token] == expert).nonzero()[:, 0].tolist()
                    total[token] += topk_weights[token, slot] * row.float()
        out = torch.empty_like(total, dtype=torch.bfloat16) if out is None else out
        out.copy_(total)
        return out, Event(), (lambda: None) if return_recv_hook else None

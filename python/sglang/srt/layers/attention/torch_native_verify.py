"""The torch_native backend with speculative verification.

Upstream's torch_native backend knows extend and decode. This subclass, registered under the same
name, also runs TARGET_VERIFY, and computes all three in one way: a batch is a list of `QueryRows`,
one a request, each a run of query rows over the KV slots that request holds.

    extend   rows = new tokens, all causal after the cached prefix
    decode   one row, sees everything
    verify   rows = draft tokens: a chain (causal), or a tree given by a QLEN_ONLY mask, where a row
             sees the committed prefix and its ancestors

Verify row i is computed by the same kernel as decode, on the keys decode would see, so in float32
the two agree to rounding. The sliding window is measured between token positions, not cache
slots: two siblings of a tree share a position.

Beyond verification, compared with upstream: query rows of the cached prefix are not computed,
slots and masks are made once a forward instead of once a layer, K and V are fetched with
`index_select` (half the time of indexing), sliding-window layers read their own pool's slots, and
logit caps and attention sinks are applied instead of dropped or refused. Requests run one after
another: padding them to one length was faster only for plain decode on many cores and up to three
times slower on one. Batches with encoder states (cross-attention) go to upstream's code.

References: upstream's intel_amx backend (tree masks, sliding-window slots).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

# Rows of one attention call: bounds the mask (and, with a logit cap, the scores) of a long prompt.
ROW_BLOCK = 256


@dataclasses.dataclass
class QueryRows:
    """The query rows of one request: rows `start:end` of the batch.

    slots: (prefix + rows,) integer, the KV slot of each token, committed prefix first.
    window_slots: the same tokens in the sliding-window pool, where the model has one.
    ancestors: (rows, rows) bool; row i sees draft token j. None: causal.
    positions: (rows,) int64, token positions; set exactly when `ancestors` is.
    """

    start: int
    end: int
    prefix: int
    slots: torch.Tensor
    window_slots: torch.Tensor | None = None
    ancestors: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    _masks: dict = dataclasses.field(default_factory=dict)

    def keys(self, first: int, last: int, window: int | None) -> tuple[int, int]:
        """Range of `slots` that rows `first:last` can see, in causal attention."""
        if self.positions is None:
            lowest, end = self.prefix + first, self.prefix + last
        else:
            lowest, end = self.prefix, self.slots.numel()  # the root is the lowest position
        return (0 if window is None else max(0, lowest - window)), end

    def mask(
        self, first: int, last: int, window: int | None, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """What rows `first:last` see of `keys(first, last, window)`.

        (last - first, keys) of `dtype`, 0 where visible and -inf elsewhere; None when all of it is.
        """
        if self.ancestors is None and last - first == 1:
            return None
        cached = (window, dtype)
        if cached in self._masks:
            return self._masks[cached]
        begin, end = self.keys(first, last, window)
        device = self.slots.device
        if self.ancestors is None:
            rows = self.prefix + torch.arange(first, last, device=device)[:, None]
            keys = torch.arange(begin, end, device=device)
            visible = keys <= rows
        else:
            rows = self.positions[first:last, None]
            prefix = torch.arange(begin, self.prefix, device=device)
            keys = torch.cat((prefix, self.positions))
            seen = torch.ones((last - first, prefix.numel()), dtype=torch.bool, device=device)
            visible = torch.cat((seen, self.ancestors[first:last]), dim=1)
        if window is not None:
            visible &= keys >= rows - window
        mask = torch.zeros(visible.shape, dtype=dtype, device=device)
        mask.masked_fill_(~visible, float("-inf"))
        if self.end - self.start <= ROW_BLOCK:
            self._masks[cached] = mask
        return mask


class TorchNativeVerifyBackend(TorchNativeAttnBackend):
    """torch_native attention for extend, decode and TARGET_VERIFY; see the module's docstring."""

    # Set by init_forward_metadata; None sends the batch to upstream's code.
    query_rows: list[QueryRows] | None = None

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        self.query_rows = None
        if forward_batch.encoder_lens is None:
            self.query_rows = self._plan(forward_batch)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of `q` (tokens, q heads * head dim) after writing `k` and `v` to the cache.

        sinks: (q heads,), logits of a key without a value that every row of the head sees.
        Returns (tokens, q heads * value head dim).
        """
        if self.query_rows is None:
            _refuse_sinks(sinks)
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, sinks)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `forward_extend`, for one token a request."""
        if self.query_rows is None:
            _refuse_sinks(sinks)
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, sinks)

    def _plan(self, forward_batch: ForwardBatch) -> list[QueryRows]:
        mode = forward_batch.forward_mode
        seq_lens = forward_batch.seq_lens.tolist()
        ancestors = None
        if mode.is_decode_or_idle():
            prefixes, counts = [n - 1 for n in seq_lens], [1] * len(seq_lens)
        elif mode.is_target_verify():
            spec_info = forward_batch.spec_info
            layout = getattr(spec_info, "ragged_verify_layout", None)
            if layout is None:
                counts = [int(spec_info.draft_token_num)] * len(seq_lens)
                ancestors = _tree_ancestors(spec_info, len(seq_lens))
            else:
                counts = layout.verify_lens.tolist()
            prefixes = seq_lens
        else:
            prefixes = forward_batch.extend_prefix_lens.tolist()
            counts = forward_batch.extend_seq_lens.tolist()

        req_to_token = self.req_to_token_pool.req_to_token
        plan, start = [], 0
        for i, row in enumerate(forward_batch.req_pool_indices.tolist()[: len(counts)]):
            end = start + counts[i]
            rows = self.rows_over(
                start, end, prefixes[i], req_to_token[row, : prefixes[i] + counts[i]]
            )
            if ancestors is not None:
                rows.ancestors, rows.positions = ancestors[i], spec_info.positions[start:end]
            plan.append(rows)
            start = end
        return plan

    def rows_over(self, start: int, end: int, prefix: int, slots: torch.Tensor) -> QueryRows:
        """`QueryRows` of causal rows `start:end` over `slots`, translated for window layers too."""
        window_slots = None
        if self.use_sliding_window_kv_pool:
            window_slots = self.token_to_kv_pool.translate_loc_from_full_to_swa(slots)
        return QueryRows(start, end, prefix, slots, window_slots)

    def _forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None and v is not None:
            write_loc = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            pool.set_kv_buffer(layer, write_loc, k, v)
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        output = q.new_empty((q.shape[0], layer.tp_q_head_num, layer.v_head_dim))
        key_buffer = pool.get_key_buffer(layer.layer_id)
        value_buffer = pool.get_value_buffer(layer.layer_id)
        window_pool = self.use_sliding_window_kv_pool and pool.layers_mapping[layer.layer_id][1]
        causal = layer.attn_type != AttentionType.ENCODER_ONLY
        window = layer.sliding_window_size if causal and layer.sliding_window_size > -1 else None

        for rows in self.query_rows:
            slots = rows.window_slots if window_pool else rows.slots
            count = rows.end - rows.start
            for first in range(0, count, ROW_BLOCK):
                last = min(first + ROW_BLOCK, count)
                begin, end = rows.keys(first, last, window) if causal else (0, slots.numel())
                seen = slots[begin:end]
                block = slice(rows.start + first, rows.start + last)
                output[block] = attend(
                    q[block],
                    key_buffer.index_select(0, seen).to(q.dtype),
                    value_buffer.index_select(0, seen).to(q.dtype),
                    mask=rows.mask(first, last, window, q.dtype) if causal else None,
                    scale=layer.scaling,
                    logit_cap=layer.logit_cap,
                    sinks=sinks,
                )
        return output.view(-1, layer.tp_q_head_num * layer.v_head_dim)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    scale: float,
    logit_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax attention of one request.

    q: (rows, q heads, head dim); k: (keys, kv heads, head dim); v: (keys, kv heads, value dim).
    mask: (rows, keys) added to the scores, or None. logit_cap: scores become cap * tanh(s / cap);
    0 means none. sinks: (q heads,) or None. Returns (rows, q heads, value dim).
    """
    rows, heads, _ = q.shape
    kv_heads, value_dim = v.shape[1:]
    # The heads that share a kv head, as rows of it: (kv heads, group * rows, head dim).
    grouped = q.view(rows, kv_heads, -1, q.shape[-1]).permute(1, 2, 0, 3)
    grouped = grouped.reshape(kv_heads, -1, q.shape[-1])
    k, v = k.transpose(0, 1), v.transpose(0, 1)
    if logit_cap > 0 or sinks is not None:
        scores = (grouped @ k.transpose(1, 2)).float().mul_(scale).view(heads, rows, -1)
        if logit_cap > 0:
            scores = scores.div_(logit_cap).tanh_().mul_(logit_cap)
        if mask is not None:
            scores += mask
        if sinks is not None:
            sink = sinks.float().view(heads, 1, 1).expand(heads, rows, 1)
            scores = torch.cat((scores, sink), dim=-1)
        weights = scores.softmax(-1)[..., : k.shape[1]].to(v.dtype)
        output = weights.reshape(kv_heads, -1, k.shape[1]) @ v
    else:
        if mask is not None:
            mask = mask.expand(heads // kv_heads, -1, -1).reshape(1, 1, grouped.shape[1], -1)
        output = scaled_dot_product_attention(
            grouped[None], k[None], v[None], attn_mask=mask, scale=scale
        )
    return output.view(kv_heads, -1, rows, value_dim).permute(2, 0, 1, 3).reshape(rows, heads, -1)


def _tree_ancestors(spec_info: object, batch_size: int) -> torch.Tensor | None:
    """(batch, draft tokens, draft tokens) bool of a tree verify; None for a chain.

    A chain is what `tree_topk == 1` says, or a verify input without that attribute (DFLASH): its
    mask, if any, is not read.
    """
    mask = spec_info.custom_mask
    if getattr(spec_info, "tree_topk", 1) == 1 or mask is None:
        return None
    width = int(spec_info.draft_token_num)
    if mask.numel() != batch_size * width * width:
        raise NotImplementedError(
            f"torch_native verifies trees with a QLEN_ONLY mask of {batch_size}x{width}x{width} "
            f"cells, got {mask.numel()}; use another attention backend for full masks."
        )
    return mask.view(batch_size, width, width).bool()


def _refuse_sinks(sinks: torch.Tensor | None) -> None:
    if sinks is not None:
        raise NotImplementedError(
            "torch_native has no attention sinks for encoder-decoder models; "
            "use another attention backend."
        )

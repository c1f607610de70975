"""Cache slots of requests: reading and writing ragged spans of the request-to-slot table.

`req_to_token (rows, pool_len)` int32 lists the KV cache slot of every position of each request. A
batch of half-open spans `[start, end)` of it, packed request after request, is one gather or one
scatter. Every span must satisfy `0 <= start <= end <= pool_len`.
"""

import torch


def ragged_span(start: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Batch row and position of every element of the packed spans `[start, start + length)`.

    start, lengths: (bs,) any integer dtype. Returns two (sum of lengths,) int64 tensors.
    """
    lengths = lengths.long()
    rows = torch.repeat_interleave(lengths)
    first = lengths.cumsum(0) - lengths
    offsets = torch.arange(rows.numel()) - first[rows]
    return rows, start.long()[rows] + offsets


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write newly allocated slots into the requests' spans of the table.

    req_pool_indices, start_offset, end_offset: (bs,); req_to_token: (rows, pool_len), written;
    out_cache_loc: at least (sum of end - start,), packed in batch order.
    Call site: srt/mem_cache/allocation.py, `assign_req_to_token_pool_func`.
    """
    rows, positions = ragged_span(start_offset, end_offset - start_offset)
    slots = out_cache_loc[: rows.numel()].to(req_to_token.dtype)
    req_to_token[req_pool_indices.long()[rows], positions] = slots


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Read the slots of the requests' spans: the inverse of `assign_req_to_token_pool_cpu`.

    req_pool_indices, start_offset, end_offset: (bs,); req_to_token: (rows, pool_len);
    out_cache_loc: at least (sum of end - start,), written, packed in batch order; the rest is left
    alone. Call sites: kernels/ops/speculative/cache_locs.py, `assign_extend_cache_locs_func` and
    `fill_front_out_cache_loc_func`.
    """
    rows, positions = ragged_span(start_offset, end_offset - start_offset)
    slots = req_to_token[req_pool_indices.long()[rows], positions]
    out_cache_loc[: rows.numel()] = slots.to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    speculative_num_steps: int,
) -> None:
    """Read the `topk * speculative_num_steps` slots that follow each request's sequence.

    req_pool_indices, seq_lens: (bs,); req_to_token: (rows, pool_len);
    out_cache_loc: (bs * topk * speculative_num_steps,), written.
    Call site: kernels/ops/speculative/cache_locs.py, `assign_draft_cache_locs_contiguous_func`.
    """
    steps = torch.arange(topk * speculative_num_steps)
    positions = seq_lens.long()[:, None] + steps
    slots = req_to_token[req_pool_indices.long()[:, None], positions]
    out_cache_loc.copy_(slots.reshape(-1))

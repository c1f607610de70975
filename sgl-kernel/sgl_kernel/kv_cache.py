"""Moves of KV cache rows between slots.

sglang hands its KV pool to kernels as the address and the row size of each layer's buffers, so they
are rebuilt here as byte tensors over the same memory.
"""

import ctypes

import torch


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor,
    strides: torch.Tensor,
    tgt_loc: torch.Tensor,
    src_loc: torch.Tensor,
) -> None:
    """Copy rows `src_loc` to rows `tgt_loc` in every buffer, all reads before any write.

    data_ptrs: (buffers,) uint64, addresses of contiguous buffers; strides: (buffers,), bytes of a
    row; tgt_loc, src_loc: (n,), row numbers, the targets distinct. Targets may also be sources.
    Nothing can be checked: a wrong address or row is a wild memory access, as in the CUDA kernel.
    Call site: kernels/ops/kvcache/cache_move.py, `copy_all_layer_kv_cache_func`.
    """
    if tgt_loc.numel() == 0:
        return
    target, source = tgt_loc.long(), src_loc.long()
    rows = int(torch.maximum(target.max(), source.max())) + 1
    for address, row_bytes in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (rows * row_bytes)).from_address(address)
        buffer = torch.frombuffer(memory, dtype=torch.uint8).view(rows, row_bytes)
        buffer[target] = buffer[source]

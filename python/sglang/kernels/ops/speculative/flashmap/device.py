"""What the launchers ask of the device: its size, and whether it converts e4m3."""

import functools

import torch


@functools.cache
def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA ``device``; 1 elsewhere (Triton's interpreter)."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that a program may take; Hopper's elsewhere (Triton's interpreter)."""
    if device.type != "cuda":
        return 227 << 10
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@functools.cache
def require_pool_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError unless the kernels read and write KV pools of ``dtype`` on ``device``."""
    if dtype in (torch.float32, torch.bfloat16, torch.float16):
        return
    if dtype != torch.float8_e4m3fn:
        raise ValueError(
            f"the FlashMap draft cannot keep its context in a {dtype} KV pool; "
            "pass --speculative-draft-kv-cache-dtype bfloat16 or fp8_e4m3"
        )
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise ValueError(
            f"{name} cannot convert float8_e4m3fn, the dtype of the FlashMap draft's KV pool; "
            "pass --speculative-draft-kv-cache-dtype bfloat16"
        )

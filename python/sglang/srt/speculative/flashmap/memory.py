"""``DraftMemory``: what a draft takes of a device, for the start log and ``/server_info``."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

GIB = 1 << 30


@dataclass(frozen=True)
class DraftMemory:
    """Bytes by what they are for."""

    weight: int
    """The checkpoint's tensors, plain, quantized, packed or with modulations folded in."""
    precomputed: int
    """Products of the draft's weights and the target's, banks of noise."""
    kvcache: int
    """The pool of the context's keys and values."""
    graph: int
    """CUDA graphs with what they allocate, logits included."""
    scratch: int
    """Seeds, graph inputs and the kernels' own buffers."""

    def gigabytes(self) -> dict[str, float]:
        """In upstream's unit, 2³⁰ bytes, and rounded as upstream's ``memory_usage`` is."""
        return {name: round(size / GIB, 3) for name, size in asdict(self).items()}

    def __str__(self) -> str:
        return ", ".join(f"{name} {size / GIB:.3f} GB" for name, size in asdict(self).items())


def parameter_bytes(model: torch.nn.Module) -> int:
    """Of storages, each once: fused weights are shared by views. Packed weights have none."""
    sizes = {}
    for parameter in model.parameters():
        if parameter.is_mkldnn:
            sizes[id(parameter)] = parameter.numel() * parameter.element_size()
        else:
            storage = parameter.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def pool_bytes(key_buffers: list[torch.Tensor], value_buffers: list[torch.Tensor]) -> int:
    return sum(buffer.nbytes for buffer in (*key_buffers, *value_buffers))

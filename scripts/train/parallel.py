"""Several GPUs: data parallel under torchrun, one process each.

Every rank draws its own batches; gradients are averaged in one all-reduce of one buffer. Drafts are
small beside their targets, so there is little to overlap it with, and ranks stay equal bit by bit.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class World:
    """This process among its peers."""

    rank: int
    size: int
    device: str

    @classmethod
    def join(cls, device: str | None = None) -> World:
        """Reads what torchrun (or accelerate launch) sets; alone without it."""
        cuda = torch.cuda.is_available() and device != "cpu"
        if "RANK" not in os.environ:
            return cls(0, 1, device or ("cuda" if cuda else "cpu"))
        local = int(os.environ.get("LOCAL_RANK", 0))
        if cuda:
            torch.cuda.set_device(local)
        dist.init_process_group("nccl" if cuda else "gloo")
        name = f"cuda:{local}" if cuda else "cpu"
        return cls(dist.get_rank(), dist.get_world_size(), name)

    def leave(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def wait(self) -> None:
        """Until every rank is here. A rank that left while rank 0 still wrote the release would
        close connections under it, and torchrun would end rank 0 for whatever befell the other."""
        if self.size > 1:
            dist.barrier()

    def average(self, tensors: Iterable[torch.Tensor]) -> None:
        """Replaces each tensor by its mean over the ranks."""
        tensors = list(tensors)
        if self.size == 1:
            return
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat)
        flat /= self.size
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
            tensor.copy_(part.view_as(tensor))

    def any(self, value: bool) -> bool:
        """Whether `value` is true on any rank."""
        if self.size == 1:
            return value
        flag = torch.tensor([float(value)], device=self.device)
        dist.all_reduce(flag)
        return bool(flag.item())

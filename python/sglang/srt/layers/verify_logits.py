"""Verify logits in the 16 bits that the LM head computes, for workers that can read them so.

Upstream's ``LogitsProcessor`` copies all logits to float32, in a verify step the rows of a whole
window. A worker whose greedy requests need an argmax alone hands the processor a buffer,
``verify_logits (rows, width of the head)`` in the head's dtype. Target-verify forwards whose logits
would be cast and nothing else then leave them there, also when they are captured in a graph, and
the worker casts what it needs in float32. Targets that cap or gather logits (``can_leave_narrow``),
heads that are quantized or have adapters, and forwards of more rows, give float32 as ever. A scale
is applied in 16 bits either way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional

import torch

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsMetadata, LogitsProcessor


def can_leave_narrow(processor: "LogitsProcessor") -> bool:
    """Whether all that ``processor`` does to the logits of a plain head of 16 bits is a cast."""
    return not (
        processor.do_tensor_parallel_all_gather
        or processor.final_logit_softcapping
        or processor.use_fp32_lm_head
        or processor.use_fp32_lm_head_output
        or processor.rl_on_policy_target is not None
    )


def verify_logits_out(
    processor: "LogitsProcessor", hidden: torch.Tensor, metadata: "LogitsMetadata"
) -> Optional[torch.Tensor]:
    """Where ``processor`` may leave the logits of ``hidden (rows, H)`` as they are; None: nowhere.

    The caller asks whether the head wrote there: not all heads do.
    """
    buffer = processor.verify_logits
    if buffer is None or not metadata.forward_mode.is_target_verify():
        return None
    return buffer[: len(hidden)] if len(hidden) <= len(buffer) else None

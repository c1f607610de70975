"""Custom logit processors in a verify step: each row is shown to them as a request of its own.

A processor is the user's code. It gets logits ``(n, V)`` and a dictionary a row, in which upstream
puts the request under ``__req__``; a processor that looks at what was said (a thinking budget, say)
reads ``origin_input_ids`` and ``output_ids`` of it. Row ``j`` of a block comes after the drafts on
the path to ``j``, which the request has not said yet, so it is handed a view of the request whose
``output_ids`` end with them. Greedy text is then what decoding one token a step gives.

The drafts are copied to the host for it, and what the host knows of the request must be complete:
``--enable-custom-logit-processor`` switches overlap scheduling off
(``arg_groups/flashmap_hook.py``). Processors come last, after penalties, grammar and bias, as in
the normal sampler.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch


class RequestAtRow:
    """A request as a processor sees it at one row of a block."""

    def __init__(self, req: "Req", drafts: list[int]) -> None:
        self._req = req
        self.output_ids = req.output_ids + array("q", drafts)

    def __getattr__(self, name: str) -> Any:
        if name == "_req":  # while a copy is being made
            raise AttributeError(name)
        return getattr(self._req, name)


def process_block(
    logits: torch.Tensor, batch: "ScheduleBatch", *, block: torch.Tensor, path: torch.Tensor
) -> None:
    """Run the custom logit processors of ``batch`` on the logits of a verify step, in place.

    Args:
        logits: ``(B · W, V)``, adjusted by all else.
        block: anchors and drafts ``(B, W)`` int64; the host knows the anchors.
        path: ``(B, W, W)`` bool: the tokens of the block that row ``j`` comes after, its own and
            the anchor included, parents before children.
    """
    width = block.shape[1]
    info = batch.sampling_info
    for entry in info.custom_logit_processor.values():
        who = entry.indices.to(torch.int64)
        lines = (who[:, None] * width + torch.arange(width, device=who.device)).flatten()
        drafts, paths = block[who, 1:].tolist(), path[who, :, 1:].tolist()
        params = [
            at_row(info.custom_params[place], batch.reqs[place], said, row)
            for place, said, rows in zip(entry.rows, drafts, paths)
            for row in rows
        ]
        result = entry.processor(logits.index_select(0, lines), params)
        logits.index_copy_(0, lines, result.to(logits.dtype))


def at_row(params: Any, req: "Req", drafts: list[int], row: list[bool]) -> Any:
    """A request's ``params`` at the row that comes after those of ``drafts`` that ``row`` marks."""
    if not isinstance(params, dict) or "__req__" not in params:
        return params
    said = [draft for draft, before in zip(drafts, row) if before]
    return params | {"__req__": RequestAtRow(req, said)}

"""The tokens that end a request: what ``min_new_tokens`` keeps it from saying."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def stop_tokens(req: "Req", vocab_size: int) -> list[int]:
    """Stop tokens of ``req``, of its model and of its tokenizer, if it has one, in ascending order.

    Ids outside the vocabulary, which requests may name, are left out.
    """
    tokens = (req.sampling_params.stop_token_ids or set()) | (req.eos_token_ids or set())
    if req.tokenizer is not None:
        tokens = tokens | (req.tokenizer.additional_stop_token_ids or set())
        tokens = tokens | {req.tokenizer.eos_token_id}
    return sorted(t for t in tokens if t is not None and 0 <= t < vocab_size)

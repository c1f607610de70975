"""Which requests FLASHMAP serves: what it cannot honour is answered with HTTP 400, never
ignored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def validate_flashmap_request(req: "Req") -> Optional[str]:
    """One sentence naming what this request asks that FLASHMAP cannot honour, or None.

    Drafts are verified a block at a time, and only what a server returns of the tokens it keeps is
    kept.
    """
    outside = _token_outside_vocabulary(req)
    if outside is not None:
        return (
            f"The prompt holds token id {outside}, but the model's ids go from 0 to "
            f"{req.vocab_size - 1}; send ids of this model's tokenizer."
        )
    offending = []
    if req.return_hidden_states_mode.need_capture():
        offending.append("return_hidden_states")
    if req.return_sampling_mask:
        offending.append("return_sampling_mask")
    if not offending:
        return None
    return (
        f"FLASHMAP speculative decoding does not support {', '.join(offending)}; leave "
        f"{'it' if len(offending) == 1 else 'them'} out or use a server without "
        "--speculative-algorithm."
    )


def _token_outside_vocabulary(req: "Req") -> Optional[int]:
    """A prompt token that no embedding exists for: looking it up would end the server."""
    # Placeholders of images and the like are beyond the vocabulary on purpose.
    if req.vocab_size is None or req.multimodal_inputs is not None or not req.origin_input_ids:
        return None
    for token in (min(req.origin_input_ids), max(req.origin_input_ids)):
        if not 0 <= token < req.vocab_size:
            return token
    return None

"""How the drafts of a batch's requests are drawn: at which temperatures, and with which filters.

Both are free choices: an accept rule is lossless for every distribution that drafts are drawn from,
as long as it divides by the same one. A draft's slots know each other less than the target's
conditionals do, which makes them broader; a factor below 1 undoes some of it, and rejection keeps
more (``docs/flashmap.md`` has what was measured).
"""

from __future__ import annotations

import torch
from sglang.kernels.ops.speculative.flashmap.sampling_inputs import sampling_inputs


def draft_sampling(sampling_info, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Temperatures ``(B,)`` and filters ``(B, 3)`` of drafts, as ``sampling_inputs`` returns them.

    ``sampling_info``: the batch's ``SamplingBatchInfo``; ``factor``: of its temperatures.
    """
    info = sampling_info
    return sampling_inputs(
        info.temperatures.view(-1).float(),
        info.top_ks.view(-1),
        info.top_ps.view(-1).float(),
        info.min_ps.view(-1).float(),
        info.need_top_k_sampling,
        info.need_top_p_sampling,
        info.need_min_p_sampling,
        factor,
    )

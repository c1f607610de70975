"""Seeds of the samples of one request, which should differ although the request names one seed."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.sampling.sampling_params import SamplingParams


def params_of_sample(params: "SamplingParams", index: int) -> "SamplingParams":
    """``params`` of sample ``index``: the seed counted on; sample 0 is as if it were alone."""
    if params.sampling_seed is None or index == 0:
        return params
    params = copy.copy(params)
    # A signed 64-bit integer, like every seed.
    params.sampling_seed = (params.sampling_seed + index + 2**63) % 2**64 - 2**63
    return params

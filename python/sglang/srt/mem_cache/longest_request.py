"""How much of the KV pool the longest request must leave free."""

from __future__ import annotations

from sglang.srt.mem_cache.allocation_sizing import (
    get_alloc_page_size,
    get_alloc_reserve_per_decode,
)
from sglang.srt.runtime_context import get_spec


def slots_beyond_a_request() -> int:
    """Slots that a decode step reserves past the tokens of a request that has the pool to itself.

    A request that outgrew the pool less these could neither go on nor be retracted: it would be
    aborted with HTTP 500 and lose its text, where one without speculation ends for its length.
    """
    if get_spec().speculative_algorithm is None:
        return 1
    return get_alloc_reserve_per_decode() + get_alloc_page_size()

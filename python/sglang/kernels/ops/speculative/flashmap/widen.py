"""``widen``: e4m3 values in the dtype they are multiplied in, which is exact."""

import triton
import triton.language as tl


@triton.jit
def widen(x, dtype: tl.constexpr):
    """``x`` in ``dtype``, a float of at least 16 bits if ``x`` is e4m3.

    From e4m3 to bfloat16 Triton emits a conversion an element (``F2F`` on sm_90, Triton 3.6 and
    3.8), which kept a draft's products slower than with weights of 16 bits. By way of float32 two
    elements are packed by an instruction, and no ``F2F`` is left.
    """
    if x.dtype == tl.float8e4nv and dtype == tl.bfloat16:
        return x.to(tl.float32).to(dtype)
    else:
        return x.to(dtype)

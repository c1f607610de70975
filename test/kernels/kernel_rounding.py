"""Compares a kernel with a reference that rounds at the same places."""

from __future__ import annotations

import torch


def assert_same_rounding(
    actual: torch.Tensor, expected: torch.Tensor, *, rtol: float, atol: float
) -> None:
    """``actual`` is near ``expected`` everywhere and, in half precision, equal almost everywhere.

    The faces of an op sum in different orders, which flips the rounding of a value in thousands. A
    rounding step left out changes a tenth of them and more. ``rtol`` and ``atol`` count units of
    the dtype's epsilon.
    """
    eps = torch.finfo(expected.dtype).eps
    torch.testing.assert_close(actual, expected, rtol=rtol * eps, atol=atol * eps)
    if expected.dtype != torch.float32:
        assert (actual != expected).float().mean() < 0.01

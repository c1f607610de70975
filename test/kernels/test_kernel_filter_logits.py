"""filter_logits: reference and kernel against the target's own filters, and at their edges."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sglang.kernels.ops.speculative.flashmap.filter_logits import filter_logits
from sglang.srt.speculative.flashmap.target_probs import filter_mask

FILTERS = {
    "top-k": (7, 0, 0),
    "top-p": (0, 0.6, 0),
    "min-p": (0, 0, 0.2),
    "all": (9, 0.7, 0.1),
    "top-k-1": (1, 0, 0),
    "top-k-beyond": (1000, 0, 0),
    "top-p-1": (0, 1.0, 0),
}
TEMPERATURES = torch.tensor([0.7, 1.0, 3.0, 0.0])


def kept(logits: torch.Tensor, filters: torch.Tensor, launch: Callable | None) -> torch.Tensor:
    """Which columns stay; those that stay keep their logit."""
    args = (logits.clone(), TEMPERATURES, filters)
    if launch is None:
        filter_logits(*args)
    else:
        args = launch("filter_logits.filter_logits", *args)[1]
    keep = args[0] > float("-inf")
    assert torch.equal(args[0][keep], logits[keep])
    return keep


@pytest.mark.parametrize("values", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize(
    "dtype, columns", [(torch.float32, 50), (torch.bfloat16, 300)], ids=["fp32", "bf16"]
)
def test_filters_are_the_targets(dtype, columns, values, launch_and_args: Callable) -> None:
    # Distinct in bfloat16 too: where logits tie, the target's filter keeps what a sort puts first.
    logits = torch.stack([torch.randperm(columns) for _ in TEMPERATURES])
    logits = (logits.float() / 16 - 5).to(dtype)
    filters = torch.tensor([values] * len(TEMPERATURES), dtype=torch.float32)
    sampled = logits[:-1].double() / TEMPERATURES[:-1, None].double()
    top_k, top_p, min_p = (column[:-1].double() for column in filters.T)
    expected = filter_mask(
        sampled.softmax(-1),
        top_ks=torch.where(top_k > 0, top_k, columns),
        top_ps=torch.where(top_p > 0, top_p, 2.0),
        min_ps=min_p,
    )
    for run in (None, launch_and_args):
        keep = kept(logits, filters, run)
        assert torch.equal(keep[:-1], expected)
        assert keep[-1].all()  # temperature 0


def test_ties_at_the_edge_are_kept(launch_and_args: Callable) -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, -3.0, -3.0]] * 4)
    # The last row's temperature is 0. Rank 4 is a -3; mass above the ones is 0.42 at 1.
    filters = torch.tensor([[2.0, 0, 0], [0, 0.5, 0], [5, 0, 0], [1, 0, 0]])
    expected = torch.tensor([[1, 1, 1, 1, 0, 0]] * 2 + [[1] * 6] * 2).bool()
    for run in (None, launch_and_args):
        assert torch.equal(kept(logits, filters, run), expected)


def test_rows_without_filters_stay_as_they_are(launch_and_args: Callable) -> None:
    logits = torch.randn(4, 20)
    filters = torch.tensor([[0.0, 0, 0], [3, 0, 0], [0, 0, 0], [0, 0, 0]])
    for run in (None, launch_and_args):
        assert kept(logits, filters, run).sum(1).tolist() == [20, 3, 20, 20]


def test_a_row_of_several_tiles(launch_and_args: Callable) -> None:
    logits = torch.randn(4, 40000, dtype=torch.float32).half()
    filters = torch.tensor([[50.0, 0, 0], [0, 0.5, 0], [0, 0, 0.3], [1, 1, 1]])
    reference, kernel = (kept(logits, filters, run) for run in (None, launch_and_args))
    # Sums of thousands of terms: a value next to top-p's edge may fall to the other side.
    assert (reference != kernel).sum() <= 40
    assert torch.equal(reference[[0, 2, 3]], kernel[[0, 2, 3]])

"""The edges of a tree step: masks as backends own them, accepted rows brought to their places."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.kernels.ops.speculative.flashmap.full_mask import write_full_mask_torch
from sglang.kernels.ops.speculative.flashmap.tree import plan_tree
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from sglang.srt.speculative.flashmap.commit import Committer
from sglang.srt.speculative.flashmap.verify import Accepted
from sglang.srt.speculative.flashmap.verify_input import TreeVerifyInput, backend_mask

WIDTH, LENS = 6, [9, 4]
CELLS = sum(WIDTH * (n + WIDTH) for n in LENS)


def plan():
    candidates = torch.randint(3, (2, 4, 3))
    return plan_tree(torch.zeros(2).long(), candidates, WIDTH, torch.zeros(2).bool())


def mask_for(owned: VerifyMask | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The mask a backend gets, that with prefixes, and that without."""
    tree, lens = plan(), torch.tensor(LENS)
    full = torch.zeros(CELLS, dtype=torch.bool)
    write_full_mask_torch(tree.mask, lens, full)
    backend = SimpleNamespace(verify_mask=owned)
    got = backend_mask(tree, backend, prefix_lens=lens, lens_bound=lens + 3)
    return got, full, tree.mask.view(-1)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8], ids=["bool", "uint8"])
def test_a_full_mask_is_written_into_the_backends_buffer(dtype: torch.dtype) -> None:
    owned = VerifyMask(torch.zeros(4 * CELLS, dtype=dtype), TreeMaskMode.FULL_MASK, max_bs=2)
    got, full, _ = mask_for(owned)
    assert got.data_ptr() == owned.buffer.data_ptr() and len(got) == CELLS + 6 * WIDTH
    assert torch.equal(got[:CELLS].bool(), full)


def test_a_batch_larger_than_the_buffer_gets_a_mask_of_its_own() -> None:
    owned = VerifyMask(torch.zeros(3), TreeMaskMode.FULL_MASK, max_bs=1)
    got, full, _ = mask_for(owned)
    assert torch.equal(got[:CELLS], full)


def test_masks_without_prefixes_are_the_trees() -> None:
    owned = VerifyMask(torch.zeros(0), TreeMaskMode.QLEN_ONLY, max_bs=0)
    for backend in (owned, None):  # on a CPU, upstream's default is this
        got, _, narrow = mask_for(backend)
        assert torch.equal(got, narrow)


def test_a_trees_verify_input_says_that_it_is_one() -> None:
    tokens = torch.zeros(2 * WIDTH).long()
    verify_input = TreeVerifyInput(tokens, tokens, WIDTH, custom_mask=plan().mask.view(-1))
    assert verify_input.topk > 1 and verify_input.tree_topk == -1
    assert verify_input.is_verify_input() and verify_input.num_tokens_per_req == WIDTH


@pytest.mark.parametrize("chains", [False, True], ids=["trees", "chains"])
def test_hidden_rows_follow_the_path(chains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = torch.tensor([[30, 31, 32, 33, 34, 35], [7, 6, 5, 4, 3, 2]])
    positions = torch.tensor(LENS)[:, None] + torch.arange(WIDTH)
    hidden = torch.arange(2.0 * WIDTH)[:, None]
    written, moved = [], []
    injector = SimpleNamespace(
        ids_for=lambda plan: slots.view(-1),
        inject_target_hidden=lambda **arguments: written.append(arguments),
    )
    pool = SimpleNamespace(move_kv_cache=lambda target, source: moved.append((target, source)))
    committer = Committer(injector, SimpleNamespace(get_kvcache=lambda: pool), WIDTH)
    path = torch.tensor([[0, 2, 5, -1], [0, -1, -1, -1]], dtype=torch.int32)
    accepted = Accepted(
        torch.tensor([2, 0]), torch.zeros(2, 4).long(), None if chains else path
    )
    window = SimpleNamespace(
        kv_loc_plan=None, verify_cache_loc_2d=slots, positions_2d=positions
    )
    commit_lens = torch.tensor([3, 1], dtype=torch.int32)
    committer.commit(window, hidden, accepted, commit_lens)
    (arguments,) = written
    depth = WIDTH if chains else 4
    assert torch.equal(arguments["cache_loc_2d"], slots[:, :depth])
    assert torch.equal(arguments["cache_loc"], slots[:, :depth].reshape(-1))
    assert torch.equal(arguments["positions"], positions[:, :depth].reshape(-1))
    assert arguments["commit_lens"] is commit_lens
    rows = arguments["target_hidden"].view(2, depth)
    if chains:
        assert torch.equal(rows, hidden.view(2, WIDTH)) and not moved
        return
    assert rows[0, :3].tolist() == [0, 2, 5] and rows[1, 0] == WIDTH
    ((target, source),) = moved
    pairs = dict(zip(target.tolist(), source.tolist()))
    assert pairs == {30: 30, 31: 32, 32: 35, 33: 33, 7: 7, 6: 6, 5: 5, 4: 4}

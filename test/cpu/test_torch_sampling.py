"""Sampling ops of verification: edge cases, the kernels they replace, and the distribution."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sglang.kernels.ops.sampling import renorm
from sglang.kernels.ops.speculative import verify_sampling
from sglang.kernels.ops.speculative.torch_sampling import (
    chain_speculative_sampling,
    top_k_renorm_probs,
    top_p_renorm_probs,
    tree_speculative_sampling_target_only,
)
from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch

LAST_COIN = 1 - 2**-24  # the largest float32 below 1
MODES = pytest.mark.parametrize("block", [False, True], ids=["token", "block"])


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_rows(seed: int, *shape: int, sharpness: float = 2.0) -> torch.Tensor:
    logits = torch.randn(shape, generator=generator(seed)) * sharpness
    return logits.softmax(-1)


def test_upstreams_names_are_these_ops_on_the_cpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("for machines without a GPU")
    assert renorm.top_k_renorm_prob is top_k_renorm_probs
    assert renorm.top_p_renorm_prob is top_p_renorm_probs
    tree_op = verify_sampling.tree_speculative_sampling_target_only
    assert tree_op is tree_speculative_sampling_target_only


# Renormalisation


def plain_sampler_probs(probs: torch.Tensor, top_k: list[int], top_p: list[float]) -> torch.Tensor:
    """What upstream's sampler without speculation draws from."""
    rows = probs.shape[0]
    _, weights, ids, _ = top_k_top_p_min_p_sampling_from_probs_torch(
        probs,
        torch.tensor(top_k),
        torch.tensor(top_p),
        torch.zeros(rows),
        False,
        None,
        torch.zeros(rows),
        return_filtered_probs=True,
    )
    kept = torch.zeros_like(probs).scatter_(1, ids, weights)
    return kept / kept.sum(-1, keepdim=True)


@pytest.mark.parametrize("vocab", [7, 3000])
def test_top_k_is_the_plain_samplers(vocab: int) -> None:
    top_k = [1, 2, vocab - 1, vocab, vocab + 1, 1 << 30]
    probs = random_rows(0, len(top_k), vocab)
    expected = plain_sampler_probs(probs, top_k, [1.0] * len(top_k))
    got = top_k_renorm_probs(probs, torch.tensor(top_k, dtype=torch.int32))
    torch.testing.assert_close(got, expected)
    assert (got > 0).sum(-1).tolist() == [min(k, vocab) for k in top_k]


@pytest.mark.parametrize("sharpness", [0.01, 4.0], ids=["flat", "sharp"])
@pytest.mark.parametrize("vocab", [7, 3000])
def test_top_p_is_the_plain_samplers(vocab: int, sharpness: float) -> None:
    top_p = [1e-6, 0.3, 0.9, 0.99999, 1.0]
    probs = random_rows(1, len(top_p), vocab, sharpness=sharpness)
    expected = plain_sampler_probs(probs, [1 << 30] * len(top_p), top_p)
    got = top_p_renorm_probs(probs, torch.tensor(top_p))
    torch.testing.assert_close(got, expected)
    assert int((got[0] > 0).sum()) == 1  # the most probable id always stays
    torch.testing.assert_close(got[-1], probs[-1])


def test_ties_keep_the_lowest_ids_and_exactly_k() -> None:
    probs = torch.tensor([[0.2, 0.2, 0.2, 0.2, 0.2], [0.1, 0.3, 0.1, 0.3, 0.2]])
    kept = top_k_renorm_probs(probs, 3)
    assert kept[0].tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0, 0])
    assert (kept[1] > 0).tolist() == [False, True, False, True, True]
    assert (top_p_renorm_probs(probs, 0.5) > 0).tolist() == [
        [True, True, True, False, False],  # two fifths lie before the third id, three after it
        [False, True, False, True, False],
    ]


def test_top_k_one_is_greedy() -> None:
    probs = random_rows(2, 40, 100)
    assert torch.equal(top_k_renorm_probs(probs, 1).argmax(-1), probs.argmax(-1))
    assert top_k_renorm_probs(probs, 1).amax(-1).tolist() == [1.0] * 40


# Chains


def chain(candidates: torch.Tensor) -> dict[str, torch.Tensor]:
    """Fresh outputs and links of a chain verify for `candidates` (batch, slots)."""
    batch, slots = candidates.shape
    return dict(
        predicts=torch.full((batch * slots,), -7, dtype=torch.int32),
        accept_index=torch.full((batch, slots), -1, dtype=torch.int32),
        accept_token_num=torch.full((batch,), -7, dtype=torch.int32),
        candidates=candidates,
        retrive_index=torch.arange(batch * slots).view(batch, slots),
        retrive_next_token=torch.full((batch, slots), -1),
        retrive_next_sibling=torch.full((batch, slots), -1),
    )


def outputs(call: dict[str, torch.Tensor]) -> list[list[int]]:
    """Tokens each request commits: the accepted drafts and the bonus token."""
    rows = []
    for b, accepted in enumerate(call["accept_token_num"].tolist()):
        path = call["accept_index"][b]
        assert (path[accepted + 1 :] == -1).all()
        rows.append(call["predicts"][path[: accepted + 1].long()].tolist())
    return rows


def close_chain(seed: int, block: bool) -> dict[str, object]:
    """A call whose draft is near enough to the target that blocks of every length are accepted."""
    batch, slots, vocab = 4, 5, 37
    target = random_rows(seed, batch, slots, vocab, sharpness=1.0)
    draft = target * random_rows(seed + 100, batch, slots, vocab, sharpness=0.7)
    draft = draft[:, :-1] / draft[:, :-1].sum(-1, keepdim=True)
    drafts = draft.flatten(0, 1).multinomial(1, generator=generator(seed)).view(batch, slots - 1)
    if seed == 0:  # a proposal of probability 0, and one that is not a number
        draft[0, 0], draft[1, 1] = 0.0, float("nan")
    return dict(
        **chain(torch.cat((torch.zeros(batch, 1, dtype=torch.int64), drafts), dim=1)),
        uniform_samples=torch.rand((batch, slots), generator=generator(seed + 200)),
        uniform_samples_for_final_sampling=torch.rand(batch, generator=generator(seed)),
        target_probs=target,
        draft_probs=draft,
        threshold_single=1.0,
        threshold_acc=1.0,
        deterministic=True,
        block_verification=block,
    )


def test_chain_equals_the_triton_kernel(tmp_path: Path) -> None:
    calls = [close_chain(seed, block) for seed in range(16) for block in (False, True)]
    torch.save(calls, tmp_path / "calls")
    script = Path(__file__).with_name("interpreted_chain.py")
    subprocess.run([sys.executable, script, tmp_path / "calls", tmp_path / "results"], check=True)
    accepted = set()
    for ours, theirs in zip(calls, torch.load(tmp_path / "results")):
        chain_speculative_sampling(**ours)
        for key in ("predicts", "accept_index", "accept_token_num"):
            assert torch.equal(ours[key], theirs[key]), key
        accepted |= {(ours["block_verification"], n) for n in ours["accept_token_num"].tolist()}
    assert accepted == {(block, n) for block in (False, True) for n in range(5)}


@MODES
@pytest.mark.parametrize("coin", [0.0, LAST_COIN])
def test_chain_accepts_everything_when_draft_is_target(block: bool, coin: float) -> None:
    target = random_rows(3, 2, 4, 11)
    candidates = torch.cat((torch.zeros(2, 1, dtype=torch.int64), target[:, :-1].argmax(-1)), 1)
    call = chain(candidates)
    chain_speculative_sampling(
        **call,
        uniform_samples=torch.full((2, 3), coin),
        uniform_samples_for_final_sampling=torch.full((2,), coin),
        target_probs=target,
        draft_probs=target[:, :-1].clone(),
        block_verification=block,
    )
    assert call["accept_token_num"].tolist() == [3, 3]
    assert [row[:3] for row in outputs(call)] == candidates[:, 1:].tolist()
    assert [row[3] for row in outputs(call)] == [0 if coin == 0 else 10] * 2


@MODES
def test_chain_refuses_what_the_draft_cannot_propose(block: bool) -> None:
    target = torch.tensor([[[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]]])
    draft = torch.tensor([[[0.0, 1.0, 0.0]]])
    call = chain(torch.tensor([[2, 0]]))  # id 0 has probability 0 under the draft
    chain_speculative_sampling(
        **call,
        uniform_samples=torch.zeros((1, 1)),
        uniform_samples_for_final_sampling=torch.tensor([LAST_COIN]),
        target_probs=target,
        draft_probs=draft,
        block_verification=block,
    )
    assert outputs(call) == [[0]]  # the residual of (.5, .5, 0) and (0, 1, 0)


@MODES
def test_chain_never_draws_what_the_target_cannot_produce(block: bool) -> None:
    """The residual is empty by rounding: upstream's kernel answers the last id."""
    target = torch.tensor([[[0.5, 0.499999, 0.0], [0.2, 0.3, 0.5]]])
    draft = torch.tensor([[[0.5, 0.5, 0.0]]])
    call = chain(torch.tensor([[0, 1]]))
    chain_speculative_sampling(
        **call,
        uniform_samples=torch.full((1, 1), LAST_COIN),
        uniform_samples_for_final_sampling=torch.tensor([LAST_COIN]),
        target_probs=target,
        draft_probs=draft,
        block_verification=block,
    )
    assert outputs(call) == [[1]]


@MODES
def test_chain_ignores_a_draft_row_that_is_not_a_number(block: bool) -> None:
    call = chain(torch.tensor([[0, 1]] * 2))
    chain_speculative_sampling(
        **call,
        uniform_samples=torch.zeros((2, 1)),
        uniform_samples_for_final_sampling=torch.tensor([0.0, LAST_COIN]),
        target_probs=torch.tensor([[[0.0, 0.5, 0.5, 0.0]] * 2] * 2),
        draft_probs=torch.full((2, 1, 4), float("nan")),
        block_verification=block,
    )
    assert outputs(call) == [[1], [2]]


def test_chain_of_one_slot_draws_from_the_target() -> None:
    call = chain(torch.tensor([[4], [4]]))
    chain_speculative_sampling(
        **call,
        uniform_samples=torch.zeros((2, 0)),
        uniform_samples_for_final_sampling=torch.tensor([0.0, LAST_COIN]),
        target_probs=torch.tensor([[[0.0, 0.4, 0.6, 0.0]]] * 2),
        draft_probs=torch.zeros((2, 0, 4)),
    )
    assert outputs(call) == [[1], [2]]


# Trees


def children(parents: list[int], node: int) -> list[int]:
    return [i for i, parent in enumerate(parents) if parent == node]


def tree(parents: list[list[int]], candidates: torch.Tensor, depth: int) -> dict[str, torch.Tensor]:
    """Fresh outputs and links of a tree verify; siblings are linked in ascending order."""
    call = chain(candidates)
    call["accept_index"] = torch.full((len(parents), depth), -1, dtype=torch.int32)
    for b, tree_parents in enumerate(parents):
        for node in range(len(tree_parents)):
            below = children(tree_parents, node)
            for child, sibling in zip(below, below[1:] + [-1]):
                call["retrive_next_sibling"][b, child] = sibling
            if below:
                call["retrive_next_token"][b, node] = below[0]
    return call


def distinct_siblings(parents: list[int], vocab: int, rng: torch.Generator) -> list[int]:
    tokens = [0] * len(parents)
    for node in range(len(parents)):
        ids = torch.randperm(vocab, generator=rng).tolist()
        for child, token in zip(children(parents, node), ids):
            tokens[child] = token
    return tokens


@pytest.mark.parametrize("thresholds", [(1.0, 1.0), (0.3, 1.0), (1.0, 0.6)])
def test_tree_follows_the_rule(thresholds: tuple[float, float]) -> None:
    """Against the rule written with parents instead of child and sibling links."""
    single, acc = thresholds
    width, vocab, depth, batch = 10, 5, 3, 100
    rng = generator(7)
    draws = torch.rand((batch, width), generator=rng)
    parents = [[-1] + [int(row[i] * min(i, 4)) for i in range(1, width)] for row in draws]
    candidates = torch.tensor([distinct_siblings(p, vocab, rng) for p in parents])
    target = random_rows(8, batch, width, vocab)
    coins, finals = torch.rand((batch, width), generator=rng), torch.rand(batch, generator=rng)
    call = tree(parents, candidates, depth)
    tree_speculative_sampling_target_only(
        **call,
        uniform_samples=coins,
        uniform_samples_for_final_sampling=finals,
        target_probs=target.clone(),
        draft_probs=torch.zeros_like(target),
        threshold_single=single,
        threshold_acc=acc,
    )
    lengths = set()
    for b, output in enumerate(outputs(call)):
        node, expected, left = 0, [], None
        while left is None:
            left, mass, following = target[b, node].clone(), 0.0, None
            if len(expected) < depth - 1:
                for child in children(parents[b], node):
                    chance = float(target[b, node, candidates[b, child]])
                    mass += chance
                    if float(coins[b, node]) < mass / acc or chance >= single:
                        following = child
                        break
                    left[candidates[b, child]] = 0
            if following is not None:
                node, left = following, None
                expected.append(int(candidates[b, node]))
        level = float(finals[b]) * float(left.double().sum())
        expected.append(int((left.double().cumsum(0) > level).nonzero()[0]))
        assert output == expected
        lengths.add(len(output))
    assert lengths >= {1, 2, 3}


def test_tree_takes_children_only_with_target_mass() -> None:
    target = torch.tensor([[[0.0, 1.0, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]])
    call = tree([[-1, 0, 0]], torch.tensor([[0, 0, 1]]), depth=3)
    tree_speculative_sampling_target_only(
        **call,
        uniform_samples=torch.zeros((1, 3)),
        uniform_samples_for_final_sampling=torch.zeros(1),
        target_probs=target,
        draft_probs=torch.zeros_like(target),
    )
    assert outputs(call) == [[1, 2]]


# Distributions: what is committed, continued by plain sampling, is a draw of the target's process.

VOCAB, LENGTH, DRAWS = 4, 3, 30000


def joint_distance(committed: list[list[int]], start: int, steps: torch.Tensor) -> float:
    """Total variation between the first LENGTH tokens and the Markov chain `steps` from `start`."""
    rng = generator(99)
    rows = torch.full((len(committed), LENGTH), -1)
    for i, tokens in enumerate(committed):
        rows[i, : len(tokens)] = torch.tensor(tokens[:LENGTH])
    for column in range(LENGTH):
        before = rows[:, column - 1] if column else torch.full((len(committed),), start)
        drawn = steps[before].multinomial(1, generator=rng)[:, 0]
        rows[:, column] = torch.where(rows[:, column] < 0, drawn, rows[:, column])
    code = (rows * VOCAB ** torch.arange(LENGTH)).sum(1)
    observed = torch.bincount(code, minlength=VOCAB**LENGTH) / len(committed)
    a, b, c = torch.meshgrid(*[torch.arange(VOCAB)] * LENGTH, indexing="ij")
    expected = torch.zeros(VOCAB**LENGTH)
    expected[(a + b * VOCAB + c * VOCAB**2).flatten()] = (
        steps[start, a] * steps[a, b] * steps[b, c]
    ).flatten()
    return float((observed - expected).abs().sum() / 2)


# Exact draws come to 0.013 (64 cells, 30000 draws); a residual or chance left out to 0.09 and more.
NOISE = 0.025


@MODES
def test_chain_is_lossless(block: bool) -> None:
    target_steps, draft_steps = random_rows(20, VOCAB, VOCAB), random_rows(21, VOCAB, VOCAB)
    rng, start = generator(22), 1
    candidates = torch.full((DRAWS, LENGTH), start)
    for i in range(1, LENGTH):
        drawn = draft_steps[candidates[:, i - 1]].multinomial(1, generator=rng)
        candidates[:, i] = drawn[:, 0]
    call = chain(candidates)
    chain_speculative_sampling(
        **call,
        uniform_samples=torch.rand((DRAWS, LENGTH - 1), generator=rng),
        uniform_samples_for_final_sampling=torch.rand(DRAWS, generator=rng),
        target_probs=target_steps[candidates],
        draft_probs=draft_steps[candidates[:, :-1]],
        block_verification=block,
    )
    assert 0.3 < call["accept_token_num"].float().mean() < 1.5
    assert joint_distance(outputs(call), start, target_steps) < NOISE


def test_tree_is_lossless_for_distinct_siblings() -> None:
    steps, start = random_rows(30, VOCAB, VOCAB), 2
    parents = [-1, 0, 0, 1, 1, 2]
    candidates = torch.tensor([[start, 3, 0, 1, 2, 2]]).expand(DRAWS, -1).contiguous()
    call = tree([parents], candidates[:1], depth=3)
    links = {
        key: call[key].expand(DRAWS, -1).contiguous()
        for key in ("retrive_next_token", "retrive_next_sibling")
    }
    call = {**chain(candidates), **links}
    call["accept_index"] = call["accept_index"][:, :3].contiguous()
    rng, target = generator(31), steps[candidates]
    tree_speculative_sampling_target_only(
        **call,
        uniform_samples=torch.rand((DRAWS, len(parents)), generator=rng),
        uniform_samples_for_final_sampling=torch.rand(DRAWS, generator=rng),
        target_probs=target,
        draft_probs=torch.zeros_like(target),
    )
    assert call["accept_token_num"].float().mean() > 0.5
    assert joint_distance(outputs(call), start, steps) < NOISE

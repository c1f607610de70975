"""Losslessness on trees: texts have the target's distribution, whatever was drafted and planned.

200 000 requests of a toy server draft candidate blocks, plan trees of them and accept by the real
code, step after step until each has two or three tokens. Their texts, 25 or 125 cells, are compared
with the exact distribution under the same parameters. The last tests plant biased rules and see
them caught.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import toy_tree
from sampling_fields import NO_TOP_K, sampling_info
from sglang.kernels.ops.speculative.flashmap.slot_draws import slot_draws
from sglang.kernels.ops.speculative.flashmap.tree import plan_tree
from sglang.srt.speculative.flashmap import accept as accept_module
from sglang.srt.speculative.flashmap.verify import accept_rejection, propose
from toy_tree import VOCAB, Distance, Sampling, ToyServer

DRAWS = 200_000
LENGTH = 2

SAMPLINGS = {
    "plain": Sampling(),
    "cold": Sampling(temperature=0.3),
    "hot": Sampling(temperature=1.6),
    "top-k": Sampling(top_k=3),
    "top-p": Sampling(top_p=0.7),
    "min-p": Sampling(min_p=0.2),
    "all-filters": Sampling(temperature=1.3, top_k=4, top_p=0.9, min_p=0.1),
    "penalties": Sampling(frequency=0.6, presence=0.3, repetition=1.4),
    "everything": Sampling(0.8, 4, 0.9, 0.05, frequency=0.4, presence=0.2, repetition=1.2),
}
SHAPES = {
    "W5": ToyServer(),
    "W2": ToyServer(width=2),
    "one-slot": ToyServer(block_size=1, width=3),
    "whole-trie": ToyServer(candidates=4, block_size=3, width=13, seed=1),
    "grown": ToyServer(candidates=1, choices=3, width=7),
    "grown-from-two": ToyServer(candidates=2, choices=2, width=6, seed=1),
}


def seeds(draws: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**63), 2**63 - 1, (draws,), generator=generator)


def distance(server: ToyServer, sampling: Sampling, length: int = LENGTH) -> Distance:
    texts, _ = server.generate(sampling.fields(DRAWS), seeds(DRAWS), length, sampling)
    return Distance.of(texts, server.joint(sampling, length))


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_match(sampling: Sampling) -> None:
    found = distance(ToyServer(), sampling)
    assert found.is_noise, found


@pytest.mark.parametrize("server", list(SHAPES.values())[1:], ids=list(SHAPES)[1:])
def test_match_on_other_trees(server: ToyServer) -> None:
    found = distance(server, SAMPLINGS["everything"], length=3)
    assert found.is_noise, found


@pytest.mark.parametrize(
    "width, choices, block, sampling, draft_temperature",
    [
        (2, 0, True, "plain", 1.0),
        (3, 0, False, "everything", 1.0),
        (6, 0, True, "everything", 1.0),
        (6, 0, False, "all-filters", 1.0),
        (6, 0, True, "cold", 1.0),
        (3, 0, True, "penalties", 1.0),
        (6, 2, True, "everything", 1.0),
        (3, 0, False, "hot", 0.7),
        (6, 0, True, "plain", 0.7),
    ],
    ids=lambda value: {False: "token-wise", True: "block-wise"}[value]
    if isinstance(value, bool)
    else str(value),
)
def test_rejection_on_chains_of_a_server_of_trees(
    width: int, choices: int, block: bool, sampling: str, draft_temperature: float
) -> None:
    server = ToyServer(
        width=width,
        choices=choices,
        tree_temperature=0.0,
        draft_temperature=draft_temperature,
        block_verification=block,
    )
    found = distance(server, SAMPLINGS[sampling])
    assert found.is_noise, found


DRAWN = {
    "two-slots": (ToyServer(candidates=1, choices=3, width=7), "plain"),
    "one-slot": (ToyServer(candidates=1, choices=4, block_size=1, width=4), "hot"),
    "three-slots": (ToyServer(candidates=1, choices=2, block_size=3, width=10, seed=1), "plain"),
    "all-tokens": (ToyServer(candidates=1, choices=5, width=9), "hot"),
    "beside-candidates": (ToyServer(candidates=2, choices=3, width=6), "everything"),
    "fewer-than-choices": (ToyServer(candidates=1, choices=4, width=8), "top-k"),
    "filters": (ToyServer(candidates=1, choices=3, width=7, seed=2), "all-filters"),
    "cold": (ToyServer(candidates=1, choices=3, width=7), "cold"),
    "penalties": (ToyServer(candidates=1, choices=3, width=7), "penalties"),
    "sharper-drafts": (ToyServer(candidates=1, choices=3, width=7, draft_temperature=0.7), "plain"),
}


@pytest.mark.parametrize("server, sampling", DRAWN.values(), ids=DRAWN)
def test_rejection_on_trees_of_draws(server: ToyServer, sampling: str) -> None:
    found = distance(dataclasses.replace(server, tree_temperature=0.0), SAMPLINGS[sampling])
    assert found.is_noise, found


@pytest.mark.parametrize("candidates, choices", [(3, 0), (1, 3)], ids=["votes", "grown"])
def test_a_batch_of_all_rules(candidates: int, choices: int) -> None:
    """Every third request is greedy, every third matches on a tree, every third is verified by
    rejection, on a chain or on a tree of draws."""
    server = ToyServer(candidates=candidates, choices=choices, tree_temperature=0.7)
    kinds = torch.arange(DRAWS) % 3
    temperatures, top_ks = [1.0, 0.6, 1.3], [1, NO_TOP_K, 4]
    info = sampling_info(
        [temperatures[k] for k in kinds.tolist()], top_ks=[top_ks[k] for k in kinds.tolist()]
    )
    texts, steps = server.generate(info, seeds(DRAWS), LENGTH, Sampling())
    greedy = server.joint(Sampling(temperature=1e-4), LENGTH).argmax()
    assert (texts[kinds == 0] == torch.tensor(divmod(int(greedy), VOCAB))).all()
    for kind, sampling in ((1, Sampling(0.6)), (2, Sampling(1.3, top_k=4))):
        found = Distance.of(texts[kinds == kind], server.joint(sampling, LENGTH))
        assert found.is_noise, (sampling, found)
        assert 0.2 < (steps[0].num_correct[kinds == kind] > 0).double().mean() < 0.97


def test_trees_accept_more_than_chains_when_cold() -> None:
    accepted = [
        server.generate(Sampling(0.3).fields(20_000), seeds(20_000), LENGTH, Sampling(0.3))[1][0]
        for server in (ToyServer(width=3), ToyServer(width=7, candidates=8))
    ]
    chain, tree = (float(a.num_correct.double().mean()) for a in accepted)
    assert tree > chain + 0.1


def test_trees_of_draws_accept_more_than_chains() -> None:
    chain, tree = (
        float(
            ToyServer(candidates=1, choices=3, width=7, tree_temperature=0.0, block_verification=b)
            .generate(Sampling().fields(20_000), seeds(20_000), LENGTH, Sampling())[1][0]
            .num_correct.double()
            .mean()
        )
        for b in (True, False)
    )
    assert tree > chain + 0.1, (chain, tree)


@pytest.mark.parametrize("sampling", ["plain", "everything"])
def test_a_seeded_text_is_the_same_whatever_was_drafted(sampling: str) -> None:
    """Other candidates, other trees, other step boundaries: the same tokens."""
    draws, length = 2000, 12
    texts, steps = zip(
        *(
            server.generate(
                SAMPLINGS[sampling].fields(draws), seeds(draws), length, SAMPLINGS[sampling]
            )
            for server in (
                ToyServer(),
                ToyServer(width=2),
                ToyServer(candidates=2, block_size=1, width=2),
                ToyServer(candidates=6, block_size=2, width=9),
                ToyServer(candidates=1, choices=4, width=9),
            )
        )
    )
    assert len({len(s) for s in steps}) > 1, "all took the same steps"
    assert all(torch.equal(text, texts[0]) for text in texts[1:])
    assert len(set(map(tuple, texts[0].tolist()))) > draws // 2


def reject_on_trees(acceptor, batch, draft, block, logits):
    """The biased rule: the first path of a tree of votes under p/q rejection, as if drawn from
    q."""
    first = draft.tree.tokens[:, 1 : 1 + draft.tokens.shape[1]]
    biased = dataclasses.replace(draft, tokens=first)
    return REJECT(acceptor, batch, biased, block, logits)


REJECT = accept_module.Acceptor._reject


def test_rejection_on_a_tree_of_votes_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ToyServer(block_size=1, width=2, candidates=3, tree_temperature=0.5)
    monkeypatch.setattr(
        accept_module.StepRules,
        "under_rejection",
        lambda _, size, device: torch.zeros(size).bool(),
    )
    monkeypatch.setattr(accept_module.Acceptor, "_reject", reject_on_trees)
    found = distance(server, Sampling())
    assert not found.is_noise and found.worst_cell > 8, found


def likeliest(logits, ids, temperatures, *_):
    """Planted: the likeliest tokens in order, as if drawn."""


def grown_by_what_was_drawn(logits, ids, temperatures, *drawn):
    """Planted: which nodes a tree has depends on what its draws are."""
    slot_draws(logits, ids, temperatures, *drawn)
    tokens, probs = drawn[-2:]
    given = (logits / temperatures.view(-1, 1, 1, 1)).softmax(-1)[:, 0]
    probs[..., 0] = given.gather(2, tokens)


@pytest.mark.parametrize("planted", [likeliest, grown_by_what_was_drawn])
def test_a_biased_tree_of_draws_is_seen(planted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy_tree, "slot_draws", planted)
    server = ToyServer(candidates=1, choices=3, width=4, tree_temperature=0.0)
    found = distance(server, Sampling(1.6))
    assert not found.is_noise and found.worst_cell > 8, found


@pytest.mark.parametrize("block", [False, True], ids=["token-wise", "block-wise"])
def test_rejection_at_another_temperature_than_the_drafts_is_seen(
    block: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: drawn at 0.7 of the requests' temperature, divided by `q` at all of it."""

    def propose_at_the_requests(logits, *, temperatures, **vocabulary):
        return propose(logits, temperatures=temperatures / 0.7, **vocabulary)

    monkeypatch.setattr(accept_module, "propose", propose_at_the_requests)
    server = ToyServer(tree_temperature=0.0, draft_temperature=0.7, block_verification=block)
    found = distance(server, Sampling())
    assert not found.is_noise and found.worst_cell > 8, found


def test_the_published_bias_of_a_majority_of_three() -> None:
    """Target (.5, .3, .2), draft (.2, .3, .5), the majority of three drafts under p/q rejection,
    ties to the smallest token: the output is (.584, .216, .2), not the target."""
    draws = DRAWS
    target, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    torch.manual_seed(0)
    candidates = q.multinomial(3 * draws, replacement=True).view(draws, 3).sort(dim=1).values
    zeros = torch.zeros(draws, dtype=torch.int64)
    tree = plan_tree(zeros, candidates[..., None], 2, zeros.bool())
    drafts = tree.tokens[:, 1:]
    accepted = accept_rejection(
        drafts,
        target.expand(draws, 2, -1),
        propose(
            q.log().expand(draws, 1, -1),
            temperatures=torch.ones(draws),
            ids=None,
            column_of=None,
        ),
        seeds=seeds(draws),
        anchors=zeros,
        block_verification=False,
    )
    found = accepted.tokens[:, 0].bincount(minlength=3).double() / draws
    torch.testing.assert_close(
        found, torch.tensor([0.584, 0.216, 0.2], dtype=torch.float64), atol=5e-3, rtol=0
    )


def test_coins_shared_between_depths_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: every node of a tree draws with the numbers of the anchor."""

    def at_the_anchor(logits, info, *, depths, seeds, anchors):
        return DRAW(logits, info, depths=torch.zeros_like(depths), seeds=seeds, anchors=anchors)

    monkeypatch.setattr(accept_module, "draw_nodes", at_the_anchor)
    found = distance(ToyServer(), Sampling())
    assert not found.is_noise and found.worst_cell > 8, found


DRAW = accept_module.draw_nodes

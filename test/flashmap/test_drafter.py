"""The drafter on a CPU: its drafts are the package's, a request's own, and leave others alone."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from draft_pair import PREFIX_LENS, VOCAB, DraftPair, Pool, Requests, relative_error
from sglang.kernels.ops.speculative.flashmap.noise import gaussian_noise
from sglang.kernels.ops.speculative.flashmap.sampler import sample_draft
from sglang.kernels.ops.speculative.flashmap.tree_growth import grow_tree
from sglang.srt.speculative.flashmap.drafter import DraftBlock, Drafter, DraftInputs
from sglang.srt.speculative.flashmap.noise import SeedTable, Stream, row_offsets
from sglang.srt.speculative.flashmap.plan import draw_weights

SIZE = len(PREFIX_LENS)
TEMPERATURES = torch.tensor([0.0, 1.0, 0.7])


class Setting:
    """A drafter, a pool with the requests' contexts (not their anchors), and a step's inputs."""

    def __init__(self, **sizes) -> None:
        self.pair = DraftPair(**sizes)
        self.requests = Requests(self.pair.config)
        self.pool = Pool(self.pair.config, self.requests.num_slots)
        self.requests.write_context(self.pair.model, self.pool)
        seeds = SeedTable(self.requests.req_to_token.shape[0], "cpu", server_seed=1)
        names = [
            SimpleNamespace(rid=f"request-{b}", sampling_params=SimpleNamespace(sampling_seed=None))
            for b in range(SIZE)
        ]
        seeds.place(names, self.requests.rows)
        self.drafter = Drafter(
            model=self.pair.model,
            serve=self.pair.model.serve,
            seed_table=seeds,
            req_to_token=self.requests.req_to_token,
            pool=self.pool,
        )
        self.inputs = DraftInputs(
            anchors=self.requests.anchors,
            seq_lens=self.requests.lens,
            rows=self.requests.rows,
            temperatures=TEMPERATURES.clone(),
            active=torch.ones(SIZE, dtype=torch.int32),
            filters=torch.zeros(SIZE, 3),
            rejected=torch.zeros(SIZE, dtype=torch.bool),
        )

    def select(self, rows: list[int], padding: int = 0) -> DraftInputs:
        """The inputs of some requests, then `padding` inactive rows."""
        padded = DraftInputs.allocate(len(rows) + padding, "cpu")
        for all_rows, values in zip(padded, self.inputs, strict=True):
            all_rows[: len(rows)] = values[rows]
        return padded

    def noise(self) -> torch.Tensor:
        """What the drafter should draw: `(B, K, noise_width)`."""
        slots = self.pair.config.block_size
        seeds = self.drafter.seed_table.seeds[self.requests.rows].repeat_interleave(slots)
        offsets = row_offsets(self.requests.lens, slots)
        width = self.pair.model.noise_width
        return gaussian_noise(seeds, offsets, width, Stream.DRAFT_NOISE.value).view(SIZE, slots, -1)


def equal_blocks(got: DraftBlock, expected: DraftBlock, rows: list[int]) -> bool:
    """Same tokens and, up to the rounding of products of another height, the same logits."""
    same_logits = relative_error(got.logits, expected.logits[rows]) < 1e-5
    return same_logits and torch.equal(got.tokens, expected.tokens[rows])


@pytest.mark.parametrize("num_steps", [1, 2], ids=lambda n: f"{n}-jumps")
def test_drafts_equal_the_package(num_steps: int) -> None:
    """Anchors, positions and noise of ragged requests end up where the package has them."""
    setting = Setting(num_steps=num_steps)
    block = setting.drafter.draft(setting.inputs)
    assert block.tokens.shape == (SIZE, 8) and block.logits.shape == (SIZE, 8, VOCAB)
    noise = setting.noise()
    for b in range(SIZE):
        if num_steps == 1:  # the package takes vocabulary-wide noise: x0 with x0 E = z Fᵀ
            embedded = noise[b].double() @ setting.pair.model._noise_factor.double().T
            inverse = torch.linalg.pinv(setting.pair.target.embedding.double())
            x0 = (embedded @ inverse).float()
        else:
            x0 = noise[b]
        expected = setting.pair.reference_logits(setting.requests, b, noise=x0)
        assert relative_error(block.logits[b], expected) < 1e-4


@pytest.mark.parametrize("size", [0, 40], ids=["whole", "Vd40"])
def test_tokens_are_draws_at_the_temperatures_of_their_rows(size: int) -> None:
    ranking = torch.randperm(VOCAB)
    setting = Setting(draft_vocab_size=size, ranking=ranking)
    block = setting.drafter.draft(setting.inputs)
    columns = block.logits.argmax(-1)
    ids = columns if size == 0 else ranking[:size].sort().values[columns]
    assert torch.equal(block.tokens[0], ids[0])
    assert not torch.equal(block.tokens[1:], ids[1:])
    # What the accept rules divide by is what the tokens are draws from.
    assert torch.equal(block.temperatures, TEMPERATURES)
    seeds = setting.drafter.seed_table.seeds[setting.requests.rows].repeat_interleave(8)
    drawn = sample_draft(
        block.logits.flatten(0, 1),
        setting.pair.model.draft_ids,
        block.temperatures.repeat_interleave(8),
        seeds,
        row_offsets(setting.requests.lens, 8),
        Stream.DRAFT_TOKEN.value,
    )
    assert torch.equal(block.tokens.flatten(), drawn)
    if size:
        assert set(block.tokens.flatten().tolist()) <= set(ranking[:size].tolist())


@pytest.mark.parametrize("rows", [[0], [2], [1, 0], [2, 1, 0]], ids=str)
def test_a_requests_drafts_do_not_depend_on_its_batch(rows: list[int]) -> None:
    setting = Setting()
    together = setting.drafter.draft(setting.inputs)
    assert equal_blocks(setting.drafter.draft(setting.select(rows)), together, rows)


def test_candidates_of_a_tree() -> None:
    """Candidate 0 is the chain's block, also of a greedy request; the others differ from it."""
    setting = Setting()
    chains = setting.drafter.draft(setting.inputs)
    slots = setting.pair.config.block_size
    setting.drafter.serve = dataclasses.replace(
        setting.drafter.serve, tree_candidates=4, tree_budget=4 * SIZE, verify_width=2 * slots + 1
    )
    setting.inputs.rejected[1] = True
    setting.inputs.filters[0, 0] = 1  # what a greedy request has in a mixed batch
    block = setting.drafter.draft(setting.inputs)
    assert equal_blocks(block, chains, [0, 1, 2])
    assert block.tree.distinct[0] > 1 and block.tree.distinct[2] > 1
    assert block.tree.tokens[1, 1 : slots + 1].tolist() == block.tokens[1].tolist()
    assert block.tree.num_nodes[0] > slots + 1 == block.tree.num_nodes[1]
    roots = (block.tree.parents == 0).sum(dim=1)
    assert roots[0] > 1 and roots[1] == 1 and block.tokens[0, 0] in block.tree.tokens[0, 1:]

    setting.drafter.serve = dataclasses.replace(setting.drafter.serve, tree_budget=1)
    block = setting.drafter.draft(setting.inputs)
    assert block.tree.num_nodes.tolist() == [slots + 1] * SIZE
    assert torch.equal(block.tree.tokens[:, 1 : slots + 1], chains.tokens)


def test_inactive_rows_write_nothing_and_change_nothing() -> None:
    setting = Setting()
    before = setting.pool.snapshot()
    alone = setting.drafter.draft(setting.select([0, 2]))
    written = setting.pool.snapshot()
    slots = torch.stack([setting.requests.slots(b, n, n + 1) for b, n in enumerate(PREFIX_LENS)])
    changed = (written != before).flatten(3).any(-1).any(0).any(0)
    mine = slots[[0, 2]].flatten()
    assert set(changed.nonzero().flatten().tolist()) == set(mine.tolist())

    padded = setting.select([0, 2], padding=3)
    padded.rows[2:] = setting.requests.rows[1]  # stale values of an earlier step
    padded.seq_lens[3:] = setting.requests.lens[1]
    padded.anchors[2:] = 5
    block = setting.drafter.draft(padded)
    after = setting.pool.snapshot()
    torch.testing.assert_close(after[:, :, mine], written[:, :, mine], rtol=1e-5, atol=1e-5)
    after[:, :, mine] = written[:, :, mine]
    assert torch.equal(after, written)
    real = DraftBlock(block.tokens[:2], block.logits[:2], block.temperatures[:2])
    assert equal_blocks(real, alone, [0, 1])
    assert block.logits.isfinite().all()


def test_another_anchor_position_draws_other_noise() -> None:
    """The same anchor token one position later, after a context of one more entry."""
    setting = Setting()
    inputs = setting.select([1])
    first = setting.drafter.draft(inputs)
    again = setting.drafter.draft(inputs)
    assert torch.equal(first.logits, again.logits) and torch.equal(first.tokens, again.tokens)
    inputs.seq_lens.add_(1)
    later = setting.drafter.draft(inputs)
    assert not torch.equal(later.tokens, first.tokens)
    noise = setting.noise()[1]
    setting.requests.lens = setting.requests.lens + 1
    assert (noise @ setting.noise()[1].T).abs().max() < 5 * noise.shape[1] ** 0.5
    assert noise.unique().numel() == noise.numel()


def test_an_anchor_is_overwritten_by_its_hidden_state() -> None:
    """The anchor's entry holds its place in the pool only until the commit that follows."""
    setting, request = Setting(), 0
    position = PREFIX_LENS[request]
    slot = setting.requests.slots(request, position, position + 1)
    setting.drafter.draft(setting.inputs)
    anchor_entry = setting.pool.snapshot()[:, :, slot]
    setting.pair.model.write_target_hidden_kv(
        target_hidden=torch.randn(1, setting.requests.hidden[0].shape[1]),
        pool=setting.pool,
        positions=torch.tensor([position]),
        cache_loc=slot,
    )
    assert (setting.pool.snapshot()[:, :, slot] != anchor_entry).flatten(2).any(-1).all()


def test_trees_grow_from_the_likeliest_tokens_of_each_slot() -> None:
    """Of one candidate: sampled rows at their temperature, chain rows as they are drafted."""
    setting = Setting()
    setting.drafter.serve = dataclasses.replace(
        setting.drafter.serve,
        verify_width=20,
        tree_candidates=1,
        tree_choices=3,
        block_verification=True,
    )
    setting.inputs.rejected[2] = True
    block = setting.drafter.draft(setting.inputs)
    tree = block.tree
    assert tree.num_nodes.tolist() == [20, 20, 9]
    assert torch.equal(tree.tokens[2, 1:9], block.tokens[2])
    for row in (0, 1):  # greedy rows at temperature 1, and row 1 has that
        probs = block.logits[row].double().softmax(dim=-1)
        paths, likely = [()], [1.0]
        for node in range(1, 20):
            parent, token = int(tree.parents[row, node]), int(tree.tokens[row, node])
            paths.append((*paths[parent], token))
            likely.append(likely[parent] * float(probs[len(paths[parent]), token]))
        assert len(set(paths)) == 20
        assert likely == pytest.approx(sorted(likely, reverse=True))
        assert likely[1] == pytest.approx(float(probs[0].max()))


def test_trees_of_draws_have_the_same_nodes_whatever_was_drawn() -> None:
    """Rows under rejection: nodes go by the draft's distributions alone, and first draws are what
    a chain would hold; other rows keep the likeliest."""
    setting = Setting()
    chains = setting.drafter.serve
    trees = dataclasses.replace(chains, verify_width=20, tree_candidates=1, tree_choices=3)
    setting.drafter.serve = trees
    grown = setting.drafter.draft(setting.inputs).tree
    setting.inputs.temperatures[1:] = 1.3
    setting.inputs.rejected[1:] = True
    block = setting.drafter.draft(setting.inputs)
    setting.drafter.serve = chains
    chain = setting.drafter.draft(setting.inputs)
    assert block.tokens is None and torch.equal(block.logits, chain.logits)
    tree = block.tree
    assert torch.equal(tree.tokens[0], grown.tokens[0])
    weights = draw_weights(3, torch.device("cpu"))
    for row in (1, 2):
        likeliest = (block.logits[row] / 1.3).softmax(dim=-1).amax(dim=-1)
        worth = weights[(likeliest * len(weights)).long()]
        other_draws = torch.tensor([7, 3, 5]).expand(1, len(worth), -1).contiguous()
        whatever = grow_tree(
            *(torch.zeros(1, dtype=torch.int64), other_draws, worth[None, ..., None].contiguous()),
            *(other_draws[..., 0].contiguous(), 20, torch.zeros(1, dtype=torch.bool)),
        )
        assert torch.equal(tree.parents[row], whatever.parents[0]) and tree.num_nodes[row] == 20
        assert not torch.equal(tree.parents[0], tree.parents[row])
        node, depth = int(tree.first_child[row, 0]), 0
        siblings = [int(tree.tokens[row, node])]
        while node >= 0:
            assert tree.tokens[row, node] == chain.tokens[row, depth]
            node, depth = int(tree.first_child[row, node]), depth + 1
        assert depth >= 3
        node = int(tree.next_sibling[row, int(tree.first_child[row, 0])])
        while node >= 0:
            siblings.append(int(tree.tokens[row, node]))
            node = int(tree.next_sibling[row, node])
        assert len(set(siblings)) == 3

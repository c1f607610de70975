"""torch_native attention against a float64 oracle that looks at one query row at a time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention import torch_native_verify
from sglang.srt.layers.attention.torch_native_draft import TorchNativeMultiStepDraftBackend
from sglang.srt.layers.attention.torch_native_verify import TorchNativeVerifyBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput

HEADS, KV_HEADS, DIM, VALUE_DIM = 6, 2, 16, 16
SLOTS, CONTEXT = 512, 128


class Pool:
    """A one-layer KV pool."""

    def __init__(self, generator: torch.Generator, slots: int = SLOTS):
        self.k = torch.randn((slots, KV_HEADS, DIM), generator=generator)
        self.v = torch.randn((slots, KV_HEADS, VALUE_DIM), generator=generator)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.k

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.v

    def set_kv_buffer(self, layer, write_loc, k: torch.Tensor, v: torch.Tensor) -> None:
        self.k[write_loc.loc] = k.view(-1, KV_HEADS, DIM)
        self.v[write_loc.loc] = v.view(-1, KV_HEADS, VALUE_DIM)


class Case:
    """A batch with random KV, its slots scattered over pages of `page_size`."""

    def __init__(self, seed: int, page_size: int = 1, prefixes: tuple[int, ...] = (7, 40, 1)):
        self.generator = torch.Generator().manual_seed(seed)
        self.pool = Pool(self.generator)
        pages = torch.randperm(SLOTS // page_size - 1, generator=self.generator) + 1
        slots = (pages[:, None] * page_size + torch.arange(page_size)).reshape(-1)
        per_request = CONTEXT // page_size * page_size
        self.req_to_token = torch.zeros((len(prefixes) + 2, CONTEXT), dtype=torch.int32)
        self.rows = torch.randperm(len(prefixes) + 2, generator=self.generator)[: len(prefixes)]
        for i, row in enumerate(self.rows):
            self.req_to_token[row, :per_request] = slots[i * per_request : (i + 1) * per_request]
        self.prefixes = torch.tensor(prefixes)

    def backend(self) -> TorchNativeVerifyBackend:
        return TorchNativeVerifyBackend(self.runner())

    def runner(self, page_size: int = 1) -> SimpleNamespace:
        pool = SimpleNamespace(req_to_token=self.req_to_token)
        return SimpleNamespace(
            device="cpu", req_to_token_pool=pool, token_to_kv_pool=self.pool, page_size=page_size
        )

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def out_cache_loc(self, counts: list[int]) -> torch.Tensor:
        parts = [
            self.req_to_token[row, n : n + count]
            for row, n, count in zip(self.rows, self.prefixes.tolist(), counts)
        ]
        return torch.cat(parts).long()

    def batch(self, mode: ForwardMode, seq_lens: torch.Tensor, **fields) -> SimpleNamespace:
        fields.setdefault("spec_info", None)
        return SimpleNamespace(
            forward_mode=mode,
            seq_lens=seq_lens,
            req_pool_indices=self.rows,
            encoder_lens=None,
            **fields,
        )


def layer_of(**fields) -> SimpleNamespace:
    defaults = dict(
        layer_id=0,
        tp_q_head_num=HEADS,
        tp_k_head_num=KV_HEADS,
        qk_head_dim=DIM,
        v_head_dim=VALUE_DIM,
        scaling=DIM**-0.5,
        logit_cap=0.0,
        sliding_window_size=-1,
        attn_type=AttentionType.DECODER,
        is_cross_attention=False,
    )
    return SimpleNamespace(**{**defaults, **fields})


def oracle_row(
    q: torch.Tensor,
    pool: Pool,
    layer: SimpleNamespace,
    slots: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one query (heads * dim,) over exactly `slots`, in float64."""
    k, v = pool.k[slots.long()].double(), pool.v[slots.long()].double()
    heads = []
    for head, query in enumerate(q.double().view(HEADS, DIM)):
        kv_head = head // (HEADS // KV_HEADS)
        scores = k[:, kv_head] @ query * layer.scaling
        if layer.logit_cap:
            scores = layer.logit_cap * torch.tanh(scores / layer.logit_cap)
        if sinks is not None:
            scores = torch.cat((scores, sinks[head : head + 1].double()))
        weights = scores.softmax(0)[: len(slots)]
        heads.append(weights @ v[:, kv_head])
    return torch.cat(heads)


def random_parents(width: int, generator: torch.Generator) -> list[int]:
    """parents[i] < i; -1 at the root."""
    draws = torch.rand(width, generator=generator).tolist()
    return [-1] + [int(draws[i] * i) for i in range(1, width)]


def path_to(node: int, parents: list[int]) -> list[int]:
    path = []
    while node != -1:
        path.insert(0, node)
        node = parents[node]
    return path


def tree_input(parents: list[list[int]], prefixes: torch.Tensor) -> SimpleNamespace:
    """What a tree verify input gives the backend: QLEN_ONLY mask and positions."""
    width = len(parents[0])
    mask = torch.zeros((len(parents), width, width), dtype=torch.bool)
    positions = []
    for b, tree in enumerate(parents):
        for node in range(width):
            path = path_to(node, tree)
            mask[b, node, path] = True
            positions.append(int(prefixes[b]) + len(path) - 1)
    return SimpleNamespace(
        draft_token_num=width,
        custom_mask=mask.flatten(),
        tree_topk=-1,
        positions=torch.tensor(positions),
    )


def chain_input(width: int, prefixes: torch.Tensor) -> DFlashVerifyInput:
    positions = (prefixes[:, None] + torch.arange(width)).flatten()
    # The mask DFLASH hands to backends it does not know; a chain must not read it.
    garbage = torch.zeros(3, dtype=torch.bool)
    tokens = torch.zeros_like(positions)
    return DFlashVerifyInput(
        draft_token=tokens, positions=positions, draft_token_num=width, custom_mask=garbage
    )


def run(case: Case, batch: SimpleNamespace, layer: SimpleNamespace, counts: list[int], **kwargs):
    """(q, output) of one forward that writes random K and V for `counts` new tokens."""
    total = sum(counts)
    batch.out_cache_loc = case.out_cache_loc(counts)
    q = case.random(total, HEADS * DIM)
    k, v = case.random(total, KV_HEADS * DIM), case.random(total, KV_HEADS * VALUE_DIM)
    k, v = k.view(total, KV_HEADS, DIM), v.view(total, KV_HEADS, VALUE_DIM)
    backend = case.backend()
    backend.init_forward_metadata(batch)
    forward = backend.forward_decode if batch.forward_mode.is_decode() else backend.forward_extend
    output = forward(q, k, v, layer, batch, **kwargs)
    again = forward(q, k, v, layer, batch, save_kv_cache=False, **kwargs)  # a second layer
    assert torch.equal(output, again)
    return q, output


FEATURES = {
    "plain": {},
    "window": dict(sliding_window_size=4),
    "cap": dict(logit_cap=2.0),
    "cap-window": dict(logit_cap=2.0, sliding_window_size=3),
}


@pytest.mark.parametrize("page_size", [1, 16], ids=["page1", "page16"])
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_verify_matches_oracle(shape: str, feature: str, page_size: int) -> None:
    width = 9
    layer = layer_of(**FEATURES[feature])
    for seed in range(3):
        case = Case(seed, page_size)
        if shape == "chain":
            parents = [list(range(-1, width - 1))] * len(case.rows)
            spec_info = chain_input(width, case.prefixes)
        else:
            parents = [random_parents(width, case.generator) for _ in case.rows]
            spec_info = tree_input(parents, case.prefixes)
        sinks = case.random(HEADS) if seed == 2 else None
        batch = case.batch(ForwardMode.TARGET_VERIFY, case.prefixes, spec_info=spec_info)
        q, output = run(case, batch, layer, [width] * len(case.rows), sinks=sinks)
        for b, row in enumerate(case.rows):
            prefix = int(case.prefixes[b])
            for node in range(width):
                path = path_to(node, parents[b])
                position = prefix + len(path) - 1
                tokens = list(range(prefix)) + [prefix + i for i in path]
                if layer.sliding_window_size > -1:
                    at = list(range(prefix)) + [prefix + i for i in range(len(path))]
                    kept = [p >= position - layer.sliding_window_size for p in at]
                    tokens = [t for t, keep in zip(tokens, kept) if keep]
                query = b * width + node
                expected = oracle_row(
                    q[query], case.pool, layer, case.req_to_token[row, tokens], sinks
                )
                torch.testing.assert_close(output[query].double(), expected, atol=2e-6, rtol=2e-6)


def test_verify_row_equals_decode_along_its_path() -> None:
    """The promise behind greedy equality: committing a path and decoding gives the same vectors."""
    width, case, layer = 12, Case(5), layer_of()
    parents = [random_parents(width, case.generator) for _ in case.rows]
    spec_info = tree_input(parents, case.prefixes)
    batch = case.batch(ForwardMode.TARGET_VERIFY, case.prefixes, spec_info=spec_info)
    q, output = run(case, batch, layer, [width] * len(case.rows))
    window = case.req_to_token.clone()
    for node in range(width):
        lens = []
        for b, row in enumerate(case.rows):
            prefix, path = int(case.prefixes[b]), path_to(node, parents[b])
            case.req_to_token[row] = window[row]
            committed = window[row, [prefix + i for i in path]]
            case.req_to_token[row, prefix : prefix + len(path)] = committed
            lens.append(prefix + len(path))
        decode = case.batch(ForwardMode.DECODE, torch.tensor(lens), out_cache_loc=None)
        backend = case.backend()
        backend.init_forward_metadata(decode)
        rows = torch.arange(len(case.rows)) * width + node
        plain = backend.forward_decode(q[rows], None, None, layer, decode, save_kv_cache=False)
        torch.testing.assert_close(output[rows], plain, atol=5e-7, rtol=1e-6)


def test_ragged_verify_matches_uniform() -> None:
    width, keep, layer = 6, [2, 6, 1], layer_of()
    case = Case(3)
    batch = case.batch(
        ForwardMode.TARGET_VERIFY, case.prefixes, spec_info=chain_input(width, case.prefixes)
    )
    q, full = run(case, batch, layer, [width] * 3)
    kept = torch.cat([torch.arange(n) + i * width for i, n in enumerate(keep)])
    ragged = chain_input(width, case.prefixes)
    ragged.ragged_verify_layout = SimpleNamespace(verify_lens=torch.tensor(keep))
    batch.spec_info = ragged
    backend = case.backend()
    backend.init_forward_metadata(batch)
    output = backend.forward_extend(q[kept], None, None, layer, batch, save_kv_cache=False)
    torch.testing.assert_close(output, full[kept], atol=5e-7, rtol=1e-6)


@pytest.mark.parametrize("feature", FEATURES)
def test_extend_and_decode_match_oracle(feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_native_verify, "ROW_BLOCK", 8)
    layer, counts = layer_of(**FEATURES[feature]), [21, 8, 1]
    case = Case(1, prefixes=(0, 40, 5))
    extend = case.batch(
        ForwardMode.EXTEND,
        case.prefixes + torch.tensor(counts),
        extend_prefix_lens=case.prefixes,
        extend_seq_lens=torch.tensor(counts),
    )
    for mode in ("extend", "decode"):
        if mode == "decode":
            counts = [1, 1, 1]
            extend = case.batch(ForwardMode.DECODE, case.prefixes + 1)
        q, output = run(case, extend, layer, counts)
        query = 0
        for b, row in enumerate(case.rows):
            for position in range(int(case.prefixes[b]), int(case.prefixes[b]) + counts[b]):
                window = layer.sliding_window_size
                first = max(0, position - window) if window > -1 else 0
                slots = case.req_to_token[row, first : position + 1]
                expected = oracle_row(q[query], case.pool, layer, slots)
                torch.testing.assert_close(output[query].double(), expected, atol=2e-6, rtol=2e-6)
                query += 1


def test_encoder_only_rows_see_the_whole_block() -> None:
    """A block drafter: verify mode, no causal order, no window."""
    width, case = 5, Case(4)
    layer = layer_of(attn_type=AttentionType.ENCODER_ONLY, sliding_window_size=2)
    batch = case.batch(
        ForwardMode.TARGET_VERIFY, case.prefixes, spec_info=chain_input(width, case.prefixes)
    )
    q, output = run(case, batch, layer, [width] * 3)
    for query in range(3 * width):
        b = query // width
        slots = case.req_to_token[case.rows[b], : int(case.prefixes[b]) + width]
        expected = oracle_row(q[query], case.pool, layer, slots)
        torch.testing.assert_close(output[query].double(), expected, atol=2e-6, rtol=2e-6)


def test_window_layers_read_the_window_pool() -> None:
    """Slots of the full pool mean nothing in the sliding-window pool."""
    case = Case(6, prefixes=(30,))
    translation = torch.randperm(SLOTS, generator=case.generator)
    full, windowed = case.pool, Pool(case.generator)
    hybrid = object.__new__(SWAKVPool)
    hybrid.swa_layer_nums = 1
    hybrid.layers_mapping = {0: (0, False), 1: (0, True)}
    hybrid.full_to_swa_index_mapping = translation
    hybrid.get_key_buffer = lambda layer_id: (full, windowed)[layer_id].k
    hybrid.get_value_buffer = lambda layer_id: (full, windowed)[layer_id].v
    case.pool = hybrid
    backend = case.backend()
    batch = case.batch(ForwardMode.DECODE, case.prefixes, out_cache_loc=None)
    backend.init_forward_metadata(batch)
    q = case.random(1, HEADS * DIM)
    slots = case.req_to_token[case.rows[0], :30]
    for layer_id, pool, seen in ((0, full, slots), (1, windowed, translation[slots.long()][-6:])):
        layer = layer_of(layer_id=layer_id, sliding_window_size=5 if layer_id else -1)
        output = backend.forward_decode(q, None, None, layer, batch, save_kv_cache=False)
        expected = oracle_row(q[0], pool, layer, seen)
        torch.testing.assert_close(output[0].double(), expected, atol=2e-6, rtol=2e-6)


def test_full_tree_mask_is_refused() -> None:
    case = Case(0)
    spec_info = tree_input([random_parents(4, case.generator)] * 3, case.prefixes)
    spec_info.custom_mask = torch.ones(4 * (int(case.prefixes.sum()) + 12), dtype=torch.bool)
    batch = case.batch(
        ForwardMode.TARGET_VERIFY, case.prefixes, spec_info=spec_info, out_cache_loc=None
    )
    with pytest.raises(NotImplementedError, match="QLEN_ONLY"):
        case.backend().init_forward_metadata(batch)


@pytest.mark.parametrize("page_size,topk", [(1, 3), (4, 1), (4, 3)])
def test_draft_branches_read_their_own_slots(page_size: int, topk: int) -> None:
    steps, layer = 4, layer_of()
    case = Case(2, page_size, prefixes=(6, 13))
    draft = TorchNativeMultiStepDraftBackend(case.runner(page_size), topk, steps)
    draft.init_forward_metadata(case.batch(ForwardMode.DECODE, case.prefixes))
    q = case.random(2 * topk, HEADS * DIM)
    for step, backend in enumerate(draft.attn_backends):
        batch = case.batch(ForwardMode.DECODE, case.prefixes, out_cache_loc=None)
        output = backend.forward_decode(q, None, None, layer, batch, save_kv_cache=False)
        for query in range(2 * topk):
            b, branch = divmod(query, topk)
            prefix = int(case.prefixes[b])
            if page_size == 1 or topk == 1:
                begin = prefix + branch * steps
            else:  # whole pages for each branch, the first holding the prefix's tail
                tail = prefix % page_size
                pages = (tail + steps + page_size - 1) // page_size
                begin = prefix - tail + branch * pages * page_size + tail
            tokens = [*range(prefix), *range(begin, begin + step + 1)]
            slots = case.req_to_token[case.rows[b], tokens]
            expected = oracle_row(q[query], case.pool, layer, slots)
            torch.testing.assert_close(output[query].double(), expected, atol=2e-6, rtol=2e-6)

"""Random inputs for the ops of `sgl_kernel`, shared by its tests and by upstream's Triton twins.

`CASES[op](rng)` returns the keyword arguments of one call of `op`. Tensors the op writes hold a
recognisable filling before the call, so a test that compares every argument afterwards also sees
writes that should not have happened.
"""

import random
from collections.abc import Callable
from typing import Any

import torch

Case = dict[str, Any]
UNWRITTEN = -7


def _ints(values: list, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def _table(rng: random.Random, bs: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    rows, pool_len = bs + 3, 90
    slots = torch.randperm(rows * pool_len, generator=_torch_rng(rng)).int()
    return slots.view(rows, pool_len), _ints(rng.sample(range(rows), bs)), pool_len


def _torch_rng(rng: random.Random) -> torch.Generator:
    return torch.Generator().manual_seed(rng.randrange(2**31))


def _spans(rng: random.Random, bs: int, pool_len: int) -> tuple[list[int], list[int]]:
    start = [rng.randint(0, pool_len - 40) for _ in range(bs)]
    return start, [s + rng.choice([0, 1, 17, 40]) for s in start]


def assign_req_to_token_pool_cpu(rng: random.Random) -> Case:
    bs = rng.randint(1, 6)
    table, requests, pool_len = _table(rng, bs)
    start, end = _spans(rng, bs, pool_len)
    return {
        "req_pool_indices": requests,
        "req_to_token": table,
        "start_offset": _ints(start, torch.int32),
        "end_offset": _ints(end, torch.int32),
        "out_cache_loc": torch.arange(10_000, 10_000 + sum(end) - sum(start)),
        "pool_len": pool_len,
    }


def assign_extend_cache_locs_cpu(rng: random.Random) -> Case:
    case = assign_req_to_token_pool_cpu(rng)
    case["out_cache_loc"] = torch.full((case["out_cache_loc"].numel() + 2,), UNWRITTEN)
    return case


def assign_draft_cache_locs_contiguous_cpu(rng: random.Random) -> Case:
    bs, topk, steps = rng.randint(1, 6), rng.randint(1, 4), rng.randint(1, 5)
    table, requests, pool_len = _table(rng, bs)
    return {
        "req_pool_indices": requests,
        "req_to_token": table,
        "seq_lens": _ints([rng.randint(0, pool_len - topk * steps) for _ in range(bs)]),
        "out_cache_loc": torch.full((bs * topk * steps,), UNWRITTEN),
        "pool_len": pool_len,
        "topk": topk,
        "speculative_num_steps": steps,
    }


def copy_all_layer_kv_cache_cpu(rng: random.Random) -> Case:
    rows, moved = 24, rng.randint(0, 12)
    buffers = [
        torch.randn(rows, 2, width, generator=_torch_rng(rng)).to(dtype)
        for width, dtype in ((3, torch.float32), (8, torch.bfloat16), (5, torch.float16))
    ]
    return {
        "buffers": buffers,
        "tgt_loc": _ints(rng.sample(range(rows), moved)),
        "src_loc": _ints([rng.randrange(rows) for _ in range(moved)]),
    }


def build_tree_kernel_efficient_cpu(rng: random.Random) -> Case:
    bs, topk, depth = rng.randint(1, 4), rng.randint(1, 4), rng.randint(1, 5)
    drafts = rng.randint(1, topk + topk * topk * (depth - 1))
    mode = rng.choice([0, 1])
    parents, selected = [], []
    for _ in range(bs):
        numbers, parent_list = _draft_numbers(rng, topk, depth)
        parents.append(parent_list)
        selected.append(sorted(rng.sample(numbers, drafts)))
    n = drafts + 1
    seq_lens = [rng.randint(0, 9) for _ in range(bs)]
    cells = n * n * bs + (n * sum(seq_lens) if mode == 0 else 0)
    return {
        "parent_list": _ints(parents) if depth > 1 else torch.empty(bs, 0, dtype=torch.int64),
        "selected_index": _ints(selected),
        "verified_seq_len": _ints(seq_lens),
        "tree_mask": torch.ones(cells, dtype=torch.bool),
        "positions": torch.full((bs * n,), UNWRITTEN),
        **_links(bs, n),
        "topk": topk,
        "depth": depth,
        "draft_token_num": n,
        "tree_mask_mode": mode,
    }


def _draft_numbers(rng: random.Random, topk: int, depth: int) -> tuple[list[int], list[int]]:
    """All draft numbers of one request's top-k drafting, and the numbers of its expanded nodes."""
    numbers, parent_list, newest = list(range(topk)), [-1], list(range(topk))
    for _ in range(depth - 1):
        expanded = sorted(rng.sample(newest, topk))
        first = len(parent_list)
        parent_list += expanded
        newest = [topk * (first + i) + j for i in range(topk) for j in range(topk)]
        numbers += newest
    return numbers, parent_list


def _links(bs: int, n: int) -> Case:
    names = "retrieve_index", "retrieve_next_token", "retrieve_next_sibling"
    return {name: torch.full((bs, n), -1) for name in names}


def random_parents(rng: random.Random, n: int) -> list[int]:
    """Parent of each of n nodes of a random tree; -1 for the root, node 0."""
    return [-1] + [rng.randrange(max(0, node - 4), node) for node in range(1, n)]


def verify_tree_greedy_cpu(rng: random.Random) -> Case:
    bs, n, longest = rng.randint(1, 5), rng.randint(1, 14), rng.randint(1, 8)
    links = _links(bs, n)
    for b in range(bs):
        parent = random_parents(rng, n)
        children = {node: [c for c in range(n) if parent[c] == node] for node in range(n)}
        for node, below in children.items():
            links["retrieve_index"][b, node] = b * n + node
            for first, second in zip(below, below[1:], strict=False):
                links["retrieve_next_sibling"][b, first] = second
            if below:
                links["retrieve_next_token"][b, node] = below[0]
    return {
        "predicts": torch.full((bs * n,), UNWRITTEN, dtype=torch.int32),
        "accept_index": torch.full((bs, longest), -1, dtype=torch.int32),
        "accept_token_num": torch.full((bs,), UNWRITTEN, dtype=torch.int32),
        # Three tokens only, so that paths are long and siblings repeat a token.
        "candidates": _ints([[rng.randrange(3) for _ in range(n)] for _ in range(bs)]),
        **{name.replace("retrieve", "retrive"): links[name] for name in links},
        "target_predict": _ints([[rng.randrange(3) for _ in range(n)] for _ in range(bs)]),
    }


def fill_bonus_tokens_cpu(rng: random.Random) -> Case:
    bs, stride = rng.randint(1, 6), rng.randint(1, 8)
    return {
        "accept_tokens": torch.arange(bs * stride, dtype=torch.int32),
        "accept_lens": _ints([rng.randint(1, stride) for _ in range(bs)], torch.int32),
        "bonus_tokens": torch.full((bs,), UNWRITTEN, dtype=torch.int32),
        "accept_stride": stride,
    }


def fill_accept_out_cache_loc_cpu(rng: random.Random) -> Case:
    bs, n, longest = rng.randint(1, 5), 8, 6
    accept_index = [
        [b * n + i if i < length else -1 for i in range(longest)]
        for b, length in enumerate(rng.choices(range(1, longest + 1), k=bs))
    ]
    return {
        "accept_index": _ints(accept_index, torch.int32),
        "out_cache_loc": torch.randperm(bs * n, generator=_torch_rng(rng)) + 100,
        "accept_out_cache_loc": torch.full((bs * longest,), UNWRITTEN),
    }


def rotate_input_ids_cpu(rng: random.Random) -> Case:
    bs = rng.randint(1, 5)
    lengths = [rng.choice([0, 1, 2, 9, 20]) for _ in range(bs)]
    start = [sum(lengths[:b]) for b in range(bs)]
    select = [s + rng.randrange(max(1, n)) for s, n in zip(start, lengths, strict=True)]
    return {
        "input_ids": torch.arange(sum(lengths)) + 100,
        "extend_start_loc": _ints(start, torch.int32),
        "extend_seq_lens": _ints(lengths, torch.int32),
        "topk_index": torch.arange(bs)[:, None] + 10_000,
        "select_index": _ints(select) if rng.random() < 0.5 else None,
    }


def reconstruct_indices_from_tree_mask(rng: random.Random) -> Case:
    bs, n = rng.randint(1, 4), rng.randint(1, 14)
    mask = torch.eye(n, dtype=torch.bool).repeat(bs, 1, 1)
    for b in range(bs):
        for node, parent in enumerate(random_parents(rng, n)):
            if parent >= 0:
                mask[b, node] |= mask[b, parent]
    return {
        "tree_mask": mask.flatten(),
        "verified_seq_len": _ints([rng.randint(0, 50) for _ in range(bs)]),
        "positions": torch.full((bs * n,), UNWRITTEN),
        **_links(bs, n),
        "batch_size": bs,
        "draft_token_num": n,
    }


CASES: dict[str, Callable[[random.Random], Case]] = {
    make.__name__: make
    for make in (
        assign_req_to_token_pool_cpu,
        assign_extend_cache_locs_cpu,
        assign_draft_cache_locs_contiguous_cpu,
        copy_all_layer_kv_cache_cpu,
        build_tree_kernel_efficient_cpu,
        verify_tree_greedy_cpu,
        fill_bonus_tokens_cpu,
        fill_accept_out_cache_loc_cpu,
        rotate_input_ids_cpu,
        reconstruct_indices_from_tree_mask,
    )
}


def kv_addresses(buffers: list[torch.Tensor]) -> Case:
    """The two arguments by which KV buffers are handed to a kernel."""
    return {
        "data_ptrs": torch.tensor([b.data_ptr() for b in buffers], dtype=torch.uint64),
        "strides": torch.tensor([b[0].numel() * b.element_size() for b in buffers]),
    }


def cases_of(op: str, count: int) -> list[Case]:
    """The first `count` cases of an op; the same in every process."""
    rng = random.Random(op)
    return [CASES[op](rng) for _ in range(count)]

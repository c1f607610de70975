"""Times the FlashMap draft's kernels on one GPU, each beside its torch reference.

`python benchmark/flashmap/kernel_times.py --batch 1 16 64`. A kernel's time is that of CUDA graph
replays between two CUDA events, with data left in the L2 cache as in a draft step; a reference that
reads the device on the host cannot be captured and is timed eagerly (marked `*`). GB/s counts every
input and output once.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from sglang.kernels.ops.speculative.flashmap.accepted_kv import (
    move_accepted,
    move_accepted_torch,
)
from sglang.kernels.ops.speculative.flashmap.accepted_rows import (
    accepted_rows,
    accepted_rows_torch,
)
from sglang.kernels.ops.speculative.flashmap.adaln import adaln, adaln_torch
from sglang.kernels.ops.speculative.flashmap.block_attention import (
    block_self_attention,
    block_self_attention_torch,
)
from sglang.kernels.ops.speculative.flashmap.context_kv import (
    write_context_kv,
    write_context_kv_torch,
)
from sglang.kernels.ops.speculative.flashmap.cross_attention import (
    paged_cross_attention,
    paged_cross_attention_torch,
)
from sglang.kernels.ops.speculative.flashmap.draft_rows import draft_rows, draft_rows_torch
from sglang.kernels.ops.speculative.flashmap.full_mask import (
    write_full_mask,
    write_full_mask_torch,
)
from sglang.kernels.ops.speculative.flashmap.greedy import (
    accept_chain,
    accept_chain_torch,
    argmax_keys,
    argmax_keys_torch,
)
from sglang.kernels.ops.speculative.flashmap.noise import normed_noise, normed_noise_torch
from sglang.kernels.ops.speculative.flashmap.norm import (
    rms_norm,
    rms_norm_rope,
    rms_norm_rope_torch,
    rms_norm_torch,
)
from sglang.kernels.ops.speculative.flashmap.residual_linear import (
    add_linear,
    add_linear_torch,
    normed_linear,
    normed_linear_torch,
)
from sglang.kernels.ops.speculative.flashmap.rope import rope_table, rope_table_torch
from sglang.kernels.ops.speculative.flashmap.sampler import sample_draft, sample_draft_torch
from sglang.kernels.ops.speculative.flashmap.sampling_inputs import (
    sampling_inputs,
    sampling_inputs_torch,
)
from sglang.kernels.ops.speculative.flashmap.skinny_linear import (
    MAX_ROWS,
    skinny_linear,
    skinny_linear_torch,
)
from sglang.kernels.ops.speculative.flashmap.slot_choices import slot_choices, slot_choices_torch
from sglang.kernels.ops.speculative.flashmap.slot_draws import slot_draws, slot_draws_torch
from sglang.kernels.ops.speculative.flashmap.tree import plan_tree, plan_tree_torch
from sglang.kernels.ops.speculative.flashmap.tree_growth import grow_tree, grow_tree_torch
from sglang.kernels.ops.speculative.flashmap.tree_rejection import (
    reject_tree,
    reject_tree_torch,
)
from sglang.kernels.ops.speculative.flashmap.tree_suffix import (
    SuffixTables,
    write_tree_suffix,
    write_tree_suffix_torch,
)
from sglang.kernels.ops.speculative.flashmap.tree_walk import walk_tree, walk_tree_torch

# The draft of Qwen3-8B.
LAYERS, DIM, HEADS, HEAD_DIM, SLOTS, VOCAB = 6, 2048, 16, 128, 16, 32768
TARGET_VOCAB = 151_936
EPS, THETA, NOISE_WIDTH = 1e-6, 10_000.0, 4096
TARGET_LAYERS, TARGET_KV_HEADS = 36, 8
VERIFY_WIDTH, COMMITTED = 17, 4
CHOICES = 8  # likeliest tokens of a draw that a tree may hold at a slot
SIBLINGS = 4  # drafts of one slot that a rejected root tries
REPLAYS = 50


@dataclass(frozen=True)
class Row:
    name: str
    bytes: int
    kernel: Callable[[], object]
    reference: Callable[[], object]
    reference_is_capturable: bool = True


def size(*tensors: torch.Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def rows(batch: int, candidates: int, context: int, dtype: torch.dtype) -> Iterator[Row]:
    """The ops of one draft step: `batch` requests of `candidates` blocks over `context` rows."""
    options = dict(dtype=dtype, device="cuda")
    blocks = batch * candidates
    tokens = blocks * SLOTS
    positions = torch.arange(tokens, device="cuda")
    table = rope_table(positions, HEAD_DIM, THETA)
    yield Row(
        "rope_table",
        size(positions, table),
        lambda: rope_table(positions, HEAD_DIM, THETA),
        lambda: rope_table_torch(positions, HEAD_DIM, THETA),
    )
    longs, heats = (torch.zeros(batch, dtype=t, device="cuda") for t in (torch.int64, torch.float))
    page_table = torch.zeros(1, context, dtype=torch.int32, device="cuda")
    inputs = (longs, longs, heats, heats[:, None].repeat(1, 3), longs.int(), longs[:1], page_table)
    args_rows = (*inputs, candidates, SLOTS, 0.5, HEAD_DIM, THETA)
    yield Row(
        "draft_rows",
        size(*draft_rows(*args_rows)),
        lambda: draft_rows(*args_rows),
        lambda: draft_rows_torch(*args_rows),
    )
    args_sampling = (heats, longs.int(), heats, heats, True, True, True, 1.0)
    yield Row(
        "sampling_inputs",
        size(*args_sampling[:4], *sampling_inputs(*args_sampling)),
        lambda: sampling_inputs(*args_sampling),
        lambda: sampling_inputs_torch(*args_sampling),
    )
    variances = torch.rand(NOISE_WIDTH, device="cuda")
    args_noise = (positions, positions, variances, variances[:1], EPS, dtype, 2)
    yield Row(
        "normed_noise",
        size(*normed_noise(*args_noise)),
        lambda: normed_noise(*args_noise),
        lambda: normed_noise_torch(*args_noise),
    )
    x, branch = torch.randn(2, tokens, DIM, **options)
    gate, scale1, shift = torch.randn(3, DIM, **options)
    yield Row(
        "rms_norm",
        2 * size(x),
        lambda: rms_norm(x, gate, EPS),
        lambda: rms_norm_torch(x, gate, EPS),
    )
    args = (x, branch, gate, scale1, shift, EPS)
    yield Row("adaln", 4 * size(x), lambda: adaln(*args), lambda: adaln_torch(*args))

    weight = torch.rand(HEAD_DIM, **options)
    qkv = torch.randn(blocks, SLOTS, 3 * DIM, **options)
    args_self = (qkv, weight, weight, table, EPS, HEADS)
    yield Row(
        "block_self_attention",
        size(qkv, x, table),
        lambda: block_self_attention(*args_self),
        lambda: block_self_attention_torch(*args_self),
    )
    few = x[:MAX_ROWS]
    up, bias = torch.randn(4 * DIM, DIM, **options) / DIM**0.5, torch.randn(4 * DIM, **options)
    wide = torch.empty(few.shape[0], 4 * DIM, **options)
    yield Row(
        "skinny_linear gelu",
        size(few, up, wide),
        lambda: skinny_linear(few, up, bias, activation="gelu", out=wide),
        lambda: skinny_linear_torch(few, up, bias, None, None, "gelu", wide),
    )
    out_proj, sums = up[:DIM].contiguous(), up.float().sum(dim=1)
    args_add = (few, out_proj, None, None, None, few, gate)
    yield Row(
        "add_linear",
        size(few, out_proj, few, few),
        lambda: add_linear(few, out_proj, residual=few, gate=gate),
        lambda: add_linear_torch(*args_add),
    )
    stream, moments = add_linear(few, out_proj, residual=few, gate=gate)
    args_normed = (stream, moments, up, bias, None, sums, EPS, "gelu", wide)
    yield Row(
        "normed_linear gelu",
        size(few, up, wide, moments),
        lambda: normed_linear(stream, moments, up, bias, sums, EPS, activation="gelu", out=wide),
        lambda: normed_linear_torch(*args_normed),
    )
    heads = x.view(tokens, HEADS, HEAD_DIM)
    yield Row(
        "rms_norm_rope",
        size(x, x, table),
        lambda: rms_norm_rope(heads, weight, table, EPS),
        lambda: rms_norm_rope_torch(heads, weight, table, EPS),
    )

    pool_slots = batch * context
    req_to_token = torch.randperm(pool_slots, device="cuda").int().view(batch, context)
    requests = torch.arange(batch, device="cuda")
    lens = torch.full((batch,), context, device="cuda")
    q = torch.randn(batch, candidates * SLOTS, HEADS, HEAD_DIM, **options)
    window = batch * VERIFY_WIDTH
    kv = torch.randn(window, LAYERS, 2, HEADS, HEAD_DIM, **options)
    weights = torch.rand(LAYERS, HEAD_DIM, **options)
    window_table = rope_table(torch.arange(window, device="cuda"), HEAD_DIM, THETA)
    slots = torch.randperm(max(pool_slots, window), device="cuda")[:window] % pool_slots
    commit_lens = torch.full((batch,), COMMITTED, dtype=torch.int32, device="cuda")
    for suffix, pool_dtype in (("", dtype), (" fp8", torch.float8_e4m3fn)):
        if pool_dtype == torch.float8_e4m3fn and torch.cuda.get_device_capability() < (8, 9):
            continue
        keys, values = (
            [
                torch.randn(pool_slots, HEADS, HEAD_DIM, **options).to(pool_dtype)
                for _ in range(LAYERS)
            ]
            for _ in range(2)
        )
        args_cross = (q, keys[0], values[0], req_to_token, requests, lens)
        yield Row(
            f"paged_cross_attention{suffix}",
            size(q, q, keys[0], values[0], req_to_token),
            lambda args=args_cross: paged_cross_attention(*args),
            lambda args=args_cross: paged_cross_attention_torch(*args),
            reference_is_capturable=False,
        )
        args_write = (kv, weights, window_table, slots, keys, values, EPS, commit_lens)
        written = batch * COMMITTED * LAYERS * 2 * DIM
        yield Row(
            f"write_context_kv{suffix}",
            written * (dtype.itemsize + pool_dtype.itemsize),
            lambda args=args_write: write_context_kv(*args),
            lambda args=args_write: write_context_kv_torch(*args),
            reference_is_capturable=False,
        )

    logits = 3 * torch.randn(tokens, VOCAB, **options)
    ids = torch.randperm(VOCAB, device="cuda")
    seeds = torch.arange(tokens, device="cuda")
    for temperature in (0.0, 1.0):
        temperatures = torch.full((tokens,), temperature, device="cuda")
        args_sample = (logits, ids, temperatures, seeds, seeds)
        yield Row(
            f"sample_draft T={temperature:g}",
            size(logits),
            lambda args=args_sample: sample_draft(*args),
            lambda args=args_sample: sample_draft_torch(*args),
            reference_is_capturable=False,
        )

    target_logits = torch.randn(window, TARGET_VOCAB, **options)
    yield Row(
        "argmax_keys",
        size(target_logits),
        lambda: argmax_keys(target_logits),
        lambda: argmax_keys_torch(target_logits),
    )
    keys = argmax_keys(target_logits).view(batch, VERIFY_WIDTH, -1)
    args_accept = (torch.zeros(batch, VERIFY_WIDTH, dtype=torch.int64, device="cuda"), keys, lens)
    yield Row(
        "accept_chain",
        size(*args_accept, *accept_chain(*args_accept)),
        lambda: accept_chain(*args_accept),
        lambda: accept_chain_torch(*args_accept, []),
    )
    anchors = torch.zeros(batch, dtype=torch.int64, device="cuda")
    chain = torch.zeros(batch, dtype=torch.bool, device="cuda")
    # Nine drafts in ten are token 0, so that candidates share prefixes.
    drafts = torch.randint(10, (batch, candidates, SLOTS), device="cuda") // 9
    heat = torch.zeros(batch, device="cuda")
    per_draw = logits.view(batch, candidates, SLOTS, VOCAB)
    for draws in (1, candidates):
        args_choices = (per_draw[:, :draws].contiguous(), ids, heat, CHOICES)
        choices, probs = slot_choices(*args_choices)
        yield Row(
            f"slot_choices N={draws}",
            size(args_choices[0], choices, probs),
            lambda args=args_choices: slot_choices(*args),
            lambda args=args_choices: slot_choices_torch(*args),
        )
        drawing = (torch.ones_like(chain), torch.ones(16, CHOICES, device="cuda"))
        numbers = seeds[: batch * draws * SLOTS]
        args_draws = (*args_choices[:3], numbers, numbers, 1, *drawing)
        args_draws += (choices.clone(), probs.clone())
        yield Row(
            f"slot_draws N={draws}",
            size(args_choices[0]) // draws + size(choices, probs),
            lambda args=args_draws: slot_draws(*args),
            lambda args=args_draws: slot_draws_torch(*args),
            reference_is_capturable=False,
        )
        for width in (VERIFY_WIDTH, 65):
            args_grow = (anchors, choices, probs, drafts[:, 0].contiguous(), width, chain)
            yield Row(
                f"grow_tree N={draws} W={width}",
                size(anchors, choices, probs, chain, *grow_tree(*args_grow).tensors()),
                lambda args=args_grow: grow_tree(*args),
                lambda args=args_grow: grow_tree_torch(*args),
            )
    # Siblings of which the target has none: p and q of the root are read before each but the first.
    nodes = torch.arange(SIBLINGS + 1, device="cuda").repeat(batch, 1)
    siblings = ids[nodes]
    p = torch.full((batch, SIBLINGS + 1, TARGET_VOCAB), 1 / TARGET_VOCAB, device="cuda")
    p[:, 0].scatter_(1, siblings, 0.0)
    column_of = torch.zeros(TARGET_VOCAB, dtype=torch.int32, device="cuda")
    column_of[ids] = torch.arange(VOCAB, dtype=torch.int32, device="cuda")
    args_reject = (
        *(siblings, torch.where(nodes == 0, 1, -1)),
        torch.where((nodes > 0) & (nodes < SIBLINGS), nodes + 1, -1),
        *(p, per_draw[:, 0].float().softmax(-1), ids, column_of, torch.rand(nodes.shape).cuda()),
        SLOTS + 1,
    )
    yield Row(
        f"reject_tree, {SIBLINGS} siblings",
        2 * size(p[:, 0, :VOCAB]) + size(ids),
        lambda: reject_tree(*args_reject),
        lambda: reject_tree_torch(*args_reject),
        reference_is_capturable=False,
    )
    for width in (VERIFY_WIDTH, 65):
        args_plan = (anchors, drafts, width, chain)
        plan = plan_tree(*args_plan)
        yield Row(
            f"plan_tree W={width}",
            size(anchors, drafts, chain, *plan.tensors()),
            lambda args=args_plan: plan_tree(*args),
            lambda args=args_plan: plan_tree_torch(*args),
        )
        # The target follows the likeliest path.
        links = plan.tokens, plan.first_child, plan.next_sibling
        args_walk = (*links, torch.zeros_like(plan.tokens), lens, SLOTS + 1)
        yield Row(
            f"walk_tree W={width}",
            size(*args_walk[:4]),
            lambda args=args_walk: walk_tree(*args),
            lambda args=args_walk: walk_tree_torch(*args, []),
            reference_is_capturable=False,
        )
        cells = batch * width * (context + width)
        args_mask = (plan.mask, lens, torch.empty(cells, dtype=torch.bool, device="cuda"))
        yield Row(
            f"write_full_mask W={width}",
            cells,
            lambda args=args_mask: write_full_mask(*args),
            lambda args=args_mask: write_full_mask_torch(*args),
            reference_is_capturable=False,
        )

        nodes = batch * width
        shapes = (batch,), (batch + 1,), (nodes, width), (nodes,), (nodes + 1,)
        out = SuffixTables(*(torch.zeros(n, dtype=torch.int32, device="cuda") for n in shapes))
        args_suffix = (
            plan.mask,
            (lens[:, None] + plan.depths).view(-1),
            lens,
            torch.arange(batch, device="cuda"),
            torch.randperm(nodes + pool_slots, device="cuda").int().view(batch, -1),
        )
        yield Row(
            f"write_tree_suffix W={width}",
            size(plan.mask, out.slots, *out.tensors()),
            lambda args=args_suffix, out=out: write_tree_suffix(*args, out),
            lambda args=args_suffix, out=out: write_tree_suffix_torch(*args, out.tensors()),
        )

    # The target's KV: four accepted drafts, each one slot from its place.
    width, moved = VERIFY_WIDTH, COMMITTED
    pool = [
        torch.zeros(batch * width, TARGET_KV_HEADS, HEAD_DIM, **options)
        for _ in range(2 * TARGET_LAYERS)
    ]
    window_slots = torch.randperm(batch * width, device="cuda").view(batch, width)
    path = torch.full((batch, SLOTS + 1), -1, dtype=torch.int32, device="cuda")
    path[:, 0] = 0
    path[:, 1 : moved + 1] = torch.arange(2, moved + 2, device="cuda")
    args_rows = (torch.randn(window, 5 * 4096, **options), path, window_slots, window_slots)
    yield Row(
        "accepted_rows",
        2 * size(args_rows[0]),
        lambda: accepted_rows(*args_rows),
        lambda: accepted_rows_torch(*args_rows),
    )
    args_move = (pool, window_slots, path)
    yield Row(
        "move_accepted",
        2 * batch * moved * size(*(buffer[0] for buffer in pool)),
        lambda args=args_move: move_accepted(*args),
        lambda args=args_move: move_accepted_torch(*args),
        reference_is_capturable=False,
    )


def microseconds(call: Callable[[], object], capture: bool) -> float:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    replay = call
    if capture:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(REPLAYS):
                call()
        replay = graph.replay
    repeats = 5 if capture else 10
    replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1000 / (repeats * (REPLAYS if capture else 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--candidates", type=int, default=8, help="draft blocks per request")
    parser.add_argument("--context", type=int, default=1024, help="context rows per request")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--json", help="where to save the rows")
    parser.add_argument("--no-reference", action="store_true", help="time the kernels only")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("the kernels need an NVIDIA GPU and none is visible")
    setting = f"{args.dtype}, {args.candidates} candidates, context {args.context}"
    print(f"{torch.cuda.get_device_name()}, {setting}")
    saved = []
    print(f"{'op':26}{'batch':>6}{'MB':>9}{'us':>9}{'GB/s':>8}{'torch us':>11}")
    with torch.inference_mode():
        for batch in args.batch:
            for row in rows(batch, args.candidates, args.context, getattr(torch, args.dtype)):
                time = microseconds(row.kernel, capture=True)
                rate = row.bytes / time / 1e3
                line = f"{row.name:26}{batch:6}{row.bytes / 1e6:9.2f}{time:9.1f}{rate:8.0f}"
                saved.append(dict(op=row.name, batch=batch, bytes=row.bytes, us=time))
                if not args.no_reference:
                    reference = microseconds(row.reference, row.reference_is_capturable)
                    saved[-1]["torch_us"] = reference
                    line += f"{reference:10.1f}{' ' if row.reference_is_capturable else '*'}"
                print(line, flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(dict(setting=setting, rows=saved), indent=1))


if __name__ == "__main__":
    main()

"""Compiles every kernel for a GPU that need not be there; ``python kernel_compiler.py ARCH DTYPE``
prints one line each: its name, bytes of shared memory, and conversions of one e4m3 to bfloat16.

The interpreter runs what the compiler may refuse (types that differ between branches, shapes that
are no powers of 2). A stand-in for Triton's driver names the target, and launching a kernel
compiles it instead.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import torch
from sglang.kernels.ops.attention import verify_mask_bits, verify_splitkv_gqa
from sglang.kernels.ops.speculative.flashmap import (
    accepted_kv,
    accepted_rows,
    adaln,
    block_attention,
    context_kv,
    cross_attention,
    draft_rows,
    filter_logits,
    fp8_linear,
    full_mask,
    greedy,
    noise,
    norm,
    residual_linear,
    rope,
    sampler,
    sampling_inputs,
    skinny_linear,
    slot_choices,
    slot_draws,
    stage_inputs,
    tree,
    tree_growth,
    tree_rejection,
    tree_suffix,
    tree_walk,
)
from sglang.kernels.ops.speculative.flashmap import launch as launching
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

ROWS, DIM, HEADS, KV_HEADS, HEAD_DIM = 8, 200, 4, 2, 96


class Target:
    """The part of a Triton driver that compiling asks for."""

    def __init__(self, arch: int) -> None:
        self.target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(kernel: JITFunction, grid: tuple) -> Any:
    def launch(*args: Any, **kwargs: Any) -> None:
        compiled = kernel.warmup(*args, grid=grid, **kwargs)
        one_by_one = len(re.findall(r"cvt\.[a-z.]*bf16\.f16", compiled.asm["ptx"]))
        print(kernel.__name__, compiled.metadata.shared, one_by_one)

    return launch


def launch_everything(dtype: torch.dtype, pool_dtypes: list[torch.dtype]) -> None:
    longs = torch.zeros(ROWS, dtype=torch.int64)
    ints = longs.int()
    draft_rows.draft_rows_triton(
        *(longs, longs, torch.zeros(ROWS), torch.zeros(ROWS, 3), ints, longs, ints[None]),
        *(2, 16, 0.5, HEAD_DIM, 10_000.0),
    )
    rope_table = rope.rope_table_triton(longs, HEAD_DIM, 10_000.0)
    staged = [longs, longs, longs, torch.zeros(ROWS), ints, torch.zeros(ROWS, 3), longs > 0]
    stage_inputs.stage_inputs_triton(staged, staged)
    floats = torch.zeros(ROWS)
    sampling_inputs.sampling_inputs_triton(floats, ints, floats, floats, True, False, True, 0.5)
    x, weight = torch.zeros(ROWS, DIM, dtype=dtype), torch.zeros(DIM, dtype=dtype)
    heads, head_weight = torch.zeros(ROWS, HEADS, HEAD_DIM, dtype=dtype), torch.zeros(HEAD_DIM)
    wide = torch.zeros(ROWS, DIM)
    noise.gaussian_at_triton(longs, longs, longs[:, None].contiguous(), 1)
    noise.normed_noise_triton(longs, longs, wide[0], wide[0, :1], 1e-6, dtype, 1)
    norm.rms_norm_triton(x, weight, 1e-6)
    norm.rms_norm_rope_triton(heads, head_weight, rope_table, 1e-6)
    adaln.adaln_triton(x, x, weight, weight, weight, 1e-6)
    adaln.adaln_triton(x, None, None, weight, weight, 1e-6)
    qkv = torch.zeros(1, ROWS, (HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype=dtype)
    block_attention.block_self_attention_triton(
        qkv, head_weight, head_weight, rope_table, 1e-6, HEADS
    )
    kv = torch.zeros(ROWS, 1, 2, KV_HEADS, HEAD_DIM, dtype=dtype)
    for pool_dtype in pool_dtypes:
        pool = torch.zeros(9, KV_HEADS, HEAD_DIM).to(pool_dtype)
        context_kv.write_context_kv_triton(
            kv, head_weight[None], rope_table, longs, [pool], [pool], 1e-6, ints[:2]
        )
        shapes = ((8, 1), (40, 4), (128, 1)) if pool_dtype == dtype else ((128, 1),)
        for queries, splits in shapes:
            q = torch.zeros(ROWS, queries, HEADS, HEAD_DIM, dtype=dtype)
            table = torch.zeros(ROWS, 64, dtype=torch.int32)
            q_rope = rope.rope_table_triton(longs.repeat(queries), HEAD_DIM, 10_000.0)
            cross_attention.paged_cross_attention_triton(
                q, pool, pool, table, longs, longs, None, head_weight, q_rope, 1e-6, splits=splits
            )
        launch_verify_attention(dtype, pool, longs)
    logits = torch.zeros(ROWS, 5000, dtype=dtype)
    filter_logits.filter_logits_triton(logits, torch.zeros(ROWS), torch.zeros(ROWS, 3))
    ids = torch.zeros(5000, dtype=torch.int64)
    for splits in (1, 2):
        sampler.sample_draft_triton(logits, ids, torch.zeros(ROWS), longs, longs, splits=splits)
    for candidates, slots, width in ((1, 1, 2), (8, 16, 17), (64, 32, 129)):
        blocks = torch.zeros(ROWS, candidates, slots, dtype=torch.int64)
        plan = tree.TreePlan.empty(ROWS, width, blocks.device)
        for scores in (None, blocks.float()):
            tree.plan_tree_triton(longs, blocks, longs > 0, plan.tensors(), scores)
        full_mask.write_full_mask_triton(plan.mask, longs, torch.zeros(9, dtype=torch.bool))
        shapes = ((ROWS,), (ROWS + 1,), (ROWS * width, width), (ROWS * width,), (ROWS * width + 1,))
        tree_suffix.write_tree_suffix_triton(
            plan.mask,
            plan.tokens.view(-1),
            longs,
            longs,
            torch.zeros(9, 64, dtype=torch.int32),
            [torch.zeros(shape, dtype=torch.int32) for shape in shapes],
        )
    for draws, count, width in ((1, 8, 17), (8, 4, 129)):
        logits = torch.zeros(1, draws, ROWS, 5000, dtype=dtype)
        tokens, probs = slot_choices.slot_choices_triton(logits, ids, torch.zeros(1), count)
        rows = torch.zeros(draws * ROWS, dtype=torch.int64)
        profile = torch.zeros(16, count)
        for splits in (1, 3):
            slot_draws.slot_draws_triton(
                *(logits, ids, torch.zeros(1), rows, rows, 1, longs[:1] > 0, profile),
                *(tokens, probs, splits),
            )
        grown = tree.TreePlan.empty(1, width, tokens.device).tensors()
        tree_growth.grow_tree_triton(longs[:1], tokens, probs, longs[None], longs[:1] > 0, grown)
    greedy.argmax_keys_triton(logits[0, 0])
    keys = plan.tokens[..., None].expand(-1, -1, 38).contiguous()
    for chosen, relay in ((plan.tokens, []), (keys, [longs] * 3)):
        links = (plan.tokens, plan.first_child, plan.next_sibling)
        path, *_ = tree_walk.walk_tree_triton(*links, chosen, longs, slots + 1, relay)
        greedy.accept_chain_triton(plan.tokens, chosen, longs, relay)
    coins, target = plan.tokens.float(), torch.zeros(*plan.tokens.shape, 5000)
    for columns, vocabulary in ((5000, (None, None)), (4500, (ids[:4500], ids.int()))):
        probs = torch.zeros(ROWS, slots, columns)
        tree_rejection.reject_tree_triton(*links, target, probs, *vocabulary, coins, slots + 1)
    hidden = torch.zeros(plan.tokens.numel(), DIM, dtype=dtype)
    accepted_rows.accepted_rows_triton(hidden, path, plan.tokens, plan.tokens)
    for pool_dtype in pool_dtypes:
        pool = torch.zeros(9, KV_HEADS, HEAD_DIM).to(pool_dtype)
        accepted_kv.move_accepted_triton([pool], plan.tokens, path)
    if torch.float8_e4m3fn in pool_dtypes:
        fp8_linear.quantize_rows_triton(x)
    out = torch.zeros(ROWS, DIM, dtype=dtype)
    for weight_dtype in pool_dtypes:
        square, scale = torch.zeros(DIM, DIM).to(weight_dtype), torch.zeros(DIM)
        for tiles in ([16, 128, 1, 4, 4, 3], [64, 64, 2, 1, 4, 3]):
            skinny_linear.skinny_linear_triton(
                x, square, weight, scale, scale[:ROWS], "gelu", out, tiles
            )
        whole = skinny_linear.Tiles(16, 512, 1, 8, 8, 1, whole=1)
        held = torch.zeros(DIM, 512).to(weight_dtype)
        skinny_linear.skinny_linear_triton(
            torch.zeros(ROWS, 512, dtype=dtype), held, weight, scale, None, "none", out, list(whole)
        )
        if dtype.itemsize == 2:
            launch_residual(dtype, weight_dtype)


def launch_residual(dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    """Both ends of a residual stream, with the default tiles."""
    narrow, wider = torch.zeros(64, 128).to(weight_dtype), torch.zeros(128, 64).to(weight_dtype)
    sums = torch.zeros(128)
    for rows in (16, 64):
        inner, stream = torch.zeros(rows, 128, dtype=dtype), torch.zeros(rows, 64, dtype=dtype)
        added, moments = residual_linear.add_linear_triton(
            inner, narrow, None, sums[:64], None, stream, stream[0]
        )
        residual_linear.normed_linear_triton(
            added, moments, wider, None, sums, sums, 1e-6, "gelu", inner
        )


def launch_verify_attention(dtype: torch.dtype, pool: torch.Tensor, longs: torch.Tensor) -> None:
    """Trees of 17 drafts (one row block) and of 65 (five); of 17 also with a window, and with all
    that a model may add."""
    k = pool.to(dtype)[:ROWS]
    indptr = torch.zeros(2, dtype=torch.int32)
    for group, length in ((4, 17), (4, 65)) if pool.dtype == dtype else ((4, 17),):
        q = torch.zeros(ROWS, group * KV_HEADS, HEAD_DIM, dtype=dtype)
        mask = torch.zeros(1, length, verify_mask_bits.words_a_row(length), dtype=torch.int64)
        verify_mask_bits.pack_verify_mask_triton(longs.new_zeros(length**2).bool(), mask)
        everything = dict(window=8, logit_cap=30.0, sinks=torch.zeros(q.shape[1], dtype=dtype))
        for more in ({}, dict(window=8), everything) if length == 17 else ({},):
            verify_splitkv_gqa.verify_attention_triton(
                *(q, k, k, q.clone(), pool, pool, indptr, indptr, longs, mask, length, 0.1),
                programs=9,
                **more,
            )


if __name__ == "__main__":
    arch, dtype = int(sys.argv[1]), getattr(torch, sys.argv[2])
    driver.set_active(Target(arch))
    JITFunction.__getitem__ = compile_only
    launching.dependent_launch = lambda device: arch >= 90
    launch_everything(dtype, [dtype, *([torch.float8_e4m3fn] if arch >= 89 else [])])

"""What torch.compile and the registry see: fake implementations and kernel specs."""

from __future__ import annotations

import pytest
import torch
from sglang.kernels.ops.speculative.flashmap import (
    accepted_kv,
    accepted_rows,
    adaln,
    block_attention,
    context_kv,
    cross_attention,
    draft_rows,
    full_mask,
    greedy,
    noise,
    norm,
    residual_linear,
    rope,
    sampler,
    sampling_inputs,
    slot_choices,
    slot_draws,
    tree,
    tree_growth,
    tree_rejection,
    tree_suffix,
    tree_walk,
)
from sglang.kernels.registry import registry
from torch._subclasses.fake_tensor import FakeTensorMode

OPS = sorted(op for op in registry.ops() if op.startswith("speculative.flashmap_"))


def test_all_ops_are_registered() -> None:
    assert len(OPS) == 32


@pytest.mark.parametrize("op", OPS)
def test_registered_targets_load(op: str) -> None:
    specs = registry.get(op)
    assert {spec.backend.value for spec in specs} == {"torch", "triton"}
    for spec in specs:
        assert callable(spec.load())
    assert hasattr(torch.ops.sglang, op.removeprefix("speculative."))


def test_fake_results_have_the_references_shapes_and_dtypes() -> None:
    rows, heads, kv_heads, head_dim, dim, layers = 6, 4, 2, 8, 12, 2
    results = {}
    for device in ("cpu", "cuda"):
        with FakeTensorMode():

            def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
                return torch.empty(*shape, dtype=dtype, device=device)  # noqa: B023

            longs = new(rows, dtype=torch.int64)
            table = new(rows, head_dim // 2, 2, dtype=torch.float32)
            pool = [new(9, kv_heads, head_dim) for _ in range(layers)]
            x, weight, head_weight = new(rows, dim), new(dim), new(head_dim)
            heads_x = new(rows, heads, head_dim)
            qkv = new(2, rows // 2, (heads + 2 * kv_heads) * head_dim)
            floats = new(rows, dtype=torch.float32)
            outputs = [
                *sampling_inputs.sampling_inputs(
                    *(floats, longs.int(), floats, floats), *(True, False, True, 0.5)
                ),
                rope.rope_table(longs, head_dim, 1e4),
                *draft_rows.draft_rows(
                    *(longs, longs, new(rows, dtype=torch.float32)),
                    new(rows, 3, dtype=torch.float32),
                    *(new(rows, dtype=torch.int32), longs, new(9, 9, dtype=torch.int32)),
                    *(2, 3, 0.5, head_dim, 1e4),
                ),
                *noise.normed_noise(
                    *(longs, longs, new(dim, dtype=torch.float32)),
                    *(new(1, dtype=torch.float32), 0.1, torch.bfloat16, 1),
                ),
                norm.rms_norm(x, weight, 1e-6),
                norm.rms_norm_rope(heads_x, head_weight, table, 1e-6),
                residual_linear.normed_linear(
                    x, new(2, rows, 1, dtype=torch.float32), new(9, dim), None, new(9), 1e-6
                ),
                residual_linear.add_linear(x, new(dim, dim), weight, residual=x, gate=weight)[0],
                *adaln.adaln(x, x, weight, weight, weight, 1e-6),
                *adaln.adaln(x, None, None, weight, weight, 1e-6),
                block_attention.block_self_attention(
                    qkv, head_weight, head_weight, table, 1e-6, heads
                ),
                *tree.plan_tree(
                    longs,
                    new(rows, 3, 4, dtype=torch.int64),
                    9,
                    new(rows, dtype=torch.bool),
                ).tensors(),
                *slot_choices.slot_choices(
                    new(rows, 2, 4, 50), None, new(rows, dtype=torch.float32), 3
                ),
                *tree_growth.grow_tree(
                    longs,
                    new(rows, 4, 6, dtype=torch.int64),
                    new(rows, 4, 6, 2, dtype=torch.float32),
                    new(rows, 4, dtype=torch.int64),
                    9,
                    new(rows, dtype=torch.bool),
                ).tensors(),
            ]
            if device == "cuda":
                # Their references read lengths and temperatures on the host.
                outputs.append(
                    cross_attention.paged_cross_attention(
                        heads_x[:, None],
                        pool[0],
                        pool[0],
                        new(9, 5, dtype=torch.int32),
                        longs,
                        longs,
                    )
                )
                assert outputs[-1].shape == (rows, 1, heads, head_dim)
                outputs.append(
                    sampler.sample_draft(x, None, new(rows, dtype=torch.float32), longs, longs)
                )
                assert outputs[-1].shape == (rows,) and outputs[-1].dtype == torch.int64
                drawing = slot_draws.slot_draws(
                    *(new(rows, 2, 4, 50), None, floats, new(rows * 8, dtype=torch.int64)),
                    *(new(rows * 8, dtype=torch.int64), 1, new(rows, dtype=torch.bool)),
                    new(4, 3, dtype=torch.float32),
                    new(rows, 4, 6, dtype=torch.int64),
                    new(rows, 4, 6, 2, dtype=torch.float32),
                )
                assert drawing is None
                keys = greedy.argmax_keys(x)
                assert keys.shape[0] == rows and keys.dtype == torch.int64
                nodes, three_splits = (new(rows, 9, *s, dtype=torch.int64) for s in ((), (3,)))
                path, num_correct, committed, *ends = tree_walk.walk_tree(
                    nodes, nodes, nodes, three_splits, longs, 5
                )
                tokens, *chain_ends = greedy.accept_chain(nodes, three_splits, longs)
                assert tokens.shape == (rows, 9) and tokens.dtype == torch.int64
                dtypes = [torch.int64, torch.int32, torch.int64]
                assert [x.dtype for x in ends] == [x.dtype for x in chain_ends[1:]] == dtypes
                assert all(x.shape == (rows,) for x in ends + chain_ends)
                assert path.shape == (rows, 5) and path.dtype == torch.int32
                assert committed.shape == (rows, 5) and committed.dtype == torch.int64
                assert num_correct.shape == (rows,) and num_correct.dtype == torch.int64
                path, num_correct, taken = tree_rejection.reject_tree(
                    *(nodes, nodes, nodes, new(rows, 9, 50, dtype=torch.float32)),
                    *(new(rows, 4, 50, dtype=torch.float32), None, None),
                    *(new(rows, 9, dtype=torch.float32), 5),
                )
                assert path.shape == (rows, 5) and path.dtype == torch.int32
                assert num_correct.shape == (rows,) and num_correct.dtype == torch.int64
                assert taken.shape == (rows,) and taken.dtype == torch.float32
                assert (
                    accepted_kv.move_accepted(pool, new(rows, 9, dtype=torch.int64), path) is None
                )
                committed_rows = accepted_rows.accepted_rows(new(rows * 9, dim), path, nodes, nodes)
                assert [x.shape[0] for x in committed_rows] == [rows * 5, rows, rows]
                mask = new(rows, 9, 9, dtype=torch.bool)
                assert full_mask.write_full_mask(mask, longs, new(99, dtype=torch.bool)) is None
                ints = new(9, dtype=torch.int32)
                suffix = tree_suffix.write_tree_suffix(
                    mask,
                    new(rows * 9, dtype=torch.int64),
                    longs,
                    longs,
                    new(9, 99, dtype=torch.int32),
                    tree_suffix.SuffixTables(*(ints,) * 5),
                )
                assert suffix is None
                kv = new(rows, layers, 2, kv_heads, head_dim)
                weights = new(layers, head_dim)
                assert (
                    context_kv.write_context_kv(kv, weights, table, longs, pool, pool, 1e-6) is None
                )
            assert all(out.device.type == device for out in outputs)
            results[device] = [(out.shape, out.dtype) for out in outputs[:39]]
    assert results["cuda"] == results["cpu"]

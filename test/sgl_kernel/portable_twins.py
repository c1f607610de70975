"""Runs upstream's Triton kernels, under Triton's interpreter, on the cases of `portable_cases`.

A process of its own, because TRITON_INTERPRET has to be set before Triton is first imported:
`python portable_twins.py COUNT FILE` saves {op: [case after the call, ...]} to FILE.
"""

import os
import sys
from collections.abc import Callable

os.environ["TRITON_INTERPRET"] = "1"

import torch
from portable_cases import CASES, Case, cases_of, kv_addresses
from sglang.kernels.ops.kvcache import cache_move
from sglang.kernels.ops.speculative import (
    cache_locs,
    eagle,
    multi_layer_eagle,
    reconstruct_tree,
    spec_tree,
)
from sglang.srt.mem_cache import allocation
from triton import next_power_of_2


def assign_req_to_token_pool_cpu(c: Case) -> None:
    bs = c["req_pool_indices"].numel()
    allocation.assign_req_to_token_pool[(bs,)](*c.values(), next_power_of_2(bs))


def assign_extend_cache_locs_cpu(c: Case) -> None:
    bs = c["req_pool_indices"].numel()
    cache_locs.assign_extend_cache_locs[(bs,)](*c.values(), next_power_of_2(bs))


def assign_draft_cache_locs_contiguous_cpu(c: Case) -> None:
    cache_locs.assign_draft_cache_locs_contiguous[(c["seq_lens"].numel(),)](**c)


def copy_all_layer_kv_cache_cpu(c: Case) -> None:
    moved = c["tgt_loc"].numel()
    if moved == 0:
        return
    cache_move.copy_all_layer_kv_cache_tiled[(len(c["buffers"]), 1)](
        **kv_addresses(c["buffers"]),
        tgt_loc_ptr=c["tgt_loc"],
        src_loc_ptr=c["src_loc"],
        num_locs=moved,
        num_locs_upper=next_power_of_2(moved),
        BYTES_PER_TILE=64,
    )


def build_tree_kernel_efficient_cpu(c: Case) -> None:
    spec_tree.sgl_build_tree_kernel_triton(**c)


def verify_tree_greedy_cpu(c: Case) -> None:
    spec_tree.verify_tree_greedy_triton(*c.values())


def fill_bonus_tokens_cpu(c: Case) -> None:
    eagle.fill_bonus_tokens[(c["accept_lens"].numel(),)](*c.values())


def fill_accept_out_cache_loc_cpu(c: Case) -> None:
    size = c["accept_index"].numel()
    eagle.fill_accept_out_cache_loc[(size,)](*c.values(), next_power_of_2(size))


def rotate_input_ids_cpu(c: Case) -> None:
    bs = c["extend_seq_lens"].numel()
    multi_layer_eagle.rotate_input_ids_kernel[(bs,)](*c.values(), BLOCK_SIZE=8)


def reconstruct_indices_from_tree_mask(c: Case) -> None:
    reconstruct_tree.reconstruct_indices_from_tree_mask_triton(**c)


def main(count: int, path: str) -> None:
    results: dict[str, list[Case]] = {}
    for op in CASES:
        twin: Callable[[Case], None] = globals()[op]
        results[op] = cases_of(op, count)
        for case in results[op]:
            twin(case)
    torch.save(results, path)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

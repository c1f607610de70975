"""Plain-Python versions of the ops of `sgl_kernel`, element by element from their contracts.

`ORACLES[op](case)` performs the call that a case of `portable_cases` describes, in place.
"""

from collections.abc import Callable

from portable_cases import Case


def assign_req_to_token_pool_cpu(c: Case) -> None:
    slots = iter(c["out_cache_loc"].tolist())
    for request, start, end in _requests(c):
        for position in range(start, end):
            c["req_to_token"][request, position] = next(slots)


def assign_extend_cache_locs_cpu(c: Case) -> None:
    out = 0
    for request, start, end in _requests(c):
        for position in range(start, end):
            c["out_cache_loc"][out] = int(c["req_to_token"][request, position])
            out += 1


def _requests(c: Case) -> list[tuple[int, int, int]]:
    columns = c["req_pool_indices"], c["start_offset"], c["end_offset"]
    return list(zip(*(column.tolist() for column in columns), strict=True))


def assign_draft_cache_locs_contiguous_cpu(c: Case) -> None:
    width = c["topk"] * c["speculative_num_steps"]
    for b, request in enumerate(c["req_pool_indices"].tolist()):
        for i in range(width):
            slot = c["req_to_token"][request, int(c["seq_lens"][b]) + i]
            c["out_cache_loc"][b * width + i] = int(slot)


def copy_all_layer_kv_cache_cpu(c: Case) -> None:
    for buffer in c["buffers"]:
        before = buffer.clone()
        for target, source in zip(c["tgt_loc"].tolist(), c["src_loc"].tolist(), strict=True):
            buffer[target] = before[source]


def build_tree_kernel_efficient_cpu(c: Case) -> None:
    n, mask_start = c["draft_token_num"], 0
    for b, seq_len in enumerate(c["verified_seq_len"].tolist()):
        numbers = c["selected_index"][b].tolist()
        node_of = {number: node for node, number in enumerate(numbers, start=1)}
        parent: list[int | None] = [None]
        for number in numbers:
            expanded = number // c["topk"]
            parent.append(0 if expanded == 0 else node_of.get(int(c["parent_list"][b, expanded])))
        width = n + (seq_len if c["tree_mask_mode"] == 0 else 0)
        for node in range(n):
            c["retrieve_index"][b, node] = b * n + node
            below = [child for child in range(n) if parent[child] == node]
            if below:
                c["retrieve_next_token"][b, node] = below[0]
            for first, second in zip(below, below[1:], strict=False):
                c["retrieve_next_sibling"][b, first] = second

            path, top = [], node
            while top is not None and top > 0:
                path.append(top)
                top = parent[top]
            c["positions"][b * n + node] = seq_len + len(path)
            row = mask_start + node * width + width - n
            for other in range(n):
                c["tree_mask"][row + other] = other == 0 or other in path
        mask_start += n * width


def verify_tree_greedy_cpu(c: Case) -> None:
    target = c["target_predict"].flatten()
    bs, n = c["candidates"].shape
    for b in range(bs):
        node, accepted = 0, []
        while True:
            row = b * n + node
            c["accept_index"][b, len(accepted)] = row
            c["predicts"][row] = target[row]
            if len(accepted) == c["accept_index"].shape[1] - 1:
                break
            child = int(c["retrive_next_token"][b, node])
            matching = []
            while child >= 0:
                if c["candidates"][b, child] == target[row]:
                    matching.append(child)
                child = int(c["retrive_next_sibling"][b, child])
            if not matching:
                break
            node = matching[0]
            accepted.append(node)
        c["accept_token_num"][b] = len(accepted)


def fill_bonus_tokens_cpu(c: Case) -> None:
    for b, length in enumerate(c["accept_lens"].tolist()):
        c["bonus_tokens"][b] = c["accept_tokens"][b * c["accept_stride"] + length - 1]


def fill_accept_out_cache_loc_cpu(c: Case) -> None:
    rows = [row for row in c["accept_index"].flatten().tolist() if row >= 0]
    for i, row in enumerate(rows):
        c["accept_out_cache_loc"][i] = c["out_cache_loc"][row]


def rotate_input_ids_cpu(c: Case) -> None:
    starts, lengths = c["extend_start_loc"].tolist(), c["extend_seq_lens"].tolist()
    for b, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        if length == 0:
            continue
        for i in range(start, start + length - 1):
            c["input_ids"][i] = int(c["input_ids"][i + 1])
        last = start + length - 1 if c["select_index"] is None else int(c["select_index"][b])
        c["input_ids"][last] = c["topk_index"][b, 0]


def reconstruct_indices_from_tree_mask(c: Case) -> None:
    bs, n = c["batch_size"], c["draft_token_num"]
    mask = c["tree_mask"].view(bs, n, n)
    for b in range(bs):
        above = [[j for j in range(i) if mask[b, i, j]] for i in range(n)]
        parent = [max(nodes, default=None) for nodes in above]
        for node in range(n):
            c["positions"][b * n + node] = int(c["verified_seq_len"][b]) + len(above[node])
            c["retrieve_index"][b, node] = b * n + node
            below = [child for child in range(n) if parent[child] == node]
            if below:
                c["retrieve_next_token"][b, node] = below[0]
            for first, second in zip(below, below[1:], strict=False):
                c["retrieve_next_sibling"][b, first] = second


ORACLES: dict[str, Callable[[Case], None]] = {
    oracle.__name__: oracle
    for oracle in (
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

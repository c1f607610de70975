"""Draft trees: construction, greedy verification and what is derived from the accepted path.

A tree has n = draft_token_num nodes; node 0 is the last verified token and parents precede their
children. Three (bs, n) tensors link it: `retrieve_index`, the flat row `b * n + node` of a node in
per-token tensors; `retrieve_next_token`, its first child; `retrieve_next_sibling`; -1 for none.
Verification spells these arguments `retrive_*`, as its callers do.
"""

import torch
from sgl_kernel.cache_locs import ragged_span
from torch.nn.functional import pad

FULL_MASK, QLEN_ONLY = 0, 1


def build_tree_kernel_efficient_cpu(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Link the drafts that top-k drafting selected into trees, and write their attention mask.

    A draft's number is `topk * t + j`: the j-th continuation of the t-th expanded node, where
    t = 0 is the root and `parent_list[b, t]` is the number of the node t > 0. A draft whose
    parent was not selected stays unlinked.

    parent_list: (bs, 1 + topk * (depth - 1)), or (bs, 0) when depth is 1;
    selected_index: (bs, n - 1), the numbers of nodes 1, 2, ...; verified_seq_len: (bs,).
    Written: positions (bs * n,), the verified length plus the node's level; the link tensors;
    tree_mask, flat bool or uint8, a row of n cells for each node. In mode 0 (full mask) each row
    is preceded by verified_seq_len cells, which are left alone; in mode 1 (QLEN_ONLY) by none.
    Raises NotImplementedError for mode 2 (bit-packed masks).
    Call site: kernels/ops/speculative/spec_tree.py, `build_tree_kernel_efficient_func`.
    """
    mode = int(tree_mask_mode)
    if mode not in (FULL_MASK, QLEN_ONLY):
        raise NotImplementedError(
            f"tree_mask_mode {mode} (bit-packed) is CUDA only: use QLEN_ONLY ({QLEN_ONLY})."
        )
    bs, n = verified_seq_len.numel(), draft_token_num
    parent = _parents(parent_list.long(), selected_index.long(), topk)
    retrieve_index.copy_(torch.arange(bs * n).view(bs, n))
    retrieve_next_token.copy_(_first(parent[:, None, :] == torch.arange(n)[:, None]))
    retrieve_next_sibling.copy_(_next_sibling(parent))

    # Climb from every node at once and mark, in its row, the path it takes; at most `depth` steps.
    mask = torch.zeros(bs, n, n, dtype=torch.bool)
    mask[:, :, 0] = True
    level = torch.zeros(bs, n, dtype=torch.long)
    current = torch.arange(n).repeat(bs, 1)
    for _ in range(depth):
        below_root = current > 0
        level += below_root
        mask.scatter_(2, current.clamp(min=0)[:, :, None], True)
        current = torch.where(below_root, parent.gather(1, current.clamp(min=0)), current)
    seq_len = verified_seq_len.long()
    positions.copy_((seq_len[:, None] + level).view(-1))

    first_cell = n * n * torch.arange(bs)
    row_stride = torch.full((bs,), n)
    if mode == FULL_MASK:
        first_cell += n * (seq_len.cumsum(0) - seq_len) + seq_len
        row_stride += seq_len
    rows = first_cell[:, None] + row_stride[:, None] * torch.arange(n)
    cells = rows[:, :, None] + torch.arange(n)
    tree_mask.view(-1)[cells.view(-1)] = mask.view(-1).to(tree_mask.dtype)


def _parents(parent_list: torch.Tensor, selected: torch.Tensor, topk: int) -> torch.Tensor:
    """Parent of each node, (bs, n) int64; -1 for the root and where it was not selected."""
    expanded = selected // topk
    # The extra column makes the root's index 0 a valid one when parent_list is (bs, 0).
    number = pad(parent_list, (0, 1), value=-1).gather(1, expanded)
    place = _first(number[:, :, None] == selected[:, None, :])
    below = torch.where(place >= 0, place + 1, -1)
    return pad(torch.where(expanded == 0, 0, below), (1, 0), value=-1)


def _next_sibling(parent: torch.Tensor) -> torch.Tensor:
    """Next node with the same parent, (bs, n) int64; -1 for none and for nodes without parent."""
    node = torch.arange(parent.shape[1])
    same_parent = parent[:, :, None] == parent[:, None, :]
    return _first(same_parent & (node > node[:, None]) & (parent >= 0)[:, :, None])


def _first(flags: torch.Tensor) -> torch.Tensor:
    """Index of the first true entry of the last dimension, which may be empty; -1 for none."""
    n = flags.shape[-1]
    index = pad(torch.where(flags, torch.arange(n), n), (0, 1), value=n).amin(-1)
    return torch.where(index == n, -1, index)


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Walk down each tree along the target's own tokens until no child matches.

    candidates, retrive_*: (bs, n), tokens and links; target_predict: (bs, n), the target's token
    after each node.
    Written: accept_index (bs, longest path), the flat rows of the accepted path, root first, the
    rest left alone; accept_token_num (bs,), accepted drafts, the root not counted; predicts
    (bs * n,), at each row of the path the token that follows it: the next draft, or at the end
    the bonus token. At most longest path - 1 drafts are accepted.
    Call site: kernels/ops/speculative/spec_tree.py, `verify_tree_greedy_func`.
    """
    tokens, rows = candidates.tolist(), retrive_index.tolist()
    children, siblings = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    wanted = target_predict.reshape(-1).tolist()
    paths = []
    for b in range(len(tokens)):
        node, path = 0, [rows[b][0]]
        for _ in range(accept_index.shape[1] - 1):
            node = children[b][node]
            while node != -1 and tokens[b][node] != wanted[path[-1]]:
                node = siblings[b][node]
            if node == -1:
                break
            path.append(rows[b][node])
        paths.append(path)

    lengths = torch.tensor([len(path) for path in paths], dtype=torch.long)
    accepted = torch.tensor([row for path in paths for row in path], dtype=torch.long)
    request, step = ragged_span(torch.zeros_like(lengths), lengths)
    accept_index[request, step] = accepted.to(accept_index.dtype)
    accept_token_num.copy_(lengths - 1)
    predicts[accepted] = target_predict.reshape(-1)[accepted].to(predicts.dtype)


def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    accept_stride: int,
) -> None:
    """Take the last accepted token of each request.

    accept_tokens: (bs, accept_stride) or flat; accept_lens: (bs,), at least 1: the bonus token
    counts; bonus_tokens: (bs,), written.
    Call site: kernels/ops/speculative/eagle.py, `fill_bonus_tokens_func`.
    """
    last = accept_lens.long()[:, None] - 1
    bonus_tokens.copy_(accept_tokens.view(-1, accept_stride).gather(1, last).view(-1))


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor,
    out_cache_loc: torch.Tensor,
    accept_out_cache_loc: torch.Tensor,
) -> None:
    """Pack the cache slots of accepted rows, in order, at the head of `accept_out_cache_loc`.

    accept_index: any shape, flat rows, -1 for none; out_cache_loc: (bs * n,);
    accept_out_cache_loc: at least (accepted rows,), the rest is left alone.
    Call site: kernels/ops/speculative/eagle.py, `fill_accept_out_cache_loc_func`.
    """
    rows = accept_index[accept_index > -1].long()
    accept_out_cache_loc[: rows.numel()] = out_cache_loc[rows].to(accept_out_cache_loc.dtype)


def rotate_input_ids_cpu(
    input_ids: torch.Tensor,
    extend_start_loc: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    topk_index: torch.Tensor,
    select_index: torch.Tensor | None = None,
) -> None:
    """Shift each request's tokens left by one and append its newly drafted token.

    input_ids: (tokens,), written; extend_start_loc, extend_seq_lens: (bs,), the request's segment,
    left alone where its length is 0; topk_index: (bs,) or (bs, 1), the new tokens; select_index:
    (bs,), the flat row that takes the new token instead of the segment's last.
    Call site: kernels/ops/speculative/multi_layer_eagle.py, `rotate_input_ids`.
    """
    start, lengths = extend_start_loc.long(), extend_seq_lens.long()
    _, rows = ragged_span(start, (lengths - 1).clamp(min=0))
    input_ids[rows] = input_ids[rows + 1]
    last = start + lengths - 1 if select_index is None else select_index.long()
    present = lengths > 0
    input_ids[last[present]] = topk_index.reshape(-1)[present].to(input_ids.dtype)


def reconstruct_indices_from_tree_mask(
    tree_mask: torch.Tensor,
    verified_seq_len: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Recover positions and links of trees from their ancestor masks.

    tree_mask: flat, (batch_size, n, n): cell [i, j] says that node j is i itself or above it, cells
    beyond the diagonal are ignored; verified_seq_len: (batch_size,).
    Written: positions and the three link tensors, batch_size * n elements each.
    Call site: kernels/ops/speculative/reconstruct_tree.py,
    `reconstruct_indices_from_tree_mask_func`.
    """
    node = torch.arange(draft_token_num)
    cells = batch_size * draft_token_num**2
    above = tree_mask.view(-1)[:cells].view(batch_size, draft_token_num, draft_token_num).bool()
    above = above & (node < node[:, None])
    # The nearest node above is the latest one; the first one below is the first child.
    parent = pad(torch.where(above, node, -1), (0, 1), value=-1).amax(-1)
    links = (
        (positions, above.sum(-1) + verified_seq_len.long()[:, None]),
        (retrieve_index, torch.arange(batch_size * draft_token_num)),
        (retrieve_next_token, _first(above.transpose(1, 2))),
        (retrieve_next_sibling, _next_sibling(parent)),
    )
    for out, values in links:
        out.view(-1).copy_(values.reshape(-1))

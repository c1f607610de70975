"""Draws one token a row from draft logits, in one pass over the vocabulary.

A row with temperature 0 takes its first maximum. Any other row adds Gumbel noise to ``logits /
temperature`` and takes the maximum, which is an exact draw from the softmax (the Gumbel-max
identity). The noise comes from :mod:`.philox` keyed by the row's seed, offset and column, so there
is no noise buffer and a row's draw does not depend on the batch around it.

The noise is ``-log(E)`` with ``E = -log(1 - v)`` exponential and ``v = (word + 1/2) / 2**32``. What
decides a draw are the smallest ``E``, for which ``1 - v`` in float32 would lose the low bits of
``v``. The reference has ``log1p``; the kernel takes ``E = v (1 + v / 2 + v**2 / 3)`` below
``2**-8``, off by less than ``v**3 / 4 < 2**-26`` of it. Columns of probability down to about
``2**-32`` are thus drawn as often as they should be.

``v >= 2**-33`` bounds the noise by 22.9. A tile of columns whose largest logit is more than that
below the best key so far cannot win, and the kernel skips its noise, which changes no draw. At low
temperatures most tiles of a peaked distribution are skipped.

The vocabulary is split over programs when there are few rows, and a second kernel picks the best
split.
"""

from typing import Optional, Tuple

import torch
import triton
import triton.language as tl
from sglang.kernels.ops.speculative.flashmap.device import sm_count
from sglang.kernels.ops.speculative.flashmap.launch import (
    launch_options,
    wait_for_inputs,
)
from sglang.kernels.ops.speculative.flashmap.philox import (
    SAMPLER_STREAM,
    philox_torch,
    philox_words,
)
from sglang.srt.utils.custom_op import register_custom_op

_PROGRAMS_PER_SM = 4
TILE = 2048
SERIES_BELOW = 2.0**-8
MAX_NOISE = 22.9
# Columns of noise the reference holds at a time: few enough for a core's cache.
REFERENCE_COLUMNS = 1 << 17


def gumbel_noise_torch(
    seeds: torch.Tensor, offsets: torch.Tensor, columns: int, stream: int = SAMPLER_STREAM
) -> torch.Tensor:
    """The sampler's float32 noise ``(R, columns)`` of int64 ``seeds (R,)`` and ``offsets (R,)``."""
    quads = torch.arange((columns + 3) // 4, device=seeds.device)
    words = philox_torch(seeds[:, None], offsets[:, None], quads, stream)
    v = words.flatten(1)[:, :columns].float() * 2.0**-32 + 2.0**-33
    v = v.clamp_max(1 - 2.0**-24)
    return -(-torch.log1p(-v)).log()


def gumbel_keys_torch(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    offsets: torch.Tensor,
    stream: int = SAMPLER_STREAM,
) -> torch.Tensor:
    """``logits (R, V)`` over positive ``temperatures (R,)`` plus noise, float32."""
    noise = gumbel_noise_torch(seeds, offsets, logits.shape[1], stream)
    return logits.float() * (1 / temperatures)[:, None] + noise


def sample_draft_torch(
    logits: torch.Tensor,
    ids: Optional[torch.Tensor],
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    offsets: torch.Tensor,
    stream: int = SAMPLER_STREAM,
) -> torch.Tensor:
    """Reference of :func:`sample_draft`."""
    rows, vocab = logits.shape
    columns = logits.float().argmax(dim=1)
    sampled = temperatures.nonzero().squeeze(1)
    for part in sampled.split(max(REFERENCE_COLUMNS // vocab, 1)):
        args = (logits[part], temperatures[part], seeds[part], offsets[part], stream)
        columns[part] = gumbel_keys_torch(*args).argmax(dim=1)
    return columns if ids is None else ids[columns]


@triton.jit
def gumbel_noise(seed, offset, first, stream, SERIES_BELOW: tl.constexpr, BLOCK: tl.constexpr):
    """The noise of columns ``first .. first + BLOCK``; both are multiples of 4."""
    quad = first // 4 + tl.arange(0, BLOCK // 4)
    w0, w1, w2, w3 = philox_words(seed, offset, quad, stream)
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (BLOCK,))
    v = tl.minimum(words.to(tl.float32) * 2.0**-32 + 2.0**-33, 1 - 2.0**-24)
    series = v * (1 + v * (0.5 + v * (1 / 3)))
    return -tl.log(tl.where(v < SERIES_BELOW, series, -tl.log(1 - v)))


@triton.jit
def _sample_kernel(
    logits_ptr,
    ids_ptr,
    temperatures_ptr,
    seeds_ptr,
    offsets_ptr,
    keys_ptr,
    columns_ptr,
    stride,
    vocab,
    share,
    stream,
    HAS_IDS: tl.constexpr,
    SPLITS: tl.constexpr,
    SERIES_BELOW: tl.constexpr,
    MAX_NOISE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    # Programs: (row, split of the vocabulary). A split has `share` columns, whole tiles.
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    temperature = tl.load(temperatures_ptr + row)
    seed = tl.load(seeds_ptr + row)
    offset = tl.load(offsets_ptr + row)
    greedy = temperature == 0
    inverse = tl.where(greedy, 1.0, 1.0 / tl.where(greedy, 1.0, temperature))
    reach = tl.where(greedy, 0.0, MAX_NOISE)
    start = split * share
    end = tl.minimum(start + share, vocab)
    best = tl.full((), float("-inf"), tl.float32)
    best_column = start
    for first in range(start, end, BLOCK):
        column = first + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + row * stride + column, mask=column < end, other=float("-inf"))
        key = logits.to(tl.float32) * inverse
        top = tl.max(key, 0)
        if top + reach > best:
            if temperature != 0:
                key += gumbel_noise(seed, offset, first, stream, SERIES_BELOW, BLOCK)
                top = tl.max(key, 0)
            if top > best:
                best = top
                best_column = tl.min(tl.where(key == top, column, vocab), 0)
    if SPLITS > 1:
        tl.store(keys_ptr + row * SPLITS + split, best)
        tl.store(columns_ptr + row * SPLITS + split, best_column)
    else:
        token = best_column.to(tl.int64)
        if HAS_IDS:
            token = tl.load(ids_ptr + token)
        tl.store(columns_ptr + row, token)


@triton.jit
def _best_split_kernel(
    keys_ptr,
    columns_ptr,
    ids_ptr,
    tokens_ptr,
    vocab,
    HAS_IDS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK_SPLITS)
    mask = split < SPLITS
    key = tl.load(keys_ptr + row * SPLITS + split, mask=mask, other=float("-inf"))
    column = tl.load(columns_ptr + row * SPLITS + split, mask=mask, other=vocab)
    token = tl.min(tl.where(key == tl.max(key, 0), column, vocab), 0).to(tl.int64)
    if HAS_IDS:
        token = tl.load(ids_ptr + token)
    tl.store(tokens_ptr + row, token)


def split_vocab(
    rows: int, vocab: int, device: torch.device, splits: Optional[int] = None
) -> Tuple[int, int]:
    """Columns of a split, whole tiles, and the number of splits: about ``splits`` if given, else
    so many that ``rows`` of them occupy the device."""
    tiles = triton.cdiv(vocab, TILE)
    if splits is None:
        splits = triton.cdiv(_PROGRAMS_PER_SM * sm_count(device), rows)
    share = triton.cdiv(tiles, min(splits, tiles)) * TILE
    return share, triton.cdiv(vocab, share)


def sample_draft_triton(
    logits: torch.Tensor,
    ids: Optional[torch.Tensor],
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    offsets: torch.Tensor,
    stream: int = SAMPLER_STREAM,
    splits: Optional[int] = None,
) -> torch.Tensor:
    """Launcher of :func:`sample_draft`; ``splits`` overrides the number of vocabulary splits."""
    rows, vocab = logits.shape
    assert logits.stride(1) == 1
    assert temperatures.shape == seeds.shape == offsets.shape == (rows,)
    assert temperatures.dtype == torch.float32 and temperatures.is_contiguous()
    assert seeds.dtype == offsets.dtype == torch.int64
    assert seeds.is_contiguous() and offsets.is_contiguous()
    assert ids is None or (
        ids.shape == (vocab,) and ids.dtype == torch.int64 and ids.is_contiguous()
    )
    tokens = torch.empty((rows,), dtype=torch.int64, device=logits.device)
    if rows == 0:
        return tokens
    share, splits = split_vocab(rows, vocab, logits.device, splits)
    keys, columns = tokens, tokens
    if splits > 1:
        keys = torch.empty((rows, splits), dtype=torch.float32, device=logits.device)
        columns = torch.empty((rows, splits), dtype=torch.int32, device=logits.device)
    _sample_kernel[(rows, splits)](
        logits,
        ids if ids is not None else tokens,
        temperatures,
        seeds,
        offsets,
        keys,
        columns,
        logits.stride(0),
        vocab,
        share,
        stream,
        HAS_IDS=ids is not None,
        SPLITS=splits,
        SERIES_BELOW=SERIES_BELOW,
        MAX_NOISE=MAX_NOISE,
        BLOCK=TILE,
        **launch_options(logits.device),
    )
    if splits > 1:
        _best_split_kernel[(rows,)](
            keys,
            columns,
            ids if ids is not None else tokens,
            tokens,
            vocab,
            HAS_IDS=ids is not None,
            SPLITS=splits,
            BLOCK_SPLITS=triton.next_power_of_2(splits),
            num_warps=1,
            **launch_options(logits.device),
        )
    return tokens


def _fake_sample_draft(
    logits: torch.Tensor,
    ids: Optional[torch.Tensor],
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    offsets: torch.Tensor,
    stream: int = SAMPLER_STREAM,
    splits: Optional[int] = None,
) -> torch.Tensor:
    return torch.empty((logits.shape[0],), dtype=torch.int64, device=logits.device)


_sample_draft_op = register_custom_op(
    sample_draft_triton,
    op_name="flashmap_sample_draft",
    mutates_args=[],
    fake_impl=_fake_sample_draft,
)


def sample_draft(
    logits: torch.Tensor,
    ids: Optional[torch.Tensor],
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    offsets: torch.Tensor,
    stream: int = SAMPLER_STREAM,
) -> torch.Tensor:
    """One token a row: a draw from ``softmax(logits / temperature)``, or the first maximum.

    Args:
        logits: ``(R, V)``, any float dtype; columns are contiguous. A column at -inf is
            never drawn.
        ids: ``(V,)`` int64, the token id of each column of a restricted vocabulary; None when
            they coincide.
        temperatures: ``(R,)`` float32; positive, or 0 for the first maximum.
        seeds: ``(R,)`` int64, each row's request seed.
        offsets: ``(R,)`` int64; rows of one seed need different offsets, and so do successive
            steps. Equal ``(seed, offset, stream)`` give equal noise.
        stream: keeps the draws of different uses of one seed apart; see :mod:`.philox`.

    Returns:
        ``(R,)`` int64 token ids.
    """
    implementation = _sample_draft_op if logits.is_cuda else sample_draft_torch
    return implementation(logits, ids, temperatures, seeds, offsets, stream)

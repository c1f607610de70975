"""Server arguments of the FLASHMAP speculative algorithm.

``Spec`` inherits them, so each is a ``--speculative-flashmap-…`` flag and a leaf of
``get_spec()`` like upstream's own; ``speculative/flashmap/config.py`` reads them from there.
"""

from __future__ import annotations

from typing import Literal, Optional

import msgspec
from sglang.srt.arg_groups.arg_utils import A


class FlashMapSpecFields(msgspec.Struct):
    """The ``speculative_flashmap_*`` fields of the ``spec`` namespace."""

    speculative_flashmap_verify_attention: A[
        Literal["auto", "backend", "splitkv"],
        "Attention of verify steps, of any speculative algorithm: the attention backend's own, or "
        "split-KV, for which verify runs on the triton backend. 'auto': with FLASHMAP and no "
        "attention backend given, split-KV where it was measured to be the best choice; 'backend' "
        "otherwise.",
    ] = "auto"
    speculative_flashmap_num_steps: A[
        Optional[int],
        "FLASHMAP only. Jumps per draft block; the draft checkpoint must have a jump grid for this "
        "many. Default: the checkpoint's num_steps.",
    ] = None
    speculative_flashmap_draft_vocab_size: A[
        Optional[int],
        "FLASHMAP only. Draft over this many most frequent tokens (draft_vocab.safetensors of the "
        "draft checkpoint); 0 drafts over the whole vocabulary. Output is lossless either way. "
        "Default: the checkpoint's draft_vocab_size.",
    ] = None
    speculative_flashmap_noise: A[
        Literal["auto", "cholesky", "folded"],
        "FLASHMAP only, drafts of one jump. How the draft's noise is embedded: one folded product, "
        "or the Cholesky factor of the embedding's Gram matrix, then norm and projection. Both "
        "have the same law. 'auto' is folded on a GPU.",
    ] = "auto"
    speculative_flashmap_noise_error: A[
        float,
        "FLASHMAP only. Leave directions out of the folded noise up to this relative root mean "
        "square error of the noise term; 0 leaves out none. Output is lossless either way.",
    ] = 0.0
    speculative_flashmap_noise_temperature: A[
        float,
        "FLASHMAP only. Factor of the draft's starting noise. 0 drafts from one fixed state. "
        "Output is lossless either way.",
    ] = 1.0
    speculative_flashmap_draft_temperature: A[
        float,
        "FLASHMAP only. Factor of a request's temperature at which its drafts are drawn, above 0 "
        "and at most 2. Greedy requests are drafted greedily whatever it is. Output is lossless "
        "either way.",
    ] = 1.0
    speculative_flashmap_tree_candidates: A[
        int,
        "FLASHMAP only. Candidate blocks per request, N, drafted in one pass from independent "
        "noise and verified as one tree of their shared prefixes. 0 verifies chains, and so does 1 "
        "without --speculative-flashmap-tree-choices. Requests above "
        "--speculative-flashmap-tree-temperature get chains of the first candidate, or with "
        "choices trees of its draws.",
    ] = 0
    speculative_flashmap_tree_choices: A[
        int,
        "FLASHMAP only. Grows trees from the likeliest tokens of each slot, this many per "
        "candidate, instead of keeping what most candidates share. One candidate is then enough "
        "for a tree. 0 counts candidates.",
    ] = 0
    speculative_flashmap_tree_budget: A[
        int,
        "FLASHMAP only. Candidate blocks per batch: a batch of B requests drafts "
        "clamp(budget // B, 1, N) for each.",
    ] = 32
    speculative_flashmap_tree_temperature: A[
        Optional[float],
        "FLASHMAP only, with trees. Sampled requests up to this temperature are verified by "
        "matching the target's own draws, hotter ones by rejection, which accepts more there: on "
        "trees of draws with --speculative-flashmap-tree-choices, else (and with "
        "--speculative-use-block-verification) on chains. The distribution is the target's either "
        "way; docs/flashmap.md says how to find the best value for a draft. Default: 0.8 for trees "
        "that grow from --speculative-flashmap-tree-choices, 0.3 for others.",
    ] = None
    speculative_flashmap_verify_width: A[
        str,
        "FLASHMAP only. Rows per request in a verify forward, W: the last token and W - 1 drafts. "
        "The same as --speculative-num-draft-tokens; 'auto' is the block size, or one more.",
    ] = "auto"
    speculative_flashmap_draft_quantization: A[
        Literal["none", "fp8"],
        "FLASHMAP only. 'fp8' keeps the draft's large weights in e4m3 with a scale per output "
        "channel (Ada, Hopper and later). Output is lossless either way.",
    ] = "none"
    speculative_flashmap_jump_bank_size: A[
        int,
        "FLASHMAP only, drafts of several jumps. Noise draws to precompute, so that no jump needs "
        "products as wide as the vocabulary; approximate, see the documentation. 0: none, the "
        "exact jumps. Output is lossless either way.",
    ] = 0
    speculative_flashmap_jump_topk: A[
        int,
        "FLASHMAP only, with a jump bank. Most probable tokens that are kept of a jump's "
        "prediction.",
    ] = 16

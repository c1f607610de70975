"""``Drafter``: blocks of drafts and their verify trees, in a CUDA graph where there is one.

A draft reads a few small per-request tensors (``DraftInputs``), the draft KV pool and the seeds of
the requests, and writes ``tokens (B, K)`` and the draft logits. On a server of trees it drafts
``N`` candidate blocks per request, side by side on the cross-attention's query axis so that the
context is read once, and plans the trees; ``N`` depends on the batch's size alone. Candidate 0 is
the same for every ``N``, at the request's draft temperature; the others are sampled at a
temperature of their own, since the likeliest blocks of different noise may be one. Everything else
is weights. So a graph per batch size needs no metadata from an attention backend and no host work
but filling the inputs; padding rows are inactive: they write no context and attend to none.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from typing import Sequence

import torch
from sglang.kernels.ops.speculative.flashmap.draft_rows import DraftRows, draft_rows
from sglang.kernels.ops.speculative.flashmap.filter_logits import filter_logits
from sglang.kernels.ops.speculative.flashmap.sampler import sample_draft
from sglang.kernels.ops.speculative.flashmap.skinny_linear import scratch_bytes
from sglang.kernels.ops.speculative.flashmap.slot_choices import slot_choices
from sglang.kernels.ops.speculative.flashmap.slot_draws import slot_draws
from sglang.kernels.ops.speculative.flashmap.stage_inputs import stage_inputs
from sglang.kernels.ops.speculative.flashmap.tree import TreePlan, plan_tree
from sglang.kernels.ops.speculative.flashmap.tree_growth import grow_tree
from sglang.srt.models.flashmap import DraftContext, FlashMapDraftModel, pool_buffers
from sglang.srt.speculative.flashmap.config import FlashMapServeConfig
from sglang.srt.speculative.flashmap.memory import pool_bytes
from sglang.srt.speculative.flashmap.noise import SeedTable, Stream
from sglang.srt.speculative.flashmap.plan import draw_weights, first_requests
from sglang.srt.speculative.flashmap.side_stream import SideStream

logger = logging.getLogger(__name__)

# Of candidates 1 and up. With the shipped draft, trees of 8 likeliest blocks were chains, of blocks
# sampled at this they had a quarter more drafts accepted (benchmark/flashmap/tree_scores.py).
_CANDIDATE_TEMPERATURE = 0.5


@dataclass(frozen=True)
class DraftInputs:
    """One entry per request, ``(B,)`` where no other shape is said."""

    anchors: torch.Tensor
    """Last verified token, int64."""
    seq_lens: torch.Tensor
    """Committed positions before the anchor (= the anchor's position), int64."""
    rows: torch.Tensor
    """``req_to_token`` row, int64."""
    temperatures: torch.Tensor
    """At which drafts are drawn (``draft_sampling``), float32; 0 drafts the argmax."""
    active: torch.Tensor
    """1, or 0 for graph padding, int32."""
    filters: torch.Tensor
    """Top-k, top-p and min-p, 0 for none, float32 ``(B, 3)``."""
    rejected: torch.Tensor
    """Whether drafts are verified by rejection, bool; read on a server of trees: the tree is then
    candidate 0 alone, or made of draws without replacement (``draws_trees``)."""

    def __iter__(self):
        return iter(getattr(self, field.name) for field in fields(self))

    @classmethod
    def allocate(cls, size: int, device: torch.device | str) -> "DraftInputs":
        def zeros(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        return cls(
            zeros(torch.int64),
            zeros(torch.int64),
            zeros(torch.int64),
            zeros(torch.float32),
            zeros(torch.int32),
            torch.zeros(size, 3, dtype=torch.float32, device=device),
            zeros(torch.bool),
        )

    @classmethod
    def greedy(cls, size: int, device: torch.device | str) -> "DraftInputs":
        """What a step of active, greedy requests need not make anew."""
        inputs = cls.allocate(size, device)
        inputs.active.fill_(1)
        return inputs

    def head(self, size: int) -> "DraftInputs":
        """Views of the first ``size`` requests."""
        return DraftInputs(*(t[:size] for t in self))


@dataclass(frozen=True)
class DraftBlock:
    """Drafts of ``B`` requests; valid until the next draft."""

    tokens: torch.Tensor | None
    """Token ids ``(B, K)`` int64 of candidate 0; None on a server whose trees are made of other
    draws (``draws_trees``)."""
    logits: torch.Tensor
    """Its logits ``(B, K, Vd)`` in the draft's dtype, -inf where a request's filters leave tokens
    out."""
    temperatures: torch.Tensor
    """Its rows' temperatures ``(B,)``: ``softmax(logits / temperatures)`` is what drafts are draws
    from, and what an accept rule divides by."""
    tree: TreePlan | None = None
    """What all candidates are verified as; None on a server of chains."""


class Drafter:
    """Drafts with ``model`` over the pools of a serving process."""

    def __init__(
        self,
        *,
        model: FlashMapDraftModel,
        serve: FlashMapServeConfig,
        seed_table: SeedTable,
        req_to_token: torch.Tensor,
        pool,
    ) -> None:
        self.model = model
        self.serve = serve
        self.seed_table = seed_table
        self.req_to_token = req_to_token
        self._buffers = pool_buffers(pool, model.config.num_hidden_layers)
        self._side = SideStream(req_to_token.device) if req_to_token.is_cuda else None
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, DraftBlock]] = {}
        self._inputs: DraftInputs | None = None
        self._logits: torch.Tensor | None = None

    @torch.inference_mode()
    def draft(self, inputs: DraftInputs) -> DraftBlock:
        """Draft one block per request."""
        size = inputs.anchors.shape[0]
        captured = next((n for n in self._graphs if n >= size), None)
        if captured is None:
            return self._draft(inputs)
        static = self._inputs.head(captured)
        pairs = zip(inputs, static)
        stage_inputs([value.to(buffer.dtype) for value, buffer in pairs], list(static))
        graph, block = self._graphs[captured]
        graph.replay()
        tokens = None if block.tokens is None else block.tokens[:size]
        tree = None if block.tree is None else first_requests(block.tree, size)
        return DraftBlock(tokens, block.logits[:size], block.temperatures[:size], tree)

    def _draft(self, inputs: DraftInputs, out: torch.Tensor | None = None) -> DraftBlock:
        model, config = self.model, self.model.config
        candidates = self.serve.candidates(inputs.rows.shape[0])
        rows = draft_rows(
            inputs.seq_lens,
            inputs.rows,
            inputs.temperatures,
            inputs.filters,
            inputs.active,
            self.seed_table.seeds,
            self.req_to_token,
            candidates,
            self.serve.block_size,
            _CANDIDATE_TEMPERATURE,
            config.head_dim,
            config.rope_theta,
        )
        context = DraftContext(
            key_buffers=self._buffers[0],
            value_buffers=self._buffers[1],
            req_to_token=self.req_to_token,
            req_pool_indices=inputs.rows,
            lens=rows.lens,
            rope=rows.rope,
            anchor_rope=rows.anchor_rope,
        )
        context = model.write_anchor(
            inputs.anchors,
            positions=inputs.seq_lens,
            slots=rows.anchor_slots,
            active=inputs.active,
            context=context,
            side=self._side,
        )
        noise = model.draw_noise(rows.seeds, rows.offsets)
        logits = model.draft_logits(noise, rows.positions, context, candidates, out=out)
        # In place: what is sampled from here is what an accept rule takes as the proposal.
        filter_logits(logits, rows.temperatures, rows.filters)
        if self.serve.draws_trees:
            logits = logits.view(-1, candidates, self.serve.block_size, logits.shape[-1])
            tree = self._grow_drawn(inputs, rows, logits)
            return DraftBlock(None, logits[:, 0], inputs.temperatures, tree)
        tokens = sample_draft(
            logits,
            model.draft_ids,
            rows.temperatures,
            rows.seeds,
            rows.offsets,
            Stream.DRAFT_TOKEN.value,
        ).view(-1, candidates, self.serve.block_size)
        logits = logits.view(*tokens.shape, logits.shape[-1])
        tree = self._plan(inputs, tokens, logits) if self.serve.trees else None
        return DraftBlock(tokens[:, 0], logits[:, 0], inputs.temperatures, tree)

    def _plan(self, inputs: DraftInputs, tokens: torch.Tensor, logits: torch.Tensor) -> TreePlan:
        """The trees of candidates ``tokens (B, N, K)`` and their ``logits (B, N, K, Vd)``; chains
        of requests under rejection."""
        width, choices = self.serve.verify_width, self.serve.tree_choices
        if choices == 0:
            return plan_tree(inputs.anchors, tokens, width, inputs.rejected)
        likely, probs = slot_choices(logits, self.model.draft_ids, inputs.temperatures, choices)
        block = tokens[:, 0].contiguous()
        return grow_tree(inputs.anchors, likely, probs, block, width, inputs.rejected)

    def _grow_drawn(self, inputs: DraftInputs, rows: DraftRows, logits: torch.Tensor) -> TreePlan:
        """Trees of the likeliest tokens by ``logits (B, N, K, Vd)``, of draws without replacement
        for requests under rejection."""
        ids, width, choices = self.model.draft_ids, self.serve.verify_width, self.serve.tree_choices
        likely, probs = slot_choices(logits, ids, inputs.temperatures, choices)
        slot_draws(
            logits,
            ids,
            inputs.temperatures,
            rows.seeds,
            rows.offsets,
            Stream.DRAFT_TOKEN.value,
            inputs.rejected,
            draw_weights(choices, logits.device),
            likely,
            probs,
        )
        return grow_tree(inputs.anchors, likely, probs, None, width, None)

    def pool_bytes(self) -> int:
        """Of the draft KV pool."""
        return pool_bytes(*self._buffers)

    def scratch_bytes(self) -> int:
        """Of the graphs' inputs and the kernels' own buffers; 0 without graphs."""
        if self._inputs is None:
            return 0
        return sum(t.nbytes for t in self._inputs) + scratch_bytes(self._inputs.anchors.device)

    def replay(self, size: int) -> None:
        """Replay the graph of ``size`` requests on the inputs of the last draft (for
        benchmarks)."""
        self._graphs[size][0].replay()

    # --- CUDA graphs -----------------------------------------------------------------------

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int], device: torch.device | str) -> None:
        """Capture one graph per batch size, largest first so that smaller ones reuse its memory."""
        self._inputs = DraftInputs.allocate(max(sizes), device)
        # One buffer for all graphs: a graph's own output would stay allocated for its lifetime.
        rows = {n: n * self.serve.candidates(n) * self.serve.block_size for n in sizes}
        self._logits = torch.empty(
            max(rows.values()), self.model.draft_vocab_size, dtype=self.model.dtype, device=device
        )
        pool = torch.cuda.graph_pool_handle()
        # Before the side stream's, whose products would else hold SMs that the first layer needs.
        stream = torch.cuda.Stream(device, priority=-1)
        graphs = {}
        for size in sorted(set(sizes), reverse=True):
            inputs, out = self._inputs.head(size), self._logits[: rows[size]]
            for _ in range(2):  # compiles the kernels and sizes cuBLAS workspaces
                self._draft(inputs, out)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                block = self._draft(inputs, out)
            graphs[size] = (graph, block)
        # Ascending, so that the first size that fits is the smallest.
        self._graphs = dict(sorted(graphs.items()))

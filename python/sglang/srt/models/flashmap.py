"""The FlashMap draft model: modules, weights and the passes of a draft step.

The network is the one of ``flashmap.FlashMapDraftModel`` (its tensor names are ours); what is
computed from it differs only by exact identities, in this order:

1. AdaLN modulations depend on a jump's two times alone: one set per jump, at load. On a GPU those
   of a single jump become part of the weights behind them (``projection.py``).
2. A single jump starts from noise ``x0 ~ N(0, I_V)``, read only through ``x0 @ E``, which is
   ``N(0, EᵀE)``: ``z @ Lᵀ`` with ``z ~ N(0, I_H)`` and ``L Lᵀ = EᵀE`` has that law, so no
   vocabulary-wide noise is drawn (or the folded form of it, see ``folded_noise.py``). At ``s = 0``
   the state's posterior is uniform: a constant.
3. The DiT's head and the target's LM head meet with no non-linearity between them: they are
   folded (in float32) into one ``(draft vocabulary, d)`` projection.
4. All layers' context keys and values come from one GEMM and are normed, rotated and scattered
   into the draft KV pool by one kernel.

More than one jump carries the block's state ``x (rows, V)`` itself, as the definition does, or
takes it from a bank of precomputed noise, which approximates it (``jump_bank.py``).

Rows: a draft of ``B`` requests with ``N`` candidate blocks of ``K`` slots has ``B * N * K`` rows,
candidates of one request side by side, so that the request's context is read once for all.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, fields
from typing import Callable, Iterable, Iterator, Optional, Union

import torch
from sglang.kernels.ops.speculative.flashmap.block_attention import block_self_attention
from sglang.kernels.ops.speculative.flashmap.context_kv import write_context_kv
from sglang.kernels.ops.speculative.flashmap.fp8_linear import can_quantize
from sglang.kernels.ops.speculative.flashmap.noise import gaussian_noise
from sglang.kernels.ops.speculative.flashmap.norm import rms_norm
from sglang.kernels.ops.speculative.flashmap.residual_linear import can_fuse
from sglang.kernels.ops.speculative.flashmap.rope import rope_table
from sglang.kernels.ops.speculative.flashmap.skinny_linear import skinny_linear
from sglang.srt.arg_groups.refusal import StartRefused
from sglang.srt.configs.draft_parallel import DraftParallelSpec, DraftTPExecution
from sglang.srt.configs.flashmap import FlashMapConfig
from sglang.srt.layers.packed_linear import can_pack, pack
from sglang.srt.speculative.flashmap.attention import ContextAttention, QueryNorm
from sglang.srt.speculative.flashmap.checkpoint import (
    DRAFT_VOCAB_TENSORS,
    check_dtype,
    check_finite,
    check_names_and_shapes,
    draft_vocabulary,
)
from sglang.srt.speculative.flashmap.config import FlashMapServeConfig
from sglang.srt.speculative.flashmap.folded_noise import FoldedNoise, NormedNoise
from sglang.srt.speculative.flashmap.jump_bank import BankNoise, JumpBank, Prediction
from sglang.srt.speculative.flashmap.memory import parameter_bytes
from sglang.srt.speculative.flashmap.network import AdaLN, Layer, Norm, TimeEmbedding
from sglang.srt.speculative.flashmap.noise import Stream, noise_factor
from sglang.srt.speculative.flashmap.projection import Modulation, Projection
from sglang.srt.speculative.flashmap.residual import FusedStream, ModulatedStream
from sglang.srt.speculative.flashmap.side_stream import SideStream
from torch import nn

# Context rows projected at a time: bounds the (rows, layers · 2 · kv) scratch of a long prefill.
_CONTEXT_CHUNK = 4096
# Rows of the embedding or LM head converted to a wider dtype at a time.
_VOCAB_CHUNK = 8192
# Clamp of 1 - s in the posterior's scale s / (1 - s)², as the weights were trained.
_MIN_REMAINING_TIME = 1e-3


@dataclass(frozen=True)
class LayerProjections:
    """The products of one layer, as a draft computes them."""

    self_qkv: Projection
    self_o: Projection
    cross_q: Projection
    cross_o: Projection
    fc1: Projection
    fc2: Projection

    def __iter__(self) -> Iterator[Projection]:
        return iter(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class JumpConstants:
    """What a jump ``s → t`` reads besides its state."""

    start: float
    end: float
    layers: list[tuple[Modulation, Modulation, Modulation]]
    final: Modulation
    noise_gate: torch.Tensor  # (1,) weight of the noise embedding

    def folded(self) -> "JumpConstants":
        """What is left once projections hold the modulations."""
        layers = [tuple(modulation.folded() for modulation in layer) for layer in self.layers]
        return dataclasses.replace(self, layers=layers, final=self.final.folded())


@dataclass(frozen=True)
class DraftContext:
    """The paged context that a draft of ``B`` requests attends to.

    ``req_to_token (rows, max_context)`` lists pool slots; request ``b`` reads the first
    ``lens[b]`` of row ``req_pool_indices[b]``, the last of which is its anchor.
    """

    key_buffers: list[torch.Tensor]
    value_buffers: list[torch.Tensor]
    req_to_token: torch.Tensor
    req_pool_indices: torch.Tensor
    lens: torch.Tensor
    # Rotary tables of the slots' positions and the anchors', where they are made already.
    rope: Optional[torch.Tensor] = None
    anchor_rope: Optional[torch.Tensor] = None
    # Where anchors are written on a stream of their own: events that the first layer and the others
    # wait for, see `write_anchor`.
    written: tuple[torch.cuda.Event, ...] = ()


# What a draft starts from: normal draws, the folded form's, or the bank's.
DraftNoise = Union[torch.Tensor, NormedNoise, BankNoise]


class FlashMapDraftModel(nn.Module):
    """A FlashMap drafter as sglang loads it; ``attach_target`` makes it ready to draft."""

    draft_parallel_spec = DraftParallelSpec(tp_execution=DraftTPExecution.SINGLE_GROUP)
    # The folded head, the noise factor and the uniform embedding are computed from weights.
    _derived_weight_cache_error = (
        "FLASHMAP keeps products of the target's embedding and LM head with the draft's weights, "
        "which an online weight update would leave stale; restart the server with the new weights."
    )

    def __init__(self, config: FlashMapConfig, quant_config=None, prefix: str = "") -> None:
        super().__init__()
        if quant_config is not None:
            raise StartRefused(
                "The FLASHMAP draft takes no --speculative-draft-model-quantization; leave it out."
            )
        self.config = config
        dim, target_dim = config.hidden_size, config.target_hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * target_dim, dim, bias=False)
        self.hidden_norm = Norm(dim)
        self.anchor_proj = nn.Linear(target_dim, dim)
        self.anchor_norm = Norm(dim)
        self.state_norm = Norm(target_dim)
        self.noise_norm = Norm(target_dim)
        self.noise_gate = nn.Parameter(torch.ones(1), requires_grad=False)
        self.x_embed = nn.Linear(target_dim, dim)
        self.time_embed = TimeEmbedding(config)
        self.jump_embed = TimeEmbedding(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.final_adaln = AdaLN(config)
        self.head = nn.Linear(dim, target_dim)
        self.requires_grad_(False)

        self._vocab_ranking: Optional[torch.Tensor] = None
        self._weights_loaded = False

    # --- loading ---------------------------------------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy a checkpoint's tensors in; the loader hands over every safetensors file of the
        folder, ``draft_vocab.safetensors`` included. Raises ``FlashMapCheckpointError``."""
        params = dict(self.named_parameters())
        found: dict[str, tuple[int, ...]] = {}
        for name, tensor in weights:
            if name in DRAFT_VOCAB_TENSORS:
                if name == "ids":
                    self._vocab_ranking = tensor
                continue
            found[name] = tuple(tensor.shape)
            if name in params and params[name].shape == tensor.shape:
                check_dtype(name, str(tensor.dtype).removeprefix("torch."), source="checkpoint")
                params[name].data.copy_(tensor)
                check_finite(name, params[name])
        check_names_and_shapes(found, self.config, source="checkpoint")
        self._weights_loaded = True

    def attach_target(
        self,
        *,
        embedding: torch.Tensor,
        lm_head: torch.Tensor,
        lm_head_bias: Optional[torch.Tensor],
        logit_scale: float,
        serve: FlashMapServeConfig,
        attention: ContextAttention,
    ) -> None:
        """Precompute all that drafts read of the target.

        Args:
            embedding: ``(≥ V, H)`` token embedding; rows past the vocabulary are padding.
            lm_head: ``(≥ V, H)`` LM head (the embedding when tied).
            lm_head_bias: ``(≥ V,)`` or None.
            logit_scale: factor of the target's logits (muP targets divide theirs).
            serve: the serving configuration.
            attention: cross-attention over the paged context.
        """
        vocab, hidden = self.config.vocab_size, self.config.target_hidden_size
        for name, weight in (("embedding", embedding), ("LM head", lm_head)):
            if weight.dim() != 2 or weight.shape[0] < vocab or weight.shape[1] != hidden:
                raise StartRefused(
                    f"FLASHMAP needs the target's whole {name} of shape ({vocab}, {hidden}) in an "
                    f"unquantized layout, got {tuple(weight.shape)}; serve the target without "
                    "quantizing its embedding or LM head."
                )
        self.serve = serve
        self.attention = attention
        self.embedding = embedding[:vocab]
        self.draft_ids = self._draft_ids(serve)
        self.draft_columns = self._draft_columns()
        self._fuse_projections()
        self._fold_head(lm_head[:vocab], lm_head_bias, logit_scale)
        self._jumps = [self._jump_constants(s, t) for s, t in serve.jumps]
        self._uniform = self._uniform_embedding()
        self._folds_modulation = len(self._jumps) == 1 and self._can_fold_modulation()
        self._project(fp8=serve.draft_quantization == "fp8")
        if self._folds_modulation:
            self._jumps = [self._jumps[0].folded()]
        self._folded_noise = self._noise_factor = self._bank = None
        if serve.jump_bank_size:
            self._bank = JumpBank(
                self.embedding,
                serve.grid,
                size=serve.jump_bank_size,
                topk=serve.jump_topk,
                temperature=serve.noise_temperature,
            )
        if len(self._jumps) == 1 and serve.folds_noise(self.embedding.device):
            self._folded_noise = self._fold_noise(self._jumps[0])
            self._x_embed = None  # is part of it
        elif len(self._jumps) == 1:
            factor = noise_factor(self.embedding) * serve.noise_temperature
            self._noise_factor = factor.to(self.dtype)
        if serve.draft_quantization == "fp8":
            self._release_replaced(can_quantize)
        elif self._folds_modulation:
            self._release_modulated()

    def _can_fold_modulation(self) -> bool:
        """A single jump's modulations become part of the weights where a kernel gains by it."""
        return self.embedding.is_cuda and self.dtype.itemsize == 2

    def _draft_ids(self, serve: FlashMapServeConfig) -> Optional[torch.Tensor]:
        """Token ids of the draft vocabulary ``(Vd,)``, or None for the whole vocabulary."""
        if not serve.draft_vocab_size:
            return None
        ranking = self._vocab_ranking
        if ranking is None:
            if self._weights_loaded:
                raise StartRefused(
                    "The FLASHMAP draft checkpoint has no draft_vocab.safetensors; pass "
                    "--speculative-flashmap-draft-vocab-size 0 to draft over the whole vocabulary."
                )
            ranking = torch.arange(self.config.vocab_size)  # load format dummy: any ids will do
        ids = draft_vocabulary(ranking, serve.draft_vocab_size, self.config.vocab_size)
        return ids.to(self.embedding.device)

    def _draft_columns(self) -> Optional[torch.Tensor]:
        """Inverse of ``draft_ids``: ``(V,)`` int32 column of each token, 0 for those outside."""
        if self.draft_ids is None:
            return None
        columns = torch.zeros(
            self.config.vocab_size, dtype=torch.int32, device=self.draft_ids.device
        )
        columns[self.draft_ids] = torch.arange(
            self.draft_ids.numel(), dtype=torch.int32, device=columns.device
        )
        return columns

    def _fuse_projections(self) -> None:
        """One weight for all layers' context k/v, one for each self-attention's q/k/v; the
        modules' own weights become views of them, so nothing is stored twice."""
        kv_dim = self.config.num_key_value_heads * self.config.head_dim
        context = []
        for layer in self.layers:
            context += [layer.cross_attn.k_proj.weight, layer.cross_attn.v_proj.weight]
        self._context_kv_weight = torch.cat([w.data for w in context])
        for i, weight in enumerate(context):
            weight.data = self._context_kv_weight[i * kv_dim : (i + 1) * kv_dim]
        self._self_qkv_weights = []
        for layer in self.layers:
            projections = [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]
            fused = torch.cat([p.weight.data for p in projections])
            start = 0
            for projection in projections:
                rows = projection.weight.shape[0]
                projection.weight.data = fused[start : start + rows]
                start += rows
            self._self_qkv_weights.append(fused)
        self._context_k_norm = torch.stack(
            [layer.cross_attn.k_norm.weight.data for layer in self.layers]
        )

    def _project(self, *, fp8: bool) -> None:
        """The products of a draft; with ``fp8`` in e4m3, except ``fc``, whose input has the
        target's outliers and, in a prefill, would be quantized too."""
        if fp8 and self.dtype == torch.float32:
            raise StartRefused(
                "--speculative-flashmap-draft-quantization fp8 needs a draft of 16 bits, and this "
                "one is float32; pass --dtype bfloat16 or leave it out."
            )

        def of(
            weight: torch.Tensor, bias: Optional[torch.Tensor], modulation: Modulation
        ) -> Projection:
            if self._folds_modulation:
                return Projection.modulated(weight, bias, modulation, fp8=fp8)
            return Projection.of(weight, bias, fp8=fp8)

        jump = self._jumps[0]
        self._projections = [
            LayerProjections(
                of(qkv, None, self_mod),
                Projection.of(layer.self_attn.o_proj.weight, fp8=fp8),
                of(layer.cross_attn.q_proj.weight, None, cross_mod),
                Projection.of(layer.cross_attn.o_proj.weight, fp8=fp8),
                of(layer.mlp.fc1.weight, layer.mlp.fc1.bias, mlp_mod),
                Projection.of(layer.mlp.fc2.weight, layer.mlp.fc2.bias, fp8=fp8),
            )
            for layer, qkv, (self_mod, cross_mod, mlp_mod) in zip(
                self.layers, self._self_qkv_weights, jump.layers
            )
        ]
        self._context_kv = Projection.of(self._context_kv_weight, fp8=fp8)
        anchor, state = self.anchor_proj, self.x_embed
        self._anchor_proj = Projection.of(anchor.weight, anchor.bias, fp8=fp8)
        self._x_embed = Projection.of(state.weight, state.bias, fp8=fp8)
        self._head = of(self._folded_head, self._folded_bias, jump.final)
        self._folded_head = self._head.weight

    def _release_modulated(self) -> None:
        """Free the weights that are kept with a modulation in them."""
        for layer in self.layers:
            attention = layer.self_attn
            modules = [attention.q_proj, attention.k_proj, attention.v_proj]
            for module in (*modules, layer.cross_attn.q_proj, layer.mlp.fc1):
                module.weight.data = module.weight.new_empty(0)
        self._self_qkv_weights = [projections.self_qkv.weight for projections in self._projections]

    def _release_replaced(self, replaced: Callable[[torch.Tensor], bool]) -> None:
        """Free the weights of which the products hold another form."""
        modules = [self.anchor_proj, self.x_embed]
        for layer in self.layers:
            for attention in (layer.self_attn, layer.cross_attn):
                modules += [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
            modules += [layer.mlp.fc1, layer.mlp.fc2]
        for module in modules:
            if replaced(module.weight):
                module.weight.data = module.weight.new_empty(0)
        self._context_kv_weight = self._context_kv.weight
        self._self_qkv_weights = [projections.self_qkv.weight for projections in self._projections]

    def _fold_head(
        self, lm_head: torch.Tensor, bias: Optional[torch.Tensor], logit_scale: float
    ) -> None:
        """``head`` and the target's LM head as one projection onto the draft vocabulary."""
        ids = self.draft_ids
        rows = lm_head.shape[0] if ids is None else ids.numel()
        weight = torch.empty(rows, self.config.hidden_size, dtype=self.dtype, device=lm_head.device)
        folded_bias = torch.empty(rows, dtype=self.dtype, device=lm_head.device)
        head_weight, head_bias = self.head.weight.float(), self.head.bias.float()
        for start in range(0, rows, _VOCAB_CHUNK):
            part = slice(start, min(start + _VOCAB_CHUNK, rows))
            chosen = part if ids is None else ids[part]
            chunk = lm_head[chosen].float() * logit_scale
            weight[part] = (chunk @ head_weight).to(self.dtype)
            chunk_bias = chunk @ head_bias
            if bias is not None:
                chunk_bias = chunk_bias + bias[chosen].float() * logit_scale
            folded_bias[part] = chunk_bias.to(self.dtype)
        self._folded_head, self._folded_bias = weight, folded_bias

    def pack_weights(self) -> None:
        """Bring the weights that drafts multiply with into the layout a CPU reads fastest, see
        ``layers/packed_linear.py``; to be called once, after ``attach_target``."""

        def packed(product: Projection) -> Projection:
            return dataclasses.replace(product, weight=pack(product.weight))

        self._projections = [LayerProjections(*map(packed, layer)) for layer in self._projections]
        self._context_kv, self._head = packed(self._context_kv), packed(self._head)
        self._anchor_proj = packed(self._anchor_proj)
        if self._x_embed is not None:
            self._x_embed = packed(self._x_embed)
        self._folded_head = self._head.weight
        if self._noise_factor is not None:
            self._noise_factor = pack(self._noise_factor)
        self._release_replaced(can_pack)
        self.fc.weight = nn.Parameter(pack(self.fc.weight), requires_grad=False)

    def _uniform_embedding(self) -> torch.Tensor:
        """``state_norm(mean of E) (1, H)``: the state term of every jump from ``s = 0``."""
        vocab = self.embedding.shape[0]
        uniform = torch.full(
            (1, vocab), 1.0 / vocab, dtype=torch.float32, device=self.embedding.device
        ).to(self.embedding.dtype)
        mean = (uniform @ self.embedding).to(self.dtype)
        return rms_norm(mean, self.state_norm.weight, self.config.rms_norm_eps)

    def _fold_noise(self, jump: "JumpConstants") -> FoldedNoise:
        return FoldedNoise.fold(
            self.embedding,
            uniform=self._uniform,
            norm_weight=self.noise_norm.weight,
            weight=self.x_embed.weight,
            bias=self.x_embed.bias,
            gate=jump.noise_gate,
            eps=self.config.rms_norm_eps,
            temperature=self.serve.noise_temperature,
            max_error=self.serve.noise_error,
            fp8=self.serve.draft_quantization == "fp8",
        )

    def _jump_constants(self, start: float, end: float) -> JumpConstants:
        times = torch.tensor([start, end], device=self.fc.weight.device)
        cond = self.time_embed(times[:1]) + self.jump_embed(times[1:])
        length = 1.0 if self.config.noise_gate == "constant" else end - start
        return JumpConstants(
            start=start,
            end=end,
            layers=[
                (
                    layer.self_attn_adaln.modulation(cond),
                    layer.cross_attn_adaln.modulation(cond),
                    layer.mlp_adaln.modulation(cond),
                )
                for layer in self.layers
            ],
            final=self.final_adaln.modulation(cond),
            noise_gate=(self.noise_gate.float() * length).to(self.dtype),
        )

    @property
    def draft_vocab_size(self) -> int:
        """Columns of the draft logits, ``Vd``."""
        return self._folded_bias.shape[0]

    def weight_bytes(self) -> int:
        """Bytes of the checkpoint's tensors, in whatever form they are kept: quantized, packed or
        with a modulation in them."""
        return parameter_bytes(self) + self._own_bytes(
            [*(product for layer in self._projections for product in layer), self._context_kv]
            + [self._anchor_proj]
            + ([] if self._x_embed is None else [self._x_embed])
        )

    def derived_bytes(self) -> int:
        """Bytes of products of the checkpoint's tensors and the target's."""
        products = [self._head, Projection(self._uniform)]
        if self._folded_noise is not None:
            products.append(self._folded_noise.projection)
        if self._noise_factor is not None:
            products.append(Projection(self._noise_factor))
        bank = self._bank.tensors() if self._bank is not None else []
        return self._own_bytes(products + [Projection(t) for t in bank])

    def _own_bytes(self, products: list[Projection]) -> int:
        """Of tensors that are no parameters, each once."""

        def address(t: torch.Tensor) -> int:
            return id(t) if t.is_mkldnn else t.data_ptr()

        parameters = {address(p) for p in self.parameters()}
        kept = {address(t): t for product in products for t in product.tensors()}
        return sum(t.numel() * t.element_size() for at, t in kept.items() if at not in parameters)

    def products(self) -> list[Projection]:
        """What a draft multiplies with, besides a Cholesky factor of its noise."""
        layers = [product for layer in self._projections for product in layer]
        return [
            *(*layers, self._context_kv, self._anchor_proj),
            *(self._input_projection(), self._head),
        ]

    def _input_projection(self) -> Projection:
        """What embeds the state or, folded, the noise."""
        return self._x_embed if self._folded_noise is None else self._folded_noise.projection

    # --- context ---------------------------------------------------------------------------

    def write_target_hidden_kv(
        self,
        *,
        target_hidden: torch.Tensor,
        pool,
        positions: torch.Tensor,
        cache_loc: torch.Tensor,
        cache_loc_2d: Optional[torch.Tensor] = None,
        commit_lens: Optional[torch.Tensor] = None,
        target_hidden_is_projected: bool = False,
    ) -> None:
        """Write the context entries of ``T`` positions (upstream's draft protocol).

        Args:
            target_hidden: ``(T, layers · H)`` captured outputs of the target layers.
            pool: the draft's KV pool.
            positions: ``(T,)``; cache_loc: ``(T,)`` pool slots.
            cache_loc_2d: ``(B, W)`` view of ``cache_loc`` when the rows are verify windows.
            commit_lens: ``(B,)``; column ``j`` of window ``b`` is written if
                ``j < commit_lens[b]``.
        """
        assert not target_hidden_is_projected
        assert (commit_lens is None) == (cache_loc_2d is None)
        key_buffers, value_buffers = pool_buffers(pool, self.config.num_hidden_layers)
        total = target_hidden.shape[0]
        # A commit is at most one verify batch; only prefills are long enough to need chunks.
        chunk = total if commit_lens is not None else _CONTEXT_CHUNK
        for start in range(0, total, max(chunk, 1)):
            part = slice(start, min(start + chunk, total))
            hidden = skinny_linear(target_hidden[part].to(self.dtype), self.fc.weight)
            entry = rms_norm(hidden, self.hidden_norm.weight, self.config.rms_norm_eps)
            self._write_context(
                entry,
                rope=self._rope(positions[part], None),
                slots=cache_loc[part],
                key_buffers=key_buffers,
                value_buffers=value_buffers,
                commit_lens=commit_lens,
            )

    def write_anchor(
        self,
        anchors: torch.Tensor,
        *,
        positions: torch.Tensor,
        slots: torch.Tensor,
        active: torch.Tensor,
        context: DraftContext,
        side: Optional[SideStream] = None,
    ) -> DraftContext:
        """Write the anchors' context entries: token ids ``anchors (B,)`` at ``positions (B,)`` into
        pool ``slots (B,)``, for requests whose ``active (B,)`` int32 is 1.

        Returns ``context``, for what attends to them; with ``side`` they are written there, the
        first layer's for themselves, since it attends long before the others.
        """
        if side is not None:
            with side.fork():
                entry = self._anchor_entry(anchors)
                written = []
                count = self.config.num_hidden_layers
                for layers in (slice(0, 1), slice(1, count))[:count]:
                    self._write_anchor_entry(entry, positions, slots, active, context, layers)
                    written.append(side.mark())
            return dataclasses.replace(context, written=tuple(written))
        entry = self._anchor_entry(anchors)
        self._write_anchor_entry(entry, positions, slots, active, context, slice(None))
        return context

    def _anchor_entry(self, anchors: torch.Tensor) -> torch.Tensor:
        embedded = self.embedding[anchors].to(self.dtype)
        hidden = self._anchor_proj(embedded)
        return rms_norm(hidden, self.anchor_norm.weight, self.config.rms_norm_eps)

    def _write_anchor_entry(self, entry, positions, slots, active, context, layers) -> None:
        self._write_context(
            entry,
            rope=self._rope(positions, context.anchor_rope),
            slots=slots,
            key_buffers=context.key_buffers,
            value_buffers=context.value_buffers,
            commit_lens=active,
            layers=layers,
        )

    def _write_context(
        self,
        entry,
        *,
        rope,
        slots,
        key_buffers,
        value_buffers,
        commit_lens,
        layers: slice = slice(None),
    ) -> None:
        """Write context entries of ``entry (T, d)`` of some ``layers``."""
        config = self.config
        first, end, _ = layers.indices(config.num_hidden_layers)
        width = 2 * config.num_key_value_heads * config.head_dim
        product = self._context_kv
        if end - first < config.num_hidden_layers:
            product = product.rows(first * width, end * width)
        kv = product(entry).view(-1, end - first, 2, config.num_key_value_heads, config.head_dim)
        write_context_kv(
            kv,
            self._context_k_norm[first:end],
            rope,
            slots,
            key_buffers[first:end],
            value_buffers[first:end],
            config.qk_norm_eps,
            commit_lens,
        )

    # --- drafting --------------------------------------------------------------------------

    @property
    def noise_width(self) -> int:
        """Standard normal draws per row: at most ``H`` for one jump, ``V`` for more."""
        if self._folded_noise is not None:
            return self._folded_noise.width
        return self.config.target_hidden_size if len(self._jumps) == 1 else self.config.vocab_size

    def draw_noise(self, seeds: torch.Tensor, offsets: torch.Tensor) -> DraftNoise:
        """What ``draft_logits`` takes for rows of ``seeds, offsets (B·N·K,)`` int64."""
        if self._bank is not None:
            return self._bank.draw(seeds, offsets)
        if self._folded_noise is not None:
            return self._folded_noise.draw(seeds, offsets)
        return gaussian_noise(seeds, offsets, self.noise_width, Stream.DRAFT_NOISE.value)

    def draft_logits(
        self,
        noise: DraftNoise,
        positions: torch.Tensor,
        context: DraftContext,
        num_candidates: int = 1,
        out: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """Logits over the draft vocabulary of every slot.

        Args:
            noise: ``(B·N·K, noise_width)`` standard normal draws, or what ``draw_noise`` returns.
            positions: ``(B·N·K,)`` positions of the slots.
            context: the paged context, anchors written.
            num_candidates: ``N``.
            out: ``(B·N·K, Vd)`` in the draft's dtype to write the result to.

        Returns:
            ``(B·N·K, Vd)`` in the draft's dtype: given the noise, the slots are independent draws
            from their softmax.
        """
        rope = self._rope(positions, context.rope)
        if isinstance(noise, BankNoise):
            return self._bank_logits(noise, rope, context, num_candidates, out)
        if len(self._jumps) == 1:
            x, factor = self._noise_input(noise)
            jump = self._jumps[0]
            stream = self._dit(x, jump, rope, context, num_candidates, row_scale=factor)
            return self._logits(stream, jump, out)
        state = noise.float() * self.serve.noise_temperature
        for jump in self._jumps:
            logits = self._jump_logits(state, jump, rope, context, num_candidates, out)
            if jump.end < 1.0:
                landed = self._full_vocabulary(logits.float().softmax(dim=-1))
                state = ((1.0 - jump.end) * state + (jump.end - jump.start) * landed) / (
                    1.0 - jump.start
                )
        return logits

    def _bank_logits(self, noise: BankNoise, rope, context, num_candidates, out) -> torch.Tensor:
        """All jumps from the bank's noise: see ``jump_bank.py``."""
        predictions: list[Prediction] = []
        for jump in self._jumps:
            if not predictions:
                posterior, state = self._uniform, self._bank.first_state(noise)
            else:
                clean, state = self._bank.state(noise, predictions)
                posterior = rms_norm(
                    clean.to(self.dtype), self.state_norm.weight, self.config.rms_norm_eps
                )
            x = self._mix(posterior, state.to(self.dtype), jump)
            logits = self._logits(self._dit(x, jump, rope, context, num_candidates), jump, out)
            if jump.end < 1.0:
                predictions.append(self._bank.predict(logits, self.draft_ids))
        return logits

    def _rope(self, positions: torch.Tensor, made: Optional[torch.Tensor]) -> torch.Tensor:
        if made is not None:
            return made
        return rope_table(positions, self.config.head_dim, self.config.rope_theta)

    def _noise_input(
        self, noise: Union[torch.Tensor, NormedNoise]
    ) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
        """Of a single jump: what is embedded ``(rows, width)``, and the product's row factors."""
        if self._folded_noise is not None:
            normed = self._folded_noise.normed(noise)
            return normed.draws, normed.factor
        embedded = skinny_linear(noise.to(self.dtype), self._noise_factor)
        return self._mix(self._uniform, embedded, self._jumps[0]), None

    def _logits(
        self,
        stream: Union[ModulatedStream, FusedStream],
        jump: JumpConstants,
        out: Optional[torch.Tensor],
    ) -> torch.Tensor:
        """The final AdaLN and the folded head: ``(rows, Vd)``."""
        return stream.read(self._head, jump.final, out=out)

    def _jump_logits(self, state, jump, rope, context, num_candidates, out) -> torch.Tensor:
        """One jump from the vocabulary-wide ``state (rows, V)``."""
        dtype = self.embedding.dtype
        embedded = (state.to(dtype) @ self.embedding).to(self.dtype)
        if jump.start == 0.0:
            posterior = self._uniform
        else:
            scale = jump.start / max(1.0 - jump.start, _MIN_REMAINING_TIME) ** 2
            clean = (state * scale).softmax(dim=-1).to(dtype) @ self.embedding
            posterior = rms_norm(
                clean.to(self.dtype), self.state_norm.weight, self.config.rms_norm_eps
            )
        x = self._mix(posterior, embedded, jump)
        return self._logits(self._dit(x, jump, rope, context, num_candidates), jump, out)

    def _full_vocabulary(self, probs: torch.Tensor) -> torch.Tensor:
        """Scatter ``(rows, Vd)`` onto the whole vocabulary, 0 outside the draft vocabulary."""
        if self.draft_ids is None:
            return probs
        full = probs.new_zeros(probs.shape[0], self.config.vocab_size)
        return full.index_copy_(1, self.draft_ids, probs)

    def _mix(self, posterior, embedded, jump: JumpConstants) -> torch.Tensor:
        """The state's and the noise's embedding, ``(rows, H)``."""
        normed = rms_norm(embedded, self.noise_norm.weight, self.config.rms_norm_eps)
        return posterior + jump.noise_gate * normed

    def _dit(
        self, x, jump: JumpConstants, rope, context, num_candidates, row_scale=None
    ) -> Union[ModulatedStream, FusedStream]:
        """The DiT on rows ``x (B·N·K, width)`` that its input projection embeds."""
        config = self.config
        heads, dim = config.num_attention_heads, config.head_dim
        slots = config.block_size
        requests = x.shape[0] // (num_candidates * slots)
        fused = self._folds_modulation and can_fuse(x, config.hidden_size)
        stream = (FusedStream if fused else ModulatedStream).start(
            self._input_projection(), x, config.layer_norm_eps, row_scale=row_scale
        )
        layers = zip(self.layers, self._projections, jump.layers)
        for i, (layer, project, (self_mod, cross_mod, mlp_mod)) in enumerate(layers):
            attended = block_self_attention(
                stream.read(project.self_qkv, self_mod).view(requests * num_candidates, slots, -1),
                layer.self_attn.q_norm.weight,
                layer.self_attn.k_norm.weight,
                rope,
                config.qk_norm_eps,
                heads,
            )
            stream.add(project.self_o, attended.reshape(-1, heads * dim), self_mod.gate)

            if i < len(context.written):
                context.written[i].wait()
            query = stream.read(project.cross_q, cross_mod)
            attended = self.attention(
                query.view(requests, num_candidates * slots, heads, dim),
                QueryNorm(layer.cross_attn.q_norm.weight, rope, config.qk_norm_eps),
                context.key_buffers[i],
                context.value_buffers[i],
                context,
            )
            stream.add(project.cross_o, attended.reshape(-1, heads * dim), cross_mod.gate)

            inner = stream.read(project.fc1, mlp_mod, activation="gelu")
            stream.add(project.fc2, inner, mlp_mod.gate)
        return stream


def pool_buffers(pool, num_layers: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Per-layer key and value buffers ``(slots, kv heads, D)`` of a draft KV pool."""
    layers = range(num_layers)
    return (
        [pool.get_key_buffer(i) for i in layers],
        [pool.get_value_buffer(i) for i in layers],
    )


EntryClass = [FlashMapDraftModel]

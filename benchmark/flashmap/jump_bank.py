"""What each approximation of a draft costs: error of its logits, agreement of its argmax.

    python benchmark/flashmap/jump_bank.py                                  # random weights
    python benchmark/flashmap/jump_bank.py --target DIR --draft DIR         # a trained draft

Every row drafts the same blocks in float32 and is compared with the exact draft from the same
noise: logits by their relative error (norm of the difference over the norm), slots by whether the
likeliest token is the same. ``cut`` keeps the top tokens of each prediction and the noise; ``cut,
redrawn`` draws their noise anew, as served. A second exact draft from other noise shows how much
the noise alone decides. A finite bank repeats draws and is no error of one draft. With a trained
draft the contexts are the target's states of ``--text``; with random weights they are random.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import torch
from sglang.kernels.ops.speculative.flashmap.noise import gaussian_noise
from sglang.srt.configs.flashmap import FlashMapConfig
from sglang.srt.models.flashmap import DraftContext, FlashMapDraftModel
from sglang.srt.speculative.flashmap.attention import ContextAttention
from sglang.srt.speculative.flashmap.config import FlashMapServeConfig
from sglang.srt.speculative.flashmap.jump_bank import BankNoise
from sglang.srt.speculative.flashmap.noise import Stream

TEXT = (
    "The lighthouse keeper counted the ships every evening. There were seven of them in spring, "
    "and by the end of the summer only two came back, because the war had taken the others. He "
    "wrote their names into a book, one line for each, and he never missed a day until the winter "
    "came."
)


class Pool:
    def __init__(
        self, config: FlashMapConfig, slots: int, dtype: torch.dtype = torch.float32
    ) -> None:
        shape = (config.num_hidden_layers, slots, config.num_key_value_heads, config.head_dim)
        self.keys, self.values = torch.zeros(2, *shape, dtype=dtype)

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        return self.keys[layer]

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        return self.values[layer]


@dataclasses.dataclass
class Setting:
    """A draft, its target's two matrices, and one text's tokens and states."""

    model: FlashMapDraftModel
    embedding: torch.Tensor
    lm_head: torch.Tensor
    tokens: torch.Tensor
    hidden: torch.Tensor
    pool_dtype: torch.dtype = torch.float32

    def attach(self, **settings) -> None:
        config = self.model.config
        grid = tuple(config.grid(settings.pop("num_steps")))
        self.model.attach_target(
            embedding=self.embedding,
            lm_head=self.lm_head,
            lm_head_bias=None,
            logit_scale=1.0,
            serve=FlashMapServeConfig(
                block_size=config.block_size,
                verify_width=config.block_size + 1,
                grid=grid,
                draft_vocab_size=0,
                block_verification=False,
                **settings,
            ),
            attention=ContextAttention("torch"),
        )

    def draft(self, noise, anchors: torch.Tensor) -> torch.Tensor:
        """Logits ``(B · K, V)`` of the blocks after positions ``anchors (B,)``."""
        config, length = self.model.config, len(self.tokens)
        pool = Pool(config, length, self.pool_dtype)
        self.model.write_target_hidden_kv(
            target_hidden=self.hidden,
            pool=pool,
            positions=torch.arange(length),
            cache_loc=torch.arange(length),
        )
        blocks = []
        for i, anchor in enumerate(anchors.tolist()):
            # A block's anchor overwrites a context entry, so every block has a copy of the pool.
            own = Pool(config, length, self.pool_dtype)
            own.keys.copy_(pool.keys)
            own.values.copy_(pool.values)
            context = DraftContext(
                key_buffers=list(own.keys),
                value_buffers=list(own.values),
                req_to_token=torch.arange(length, dtype=torch.int32)[None],
                req_pool_indices=torch.zeros(1, dtype=torch.int64),
                lens=torch.tensor([anchor + 1], dtype=torch.int32),
            )
            at = torch.tensor([anchor])
            self.model.write_anchor(
                self.tokens[at],
                positions=at,
                slots=at,
                active=torch.ones(1, dtype=torch.int32),
                context=context,
            )
            part = slice(i * config.block_size, (i + 1) * config.block_size)
            positions = anchor + torch.arange(1, config.block_size + 1)
            blocks.append(self.model.draft_logits(rows_of(noise, part), positions, context))
        return torch.cat(blocks)


def rows_of(noise, part: slice):
    if isinstance(noise, torch.Tensor):
        return noise[part]
    return BankNoise(noise.rows[part], noise.seeds[part], noise.offsets[part])


def random_setting() -> Setting:
    config = FlashMapConfig(
        vocab_size=8192,
        target_hidden_size=256,
        target_layer_ids=[0, 1],
        hidden_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=1024,
    )
    model = FlashMapDraftModel(config)
    embedding = torch.randn(config.vocab_size, config.target_hidden_size) * 0.1
    tokens = torch.randint(config.vocab_size, (80,))
    hidden = torch.randn(80, 2 * config.target_hidden_size)
    return Setting(model, embedding, embedding, tokens, hidden)


def trained_setting(target: str, draft: str, text: str) -> Setting:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = FlashMapConfig.from_pretrained(draft)
    model = FlashMapDraftModel(config)
    model.load_weights(load_file(Path(draft) / "model.safetensors").items())
    theirs = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(target)(text, return_tensors="pt").input_ids
    states = theirs(ids, output_hidden_states=True).hidden_states
    hidden = torch.cat([states[i + 1][0] for i in config.target_layer_ids], dim=-1)
    matrices = (theirs.get_input_embeddings().weight, theirs.get_output_embeddings().weight)
    return Setting(model, *matrices, ids[0], hidden)


def compare(name: str, logits: torch.Tensor, exact: torch.Tensor) -> dict:
    error = float((logits - exact).norm() / exact.norm())
    agree = float((logits.argmax(-1) == exact.argmax(-1)).float().mean())
    print(f"| {name} | {error:.4f} | {agree:.3f} |", flush=True)
    return dict(draft=name, error=error, agree=agree)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", help="folder of the target, with --draft")
    parser.add_argument("--draft", help="folder of a FlashMap release for it")
    parser.add_argument("--text", default=TEXT)
    parser.add_argument("--num-steps", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--bank-size", type=int, default=256)
    parser.add_argument("--topk", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--json", help="where to save the rows")
    options = parser.parse_args()
    torch.manual_seed(0)
    trained = options.target and options.draft
    setting = (
        trained_setting(options.target, options.draft, options.text)
        if trained
        else random_setting()
    )
    config = setting.model.config
    anchors = torch.linspace(8, len(setting.tokens) - 1, options.blocks).long()
    slots = torch.arange(options.blocks * config.block_size)
    rows = slots % options.bank_size
    zeros = torch.zeros_like(rows)
    z = gaussian_noise(zeros, rows, config.vocab_size, Stream.DRAFT_NOISE.value)
    setting.attach(num_steps=options.num_steps)
    exact = setting.draft(z, anchors)
    print(f"{options.num_steps} jumps, {len(slots)} slots, {config.vocab_size} tokens")
    print("| draft | relative error of logits | same argmax |\n|---|---|---|")
    other = gaussian_noise(zeros + 1, slots, config.vocab_size, Stream.DRAFT_NOISE.value)
    rows_made = [compare("exact, other noise", setting.draft(other, anchors), exact)]
    for topk in options.topk:
        setting.attach(
            num_steps=options.num_steps, jump_bank_size=options.bank_size, jump_topk=topk
        )
        own, anew = BankNoise(rows, zeros, rows), BankNoise(rows, zeros + 2, slots)
        rows_made.append(compare(f"cut to {topk}", setting.draft(own, anchors), exact))
        rows_made.append(compare(f"cut to {topk}, redrawn", setting.draft(anew, anchors), exact))
    if options.json:
        Path(options.json).write_text(json.dumps(rows_made, indent=1))


if __name__ == "__main__":
    main()

"""What 8 bits do to a trained draft: error of its logits, and how many drafts the target accepts.

    python benchmark/flashmap/fp8_error.py --target DIR --draft drafts/smollm2-135m-instruct

On a CPU, by the kernels' references, which multiply the values that both sides are rounded to. The
target continues held-out prompts greedily in float32; after every third token the draft proposes a
block, always from the same noise. Against the float32 draft: relative error of the logits, and
slots with the same likeliest token. Accept length: the drafts in front of the first one that is not
the target's, and one. Weights of e4m3 have a scale a channel; activations, where they are quantized
too (more than 64 rows), one a row.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from sglang.kernels.ops.speculative.flashmap import fp8_linear
from sglang.kernels.ops.speculative.flashmap.noise import gaussian_noise
from sglang.srt.configs.flashmap import FlashMapConfig
from sglang.srt.models.flashmap import FlashMapDraftModel
from sglang.srt.speculative.flashmap.noise import Stream

sys.path.insert(0, str(Path(__file__).resolve().parent))
from jump_bank import Setting  # noqa: E402

PROMPTS = Path(__file__).resolve().parents[2] / "scripts/train/heldout.jsonl"
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Form:
    """How a draft computes."""

    name: str
    dtype: torch.dtype
    weights: str = "none"
    most_rows_in_16_bits: int = fp8_linear.MAX_ROWS
    pool: torch.dtype | None = None
    """Of the context's keys and values; None: the draft's."""


FORMS = (
    Form("float32", torch.float32),
    Form("bfloat16", torch.bfloat16),
    Form("bfloat16, e4m3 context", torch.bfloat16, pool=E4M3),
    Form("e4m3 weights", torch.bfloat16, "fp8"),
    Form("e4m3 weights and context", torch.bfloat16, "fp8", pool=E4M3),
    Form("e4m3 weights and activations", torch.bfloat16, "fp8", 0),
    Form("e4m3 weights, activations and context", torch.bfloat16, "fp8", 0, E4M3),
)


@dataclass(frozen=True)
class Text:
    tokens: torch.Tensor
    """``(T,)``, the prompt's and the answer's."""
    hidden: torch.Tensor
    """``(T, layers · H)`` of the draft's target layers."""
    anchors: torch.Tensor
    """Positions that are drafted after."""


def texts(options: argparse.Namespace, config: FlashMapConfig) -> tuple[list[Text], tuple]:
    """Greedy answers, and the target's embedding and LM head."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    prompts = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()]
    made = []
    for prompt in prompts[:: max(1, len(prompts) // options.prompts)][: options.prompts]:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=False,
        )
        text = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=options.tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        states = target(text, output_hidden_states=True).hidden_states
        hidden = torch.cat([states[i + 1][0] for i in config.target_layer_ids], dim=-1)
        anchors = torch.arange(ids.shape[1], text.shape[1] - config.block_size, 3)
        made.append(Text(text[0], hidden, anchors))
    return made, (target.get_input_embeddings().weight, target.get_output_embeddings().weight)


def drafted(form: Form, options: argparse.Namespace, config, some: list[Text], matrices: tuple):
    """Float32 logits ``(slots, V)`` of all blocks."""
    from safetensors.torch import load_file

    fp8_linear.MAX_ROWS = form.most_rows_in_16_bits
    model = FlashMapDraftModel(config)
    model.load_weights(load_file(Path(options.draft) / "model.safetensors").items())
    model.to(form.dtype)
    embedding, head = (matrix.to(form.dtype) for matrix in matrices)
    blocks = []
    for index, text in enumerate(some):
        setting = Setting(
            *(model, embedding, head, text.tokens, text.hidden), form.pool or form.dtype
        )
        if index == 0:
            setting.attach(num_steps=1, noise="cholesky", draft_quantization=form.weights)
        rows = torch.arange(len(text.anchors) * config.block_size)
        seeds = torch.full_like(rows, index)
        noise = gaussian_noise(seeds, rows, model.noise_width, Stream.DRAFT_NOISE.value)
        blocks.append(setting.draft(noise, text.anchors).float())
    return torch.cat(blocks)


def accept_length(logits: torch.Tensor, some: list[Text], slots: int) -> float:
    """Drafts before the first wrong one, and one."""
    truth = torch.cat(
        [text.tokens[text.anchors[:, None] + torch.arange(1, slots + 1)] for text in some]
    )
    right = logits.argmax(dim=-1).view(-1, slots) == truth
    return 1 + float(right.long().cumprod(dim=1).sum(dim=1).double().mean())


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", required=True, help="folder of the target")
    parser.add_argument("--draft", required=True, help="folder of a FlashMap release for it")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=48, help="of an answer")
    parser.add_argument("--json", type=Path, help="where to save the rows")
    options = parser.parse_args()
    config = FlashMapConfig.from_pretrained(options.draft)
    some, matrices = texts(options, config)
    print(f"{sum(len(text.anchors) for text in some)} drafts of {config.block_size} slots")
    print("| draft | error of logits | same likeliest token | accept length |\n|---|---|---|---|")
    exact, rows = None, []
    for form in FORMS:
        logits = drafted(form, options, config, some, matrices)
        exact = logits if exact is None else exact
        error = float((logits - exact).norm() / exact.norm())
        same = float((logits.argmax(-1) == exact.argmax(-1)).double().mean())
        length = accept_length(logits, some, config.block_size)
        rows.append(dict(draft=form.name, error=error, same=same, accept_length=length))
        print(f"| {form.name} | {error:.4f} | {100 * same:.1f} % | {length:.3f} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

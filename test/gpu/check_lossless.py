"""On one NVIDIA GPU: greedy text with FLASHMAP equals text without, up to near-ties of bfloat16.

    python test/gpu/check_lossless.py --attention-backend fa3

Not collected by pytest: it starts two engines and needs a GPU. A random Llama of a few layers and an
untrained draft are made in a temporary folder; prompts are random token ids, longer than a prefill
chunk or not, in batches whose sizes pad the captured graphs. A verify forward has other GEMM shapes
than a decode step, so in bfloat16 two tokens whose logits nearly tie may swap: every first
divergence is printed with the plain run's gap between its two best tokens, and a gap above
``--max-gap`` fails. (Upstream's CUDA norms have no float32; the exact check runs on the CPU.)
Seeded sampled requests must be the same alone and in a batch.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path

import torch


def write_models(folder: Path) -> tuple[str, str]:
    import json

    import transformers
    from safetensors.torch import save_file

    from sglang.srt.configs.flashmap import FlashMapConfig
    from sglang.srt.speculative.flashmap.checkpoint import expected_shapes

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.02,
        tie_word_embeddings=False,
    )
    target, draft = folder / "target", folder / "draft"
    transformers.LlamaForCausalLM(config).save_pretrained(target)
    keys = dict(
        target_model="random",
        target_hidden_size=512,
        vocab_size=4096,
        target_layer_ids=[0, 2, 4],
        block_size=8,
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=512,
        cond_dim=64,
        time_embed_dim=64,
    )
    draft.mkdir()
    (draft / "config.json").write_text(
        json.dumps(keys | dict(model_type="flashmap", architectures=["FlashMapDraftModel"]))
    )
    tensors = {}
    for name, shape in expected_shapes(FlashMapConfig(**keys)).items():
        scale = 1.0 / shape[-1] ** 0.5 if len(shape) > 1 else 0.1
        tensors[name] = torch.randn(shape) * scale + (1.0 if "norm.weight" in name else 0.0)
    save_file(tensors, str(draft / "model.safetensors"))
    return str(target), str(draft)


def generate(model: str, draft: str | None, prompts, options) -> list[dict]:
    """Outputs of every prompt, batch by batch; a drafting engine also runs the seeded requests."""
    import sglang

    arguments = dict(
        model_path=model,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        attention_backend=options.attention_backend,
        page_size=options.page_size,
        sampling_backend="pytorch",
        cuda_graph_bs_decode=[1, 4, 8, 16],
        disable_prefill_cuda_graph=True,
        mem_fraction_static=0.3,
        log_level="warning",
        chunked_prefill_size=256,
    )
    if draft is not None:
        arguments |= dict(speculative_algorithm="FLASHMAP", speculative_draft_model_path=draft)
    engine = sglang.Engine(**arguments)
    params = dict(temperature=0.0, max_new_tokens=96, ignore_eos=True)
    outputs = []
    for batch in prompts:
        outputs += engine.generate(
            input_ids=batch, sampling_params=params, return_logprob=True, top_logprobs_num=2
        )
    if draft is not None:
        check_seeds(engine, prompts[0])
    engine.shutdown()
    return outputs


def check_seeds(engine, prompts: list[list[int]]) -> None:
    def seeded(seed: int, temperature: float = 1.0) -> dict:
        return dict(
            temperature=temperature, sampling_seed=seed, max_new_tokens=24, ignore_eos=True
        )

    alone = engine.generate(input_ids=prompts[0], sampling_params=seeded(7))
    again = engine.generate(input_ids=prompts[0], sampling_params=seeded(7))
    crowd = engine.generate(
        input_ids=prompts,
        sampling_params=[seeded(7 + i, 0.0 if i > 2 else 1.0) for i in range(len(prompts))],
    )
    print(
        "seeded request: repeated "
        f"{'equal' if alone['output_ids'] == again['output_ids'] else 'DIFFERENT'}, in a batch "
        f"{'equal' if alone['output_ids'] == crowd[0]['output_ids'] else 'different (bfloat16)'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--attention-backend", default="triton")
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--max-gap", type=float, default=0.02)
    options = parser.parse_args()
    rng = random.Random(0)
    prompts = [
        [[rng.randrange(5, 4000) for _ in range(rng.randrange(3, 600))] for _ in range(size)]
        for size in (5, 16, 1, 11)
    ]
    with tempfile.TemporaryDirectory() as folder:
        model, draft = write_models(Path(folder))
        plain = generate(model, None, prompts, options)
        drafted = generate(model, draft, prompts, options)
    gaps, worst_logprob = [], 0.0
    for a, b in zip(plain, drafted):
        pairs = list(zip(a["output_ids"], b["output_ids"]))
        first = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
        agreed = len(pairs) if first is None else first
        for side_a, side_b in zip(
            a["meta_info"]["output_token_logprobs"][:agreed],
            b["meta_info"]["output_token_logprobs"][:agreed],
        ):
            worst_logprob = max(worst_logprob, abs(side_a[0] - side_b[0]))
        if first is not None:
            best, second = a["meta_info"]["output_top_logprobs"][first][:2]
            gaps.append(best[0] - second[0])
    accept = [o["meta_info"]["spec_accept_length"] for o in drafted]
    print(
        f"{options.attention_backend}, page size {options.page_size}: "
        f"{len(plain) - len(gaps)} of {len(plain)} texts equal, gaps at first divergences "
        f"{[round(g, 4) for g in gaps]}, largest logprob difference {worst_logprob:.4f}, "
        f"mean accept length {sum(accept) / len(accept):.3f}"
    )
    raise SystemExit(1 if any(gap > options.max_gap for gap in gaps) else 0)


if __name__ == "__main__":
    main()

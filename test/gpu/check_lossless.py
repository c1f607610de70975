"""On one NVIDIA GPU: greedy float32 text with FLASHMAP equals text without, batched, with CUDA graphs.

    python test/gpu/check_lossless.py [--attention-backend triton]

Not collected by pytest: it starts three engines and needs a GPU. A random Llama of a few layers and
an untrained draft are made in a temporary folder; prompts are random token ids, in batches whose
sizes pad the captured graphs, greedy and sampled requests mixed. Also printed: sampled requests
with seeds alone and in a batch, and the number of first divergences in bfloat16.
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
        initializer_range=0.05,
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


def generate(model: str, draft: str | None, prompts, params, options, **more) -> list[dict]:
    import sglang

    arguments = dict(
        model_path=model,
        skip_tokenizer_init=True,
        attention_backend=options.attention_backend,
        sampling_backend="pytorch",
        cuda_graph_bs_decode=[1, 4, 8, 16],
        disable_prefill_cuda_graph=True,
        mem_fraction_static=0.3,
        log_level="warning",
        chunked_prefill_size=256,
        **more,
    )
    if draft is not None:
        arguments |= dict(speculative_algorithm="FLASHMAP", speculative_draft_model_path=draft)
    engine = sglang.Engine(**arguments)
    outputs = [engine.generate(input_ids=batch, sampling_params=params) for batch in prompts]
    alone = engine.generate(
        input_ids=prompts[0][0],
        sampling_params=dict(temperature=1.0, sampling_seed=7, max_new_tokens=48, ignore_eos=True),
    )
    crowd = engine.generate(
        input_ids=prompts[0],
        sampling_params=[
            dict(temperature=1.0 if i < 3 else 0.0, sampling_seed=7 + i, max_new_tokens=48, ignore_eos=True)
            for i in range(len(prompts[0]))
        ],
    )
    engine.shutdown()
    flat = [o for batch in outputs for o in (batch if isinstance(batch, list) else [batch])]
    if draft is not None:
        same = alone["output_ids"] == crowd[0]["output_ids"]
        lengths = [o["meta_info"].get("spec_accept_length") for o in flat]
        print(f"seeded request alone and in a batch equal: {same}; accept lengths {lengths[:4]}")
    return flat


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--attention-backend", default="triton")
    options = parser.parse_args()
    rng = random.Random(0)
    prompts = [
        [[rng.randrange(5, 4000) for _ in range(rng.randrange(3, 600))] for _ in range(size)]
        for size in (5, 16, 1, 11)
    ]
    params = dict(temperature=0.0, max_new_tokens=96, ignore_eos=True)
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        model, draft = write_models(Path(folder))
        for dtype in ("float32", "bfloat16"):
            if dtype == "float32" and options.attention_backend == "fa3":
                continue  # FlashAttention 3 has no float32
            plain = generate(model, None, prompts, params, options, dtype=dtype)
            drafted = generate(model, draft, prompts, params, options, dtype=dtype)
            equal = sum(a["output_ids"] == b["output_ids"] for a, b in zip(plain, drafted))
            print(f"{options.attention_backend} {dtype}: {equal} of {len(plain)} texts equal", flush=True)
            failed |= dtype == "float32" and equal != len(plain)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()

"""On one NVIDIA GPU: what leaves FLASHMAP's text alone: other caches, prefill graphs, sleep.

    python test/gpu/check_serving.py [--attention-backend fa3] [--checks cache graphs sleep]

Not collected by pytest: each line starts an engine or two. Models are those of `check_lossless.py`.
`cache`: with an fp8 KV cache of the target, text with FLASHMAP equals text without it up to
near-ties, whether the draft's cache is its own dtype (the default) or fp8 too; the accept lengths
of both are printed. `graphs`: with prefill graphs as without them, texts are equal up to near-ties.
`sleep`: an engine that released its memory leaves more of the GPU's free, and once resumed
answers as before, its drafts accepted as before; likewise if only the cache was released.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from check_lossless import write_models

PARAMS = dict(temperature=0.0, max_new_tokens=64, ignore_eos=True)


def start(options: argparse.Namespace, **arguments: Any) -> Any:
    import sglang

    common = dict(
        skip_tokenizer_init=True,
        dtype="bfloat16",
        attention_backend=options.attention_backend,
        cuda_graph_bs_decode=[1, 8],
        mem_fraction_static=0.9,  # of what other engines leave, too; the pool is bounded
        max_total_tokens=32768,
        log_level="warning",
        chunked_prefill_size=256,
    )
    return sglang.Engine(**common | arguments)


def generate(engine: Any, prompts: list[list[int]]) -> list[dict]:
    """Greedy answers."""
    return engine.generate(
        input_ids=prompts, sampling_params=PARAMS, return_logprob=True, top_logprobs_num=2
    )


def answers(prompts: list[list[int]], options: argparse.Namespace, **arguments: Any) -> list[dict]:
    """Greedy answers of an engine that is started with `arguments` and shut down again."""
    engine = start(options, **arguments)
    found = generate(engine, prompts)
    engine.shutdown()
    return found


def sleeps(prompts: list[list[int]], options: argparse.Namespace, **arguments: Any) -> bool:
    """Whether an engine answers as before once it has slept."""
    engine = start(
        options, enable_memory_saver=True, enable_weights_cpu_backup=True, **arguments
    )
    awake = generate(engine, prompts)
    fine = True
    for tags in (None, ["kv_cache"]):
        free = [torch.cuda.mem_get_info()[0]]
        engine.release_memory_occupation(tags)
        free.append(torch.cuda.mem_get_info()[0])
        engine.resume_memory_occupation(tags)
        free.append(torch.cuda.mem_get_info()[0])
        mebibytes = ", ".join(f"{bytes_ / 2**20:.0f}" for bytes_ in free)
        name = f"slept ({'everything' if tags is None else 'cache'}; MiB free {mebibytes})"
        again = generate(engine, prompts)
        fine &= compare(name, awake, again, options.max_gap) and free[1] > free[0]
        lengths = [
            sum(a["meta_info"]["spec_accept_length"] for a in found) for found in (awake, again)
        ]
        fine &= lengths[1] > 0.95 * lengths[0]
    engine.shutdown()
    return fine


def compare(name: str, plain: list[dict], drafted: list[dict], max_gap: float) -> bool:
    """Print how two lists of answers differ; whether every first divergence is a near-tie."""
    gaps = []
    for a, b in zip(plain, drafted):
        pairs = zip(a["output_ids"], b["output_ids"])
        first = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
        if first is not None:
            best, second = a["meta_info"]["output_top_logprobs"][first][:2]
            gaps.append(round(best[0] - second[0], 4))
    lengths = [a["meta_info"]["spec_accept_length"] for a in drafted]
    print(
        f"{name}: {len(plain) - len(gaps)} of {len(plain)} texts equal, gaps at first divergences "
        f"{gaps}, mean accept length {sum(lengths) / len(lengths):.3f}",
        flush=True,
    )
    return all(gap <= max_gap for gap in gaps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--attention-backend", default="triton")
    parser.add_argument("--checks", nargs="+", default=["cache", "graphs", "sleep"])
    parser.add_argument("--max-gap", type=float, default=0.02)
    options = parser.parse_args()
    rng = random.Random(0)
    prompts = [
        [rng.randrange(5, 4000) for _ in range(rng.randrange(3, 600))] for _ in range(12)
    ]
    fine = True
    with tempfile.TemporaryDirectory() as folder:
        model, draft = write_models(Path(folder))
        target = dict(model_path=str(model))
        flashmap = target | dict(
            speculative_algorithm="FLASHMAP", speculative_draft_model_path=str(draft)
        )
        if "cache" in options.checks:
            fp8 = dict(kv_cache_dtype="fp8_e4m3", disable_prefill_cuda_graph=True)
            plain = answers(prompts, options, **target, **fp8)
            for name, more in (
                ("fp8 cache, the draft's as it is", {}),
                ("fp8 caches", dict(speculative_draft_kv_cache_dtype="fp8_e4m3")),
            ):
                drafted = answers(prompts, options, **flashmap, **fp8, **more)
                fine &= compare(name, plain, drafted, options.max_gap)
        if "graphs" in options.checks:
            without = answers(prompts, options, **flashmap, disable_prefill_cuda_graph=True)
            graphs = answers(prompts, options, **flashmap)
            fine &= compare("prefill graphs", without, graphs, options.max_gap)
        if "sleep" in options.checks:
            fine &= sleeps(prompts, options, **flashmap)
    raise SystemExit(0 if fine else 1)


if __name__ == "__main__":
    main()

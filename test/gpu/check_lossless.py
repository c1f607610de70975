"""On one NVIDIA GPU: greedy text with FLASHMAP equals text without, up to near-ties of bfloat16.

    python test/gpu/check_lossless.py --backends fa3 triton flashinfer --tree-candidates 8

Not collected by pytest: it starts an engine for plain decoding, for chains and, with
``--tree-candidates``, for trees on each attention backend. The target is a random Llama of a few
layers; the draft replays the plain run's answers with every tenth token wrong, candidate by
candidate elsewhere (``drafts/device_oracle.py``), in CUDA graphs, so that accepted drafts, moved KV
and rejected ones all occur in every request. Prompts are random token ids, longer than a prefill
chunk or not, in batches whose sizes pad the captured graphs; some branch off what others generated.

A verify forward has other GEMM shapes than a decode step, so in bfloat16 two tokens whose logits
nearly tie may swap: every first divergence is printed with the plain run's gap between its two best
tokens, and a gap above ``--max-gap`` fails. (Upstream's CUDA norms have no float32; the exact check
runs on the CPU, also by this script: ``--device cpu --backends torch_native --dtype float32``.)
Trees that are not accepted longer than chains fail too. Seeded sampled requests are compared
alone, again and in a batch.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from pathlib import Path

import torch

TEST_FOLDER = Path(__file__).resolve().parents[1]
WRONG = 0.1


def write_models(folder: Path) -> tuple[Path, Path]:
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
    return target, draft


def engine_arguments(options, backend: str, target: Path) -> dict:
    arguments = dict(
        model_path=str(target),
        skip_tokenizer_init=True,
        dtype=options.dtype,
        device=options.device,
        attention_backend=backend,
        page_size=options.page_size,
        sampling_backend="pytorch",
        mem_fraction_static=0.9,  # of what other engines leave, too; the pool is bounded
        max_total_tokens=32768,
        log_level="warning",
        chunked_prefill_size=256,
    )
    if options.device != "cpu":
        arguments |= dict(cuda_graph_bs_decode=[1, 4, 8, 16], disable_prefill_cuda_graph=True)
    return arguments


def run(arguments: dict, prompts: list[list[list[int]]], tokens: int, seeds: bool) -> list[dict]:
    """Greedy outputs of every prompt, batch by batch; drafting engines also run seeded requests,
    and the prompts again without logprobs (``bare``), whose logits then stay in 16 bits."""
    import sglang

    engine = sglang.Engine(**arguments)
    params = dict(temperature=0.0, max_new_tokens=tokens, ignore_eos=True)
    outputs = []
    for batch in prompts:
        outputs += engine.generate(
            input_ids=batch, sampling_params=params, return_logprob=True, top_logprobs_num=2
        )
    if seeds:
        check_seeds(engine, prompts[0])
        engine.flush_cache()  # prompts are prefilled in the same chunks again
        bare = []
        for batch in prompts:
            bare += engine.generate(input_ids=batch, sampling_params=params)
        for output, again in zip(outputs, bare, strict=True):
            output["bare"] = again
    engine.shutdown()
    return outputs


def check_seeds(engine, prompts: list[list[int]]) -> None:
    def seeded(seed: int, temperature: float) -> dict:
        return dict(
            temperature=temperature, sampling_seed=seed, max_new_tokens=24, ignore_eos=True
        )

    for temperature in (0.2, 1.0):
        alone = engine.generate(input_ids=prompts[0], sampling_params=seeded(7, temperature))
        again = engine.generate(input_ids=prompts[0], sampling_params=seeded(7, temperature))
        # Greedy and other temperatures beside it.
        others = [seeded(8 + i, 0.5 * (i % 3)) for i in range(len(prompts) - 1)]
        crowd = engine.generate(
            input_ids=prompts, sampling_params=[seeded(7, temperature), *others]
        )
        same = alone["output_ids"] == crowd[0]["output_ids"]
        print(
            f"  seeded request, T={temperature:g}: repeated "
            f"{'equal' if alone['output_ids'] == again['output_ids'] else 'DIFFERENT'}, in a batch "
            f"{'equal' if same else 'different (rounding)'}"
        )


def compare(
    name: str, plain: list[dict], drafted: list[dict], max_gap: float
) -> tuple[dict[int, float], bool]:
    """Prints a line; the accept lengths of the texts that are equal by their index (past a
    divergence the replayed answer is of another text), and whether all first divergences are
    near-ties."""
    gaps, worst_logprob, equal = [], 0.0, {}
    for index, (a, b) in enumerate(zip(plain, drafted, strict=True)):
        pairs = list(zip(a["output_ids"], b["output_ids"], strict=True))
        first = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
        agreed = len(pairs) if first is None else first
        expected = a["meta_info"]["output_token_logprobs"]
        logprobs = b["meta_info"].get("output_token_logprobs", expected)
        for (mine, *_), (theirs, *_) in zip(expected[:agreed], logprobs[:agreed], strict=True):
            worst_logprob = max(worst_logprob, abs(mine - theirs))
        if first is not None:
            best, second = a["meta_info"]["output_top_logprobs"][first][:2]
            gaps.append(best[0] - second[0])
        else:
            equal[index] = b["meta_info"]["spec_accept_length"]
    lengths = [o["meta_info"]["spec_accept_length"] for o in drafted]
    accept_length = sum(lengths) / len(lengths)
    print(
        f"{name}: {len(plain) - len(gaps)} of {len(plain)} texts equal, gaps at first divergences "
        f"{[round(g, 4) for g in gaps]}, largest logprob difference {worst_logprob:.4f}, mean "
        f"accept length {accept_length:.3f}",
        flush=True,
    )
    return equal, all(gap <= max_gap for gap in gaps)


def check_backend(options, backend: str, folder: Path, target: Path, untrained: Path) -> bool:
    from drafts.folders import write_oracle
    from drafts.replay import Corruption, Reference

    rng = random.Random(0)
    prompts = [
        [[rng.randrange(5, 4000) for _ in range(rng.randrange(3, 600))] for _ in range(size)]
        for size in options.batches
    ]
    arguments = engine_arguments(options, backend, target)
    tokens = options.tokens
    # triton_splitkv names how drafts are verified.
    without_drafts = arguments | dict(attention_backend=backend.removesuffix("_splitkv"))
    plain = run(without_drafts, prompts, tokens, seeds=False)
    flat = [prompt for batch in prompts for prompt in batch]
    references = [
        Reference(tuple(prompt), tuple(output["output_ids"]))
        for prompt, output in zip(flat, plain, strict=True)
    ]
    # Branches within a generated text, whose prefix the radix cache holds as moved KV.
    branches = [
        list(r.tokens[: len(r.prompt) + tokens // 2]) for r in references[: options.batches[0]]
    ]
    prompts.append(branches)
    plain += [
        dict(output_ids=output["output_ids"][tokens // 2 :], meta_info=tail(output, tokens // 2))
        for output in plain[: len(branches)]
    ]
    draft = folder / f"oracle-{backend}"
    write_oracle(
        draft, untrained, references, Corruption((WRONG,)), architecture="DeviceOracleDraftModel"
    )
    arguments |= dict(
        speculative_algorithm="FLASHMAP", speculative_draft_model_path=str(draft)
    )
    settings = {"chains": {}}
    if options.tree_candidates > 1:
        settings["trees"] = dict(
            speculative_flashmap_tree_candidates=options.tree_candidates,
            speculative_flashmap_tree_budget=options.tree_budget,
            speculative_num_draft_tokens=options.verify_width,
        )
    fine, lengths = True, []
    for name, setting in settings.items():
        drafted = run(arguments | setting, prompts, tokens, seeds=True)
        for output in drafted[-len(branches) :]:  # the plain run went on for half as long
            for each in (output, output["bare"]):
                each["output_ids"] = each["output_ids"][: tokens - tokens // 2]
        label = f"{backend}, page size {options.page_size}, {name}"
        equal, near_ties = compare(label, plain, drafted, options.max_gap)
        lengths.append(equal)
        bare = [output["bare"] for output in drafted]
        fine &= near_ties & compare(f"{label}, no logprobs", plain, bare, options.max_gap)[1]
    return fine & accepted_longer(backend, list(settings), lengths)


def accepted_longer(backend: str, names: list[str], lengths: list[dict[int, float]]) -> bool:
    """Whether texts that every setting wrote alike were accepted well as chains, and longer as
    trees; prints a line."""
    common = set.intersection(*map(set, lengths))
    if not common:
        print(f"{backend}: no text is equal in {' and '.join(names)}; nothing to compare")
        return False
    means = [sum(each[index] for index in common) / len(common) for each in lengths]
    fine = means == sorted(set(means)) and means[0] >= 2
    described = ", ".join(f"{name} {mean:.3f}" for name, mean in zip(names, means, strict=True))
    print(
        f"{backend}: mean accept length of the {len(common)} texts equal everywhere: {described}"
        f"{'' if fine else ': drafts or trees are broken'}",
        flush=True,
    )
    return fine


def tail(output: dict, start: int) -> dict:
    names = ("output_token_logprobs", "output_top_logprobs")
    return {name: output["meta_info"][name][start:] for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", nargs="+", default=["fa3", "triton"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--tree-candidates", type=int, default=0)
    parser.add_argument("--tree-budget", type=int, default=64)
    parser.add_argument("--verify-width", type=int, default=9)
    parser.add_argument("--batches", type=int, nargs="+", default=[5, 16, 1, 11])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--max-gap", type=float, default=0.02)
    options = parser.parse_args()
    sys.path.insert(0, str(TEST_FOLDER))
    os.environ["SGLANG_EXTERNAL_MODEL_PACKAGE"] = "drafts"
    paths = [str(TEST_FOLDER), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        target, untrained = write_models(folder)
        fine = [check_backend(options, b, folder, target, untrained) for b in options.backends]
    raise SystemExit(0 if all(fine) else 1)


if __name__ == "__main__":
    main()

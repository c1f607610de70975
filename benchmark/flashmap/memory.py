"""What a server's weights, pools and graphs take, as `/server_info` reports it.

    python benchmark/flashmap/memory.py --json out/memory.json
    python benchmark/flashmap/memory.py --target DIR --draft DIR --arguments '{"dtype": "float32"}'

Without folders the models have Qwen3-8B shapes and random weights, which needs a GPU. `--prefill N`
then answers a prompt of N tokens, the longest that fits by default, at the server's own
`--mem-fraction-static` (0.9 here), and prints what is left of the device before and after.
`--sleep` starts the server with the memory saver, and prints what is left while it sleeps and once
it is awake.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import shapes  # noqa: E402


def arguments(options: argparse.Namespace) -> dict[str, Any]:
    chosen: dict[str, Any] = dict(
        speculative_algorithm="FLASHMAP",
        skip_tokenizer_init=True,
        mem_fraction_static=0.9,
        log_level="warning",
    )
    if options.target:
        chosen |= dict(model_path=options.target, speculative_draft_model_path=options.draft)
    else:
        folder = Path(options.out)
        chosen |= dict(
            model_path=shapes.write(folder / "target", shapes.TARGET),
            speculative_draft_model_path=shapes.write(folder / "flashmap", shapes.FLASHMAP),
            load_format="dummy",
            speculative_draft_load_format="dummy",
        )
    if options.sleep:
        chosen |= dict(enable_memory_saver=True, enable_weights_cpu_backup=True)
    return chosen | json.loads(options.arguments)


def rows(usage: dict[str, Any]) -> list[tuple[str, float]]:
    """The sizes in `memory_usage`, nested ones by their path, in units of 2³⁰ bytes."""
    found = []
    for name, value in usage.items():
        if isinstance(value, dict):
            found += [(f"{name}, {inner}", size) for inner, size in rows(value)]
        elif isinstance(value, float):
            found.append((name, value))
    return found


def free_gb() -> float | None:
    """Of the first GPU; None without one."""
    import torch

    return torch.cuda.mem_get_info(0)[0] / 2**30 if torch.cuda.is_available() else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", help="folder of the target, with --draft")
    parser.add_argument("--draft", help="folder of a FlashMap release for it")
    parser.add_argument("--arguments", default="{}", help="JSON of more engine arguments")
    parser.add_argument("--prefill", type=int, help="prompt tokens, 0 for none")
    parser.add_argument("--sleep", action="store_true", help="release the GPU's memory at the end")
    parser.add_argument("--out", default="out/memory", help="folder of the random models' configs")
    parser.add_argument("--json", type=Path, help="where to save the rows")
    options = parser.parse_args()
    if bool(options.target) != bool(options.draft):
        parser.error("--target and --draft come together")
    import sglang

    engine = sglang.Engine(**arguments(options))
    info = engine.get_server_info()
    state = info["internal_states"][0]
    found = rows(state["memory_usage"])
    longest = info["max_req_input_len"] - 8  # room for the answer
    tokens = longest if options.prefill is None else min(options.prefill, longest)
    if tokens:
        before = free_gb()
        prompt = [1 + i % 100 for i in range(tokens)]
        sampling = dict(temperature=0.0, max_new_tokens=4, ignore_eos=True)
        answer = engine.generate(input_ids=prompt, sampling_params=sampling)
        assert len(answer["output_ids"]) == 4
        if before is not None:
            found.append(("free before the prefill", before))
            found.append((f"free after a prefill of {tokens} tokens", free_gb()))
    if options.sleep:
        engine.release_memory_occupation()
        found.append(("free asleep", free_gb()))
        engine.resume_memory_occupation()
        found.append(("free awake", free_gb()))
    print("| what | GB |\n|---|---|")
    for name, size in found:
        print(f"| {name} | {size:.3f} |")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(dict(found), indent=1))
    engine.shutdown()


if __name__ == "__main__":
    main()

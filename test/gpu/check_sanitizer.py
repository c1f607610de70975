"""The split-KV kernels under compute-sanitizer, on one NVIDIA GPU:

    python test/gpu/check_sanitizer.py            # runs both tools on itself

Not collected by pytest. `memcheck` finds reads and writes outside of allocations (each tensor is
one of its own here), `racecheck` hazards in shared memory. Launches are few and small: chains and
trees of one word and of two, ragged prefixes and an empty one, runs that are cut and merged, window
and sinks, an e4m3 pool.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("memcheck", "racecheck")


def launch() -> None:
    sys.path.insert(0, str(ROOT / "benchmark" / "flashmap"))
    import torch
    import verify_attention

    prefixes = [130, 0, 1, 64, 700]
    for length, tree in ((17, False), (17, True), (65, True)):
        problem = verify_attention.Problem(
            len(prefixes), 0, length, tree, prefixes=prefixes, layers=1
        )
        for programs in (None, 3):
            problem.splitkv(programs=programs)
        problem.splitkv(window=100, sinks=torch.randn(verify_attention.HEADS, device="cuda"))
    eight_bits = verify_attention.Problem(
        1, 300, 17, True, pool_dtype=torch.float8_e4m3fn, layers=1
    )
    eight_bits.splitkv(k_scale=0.5, v_scale=2.0)
    torch.cuda.synchronize()
    print("launched", flush=True)


def main() -> None:
    if "--launch" in sys.argv:
        launch()
        return
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    # Compiled before: the compiler need not be watched.
    subprocess.run([sys.executable, __file__, "--launch"], check=True)
    # A tensor that shares a cached block with another hides what is read past its end.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    failed = False
    for tool in TOOLS:
        command = [sanitizer, "--tool", tool, "--kernel-regex", "kns=verify"]
        if tool == "memcheck":
            # Errors that calls of the driver return are handled by who called it.
            command += ["--report-api-errors", "no"]
        command += ["--error-exitcode", "9"]
        run = subprocess.run(
            [*command, sys.executable, __file__, "--launch"],
            env=environment,
            capture_output=True,
            text=True,
        )
        lines = [line for line in run.stdout.splitlines() if line.startswith("=========")]
        print(f"{tool}: exit {run.returncode}", *lines[:8], *lines[-1:], sep="\n", flush=True)
        failed |= run.returncode != 0 or "launched" not in run.stdout
    sys.exit(failed)


if __name__ == "__main__":
    main()

"""Every kernel compiles for its GPUs and fits in their shared memory; no GPU is needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# (architecture, dtype) -> shared memory of one block.
SHARED_BYTES = {(89, "float32"): 99 << 10, (90, "bfloat16"): 227 << 10}


@pytest.mark.parametrize("arch, dtype", SHARED_BYTES, ids=[f"sm{a}-{d}" for a, d in SHARED_BYTES])
def test_kernels_compile(
    arch: int, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    script = Path(__file__).with_name("kernel_compiler.py")
    run = subprocess.run(
        [sys.executable, script, str(arch), dtype], capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stderr[-4000:]
    rows = [line.split() for line in run.stdout.splitlines()]
    shared = {name: int(size) for name, size, _ in rows}
    assert len(shared) == 34
    assert max(shared.values()) <= SHARED_BYTES[arch, dtype]
    # See `widen.py`.
    assert not [name for name, _, one_by_one in rows if int(one_by_one)]

"""Puts the built tree under test: `sglang` is build/tree, here and in processes tests start."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT / "scripts"))

from fork.checkout import here  # noqa: E402
from fork.errors import ForkError  # noqa: E402
from fork.tree import build_tree  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    """Brings build/tree up to date and puts it first on the path, before tests are imported."""
    tree = here().build / "tree"
    try:
        build_tree(here(), tree)
    except ForkError as error:
        pytest.exit(f"the tree under test cannot be built: {error}", returncode=2)
    if str(_ROOT / "python") in sys.path:
        pytest.exit(
            "python/ is on sys.path and would hide sglang; remove it from PYTHONPATH", returncode=2
        )
    paths = [str(tree)]
    # A folder of that name (test/sgl_kernel) is found too, but has no loader of its own.
    spec = importlib.util.find_spec("sgl_kernel")
    if spec is None or spec.origin is None:
        paths.append(str(_ROOT / "sgl-kernel"))
    sys.path[:0] = paths
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *(p for p in inherited if p not in paths)])
    # Servers that tests start would otherwise compile the tree on every start.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked `cuda` on a machine without an NVIDIA GPU."""
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))

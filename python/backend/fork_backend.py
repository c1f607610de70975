"""Build backend (PEP 517, PEP 660): hands over to scripts/fork for `pip install ./python`.

It needs a whole checkout (the patches' tool lies in scripts/), hence no source distribution.
"""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(_ROOT / "scripts"))
# pip shows the traceback of a failing hook; only its last line, our one sentence, helps.
sys.tracebacklimit = 0

try:
    from fork import metadata, pack, tree, upstream_wheel
    from fork.checkout import Checkout
except ImportError:
    raise RuntimeError(
        "python/ cannot be built outside its repository; clone the whole repository and install "
        "./python from it."
    ) from None

_CHECKOUT = Checkout(_ROOT)


def get_requires_for_build_wheel(config_settings: dict | None = None) -> list[str]:
    return []


get_requires_for_build_editable = get_requires_for_build_wheel


def build_wheel(
    wheel_directory: str,
    config_settings: dict | None = None,
    metadata_directory: str | None = None,
) -> str:
    return pack.build_wheel(_CHECKOUT, Path(wheel_directory)).name


def build_editable(
    wheel_directory: str,
    config_settings: dict | None = None,
    metadata_directory: str | None = None,
) -> str:
    folder = _CHECKOUT.build / "tree"
    tree.build_tree(_CHECKOUT, folder)
    return pack.build_editable(_CHECKOUT, Path(wheel_directory), folder).name


def prepare_metadata_for_build_wheel(
    metadata_directory: str, config_settings: dict | None = None
) -> str:
    name = metadata.dist_info_name(_CHECKOUT)
    for path, data in pack.dist_info(_CHECKOUT, upstream_wheel.fetch(_CHECKOUT)).items():
        target = Path(metadata_directory) / name / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    return name


prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel


def build_sdist(sdist_directory: str, config_settings: dict | None = None) -> str:
    raise RuntimeError(
        "there is no source distribution: clone the repository, or build a wheel with `make wheel`."
    )

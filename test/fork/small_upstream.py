"""A small upstream: a wheel of a few files, so that each case takes milliseconds."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import platform
import sys
import zipfile
from pathlib import Path

from fork.checkout import Checkout

VERSION = "9.8.7"
TAG = f"cp{sys.version_info.major}{sys.version_info.minor}"
SERVER_ARGS = "\n".join(
    [
        "import os",
        "",
        "class ServerArgs:",
        "    port = 1",
        "",
        "    def check(self):",
        "        return os.sep",
    ]
    + [f"OPTION_{i} = 'the value of option {i}'" for i in range(30)]
)
METADATA = (
    "Metadata-Version: 2.4\nName: sglang\nVersion: {version}\n"
    "Requires-Dist: torch==2.0\nRequires-Dist: numpy\n"
    'Requires-Dist: gpu-kernels[cu13]==1.0; sys_platform == "linux"\n'
    'Requires-Dist: pytest; extra == "test"\n\nLong words.\n'
)
HEADER = "Why: a reason\nUpstream: no\nDrop-when: never"


def upstream_files(version: str = VERSION) -> dict[str, str]:
    info = f"sglang-{version}.dist-info"
    return {
        "sglang/__init__.py": "from sglang.version import __version__\n",
        "sglang/version.py": "from sglang._version import __version__\n",
        "sglang/_version.py": f"__version__ = '{version}'\n",
        "sglang/srt/__init__.py": "",
        "sglang/srt/server_args.py": f"{SERVER_ARGS}\n",
        "sglang/srt/layers/linear.py": "class Linear:\n    pass\n",
        "sglang/srt/fast.cpython-311-x86_64-linux-gnu.so": "binary",
        "sglang/srt/configs/E=1,N=2, block.json": "{}\n",
        f"{info}/METADATA": METADATA.format(version=version),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {TAG}-{TAG}-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\nsglang = sglang.version:main\n",
        f"{info}/top_level.txt": "sglang\n",
        f"{info}/licenses/LICENSE": "upstream's licence\n",
    }


def make_wheel(folder: Path, files: dict[str, str], version: str = VERSION) -> Path:
    """Writes the wheel of `files` as upstream's build would: with modes and a RECORD."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"sglang-{version}-{TAG}-{TAG}-manylinux_2_34_{platform.machine()}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            entry = zipfile.ZipInfo(name)
            entry.external_attr = (0o100755 if name.endswith(".so") else 0o100644) << 16
            archive.writestr(entry, text)
        archive.writestr(f"sglang-{version}.dist-info/RECORD", record(files))
    return path


def record(files: dict[str, str]) -> str:
    rows = io.StringIO()
    for name, text in files.items():
        digest = (
            base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        )
        csv.writer(rows).writerow((name, f"sha256={digest}", len(text)))
    return rows.getvalue()


def pin(checkout: Checkout, wheel: Path, version: str = VERSION, budget: int = 20) -> None:
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    checkout.pin_file.write_text(
        f'version = "{version}"\nlocal = "flashmap.1"\nbudget = {budget}\n'
        f'[wheels]\n"{wheel.name}" = "{digest}"\n'
    )


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)

"""The fork's wheel: upstream's wheel with patched files, the overlay and metadata of our own.

Upstream's tags, extension modules and entry points stay. Times are fixed and entries sorted, so the
same checkout always gives the same bytes.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import zipfile
from pathlib import Path

from . import metadata
from .checkout import Checkout
from .errors import ForkError
from .overlay import overlay_files, owned_by_upstream
from .patched import patched_files
from .patches import read_series
from .tree import VERSION_FILE, version_source
from .upstream_wheel import fetch

_TIME = (2020, 1, 1, 0, 0, 0)


def wheel_file_name(checkout: Checkout, upstream_wheel: Path) -> str:
    tags = upstream_wheel.name.removeprefix(f"sglang-{checkout.pin.version}-")
    return f"sglang-{checkout.pin.fork_version}-{tags}"


def dist_info(checkout: Checkout, upstream_wheel: Path) -> dict[str, bytes]:
    """Content of the .dist-info folder's files by name, without RECORD."""
    patched = sorted({path for patch in read_series(checkout.patches) for path in patch.files})
    added = overlay_files(checkout.overlay)
    notice = (checkout.root / "NOTICE").read_text()
    notice += "\nModified files of upstream:\n" + "".join(
        f"  {p}\n" for p in [VERSION_FILE, *patched]
    )
    notice += "\nAdded files:\n" + "".join(f"  {path}\n" for path in added)
    kind = metadata.read_wheel(upstream_wheel, "WHEEL").splitlines()
    kind = ["Generator: sglang fork" if line.startswith("Generator:") else line for line in kind]
    upstream = {
        "entry_points.txt": metadata.read_wheel(upstream_wheel, "entry_points.txt"),
        "top_level.txt": metadata.read_wheel(upstream_wheel, "top_level.txt"),
        "licenses/LICENSE.upstream": metadata.read_wheel(upstream_wheel, "licenses/LICENSE"),
    }
    ours = {
        "METADATA": metadata.compose(checkout, metadata.read_wheel(upstream_wheel, "METADATA")),
        "WHEEL": "\n".join(kind).strip() + "\n",
        "licenses/LICENSE": (checkout.root / "LICENSE").read_text(),
        "licenses/NOTICE": notice,
    }
    return {name: text.encode() for name, text in sorted({**upstream, **ours}.items())}


def build_wheel(checkout: Checkout, out: Path) -> Path:
    """Writes the wheel into `out` and returns its path.

    Raises ForkError when a patch does not apply exactly or upstream owns an overlay path.
    """
    upstream_wheel = fetch(checkout)
    files = patched_files(upstream_wheel, read_series(checkout.patches))
    files[VERSION_FILE] = version_source(checkout.pin.fork_version).encode()
    ours = overlay_files(checkout.overlay)
    with zipfile.ZipFile(upstream_wheel) as archive:
        entries = [entry for entry in archive.infolist() if not entry.is_dir()]
        for name in owned_by_upstream(ours, {entry.filename for entry in entries}):
            raise ForkError(f"python/{name} exists upstream; change it with a patch, or rename it.")
        modes = {entry.filename: entry.external_attr for entry in entries}
        content = {
            entry.filename: archive.read(entry)
            for entry in entries
            if not entry.filename.split("/")[0].endswith(".dist-info")
        }
    content.update(files)
    content.update({name: (checkout.overlay.parent / name).read_bytes() for name in ours})
    info = dist_info(checkout, upstream_wheel)
    return write_wheel(
        checkout, out / wheel_file_name(checkout, upstream_wheel), content, info, modes
    )


def build_editable(checkout: Checkout, out: Path, tree: Path) -> Path:
    """Writes a wheel that puts `tree` on the path of the environment it is installed in."""
    upstream_wheel = fetch(checkout)
    content = {"__editable__.sglang.pth": f"{tree}\n".encode()}
    name = wheel_file_name(checkout, upstream_wheel)
    return write_wheel(checkout, out / name, content, dist_info(checkout, upstream_wheel), {})


def write_wheel(
    checkout: Checkout,
    path: Path,
    content: dict[str, bytes],
    info: dict[str, bytes],
    modes: dict[str, int],
) -> Path:
    """Writes the files of `content`, then `info` and RECORD; `modes` are external attributes."""
    folder = metadata.dist_info_name(checkout)
    members = [
        *sorted(content.items()),
        *((f"{folder}/{name}", data) for name, data in info.items()),
    ]
    record = io.StringIO()
    # csv quotes the commas in the names of upstream's kernel configurations.
    rows = csv.writer(record, lineterminator="\n")
    rows.writerows((name, f"sha256={_digest(data)}", len(data)) for name, data in members)
    rows.writerow((f"{folder}/RECORD", "", ""))
    members.append((f"{folder}/RECORD", record.getvalue().encode()))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members:
            entry = zipfile.ZipInfo(name, _TIME)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system = 3
            entry.external_attr = (
                0o100755 << 16 if modes.get(name, 0) >> 16 & 0o100 else 0o100644 << 16
            )
            archive.writestr(entry, data)
    partial.replace(path)
    return path


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()

"""What `make check` refuses: every way in which the fork could drift from its own rules.

Each fault is one line that names the file and the way out. Later checks need the series to apply,
so they are skipped when it does not.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

from .checkout import Checkout
from .errors import ForkError
from .git import Git
from .imports import Source
from .metadata import read_wheel
from .overlay import overlay_files, owned_by_upstream
from .patched import patched_files
from .patches import Patch, parse, series_names
from .upstream_wheel import fetch

# A file most of whose telling lines stand in one upstream file is a copy of it, not a new file.
_COPY_RATIO, _COPY_LINES, _TELLING_LENGTH = 0.6, 12, 20


def check(checkout: Checkout, wheel: Path | None = None) -> list[str]:
    """All faults of the checkout against `wheel` (the pinned one), in the order of their weight."""
    wheel = wheel or fetch(checkout)
    with zipfile.ZipFile(wheel) as archive:
        upstream_files = {name for name in archive.namelist() if not name.endswith("/")}
    faults, patches = series_faults(checkout)
    faults += header_faults(patches) + budget_faults(checkout, patches)
    faults += overlay_faults(checkout, upstream_files)
    replaced: dict[str, bytes] = {}
    try:
        replaced = patched_files(wheel, patches)
    except ForkError as error:
        faults.append(str(error))
    else:
        faults += import_faults(checkout, wheel, replaced)
    return faults + copy_faults(checkout, wheel) + committed_faults(checkout, wheel)


def summary(checkout: Checkout) -> str:
    """One line on the size of the fork."""
    _, patches = series_faults(checkout)
    changed = sum(patch.changed_lines for patch in patches)
    return (
        f"check: {len(patches)} patches change {changed} of at most {checkout.pin.budget} upstream "
        f"lines, {len(overlay_files(checkout.overlay))} overlay files"
    )


def series_faults(checkout: Checkout) -> tuple[list[str], list[Patch]]:
    """Faults of python/patches as files, and the patches that could be read."""
    folder = checkout.patches
    names = series_names(folder)
    present = {path.name for path in folder.glob("*.patch")}
    faults = [
        f"series names {name}, which does not exist; remove the line"
        for name in names
        if name not in present
    ]
    faults += [
        f"{name} is not in series; run `make refresh` or delete it"
        for name in sorted(present - set(names))
    ]
    faults += [
        f"series names {name} twice" for name in sorted({n for n in names if names.count(n) > 1})
    ]
    patches = []
    for name in dict.fromkeys(names):
        if name in present:
            try:
                patches.append(parse(folder / name))
            except ForkError as error:
                faults.append(str(error))
    return [f"python/patches: {fault}" for fault in faults], patches


def header_faults(patches: list[Patch]) -> list[str]:
    return [
        f"python/patches/{patch.name}: the header lacks {', '.join(missing)}; "
        "add it to the commit's message"
        for patch in patches
        if (missing := patch.missing_fields())
    ]


def budget_faults(checkout: Checkout, patches: list[Patch]) -> list[str]:
    total, budget = sum(patch.changed_lines for patch in patches), checkout.pin.budget
    if total <= budget:
        return []
    worst = max(patches, key=lambda patch: patch.changed_lines)
    return [
        f"the patches change {total} upstream lines, {total - budget} more than the budget of "
        f"{budget} in python/upstream.toml; move code into the overlay "
        f"(most: {worst.name}, {worst.changed_lines})"
    ]


def overlay_faults(checkout: Checkout, upstream_files: set[str]) -> list[str]:
    return [
        f"python/{name} exists upstream; change it with a patch, or rename it"
        for name in owned_by_upstream(overlay_files(checkout.overlay), upstream_files)
    ]


def import_faults(checkout: Checkout, wheel: Path, replaced: dict[str, bytes]) -> list[str]:
    """Imports of sglang names that do not exist, in the overlay, tests, benchmarks and scripts."""
    overlay = {
        name: (checkout.overlay.parent / name).read_bytes()
        for name in overlay_files(checkout.overlay)
    }
    source = Source(wheel, {**replaced, **overlay})
    ours = {
        f"python/{name}": (name, text) for name, text in overlay.items() if name.endswith(".py")
    }
    for folder in ("test", "benchmark", "scripts"):
        for path in sorted((checkout.root / folder).rglob("*.py")):
            name = path.relative_to(checkout.root).as_posix()
            ours[name] = (name, path.read_bytes())
    faults, version = [], wheel.name.split("-")[1]
    for shown, (name, text) in ours.items():
        try:
            for line, missing in sorted(source.missing(name, text)):
                faults.append(
                    f"{shown}:{line} imports {missing}, which sglang {version} "
                    "with our patches lacks"
                )
        except SyntaxError as error:
            faults.append(f"{shown}:{error.lineno} is not valid Python: {error.msg}")
    return faults


def copy_faults(checkout: Checkout, wheel: Path) -> list[str]:
    """Overlay files that are mostly an upstream file."""
    wanted = {}
    for name in overlay_files(checkout.overlay):
        lines = set(_telling((checkout.overlay.parent / name).read_bytes()))
        if len(lines) >= _COPY_LINES:
            wanted[name] = lines
    sought = set().union(*wanted.values()) if wanted else set()
    faults = []
    with zipfile.ZipFile(wheel) as archive:
        for path in archive.namelist() if sought else []:
            if not path.endswith(".py"):
                continue
            shared = sought.intersection(_telling(archive.read(path)))
            for name, lines in wanted.items():
                if len(lines & shared) > _COPY_RATIO * len(lines):
                    percent = round(100 * len(lines & shared) / len(lines))
                    faults.append(
                        f"python/{name}: {percent} % of its lines are those of upstream's {path}; "
                        "import or subclass what it has instead"
                    )
    return faults


def _telling(text: bytes) -> Iterator[bytes]:
    """Lines that say something of their own: long enough, neither an import nor a comment."""
    for line in text.splitlines():
        line = line.strip()
        if len(line) >= _TELLING_LENGTH and not line.startswith((b"#", b"import ", b"from ")):
            yield line


def committed_faults(checkout: Checkout, wheel: Path) -> list[str]:
    """Files of this repository that are upstream's, byte for byte, wherever they lie."""
    rows = csv.reader(io.StringIO(read_wheel(wheel, "RECORD")))
    by_hash = {
        row[1].removeprefix("sha256="): row[0] for row in rows if row[1] and int(row[2]) > 200
    }
    listed = Git(checkout.root).run("ls-files", "-z", "--cached", "--others", "--exclude-standard")
    faults = []
    for name in sorted(set(listed.stdout.decode().split("\0")) - {""}):
        path = checkout.root / name
        if path.is_file() and not path.is_symlink():
            digest = hashlib.sha256(path.read_bytes()).digest()
            origin = by_hash.get(base64.urlsafe_b64encode(digest).rstrip(b"=").decode())
            if origin:
                faults.append(
                    f"{name} is upstream's {origin}; upstream's source is not committed here"
                )
    return faults

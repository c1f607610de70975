"""The overlay: files that upstream lacks, linked into the tree so that an edit is live at once."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

from .errors import ForkError

_SKIPPED = {"__pycache__"}


def overlay_files(folder: Path) -> list[str]:
    """Sorted paths of the files in `folder`, the overlay's `sglang`, e.g. `sglang/srt/x.py`."""
    found = []
    for where, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED)
        inside = Path(where).relative_to(folder.parent)
        found += [(inside / name).as_posix() for name in names if not name.endswith(".pyc")]
    return sorted(found)


def owned_by_upstream(files: list[str], upstream_files: set[str]) -> list[str]:
    """Those of `files` that upstream has too, as a file or as a folder, or has a file above."""
    folders = {
        parent.as_posix() for name in upstream_files for parent in PurePosixPath(name).parents
    }
    return [
        name
        for name in files
        if name in upstream_files
        or name in folders
        or any(parent.as_posix() in upstream_files for parent in PurePosixPath(name).parents)
    ]


def plan_links(files: list[str], upstream_files: set[str]) -> list[str]:
    """Smallest set of links: the topmost folder that upstream lacks, else the single file.

    Raises ForkError when upstream owns one of `files`.
    """
    for name in owned_by_upstream(files, upstream_files):
        raise ForkError(f"python/{name} exists upstream; change it with a patch, or rename it.")
    folders = {
        parent.as_posix() for name in upstream_files for parent in PurePosixPath(name).parents
    }
    links = set()
    for name in files:
        path = PurePosixPath(name)
        above = [parent.as_posix() for parent in reversed(path.parents)]
        links.add(next((parent for parent in above if parent not in folders), name))
    return sorted(links)


def link(tree: Path, overlay_root: Path, links: list[str], previous: list[str]) -> None:
    """Makes `tree` hold `links` and none of `previous` that is no longer wanted.

    Links are relative, so a checkout can be moved. `overlay_root` is the folder that holds
    `sglang/`.
    """
    for name in set(previous) - set(links):
        path = tree / name
        if path.is_symlink():
            path.unlink()
    for name in links:
        path = tree / name
        target = os.path.relpath(overlay_root / name, path.parent)
        if path.is_symlink() and os.readlink(path) == target:
            continue
        if path.is_symlink() or path.exists():
            if not path.is_symlink():
                raise ForkError(f"{path} is in the way of the overlay; move it into python/{name}.")
            path.unlink()
        path.symlink_to(target)

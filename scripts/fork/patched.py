"""Upstream's files after the patches, without the whole tree: only touched files are unpacked."""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path

from .errors import ForkError
from .git import init
from .patches import Patch, commit_series


def patched_files(wheel: Path, patches: list[Patch]) -> dict[str, bytes]:
    """Content by path of every file that `patches` touch, e.g. `sglang/srt/server_args.py`.

    Raises ForkError when a patch does not apply exactly, or touches a path that is not upstream's.
    """
    if not patches:
        return {}
    touched = sorted({path for patch in patches for path in patch.files})
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        git = init(Path(folder))
        owned = set(archive.namelist())
        for path in touched:
            if path not in owned:
                name = next(patch.name for patch in patches if path in patch.files)
                raise ForkError(
                    f"{name} adds or changes {path}, which upstream lacks; use the overlay."
                )
            archive.extract(path, folder)
        git.text("add", "--all", "--force")
        git.text("commit", "-q", "-m", "touched files")
        head = commit_series(git, "HEAD", patches)
        kept = set(git.bytes("ls-tree", "-r", "-z", "--name-only", head).decode().split("\0"))
        if lost := [path for path in touched if path not in kept]:
            raise ForkError(
                f"the patches delete {', '.join(lost)}; leave upstream's files in place."
            )
        return {path: git.bytes("cat-file", "blob", f"{head}:{path}") for path in touched}

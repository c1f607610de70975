"""The built tree: pristine upstream in a throwaway git repository, one commit a patch, overlay
linked in.

Commits: `upstream` (tag; the wheel's files as they are), `base` (tag; the fork's version written
in), then the series. Everything between `base` and HEAD belongs to python/patches and `refresh`
writes it there. A stamp in .git says what the tree was made of; when nothing changed there is
nothing to do, and when only patches or the overlay changed only they are redone, in place, so that
files nobody touched keep their times.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from . import metadata
from .checkout import Checkout
from .errors import ForkError
from .git import Git, init
from .overlay import link, overlay_files, plan_links
from .patches import commit_series, export_series, read_series, series_names, write_series
from .upstream_wheel import fetch, wheel_name

VERSION_FILE = "sglang/_version.py"


def version_source(version: str) -> str:
    """Text of `sglang/_version.py`, which upstream's build generates and `__version__` is from."""
    numbers = version.split("+")[0].split(".")
    parts = ", ".join([*numbers, *(repr(part) for part in version.split("+")[1:])])
    return (
        '"""Written by the fork\'s build."""\n\n'
        f"__version__ = version = {version!r}\n"
        f"__version_tuple__ = version_tuple = ({parts})\n"
        "__commit_id__ = commit_id = None\n"
    )


def build_tree(checkout: Checkout, folder: Path, force: bool = False, rebase: bool = False) -> str:
    """Brings `folder` up to date and returns one line that says what was done.

    Raises ForkError when `folder` holds edits or commits that `refresh` has not saved, unless
    `force` (they are discarded) or `rebase` (commits are carried over onto the changed series).
    """
    with _lock(folder):
        return _build_tree(checkout, folder, force, rebase)


def _build_tree(checkout: Checkout, folder: Path, force: bool, rebase: bool) -> str:
    stamp, old = _stamp(checkout), read_stamp(folder)
    made_of = ("wheel", "version", "patches", "overlay", "metadata")
    if old and not force and all(old[key] == stamp[key] for key in made_of):
        return f"{folder} is up to date"
    if not old and folder.exists() and any(folder.iterdir()):
        raise ForkError(
            f"{folder} was not made by `make tree`; remove it or name another with --dir."
        )
    fresh = not old or any(old[key] != stamp[key] for key in ("wheel", "version"))
    repatch = fresh or force or old["patches"] != stamp["patches"]
    if old and repatch and not force:
        refuse_unsaved(folder, old, allow_commits=rebase and not fresh)
    done = []
    if fresh:
        _unpack(checkout, folder)
        done.append(f"unpacked sglang {checkout.pin.version}")
    git = Git(folder)
    if repatch:
        patches = read_series(checkout.patches)
        head = commit_series(git, "base", patches)
        own = git.text("rev-parse", "HEAD") if rebase and old and not fresh else None
        _check_out(git, head, force)
        done.append(f"applied {len(patches)} patches")
    upstream_files = set(git.bytes("ls-files", "-z").decode().split("\0")) - {""}
    links = plan_links(overlay_files(checkout.overlay), upstream_files)
    link(folder, checkout.overlay.parent, links, old["links"] if old and not fresh else [])
    exclude = ["__pycache__/", "*.pyc", "/*.dist-info/", *(f"/{name}" for name in links)]
    (folder / ".git" / "info" / "exclude").write_text("".join(f"{name}\n" for name in exclude))
    metadata.write_dist_info(checkout, folder)
    _write_stamp(folder, {**stamp, "links": links, "head": head if repatch else old["head"]})
    if repatch and own and own != old["head"]:
        _carry_over(git, own, old["head"], head)
        done.append("rebased your commits")
    return f"{folder}: {', '.join([*done, f'linked {len(links)} overlay paths'])}"


def _check_out(git: Git, head: str, force: bool) -> None:
    """Puts branch `fork` and the files at `head`; with `force`, whatever state they are in."""
    if force:
        git.run("rebase", "--quit")
        git.text("clean", "-q", "-f", "-d")
    git.text("checkout", "-q", "--force", "-B", "fork", head)


def _carry_over(git: Git, own: str, since: str, head: str) -> None:
    """Replays the commits `since..own` on `head`.

    Called when the stamp is that of the new series already, so that after a conflict git alone can
    finish what is left.
    """
    git.text("reset", "-q", "--hard", own)
    if git.run("rebase", "-q", "--onto", head, since).returncode:
        files = ", ".join(git.text("diff", "--name-only", "--diff-filter=U").split())
        raise ForkError(
            f"your commits conflict with the changed series in {files}; resolve them in "
            f"{git.folder}, `git rebase --continue`, then `make refresh`."
        )


def refresh(checkout: Checkout, folder: Path, force: bool = False) -> list[str]:
    """Writes the commits on top of `base` to python/patches; returns what changed there.

    Edits that are not committed stay in the tree and out of the patches. Raises ForkError when
    python/patches changed since the tree was built, which would be lost, unless `force`.
    """
    with _lock(folder):
        old = read_stamp(folder)
        if not old:
            raise ForkError(f"{folder} is not a built tree; run `make tree` first.")
        stamp = _stamp(checkout)
        if old["patches"] != stamp["patches"] and not force:
            raise ForkError(
                f"{checkout.patches} changed since {folder} was built and refresh would overwrite "
                "that; take it in with `python scripts/upstream.py tree --rebase`, or overwrite it "
                "with --force."
            )
        git = Git(folder)
        if git.run("merge-base", "--is-ancestor", "base", "HEAD").returncode:
            raise ForkError(f"HEAD of {folder} is not on top of `base`; check out branch `fork`.")
        known = series_names(checkout.patches) if (checkout.patches / "series").exists() else []
        patches = export_series(git, "base", known=known)
        for patch in patches:
            if missing := patch.missing_fields():
                raise ForkError(
                    f"the message of '{patch.message.splitlines()[0]}' lacks {', '.join(missing)}; "
                    "add the lines with `git commit --amend` or `git rebase -i base`."
                )
        changed = write_series(checkout.patches, patches)
        head = git.text("rev-parse", "HEAD")
        _write_stamp(folder, {**old, "patches": _stamp(checkout)["patches"], "head": head})
        if dirty := _dirty(git):
            changed.append(f"left out {len(dirty)} edited files that are not committed in {folder}")
        return changed


def refuse_unsaved(folder: Path, stamp: dict, allow_commits: bool = False) -> None:
    """Raises ForkError when `folder` holds edits or commits that python/patches does not have."""
    git = Git(folder)
    way_out = "commit and `make refresh`, or discard them with --force"
    if (folder / ".git" / "rebase-merge").exists():
        raise ForkError(
            f"a rebase is in progress in {folder}; finish it with `git rebase --continue`."
        )
    if dirty := _dirty(git):
        raise ForkError(
            f"{folder} has edits that are not committed ({', '.join(dirty[:3])}); {way_out}."
        )
    if not allow_commits and git.text("rev-parse", "HEAD") != stamp["head"]:
        raise ForkError(
            f"{folder} has commits that are not in python/patches, and those changed; carry them "
            "over with `python scripts/upstream.py tree --rebase`, or discard them with --force."
        )


def read_stamp(folder: Path) -> dict | None:
    """What the tree in `folder` was made of, or None where there is none."""
    path = folder / ".git" / "fork-stamp.json"
    return json.loads(path.read_text()) if path.exists() else None


def _write_stamp(folder: Path, stamp: dict) -> None:
    (folder / ".git" / "fork-stamp.json").write_text(json.dumps(stamp, indent=1, sort_keys=True))


def _dirty(git: Git) -> list[str]:
    lines = (
        git.bytes(
            "-c", "status.renames=false", "status", "--porcelain", "--untracked-files=all", "-z"
        )
        .decode()
        .split("\0")
    )
    return [line[3:] for line in lines if line]


def _stamp(checkout: Checkout) -> dict:
    def digest(paths: list[Path]) -> str:
        parts = (f"{path.name}\0".encode() + path.read_bytes() for path in paths if path.exists())
        return hashlib.sha256(b"\0".join(parts)).hexdigest()

    files = overlay_files(checkout.overlay)
    return {
        "wheel": checkout.pin.wheels[wheel_name(checkout)],
        "version": checkout.pin.fork_version,
        "patches": digest([checkout.patches / "series", *sorted(checkout.patches.glob("*.patch"))]),
        "overlay": hashlib.sha256("\n".join(files).encode()).hexdigest(),
        "metadata": digest([checkout.root / "python" / "pyproject.toml"]),
    }


def _unpack(checkout: Checkout, folder: Path) -> None:
    """Replaces `folder` by a repository with the tags `upstream` and `base`, by one rename."""
    wheel = fetch(checkout)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".tree-") as scratch:
        new = Path(scratch) / "tree"
        commit_upstream(init(new), wheel, checkout.pin.version)
        git = Git(new)
        (new / VERSION_FILE).write_text(version_source(checkout.pin.fork_version))
        git.text("commit", "-q", "-a", "-m", f"Report version {checkout.pin.fork_version}")
        git.text("tag", "base")
        if folder.exists():
            shutil.rmtree(folder)
        new.rename(folder)


def commit_upstream(git: Git, wheel: Path, version: str) -> None:
    """Commits the package files of `wheel`, as they are, and tags the commit `upstream`."""
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            if entry.is_dir() or entry.filename.split("/")[0].endswith(".dist-info"):
                continue
            path = Path(archive.extract(entry, git.folder))
            if entry.external_attr >> 16 & 0o100:
                path.chmod(0o755)
    git.text("add", "--all", "--force")
    git.text("commit", "-q", "-m", f"sglang {version}, as released")
    git.text("tag", "upstream")


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """One writer at a time: several shells may share a tree."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

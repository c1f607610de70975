"""Moves the series to another upstream release, in a scratch repository, one patch at a time.

The scratch repository holds the pinned release with the series as commits, and the other release
as a root commit tagged `base`. A survey first tries every patch and says which apply, which
conflict in what files and which the release has already; then a rebase carries the commits over
and stops at the first conflict, which git resolves as always. Called again after that, `bump` looks
at the result, and with `write` makes it the fork's own.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .checkout import Checkout
from .errors import ForkError
from .faults import import_faults, overlay_faults
from .git import Git, init
from .patches import commit_series, export_series, read_series, series_names, write_series
from .tree import commit_upstream
from .upstream_wheel import download, fetch, sha256


def bump(checkout: Checkout, version: str, scratch: Path, write: bool = False) -> Iterator[str]:
    """Ports the series to upstream's `version` in `scratch`; yields the lines of the report.

    Raises ForkError when the release cannot be downloaded, at a conflict, or, with `write`, when
    the overlay does not fit the release.
    """
    wheel = _other_wheel(checkout, version)
    git = Git(scratch)
    if not (scratch / ".git").exists():
        _prepare(checkout, wheel, version, scratch)
        yield from _survey(scratch)
        result = git.run("rebase", "-q", "--onto", "base", "pinned", "fork")
        if result.returncode and not _in_progress(scratch):
            raise ForkError(f"git rebase failed in {scratch}: {result.stderr.decode().strip()}")
    faults = _overlay_faults(checkout, wheel, scratch)
    yield from (f"overlay:   {fault}" for fault in faults)
    if _in_progress(scratch):
        subject = git.text("log", "-1", "--format=%s", "REBASE_HEAD")
        raise ForkError(
            f"'{subject}' conflicts in {', '.join(_conflicts(git))}; resolve it in {scratch}, "
            "`git add` and `git rebase --continue`, then run this again."
        )
    if faults:
        raise ForkError(
            f"the series applies to sglang {version}, the overlay does not: mend the {len(faults)} "
            "places above and run this again."
        )
    if write:
        yield from _write(checkout, version, scratch)
    else:
        yield f"the series applies to sglang {version}; --write makes it the pinned release"


def _other_wheel(checkout: Checkout, version: str) -> Path:
    """The release's wheel for this interpreter; its hash is not known before `write`."""
    folder = checkout.cache / "bump"
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    found = next(folder.glob(f"sglang-{version}-{tag}-*"), None)
    return found or download(version, folder)


def _prepare(checkout: Checkout, wheel: Path, version: str, scratch: Path) -> None:
    pinned = fetch(checkout)
    scratch.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch.parent, prefix=".bump-") as folder:
        git = init(Path(folder) / "repository")
        commit_upstream(git, pinned, checkout.pin.version)
        git.text("tag", "pinned")
        head = commit_series(git, "pinned", read_series(checkout.patches))
        git.text("tag", "series", head)
        git.text("checkout", "-q", "--orphan", "other")
        git.text("rm", "-q", "-r", "-f", ".")
        git.text("tag", "-d", "upstream")
        commit_upstream(git, wheel, version)
        git.text("tag", "base")
        git.text("branch", "-f", "fork", "series")
        shutil.move(git.folder, scratch)


def _survey(scratch: Path) -> list[str]:
    """Tries each patch on the release, leaving out those that conflict; one line a patch."""
    git = Git(scratch)
    git.text("checkout", "-q", "--detach", "base")
    lines = []
    for commit in git.text("rev-list", "--reverse", "pinned..series").split():
        subject = git.text("log", "-1", "--format=%s", commit)
        picked = git.run("cherry-pick", commit)
        if not picked.returncode:
            lines.append(f"applies:   {subject}")
            continue
        conflicts = _conflicts(git)
        git.run("cherry-pick", "--abort")
        if conflicts:
            lines.append(f"conflicts: {subject} ({', '.join(conflicts)})")
        else:
            lines.append(f"superfluous: {subject} (the release has this change)")
    return lines


def _conflicts(git: Git) -> list[str]:
    return git.text("diff", "--name-only", "--diff-filter=U").split()


def _in_progress(scratch: Path) -> bool:
    return (scratch / ".git" / "rebase-merge").exists()


def _overlay_faults(checkout: Checkout, wheel: Path, scratch: Path) -> list[str]:
    """Faults of the overlay against the release with what applies of the series.

    Names that only a patch that is not ported yet would bring are looked up in the pinned release.
    """
    git = Git(scratch)
    replaced = {}
    spans = [("pinned", "series")] if _in_progress(scratch) else []
    for since, commit in (*spans, ("base", "HEAD")):
        changed = git.text("diff", "--name-only", "--diff-filter=d", since, commit).split()
        replaced |= {path: git.bytes("cat-file", "blob", f"{commit}:{path}") for path in changed}
    owned = set(git.text("ls-tree", "-r", "--name-only", "base").split("\n"))
    return overlay_faults(checkout, owned) + import_faults(checkout, wheel, replaced)


def _write(checkout: Checkout, version: str, scratch: Path) -> list[str]:
    hashes = _hashes(checkout, version)
    known = series_names(checkout.patches)
    changed = write_series(checkout.patches, export_series(Git(scratch), "base", "fork", known))
    text = checkout.pin_file.read_text()
    text = re.sub(r'(?m)^version = ".*"$', f'version = "{version}"', text)
    text = text[: text.index("[wheels]")] + "[wheels]\n"
    text += "".join(f'"{name}" = "{digest}"\n' for name, digest in hashes.items())
    checkout.pin_file.write_text(text)
    return [*changed, f"wrote upstream.toml: sglang {version}, {len(hashes)} wheels"]


def _hashes(checkout: Checkout, version: str) -> dict[str, str]:
    """sha256 of the release's wheel for every interpreter and machine that is pinned now."""
    hashes = {}
    for name in checkout.pin.wheels:
        _, _, python, _, platform = name.removesuffix(".whl").split("-")
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", folder]
            command += [
                "--only-binary=:all:",
                "--platform",
                platform,
                "--python-version",
                python[2:],
            ]
            result = subprocess.run(
                [*command, f"sglang=={version}"], capture_output=True, text=True
            )
            if result.returncode:
                raise ForkError(f"sglang {version} has no wheel for {python} on {platform}.")
            found = next(Path(folder).iterdir())
            hashes[found.name] = sha256(found)
    return hashes

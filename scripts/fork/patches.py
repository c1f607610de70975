"""The series: each patch is a commit message and a zero-context diff of upstream's files.

A patch file is the message's subject, a blank line, its body with the three header fields, a blank
line and the diff. There are no dates, authors, hashes or `index` lines, so the same change always
gives the same bytes, whoever writes it. Zero context keeps upstream's source out of this repository
except for the lines a patch removes; what makes that safe is the pinned sha256 of the wheel.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .errors import ForkError
from .git import Git

FIELDS = ("Why", "Upstream", "Drop-when")
_DIFF = ("-p", "-U0", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames")
_DIFF += ("--diff-algorithm=myers", "--indent-heuristic", "--src-prefix=a/", "--dst-prefix=b/")


@dataclass(frozen=True)
class Patch:
    """One patch: its file name, the commit message and the diff from the first `diff --git`."""

    name: str
    message: str
    diff: bytes

    @property
    def files(self) -> list[str]:
        """Paths the diff touches, e.g. `sglang/srt/server_args.py`."""
        return [path.decode() for path in re.findall(rb"^diff --git a/(\S+) b/", self.diff, re.M)]

    @property
    def hunks(self) -> bytes:
        """The diff without the function names after `@@`, which depend on git's version."""
        return re.sub(rb"^(@@ [-+,0-9 ]+ @@).*$", rb"\1", self.diff, flags=re.M)

    @property
    def changed_lines(self) -> int:
        """Lines added plus lines removed."""
        lines = self.diff.splitlines()
        return sum(
            line[:1] in b"+-" and line[:4] not in (b"+++ ", b"--- ") for line in lines if line
        )

    def missing_fields(self) -> list[str]:
        """Header fields that the message lacks or leaves empty."""
        return [name for name in FIELDS if not re.search(rf"^{name}:[ \t]*\S", self.message, re.M)]

    def to_bytes(self) -> bytes:
        return self.message.strip().encode() + b"\n\n" + self.diff


def parse(path: Path) -> Patch:
    """Reads a patch file; raises ForkError when it holds no diff."""
    data = path.read_bytes()
    start = 0 if data.startswith(b"diff --git ") else data.find(b"\ndiff --git ") + 1
    if start == 0 and not data.startswith(b"diff --git "):
        raise ForkError(f"{path} holds no `diff --git` part; write it with `make refresh`.")
    return Patch(path.name, data[:start].decode().strip(), data[start:])


def series_names(folder: Path) -> list[str]:
    """The names in `series`, in order; raises ForkError when the file is missing."""
    series = folder / "series"
    if not series.exists():
        raise ForkError(f"{series} is missing; restore it or run `make refresh`.")
    return [line.strip() for line in series.read_text().splitlines() if line.strip()]


def read_series(folder: Path) -> list[Patch]:
    """The patches of `folder` in order; raises ForkError for a name whose file is missing."""
    patches = []
    for name in series_names(folder):
        if not (folder / name).exists():
            raise ForkError(
                f"{folder / 'series'} names {name}, which does not exist; remove the line."
            )
        patches.append(parse(folder / name))
    return patches


def write_series(folder: Path, patches: list[Patch]) -> list[str]:
    """Makes `folder` hold exactly `patches`; returns the names that were written or removed."""
    wanted = {patch.name: patch.to_bytes() for patch in patches}
    wanted["series"] = "".join(f"{patch.name}\n" for patch in patches).encode()
    folder.mkdir(parents=True, exist_ok=True)
    changed = []
    for path in sorted(folder.glob("*.patch")):
        if path.name not in wanted:
            path.unlink()
            changed.append(f"removed {path.name}")
    for name, data in wanted.items():
        path = folder / name
        if not path.exists() or path.read_bytes() != data:
            path.write_bytes(data)
            changed.append(f"wrote {name}")
    return changed


def commit_series(git: Git, base: str, patches: list[Patch]) -> str:
    """Commits `patches` on `base` without touching the working tree; returns the last commit.

    Raises ForkError naming the first patch that does not apply exactly at the lines it names.
    """
    head = git.text("rev-parse", base)
    with tempfile.TemporaryDirectory() as folder:
        staged = git.with_index(Path(folder) / "index")
        staged.text("read-tree", base)
        for patch in patches:
            apply = ("apply", "--cached", "--unidiff-zero", "--whitespace=nowarn", "-")
            result = staged.run(*apply, stdin=patch.diff)
            if result.returncode:
                words = result.stderr.decode(errors="replace").strip().replace("\n", "; ")
                raise ForkError(f"{patch.name} does not apply: {words}; fix it in build/tree.")
            tree = staged.text("write-tree")
            message = f"{patch.message.strip()}\n".encode()
            head = staged.text("commit-tree", tree, "-p", head, stdin=message)
            # git apply looks for removed lines elsewhere when they are not where the hunk says.
            if Patch(patch.name, "", diff_of(git, head)).hunks != patch.hunks:
                raise ForkError(
                    f"{patch.name} does not apply exactly: its lines were found elsewhere, or it "
                    "was not written by `make refresh`; check the result in build/tree and refresh."
                )
    return head


def diff_of(git: Git, commit: str) -> bytes:
    """The commit's change as a zero-context diff with stable bytes."""
    diff = git.bytes("diff-tree", "--no-commit-id", "-r", *_DIFF, commit)
    return re.sub(rb"^index [0-9a-f]+\.\.[0-9a-f]+.*\n", b"", diff, flags=re.M)


def export_series(git: Git, base: str, head: str = "HEAD", known: list[str] = ()) -> list[Patch]:
    """The commits in `base..head` as patches, numbered in order and named after their subjects.

    A patch that is among the `known` names keeps its number unless the order forbids it, so that
    numbers may leave gaps and inserting a patch renames no more files than it must.

    Raises ForkError for a merge, a commit without a diff or a binary change.
    """
    numbers = {name[5:]: int(name[:4]) for name in known if re.match(r"\d{4}-", name)}
    patches: list[Patch] = []
    number = 0
    for commit in git.text("rev-list", "--reverse", f"{base}..{head}").split():
        message = git.text("log", "-1", "--format=%B", commit)
        subject = message.splitlines()[0]
        if " " in git.text("log", "-1", "--format=%P", commit):
            raise ForkError(f"'{subject}' is a merge; make the series linear with `git rebase`.")
        diff = diff_of(git, commit)
        if not diff:
            raise ForkError(f"'{subject}' changes nothing; drop it with `git rebase -i base`.")
        if b"\nBinary files " in diff or b"\nGIT binary patch" in diff:
            raise ForkError(f"'{subject}' changes a binary file; only text can be patched.")
        topic = re.sub(r"[^a-z0-9]+", "-", subject.lower()).strip("-")[:56].strip("-") + ".patch"
        number = max(number + 1, numbers.get(topic, 0))
        patches.append(Patch(f"{number:04d}-{topic}", message, diff))
    return patches

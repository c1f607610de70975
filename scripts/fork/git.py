"""Runs git the same way on every machine: fixed identity, no user configuration."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from .errors import ForkError

_IDENTITY = {"NAME": "sglang fork", "EMAIL": "fork@localhost", "DATE": "2000-01-01T00:00:00+0000"}
_ENVIRONMENT = {
    **{
        f"GIT_{who}_{key}": value
        for who in ("AUTHOR", "COMMITTER")
        for key, value in _IDENTITY.items()
    },
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_SYSTEM": os.devnull,
    "LC_ALL": "C",
}


class Git:
    """git in `folder`; every method raises ForkError with git's last words when git fails."""

    def __init__(self, folder: Path, **extra: str):
        self.folder = folder
        # A git hook or an outer `git rebase --exec` exports GIT_DIR, which would redirect us.
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
        self._environment = {**inherited, **_ENVIRONMENT, **extra}

    def run(
        self, *arguments: str, stdin: bytes | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        """Runs git and returns the result whatever its exit status."""
        try:
            return subprocess.run(
                ["git", "-c", "safe.directory=*", "-C", str(self.folder), *arguments],
                input=stdin if stdin is not None else b"",
                capture_output=True,
                env=self._environment,
            )
        except FileNotFoundError:
            raise ForkError("git is not installed; install git and try again.") from None

    def bytes(self, *arguments: str, stdin: bytes | None = None) -> bytes:
        result = self.run(*arguments, stdin=stdin)
        if result.returncode:
            words = result.stderr.decode(errors="replace").strip() or f"exit {result.returncode}"
            raise ForkError(f"git {arguments[0]} failed in {self.folder}: {words}")
        return result.stdout

    def text(self, *arguments: str, stdin: bytes | None = None) -> str:
        return self.bytes(*arguments, stdin=stdin).decode().strip()

    def with_index(self, index: Path) -> Git:
        """The same repository with another index file: the working tree is left alone."""
        return Git(self.folder, GIT_INDEX_FILE=str(index))


def init(folder: Path) -> Git:
    """Makes an empty repository with settings that keep content and diffs byte for byte."""
    folder.mkdir(parents=True, exist_ok=True)
    git = Git(folder)
    git.text("init", "-q", "-b", "fork")
    settings = {
        "core.autocrlf": "false",
        "core.hooksPath": os.devnull,
        "core.compression": "1",
        "commit.gpgSign": "false",
        "gc.auto": "0",
        "advice.detachedHead": "false",
    }
    for key, value in settings.items():
        git.text("config", key, value)
    (folder / ".git" / "info").mkdir(exist_ok=True)
    (folder / ".git" / "info" / "attributes").write_text("* -text -filter\n*.py diff=python\n")
    return git

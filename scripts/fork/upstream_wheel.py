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
    command += ["--disable-pip-version-check", "--dest", str(folder), f"sglang=={version}"]
    # pip's progress goes to the terminal; its errors are kept to tell the two causes apart.
    result = subprocess.run(command, stderr=subprocess.PIPE, stdout=sys.stderr, text=True)
    if result.returncode:
        if "No module named pip" in result.stderr:
            raise ForkError(f"{sys.executable} has no pip; run `{sys.executable} -m ensurepip`.")
        if "from versions: none" in result.stderr or "onnection" in result.stderr:
            raise ForkError(
                f"sglang {version} could not be downloaded: no package index answered; "
                f"check the network, or put the wheel into {folder} yourself."
            )
        last = result.stderr.strip().splitlines()[-1]
        raise ForkError(f"sglang {version} could not be downloaded by pip: {last}")
    return next(folder.glob(f"sglang-{version}-*.whl"))


def fetch(checkout: Checkout) -> Path:
    """Path of the verified wheel, downloaded on first use.

    Raises ForkError when there is no network or the file's sha256 is not the pinned one.
    """
    name = wheel_name(checkout)
    path = checkout.cache / "wheels" / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        print(f"downloading {name}", file=sys.stderr)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            found = download(checkout.pin.version, Path(folder))
            if found.name != name:
                raise ForkError(
                    f"pip offered {found.name}, whose sha256 is not in {checkout.pin_file}; "
                    f"only {name} is known for this interpreter."
                )
            verify(checkout, found)
            found.replace(path)
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

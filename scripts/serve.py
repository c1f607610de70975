"""`make serve`: sets up, gets the demo target and its draft, serves them with FLASHMAP.

The demo target has a trained draft in drafts/; any other target gets an untrained one.

Arguments this script does not know go to `sglang.launch_server` and win over the ones it passes
itself. The server runs in the foreground in a process group of its own: Ctrl-C (or SIGTERM) ends
all of it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import demo_target
import setup_env
from fork.checkout import Checkout, here
from fork.errors import ForkError
from fork.upstream_wheel import sha256

PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PATIENCE_S = 10
TREE_ARGUMENTS = (
    *("--speculative-flashmap-tree-candidates", "1", "--speculative-flashmap-tree-choices", "8"),
)
VERIFY_WIDTHS = {"cuda": "16", "cpu": "9"}
"""For the demo target's draft, which is accepted longer so than as a chain. 16 rows cost a GPU
little more than 9, and a CPU what they gain (docs/benchmarks.md)."""


def check_port(host: str, port: int) -> None:
    """Raises ForkError when nothing can listen on `port`."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            raise ForkError(
                f"port {port} of {host} cannot be used ({getattr(error, 'strerror', 0) or error}); "
                f'choose another: make serve ARGS="--port {30001 if port != 30001 else 30002}".'
            ) from None


def last_line(command: list[str]) -> str:
    """Runs `command` with its output on the terminal; returns the last line of its stdout."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    lines = [""]
    for line in process.stdout:
        lines.append(line.strip())
        print(line, end="", flush=True)
    if process.wait():
        raise ForkError(f"{Path(command[1]).name} failed; its own words are above.")
    return lines[-1]


def shipped_draft(checkout: Checkout) -> Path | None:
    """The demo target's trained draft in drafts/, None where a checkout leaves it out.

    Raises ForkError when a file is not the one that the folder's SHA256SUMS lists.
    """
    folder = checkout.root / "drafts" / demo_target.NAME
    sums = folder / demo_target.SUMS
    if not sums.exists():
        return None
    for line in sums.read_text().splitlines():
        expected, name = line.split(maxsplit=1)
        path = folder / name
        if not path.exists() or sha256(path) != expected:
            raise ForkError(
                f"{path} is {'damaged' if path.exists() else 'missing'}: "
                "`git checkout drafts` brings it back."
            )
    return folder


def demo_draft(checkout: Checkout, python: Path, target: Path) -> Path:
    """An untrained draft for `target`, made once for each version of the script that makes it."""
    script = checkout.root / "scripts" / "make_draft.py"
    version = hashlib.sha256(script.read_bytes() + str(target).encode()).hexdigest()[:8]
    folder = checkout.cache / "drafts" / f"{target.name}-untrained-{version}"
    if not folder.exists():
        print("making an untrained draft", flush=True)
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.parent.mkdir(parents=True, exist_ok=True)
        last_line([str(python), str(script), "--target", str(target), "--output", str(partial)])
        partial.rename(folder)
    return folder


def curl_line(url: str, model: str) -> str:
    """A shell command that asks the server one question."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 64,
        "temperature": 0,
    }
    data = shlex.quote(json.dumps(body))
    return f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d {data}"


def announce(url: str, model: str, process: subprocess.Popen) -> None:
    """Waits until the server answers, then says how to use it; gives up when the process ends."""
    start = time.monotonic()
    while process.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            break
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
    else:
        return
    seconds = time.monotonic() - start
    print(f"\nready after {seconds:.0f} s; try it:\n\n  {curl_line(url, model)}\n", flush=True)
    print("Ctrl-C stops the server", flush=True)


def alive(group: int) -> bool:
    """Whether a process of the group still runs; what only waits to be reaped does not count."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(pgrp) == group and state != "Z":
            return True
    return False


def stop_group(process: subprocess.Popen) -> None:
    """Ends every process of the server's group: asks the server, then all, then insists."""
    group = process.pid
    for number, ask in (
        (signal.SIGTERM, os.kill),
        (signal.SIGTERM, os.killpg),
        (signal.SIGKILL, os.killpg),
    ):
        deadline = time.monotonic() + _PATIENCE_S
        with contextlib.suppress(ProcessLookupError):
            ask(group, number)
        while process.poll() is None or alive(group):
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        else:
            return


def run_server(command: list[str], url: str, model: str) -> int:
    """Runs the server until it ends or we are told to stop; returns the exit status to pass on."""
    libc = ctypes.CDLL(None)
    for number in (signal.SIGTERM, signal.SIGHUP):
        # nohup asks that the end of the terminal is ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    process = None
    try:
        process = subprocess.Popen(
            command,
            start_new_session=True,
            # The kernel stops the server even when this process is killed outright.
            preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
        )
        threading.Thread(target=announce, args=(url, model, process), daemon=True).start()
        return process.wait()
    except KeyboardInterrupt:
        print("\nstopping the server", flush=True)
        # A second Ctrl-C must not leave half of the server behind.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return 0
    finally:
        if process:
            stop_group(process)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/serve.py", description=__doc__.split("\n")[0], allow_abbrev=False
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--model-path", "--model", help="default: the demo target")
    words = "default: drafts/ for the demo target, else untrained"
    parser.add_argument("--speculative-draft-model-path", help=words)
    parser.add_argument("--served-model-name", help="default: the name of the model's folder")
    options, passed_on = parser.parse_known_args()
    checkout = here()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    try:
        check_port(options.host, options.port)
        device = "cuda" if setup_env.has_nvidia_gpu() else "cpu"
        print(setup_env.setup(checkout, device, test=False), flush=True)
        python = checkout.root / ".venv" / "bin" / "python"
        target = options.model_path
        if target is None:
            target = last_line([str(python), str(checkout.root / "scripts" / "demo_target.py")])
        draft, drafting = options.speculative_draft_model_path, ()
        if draft is None and options.model_path is None:
            draft = shipped_draft(checkout)
            if draft:
                width = ("--speculative-num-draft-tokens", VERIFY_WIDTHS[device])
                drafting = TREE_ARGUMENTS + width
        if draft is None:
            draft = demo_draft(checkout, python, Path(target))
        model = options.served_model_name or Path(target).name
        command = [str(python), "-m", "sglang.launch_server", "--model-path", str(target)]
        command += [
            "--served-model-name",
            model,
            "--host",
            options.host,
            "--port",
            str(options.port),
        ]
        command += ["--speculative-algorithm", "FLASHMAP"]
        command += ["--speculative-draft-model-path", str(draft), *drafting]
        # Our own waiting for /health would fill the log.
        command += ["--log-level-http", "warning", *passed_on]
        print(shlex.join(["python", *command[1:]]), flush=True)
        # 0.0.0.0 is where the server listens, not where a client can ask.
        client = "127.0.0.1" if options.host in ("0.0.0.0", "::") else options.host
        return run_server(command, f"http://{client}:{options.port}", model)
    except ForkError as error:
        print(f"error: {error}".replace(f"{checkout.root}/", ""), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())

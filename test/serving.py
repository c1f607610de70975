"""Start a real server in a test: one subprocess, one port, nothing left behind.

    with Server("--model-path", folder) as server:
        text = server.generate("Hello", max_new_tokens=8)["text"]

The server runs in its own process group. Leaving the block, a failing start and the death of the
test process all end the whole group.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

PR_SET_PDEATHSIG = 1  # linux/prctl.h


class ServerFailed(RuntimeError):
    """The server exited or never became healthy; the message ends with its log."""


class Server:
    """`python -m sglang.launch_server ARGS` on a free port of 127.0.0.1.

    `args` are passed as they are. `env` is added to the environment of this process (a value of
    None removes the name). `start_timeout` is in seconds.
    """

    def __init__(
        self,
        *args: object,
        env: dict[str, str | None] | None = None,
        start_timeout: float = 300.0,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = [sys.executable, "-m", "sglang.launch_server", "--host", "127.0.0.1"]
        self.command += ["--port", str(self.port), *map(str, args)]
        self.env = server_environment(env or {})
        self.start_timeout = start_timeout
        self.process: subprocess.Popen | None = None
        # Sockets and whatever else the server puts into the temporary folder go there too.
        self.folder = Path(tempfile.mkdtemp(prefix="sglang-"))
        self.log_path = self.folder / "log"
        self.env["TMPDIR"] = str(self.folder)

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, exc_type: object, *_: object) -> None:
        self.stop()
        if exc_type is None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def start(self) -> None:
        """Launch and return once `/health` answers 200; raises ServerFailed otherwise."""
        libc = ctypes.CDLL(None)

        def prepare() -> None:
            # The kernel ends the server when the test process dies, however it dies; the server's
            # own processes do the same with their parent.
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            # A shell starts background jobs with SIGINT ignored, and that would be inherited.
            signal.signal(signal.SIGINT, signal.SIG_DFL)

        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                self.command,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=prepare,
            )
        deadline = time.monotonic() + self.start_timeout
        while not self._healthy():
            if self.process.poll() is not None:
                self._fail(f"the server exited with {self.process.returncode} while starting")
            if time.monotonic() > deadline:
                self._fail(f"the server was not healthy after {self.start_timeout:.0f} s")
            time.sleep(0.25)

    def stop(self) -> None:
        """End every process of the server; returns when none is left."""
        if self.process is None:
            return
        members = self.processes()
        self.process.send_signal(signal.SIGINT)  # as Ctrl-C; SIGTERM takes five seconds longer
        if not self._wait(members, 10.0):
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            for member in members:  # it may have left the process group
                if member.is_running():
                    member.kill()
            self._wait(members, 10.0)
        self.process = None

    def _wait(self, members: list[psutil.Process], patience: float) -> bool:
        """Whether all `members` ended within `patience` seconds."""
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            self.process.poll()
            if not any(_runs(member) for member in members):
                return True
            time.sleep(0.1)
        return False

    def processes(self) -> list[psutil.Process]:
        """The launcher and everything it started that still runs."""
        if self.process is None:
            return []
        try:
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def cpu_seconds(self) -> float:
        """User and system time of all processes of the server so far."""
        total = 0.0
        for member in self.processes():
            try:
                times = member.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system
        return total

    def log(self, tail: int | None = None) -> str:
        """The server's output, or its last `tail` lines."""
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(lines if tail is None else lines[-tail:])

    def request(self, path: str, payload: Any = None, timeout: float = 300.0) -> Any:
        """GET `path`, or POST `payload` as JSON; the decoded JSON answer.

        Raises `urllib.error.HTTPError` for a status of 400 or more.
        """
        data = None if payload is None else json.dumps(payload).encode()
        request = urllib.request.Request(
            self.url + path, data=data, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as response:
            body = response.read()
        return json.loads(body) if body else None

    def stream(self, path: str, payload: Any, timeout: float = 300.0) -> Iterator[Any]:
        """POST `payload` with `stream` set; the decoded events of the answer as they come."""
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(payload | {"stream": True}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=timeout) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])

    def generate(self, prompt: str | list[Any], **sampling_params: Any) -> Any:
        """`/generate` for one prompt or a list of them (texts or token id lists).

        Greedy unless `temperature` is given. The answer holds `text`, `output_ids` and `meta_info`.
        """
        sampling_params.setdefault("temperature", 0.0)
        first = prompt[0] if isinstance(prompt, list) and prompt else prompt
        key = "text" if isinstance(first, str) else "input_ids"
        return self.request("/generate", {key: prompt, "sampling_params": sampling_params})

    def _healthy(self) -> bool:
        try:
            self.request("/health", timeout=5.0)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False
        return True

    def _fail(self, reason: str) -> None:
        self.stop()
        command = " ".join(self.command)
        raise ServerFailed(f"{reason}\n{command}\n--- {self.log_path} ---\n{self.log(60)}")


def with_habits(server: Server, *habits: str) -> Server:
    """Give `server`, which runs on a CPU, some of the habits listed in `gpu_habits.py`."""
    module = server.command.index("-m")
    server.command[module : module + 2] = [str(Path(__file__).with_name("gpu_habits.py"))]
    server.env["GPU_HABITS"] = ",".join(habits)
    return server


def _runs(process: psutil.Process) -> bool:
    try:
        # Without an init process in the container, orphans stay zombies.
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def free_port() -> int:
    """A TCP port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def server_environment(changes: dict[str, str | None]) -> dict[str, str]:
    """This environment with the packages under test importable, then `changes`."""
    env = dict(os.environ)
    roots = []
    for package in ("sglang", "sgl_kernel"):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin:
            roots.append(str(Path(spec.origin).parents[1]))
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(roots))
    for name, value in changes.items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value
    return env

"""Setting up and serving: what ends in one sentence, and that stopping leaves no process behind."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import demo_target
import psutil
import pytest
import serve
import setup_env
from fork.checkout import Checkout, here
from fork.errors import ForkError

SCRIPTS = here().root / "scripts"

# A server whose child ignores polite signals, as a hung scheduler does.
STUBBORN = """
import http.server, subprocess, sys
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
child += "; print('up', flush=True); time.sleep(300)"
started = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE)
started.stdout.readline()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["ERROR: Could not find a version that satisfies x (from versions: none)\n"], "network"),
        (["WARNING: Retrying after connection broken by NewConnectionError\n"], "network"),
        (["ERROR: Could not install: [Errno 28] No space left on device\n"], "disk is full"),
        (["noise\n", "ERROR: No matching x\n", "ERROR: ResolutionImpossible\n"], "No matching x"),
    ],
    ids=["no-versions", "no-connection", "no-space", "other"],
)
def test_failure_of_pip_is_one_sentence(lines: list[str], words: str) -> None:
    sentence = setup_env.explain(lines)
    assert words in sentence and "\n" not in sentence


def test_full_disk_is_refused_before_anything_is_installed(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(checkout.root)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=3 * 10**9))
    (checkout.root / "sgl-kernel").mkdir()
    (checkout.root / "sgl-kernel" / "pyproject.toml").touch()
    with pytest.raises(
        ForkError, match=r"need about 7 GB and .* has 3\.0 GB free; free some space"
    ):
        setup_env.setup(checkout, "cpu", test=False)
    assert not (checkout.root / ".venv").exists()


def test_interpreter_without_a_wheel_is_refused(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = type("version_info", (tuple,), {"major": 3, "minor": 14})((3, 14))
    monkeypatch.setattr(sys, "version_info", later)
    with pytest.raises(ForkError, match="no pinned wheel for cp314 .* with one of cp3"):
        setup_env.setup(checkout, "cpu", test=False)


def test_old_python_is_refused_in_one_sentence() -> None:
    code = "import sys; sys.version_info = (3, 10, 1); import fork"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(SCRIPTS)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    assert result.stderr.startswith("error: this is Python 3.10; sglang needs 3.11, 3.12 or 3.13")
    assert len(result.stderr.splitlines()) == 1


def test_stamp_changes_with_what_decides_the_environment(checkout: Checkout) -> None:
    (checkout.root / "sgl-kernel").mkdir()
    (checkout.root / "sgl-kernel" / "pyproject.toml").touch()
    first = setup_env.environment_stamp(checkout, "cpu", False)
    assert first == setup_env.environment_stamp(checkout, "cpu", False)
    assert first != setup_env.environment_stamp(checkout, "cuda", False)
    path = checkout.root / "python" / "pyproject.toml"
    path.write_text(path.read_text().replace("dill>=1", "dill>=2"))
    assert first != setup_env.environment_stamp(checkout, "cpu", False)


def test_port_in_use_is_refused_before_anything_is_set_up(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = subprocess.run(
            [sys.executable, str(SCRIPTS / "serve.py"), "--port", str(port)],
            capture_output=True,
            text=True,
        )
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr.startswith(f"error: port {port} of 127.0.0.1 cannot be used (Address")
    assert len(result.stderr.splitlines()) == 1


@pytest.fixture
def draft(checkout: Checkout) -> Path:
    """A small shipped draft in a checkout."""
    folder = checkout.root / "drafts" / demo_target.NAME
    folder.mkdir(parents=True)
    lines = []
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text(name)
        lines.append(f"{hashlib.sha256(name.encode()).hexdigest()}  {name}\n")
    (folder / demo_target.SUMS).write_text("".join(lines))
    return folder


def test_shipped_draft_is_the_one_served(checkout: Checkout, draft: Path) -> None:
    assert serve.shipped_draft(checkout) == draft


def test_checkout_without_drafts_has_none(checkout: Checkout) -> None:
    assert serve.shipped_draft(checkout) is None


@pytest.mark.parametrize("fault", ["damaged", "missing"])
def test_faulty_shipped_draft_is_refused(checkout: Checkout, draft: Path, fault: str) -> None:
    weights = draft / "model.safetensors"
    if fault == "missing":
        weights.unlink()
    else:
        weights.write_text("model.safetensorz")
    with pytest.raises(ForkError, match=f"model.safetensors is {fault}: `git checkout drafts`"):
        serve.shipped_draft(checkout)


def test_draft_in_this_repository_matches_its_sums() -> None:
    folder = serve.shipped_draft(here())  # checks them
    names = {line.split()[1] for line in (folder / demo_target.SUMS).read_text().splitlines()}
    # What a server reads; `sha256sum` of these three makes the file anew.
    assert names == {"config.json", "draft_vocab.safetensors", "model.safetensors"}
    assert (folder / "model.safetensors").stat().st_size <= 20_000_000


def running(member: psutil.Process) -> bool:
    """Whether it still runs; what only waits to be reaped does not."""
    try:
        return member.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "terminate"])
def test_stopping_leaves_no_process_behind(tmp_path: Path, number: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    script = tmp_path / "server.py"
    script.write_text(STUBBORN)
    code = (
        "import sys, serve; serve._PATIENCE_S = 1; "
        f"sys.exit(serve.run_server([sys.executable, {str(script)!r}, '{port}'], "
        f"'http://127.0.0.1:{port}', 'demo'))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SCRIPTS)},
        # A shell starts background jobs with Ctrl-C ignored, and that is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    output = [process.stdout.readline()]
    while "Ctrl-C" not in output[-1]:
        assert output[-1], "the server never became ready"
        output.append(process.stdout.readline())
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) == 2
    try:
        process.send_signal(number)
        assert process.wait(60) == 0
        assert not [member for member in family if running(member)]
    finally:
        for member in [process, *family]:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
    assert f"curl http://127.0.0.1:{port}/v1/chat/completions" in "".join(output)


def test_curl_line_survives_the_shell() -> None:
    line = serve.curl_line("http://127.0.0.1:1", 'it\'s "demo"')
    echoed = subprocess.run(
        ["bash", "-c", line.replace("curl ", "printf '%s\\n' ", 1)], capture_output=True, text=True
    ).stdout.splitlines()
    assert json.loads(echoed[-1])["model"] == 'it\'s "demo"'

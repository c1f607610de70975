"""A run: resumed, killed, gone wrong, estimated, on several ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import train_draft
from train import checkpoint
from train.features import RememberingReader
from train.objectives import OneJump
from training_runs import train_command

STEPS = ("--stage", "one-jump", "--steps", 12, "--validate-every", 0)


def weights(run: Path) -> dict[str, torch.Tensor]:
    return checkpoint.load(run)["network"]


@pytest.fixture(scope="module")
def unbroken(target: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    assert train_draft.main(train_command(target, data, folder, *STEPS)) == 0
    return folder


def assert_same(run: Path, other: Path) -> None:
    for name, value in weights(other).items():
        assert torch.equal(weights(run)[name], value), name


def test_resumed_run_has_the_unbroken_ones_weights(target, data, unbroken, tmp_path) -> None:
    command = train_command(target, data, tmp_path / "run", *STEPS)
    assert train_draft.main([*command, "--seconds", "1e-9"]) == 0
    assert checkpoint.load(tmp_path / "run")["step"] == 1
    assert not (tmp_path / "run/release").exists()
    assert train_draft.main(command) == 0
    assert_same(tmp_path / "run", unbroken)


def test_killed_run_keeps_its_last_checkpoint(target, data, unbroken, tmp_path) -> None:
    folder = tmp_path / "run"
    command = train_command(target, data, folder, *STEPS, "--save-seconds", 0)
    # A machine that trains may have no sglang.
    code = "import sys; sys.modules['sglang'] = None; import train_draft; train_draft.main()"
    environment = os.environ | {"PYTHONPATH": str(Path(train_draft.__file__).parent)}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *command], stderr=log, env=environment
        )
        deadline = time.monotonic() + 200
        while not (folder / checkpoint.FILE).exists() and time.monotonic() < deadline:
            assert process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.005)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert checkpoint.load(folder)["step"] >= 1
    assert train_draft.main(command) == 0
    assert_same(folder, unbroken)


def test_terminated_run_saves_first(target, data, unbroken, tmp_path, monkeypatch) -> None:
    loss = OneJump.loss

    def terminate(self, network, example, draws, progress):
        if draws.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss(self, network, example, draws, progress)

    command = train_command(target, data, tmp_path / "run", *STEPS)
    with monkeypatch.context() as patch:
        patch.setattr(OneJump, "loss", terminate)
        assert train_draft.main(command) == 0
    assert checkpoint.load(tmp_path / "run")["step"] == 5
    assert train_draft.main(command) == 0
    assert_same(tmp_path / "run", unbroken)


def test_nan_stops_with_the_step_and_a_way_out(target, data, tmp_path, monkeypatch, capsys) -> None:
    loss = OneJump.loss

    def spoil(self, network, example, draws, progress):
        value = loss(self, network, example, draws, progress)
        return value * float("nan") if draws.step == 3 else value

    monkeypatch.setattr(OneJump, "loss", spoil)
    command = train_command(target, data, tmp_path / "run", *STEPS, "--save-seconds", 0)
    assert train_draft.main(command) == 1
    error = capsys.readouterr().err
    assert "the loss is nan" in error and "at step 3: lower --lr" in error
    state = checkpoint.load(tmp_path / "run")
    assert state["step"] == 3
    assert all(bool(value.isfinite().all()) for value in state["network"].values())


def test_dry_run_prints_memory_and_time_and_saves_nothing(target, data, tmp_path, capsys) -> None:
    command = train_command(target, data, tmp_path / "run", *STEPS, "--dry-run")
    assert train_draft.main(command) == 0
    rows = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert "M parameters" in rows["draft"] and rows["all steps"].strip().startswith("12 · ")
    assert {"checkpoint", "peak measured", "a step"} <= {key.strip() for key in rows}
    assert not list((tmp_path / "run").iterdir())


def test_then_trains_another_draft_on_the_states_read(target, data, tmp_path, monkeypatch) -> None:
    read, fill = [], RememberingReader._fill
    monkeypatch.setattr(
        RememberingReader, "_fill", lambda self, *args: (read.append(self), fill(self, *args))
    )
    more = (*STEPS, "--steps", 2, "--remember")
    then = f"--lr 0.5 --output {tmp_path / 'second'}"
    command = train_command(target, data, tmp_path / "first", *more, "--then", then)
    assert train_draft.main(command) == 0
    assert len(set(map(id, read))) == 1
    assert train_draft.main(train_command(target, data, tmp_path / "own", *more, "--lr", 0.5)) == 0
    assert_same(tmp_path / "second", tmp_path / "own")
    assert not torch.equal(*(weights(tmp_path / run)["fc.weight"] for run in ("first", "second")))


def test_terminated_run_starts_no_other(target, data, tmp_path, monkeypatch) -> None:
    loss = OneJump.loss

    def terminate(self, *args):
        os.kill(os.getpid(), signal.SIGTERM)
        return loss(self, *args)

    monkeypatch.setattr(OneJump, "loss", terminate)
    command = train_command(target, data, tmp_path / "first", *STEPS)
    assert train_draft.main([*command, "--then", f"--output {tmp_path / 'second'}"]) == 0
    assert checkpoint.load(tmp_path / "first")["step"] == 1
    assert not (tmp_path / "second").exists()


def test_then_shares_the_target_and_its_data(target, data, tmp_path, capsys) -> None:
    command = train_command(target, data, tmp_path / "run", *STEPS)
    assert train_draft.main([*command, "--then", "--max-length 20"]) == 1
    assert "--then changes --max-length" in capsys.readouterr().err


def test_other_arguments_do_not_resume(target, data, unbroken, capsys) -> None:
    command = train_command(target, data, unbroken, *STEPS, "--lr", 0.5)
    assert train_draft.main(command) == 1
    assert "holds a run with another learning_rate" in capsys.readouterr().err


def test_broken_checkpoint_is_told(target, data, unbroken, tmp_path, capsys) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    content = (unbroken / checkpoint.FILE).read_bytes()
    (folder / checkpoint.FILE).write_bytes(content[: len(content) // 2])
    assert train_draft.main(train_command(target, data, folder, *STEPS)) == 1
    assert "checkpoint.pt is broken" in capsys.readouterr().err


def test_map_needs_a_flow(target, data, tmp_path, capsys) -> None:
    command = train_command(target, data, tmp_path / "run", "--stage", "map")
    assert train_draft.main(command) == 1
    assert "pass --init, the release of a --stage flow" in capsys.readouterr().err


class _Pair:
    """A world of two in one process: ranks are threads."""

    def __init__(self) -> None:
        self.barrier, self.given = threading.Barrier(2), [None, None]

    def member(self, rank: int) -> SimpleNamespace:
        def average(tensors) -> None:
            tensors = list(tensors)
            self.given[rank] = [tensor.clone() for tensor in tensors]
            self.barrier.wait()
            for tensor, first, second in zip(tensors, *self.given):
                tensor.copy_((first + second) / 2)
            self.barrier.wait()

        return SimpleNamespace(rank=rank, size=2, device="cpu", average=average, any=bool)


def test_two_ranks_train_one_draft(target, data, tmp_path) -> None:
    more = (*STEPS, "--steps", 3)
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        + [train_draft.__file__, *train_command(target, data, tmp_path / "run", *more)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    run = json.loads((tmp_path / "run/release/training.json").read_text())["runs"][-1]
    assert run["ranks"] == 2

    pair, trainers = _Pair(), []
    for rank in range(2):
        options = train_draft.parse(train_command(target, data, tmp_path / str(rank), *more))
        trainers.append(train_draft.make_trainer(options, pair.member(rank))[0])
    threads = [
        threading.Thread(target=lambda t=trainer: [t.train_step() for _ in range(3)])
        for trainer in trainers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, second = (trainer.network.state_dict() for trainer in trainers)
    for name, value in weights(tmp_path / "run").items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(value, first[name], atol=1e-5, rtol=1e-4)

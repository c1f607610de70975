"""When a process serves on the CPU, and the memory defaults of such a server."""

from __future__ import annotations

from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.arg_groups import model_override_base
from sglang.srt.platforms import cpu_engine
from sglang.srt.platforms.cpu_engine import DEFAULT_KV_TOKENS, CpuEnginePlatform


@pytest.fixture
def empty_machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No accelerator, no platform plugin, no CUDA kernels, no variable."""

    def not_installed(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(cpu_engine.metadata, "entry_points", lambda group: ())
    monkeypatch.setattr(cpu_engine.metadata, "distribution", not_installed)
    return monkeypatch


def enabled() -> bool:
    return cpu_engine.cpu_engine_enabled.__wrapped__()


def test_empty_machine_serves_on_the_cpu(empty_machine: pytest.MonkeyPatch) -> None:
    assert enabled()


@pytest.mark.parametrize(
    "owner,name,value",
    [
        (torch.cuda, "is_available", lambda: True),
        (torch.accelerator, "is_available", lambda: True),
        (torch.version, "hip", "6.4"),
        (cpu_engine.metadata, "entry_points", lambda group: ("plugin",)),
        (cpu_engine.metadata, "distribution", lambda name: name),
    ],
    ids=["cuda", "accelerator", "rocm-build", "platform-plugin", "cuda-kernels"],
)
def test_other_hardware_keeps_the_cpu_off(
    empty_machine: pytest.MonkeyPatch, owner: object, name: str, value: object
) -> None:
    empty_machine.setattr(owner, name, value)
    assert not enabled()
    empty_machine.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert enabled()


def test_variable_keeps_the_cpu_off(empty_machine: pytest.MonkeyPatch) -> None:
    empty_machine.setenv("SGLANG_USE_CPU_ENGINE", "0")
    assert not enabled()


@pytest.mark.parametrize(
    "given,context_len,expected",
    [
        ({}, 2048, DEFAULT_KV_TOKENS),
        ({}, 131072, 131072),
        (dict(max_total_tokens=100), 2048, 100),
        (dict(mem_fraction_static=0.5), 2048, None),
    ],
    ids=["default", "long-context", "tokens-given", "share-given"],
)
def test_kv_cache_is_bounded_unless_sized(
    monkeypatch: pytest.MonkeyPatch, given: dict, context_len: int, expected: int | None
) -> None:
    config = SimpleNamespace(context_len=context_len)
    monkeypatch.setattr(model_override_base, "model_config_of", lambda server_args: config)
    fields = dict(max_total_tokens=None, mem_fraction_static=None, sleep_on_idle=False)
    server_args = SimpleNamespace(**{**fields, **given})
    CpuEnginePlatform().apply_server_args_defaults(server_args)
    assert server_args.max_total_tokens == expected
    assert server_args.sleep_on_idle

"""When to serve on the CPU, and the defaults of such a server.

Upstream serves on the CPU only where SGLANG_USE_CPU_ENGINE=1 asks for it. Here a machine that has
nothing else to serve on needs no variable; where the variable is set, it decides alone.
"""

from __future__ import annotations

import functools
import os
from importlib import metadata
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.plugins import PLATFORM_PLUGINS_GROUP

# KV slots of a server that was told nothing about memory.
DEFAULT_KV_TOKENS = 65536


@functools.lru_cache(maxsize=1)
def cpu_engine_enabled() -> bool:
    """Whether this process serves on the CPU; constant for its life.

    Without SGLANG_USE_CPU_ENGINE: true when torch sees no accelerator and neither a platform plugin
    nor upstream's CUDA kernels are installed. The last two mean that the machine is meant for other
    hardware (a container built where the GPU is not visible, say), which upstream handles.
    """
    choice = os.getenv("SGLANG_USE_CPU_ENGINE")
    if choice is not None:
        return choice == "1"
    return not (_torch_has_accelerator() or _has_platform_plugin() or _has_cuda_kernels())


def _torch_has_accelerator() -> bool:
    builds = (torch.version.hip, getattr(torch.version, "musa", None))
    # torch.cuda first: asking torch.accelerator starts the CUDA runtime, which breaks fork().
    return any(builds) or torch.cuda.is_available() or torch.accelerator.is_available()


def _has_platform_plugin() -> bool:
    return bool(metadata.entry_points(group=PLATFORM_PLUGINS_GROUP))


def _has_cuda_kernels() -> bool:
    try:
        metadata.distribution("sglang-kernel")
    except metadata.PackageNotFoundError:
        return False
    return True


class CpuEnginePlatform(CpuSRTPlatform):
    """The CPU platform with the defaults a server without an accelerator wants."""

    def apply_server_args_defaults(self, server_args: Any) -> None:
        from sglang.srt.arg_groups.model_override_base import model_config_of

        # A scheduler that polls takes a core from the model: there is no device to keep fed.
        server_args.sleep_on_idle = True
        # Upstream's share of the device's memory would be most of the machine's, written at start.
        if server_args.max_total_tokens is None and server_args.mem_fraction_static is None:
            context_len = model_config_of(server_args).context_len
            server_args.max_total_tokens = max(DEFAULT_KV_TOKENS, context_len)

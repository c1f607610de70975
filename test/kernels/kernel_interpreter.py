"""Runs the kernels' Triton launchers under Triton's interpreter, in a process of its own.

TRITON_INTERPRET has to be set before Triton is first imported, and must not reach the servers that
other tests start. Arguments and results cross as bytes, so a mutated argument comes back as a copy.
"""

from __future__ import annotations

import importlib
import io
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

PACKAGE = "sglang.kernels.ops.speculative.flashmap"


def start_interpreter() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _initialize)


def interpret(pool: ProcessPoolExecutor, name: str, args: tuple, kwargs: dict) -> tuple[Any, tuple]:
    """Calls launcher ``name`` in the interpreter's process; returns its result and arguments."""
    import torch

    payload = io.BytesIO()
    torch.save((args, kwargs), payload)
    answer = pool.submit(_launch, name, payload.getvalue()).result()
    return torch.load(io.BytesIO(answer), weights_only=False)


def launcher(name: str) -> Callable:
    """``module.op`` of the drafter's kernels, or an op's full path."""
    module, _, function = name.rpartition(".")
    module = module if "." in module else f"{PACKAGE}.{module}"
    return getattr(importlib.import_module(module), f"{function}_triton")


def _initialize() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    _round_as_hardware_does()


def _launch(name: str, payload: bytes) -> bytes:
    import torch

    args, kwargs = torch.load(io.BytesIO(payload), weights_only=False)
    result = launcher(name)(*args, **kwargs)
    answer = io.BytesIO()
    torch.save((result, args), answer)
    return answer.getvalue()


def _round_as_hardware_does() -> None:
    """Corrects Triton's interpreter, which truncates on the way to bfloat16 and float8 and
    multiplies bfloat16 tiles as integers."""
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    dtypes = {
        "fp64": torch.float64,
        "fp32": torch.float32,
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
        "fp8e4nv": torch.float8_e4m3fn,
    }
    words = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}

    def convert(array: np.ndarray, source: tl.dtype, target: tl.dtype, rounding: Any) -> np.ndarray:
        source, target = dtypes[source.name], dtypes[target.name]
        bits = np.ascontiguousarray(array).reshape(-1).view(f"uint{8 * source.itemsize}")
        values = torch.from_numpy(bits.copy()).view(source).to(target)
        return values.view(words[target.itemsize]).numpy().reshape(array.shape)

    dot = interpreter.InterpreterBuilder.create_dot

    def dot_in_float32(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (
            interpreter.TensorHandle(
                convert(x.data, x.dtype.scalar, tl.float32, None).view(np.float32), tl.float32
            )
            for x in (a, b)
        )
        return dot(self, a, b, *rest)

    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.create_dot = dot_in_float32

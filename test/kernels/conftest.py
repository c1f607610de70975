"""Fixtures of the kernel tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kernel_interpreter import interpret, launcher, start_interpreter


def _move(value: Any, device: str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)._make(_move(item, device) for item in value)
    if isinstance(value, (list, tuple)):
        return type(value)(_move(item, device) for item in value)
    return value


@pytest.fixture(scope="session")
def launch_and_args() -> Iterator[Callable]:
    """Calls ``launch("module.op", *args)`` on an op's Triton launcher.

    It runs on the GPU if there is one, else under the interpreter. Returns the launcher's
    result and the arguments after the call, on the CPU.
    """
    if torch.cuda.is_available():

        def on_gpu(name: str, *args: Any, **kwargs: Any) -> tuple[Any, tuple]:
            args = _move(args, "cuda")
            kwargs = {name: _move(value, "cuda") for name, value in kwargs.items()}
            return _move((launcher(name)(*args, **kwargs), args), "cpu")

        yield on_gpu
        return
    with start_interpreter() as pool:
        yield lambda name, *args, **kwargs: interpret(pool, name, args, kwargs)


@pytest.fixture(scope="session")
def launch(launch_and_args: Callable) -> Callable:
    """Like ``launch_and_args``, returning the result alone."""
    return lambda *args, **kwargs: launch_and_args(*args, **kwargs)[0]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)

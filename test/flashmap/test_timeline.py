"""What the timeline benchmark makes of a trace, and the floors that step times are drawn with."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmark" / "flashmap"


def load(name: str) -> ModuleType:
    path = FOLDER / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"flashmap_benchmark_{name}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def trace(steps: int) -> list[dict]:
    """Steps of 90 µs: a draft's first kernel, a gap of 1, two kernels that overlap by 5, a gap of
    2, and something that is no work of the GPU."""
    events, at = [], 1000.0
    for _ in range(steps):
        for name, start, duration in (
            ("_draft_rows_kernel", 0, 2),
            ("void gemm<float, 3>(int)", 3, 50),
            ("void cutlass::attend<a<b>>(x)", 48, 40),
        ):
            events.append(dict(cat="kernel", name=name, ts=at + start, dur=duration))
        events.append(dict(cat="cpu_op", name="launch", ts=at, dur=90))
        at += 90
    return events


def test_timeline_of_a_trace() -> None:
    timeline = load("timeline").Timeline.of(trace(14), steps=10)
    assert (timeline.step_us, timeline.busy_us, timeline.launches) == (90, 87, 3)
    assert timeline.gap_share == pytest.approx(3 / 90)
    assert timeline.longest_gaps_us[:2] == [2, 2]
    assert timeline.kernels == [
        ("gemm", 50, 1),
        ("cutlass::attend", 40, 1),
        ("_draft_rows_kernel", 2, 1),
    ]


def test_a_trace_that_is_too_short_is_refused() -> None:
    with pytest.raises(SystemExit, match="5 drafts, 11 are needed"):
        load("timeline").Timeline.of(trace(5), steps=10)


def test_floors() -> None:
    """Few requests are bound by bytes, many by arithmetic; a draft adds to both."""
    shapes = load("shapes")
    machine = dict(bandwidth=4e12, flops=1e15)
    plain, drafted = (shapes.floor_ms(1, 256, rows=rows, **machine) for rows in (1, 17))
    # 7.57 billion weights of the target, 0.49 of the draft, two bytes each.
    assert plain == pytest.approx(3.79, abs=0.05)
    assert drafted - plain == pytest.approx(0.24, abs=0.02)
    many = shapes.floor_ms(64, 256, rows=17, **machine)
    assert many == pytest.approx(64 * (17 * 2 * 7.57e9 + 2 * 16 * 0.43e9) / 1e12, rel=0.02)

"""Every op of `sgl_kernel` against plain-Python oracles and against upstream's Triton kernels."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sgl_kernel
import sgl_kernel.speculative
import torch
from portable_cases import CASES, Case, cases_of, kv_addresses
from portable_oracles import ORACLES

HERE = Path(__file__).parent
ORACLE_CASES, TWIN_CASES = 40, 3


def run(op: str, case: Case) -> None:
    """The op under test, called as upstream's call site calls it."""
    arguments = dict(case)
    if "buffers" in case:
        arguments = {**kv_addresses(arguments.pop("buffers")), **arguments}
    function = getattr(sgl_kernel, op, None) or getattr(sgl_kernel.speculative, op)
    assert function(**arguments) is None


def assert_same(actual: Case, expected: Case) -> None:
    for name, value in expected.items():
        assert _plain(actual[name]) == _plain(value), name


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    return [_plain(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("op", CASES)
def test_op_equals_oracle(op: str) -> None:
    pairs = zip(cases_of(op, ORACLE_CASES), cases_of(op, ORACLE_CASES), strict=True)
    for actual, expected in pairs:
        run(op, actual)
        ORACLES[op](expected)
        assert_same(actual, expected)


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Case]]:
    out = tmp_path_factory.mktemp("twins") / "twins.pt"
    done = subprocess.run(
        [sys.executable, HERE / "portable_twins.py", str(TWIN_CASES), out],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(out)


@pytest.mark.parametrize("op", CASES)
def test_op_equals_upstream_triton_kernel(op: str, twins: dict[str, list[Case]]) -> None:
    for actual, expected in zip(cases_of(op, TWIN_CASES), twins[op], strict=True):
        run(op, actual)
        assert_same(actual, expected)


def test_lone_root_is_a_tree() -> None:
    links = [torch.full((2, 1), -1) for _ in range(3)]
    positions, mask = torch.empty(2, dtype=torch.int64), torch.zeros(2, dtype=torch.bool)
    none = torch.empty(2, 0, dtype=torch.int64)
    sgl_kernel.build_tree_kernel_efficient_cpu(
        none, none, torch.tensor([5, 6]), mask, positions, *links, 2, 1, 1, 1
    )
    assert positions.tolist() == [5, 6] and mask.tolist() == [True, True]
    assert [link.flatten().tolist() for link in links] == [[0, 1], [-1, -1], [-1, -1]]


@pytest.mark.parametrize("op", ["assign_req_to_token_pool_cpu", "assign_extend_cache_locs_cpu"])
def test_empty_batch_changes_nothing(op: str) -> None:
    none, table = torch.empty(0, dtype=torch.int64), torch.arange(12).view(3, 4)
    getattr(sgl_kernel, op)(none, table, none, none, none, 4)
    assert table.flatten().tolist() == list(range(12))


def test_bit_packed_mask_is_refused() -> None:
    case = next(c for c in cases_of("build_tree_kernel_efficient_cpu", 1))
    with pytest.raises(NotImplementedError, match="use QLEN_ONLY"):
        run("build_tree_kernel_efficient_cpu", case | {"tree_mask_mode": 2})

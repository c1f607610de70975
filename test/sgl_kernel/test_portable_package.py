"""The package `sgl_kernel` as sglang meets it: scalar types, absent names, its CUDA namesake."""

import subprocess
import sys
from pathlib import Path

import pytest
import sgl_kernel
import torch
from sgl_kernel.scalar_type import ScalarType, scalar_types

FORMATS = [
    ("float16", torch.float16),
    ("bfloat16", torch.bfloat16),
    ("float8_e4m3fn", torch.float8_e4m3fn),
    ("float8_e5m2", torch.float8_e5m2),
    ("int8", torch.int8),
    ("uint8", torch.uint8),
]


@pytest.mark.parametrize(("name", "dtype"), FORMATS, ids=[name for name, _ in FORMATS])
def test_scalar_type_has_the_range_of_torch(name: str, dtype: torch.dtype) -> None:
    scalar = getattr(scalar_types, name)
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    assert (scalar.size_bits, scalar.min(), scalar.max()) == (info.bits, info.min, info.max)
    assert scalar.is_floating_point() == dtype.is_floating_point == (not scalar.is_integer())
    assert scalar.is_signed() == (info.min < 0)


def test_bias_shifts_the_range_of_an_unsigned_type() -> None:
    assert (scalar_types.uint4b8.min(), scalar_types.uint4b8.max()) == (-8, 7)
    assert (scalar_types.uint8b128.min(), scalar_types.uint8b128.max()) == (-128, 127)
    assert scalar_types.uint4b8.has_bias() and not scalar_types.uint4.has_bias()


def test_scalar_type_ids_are_distinct_and_pack_every_field() -> None:
    named = [v for v in vars(scalar_types).values() if isinstance(v, ScalarType)]
    assert len({scalar.id for scalar in named}) == len(named) == 11
    assert scalar_types.uint4b8.id == 4 << 8 | 8 << 17 | 1 << 50


def test_other_names_raise_import_error() -> None:
    with pytest.raises(ImportError, match="silu_and_mul"):
        from sgl_kernel import silu_and_mul  # noqa: F401


def test_no_op_is_registered_with_torch() -> None:
    assert not hasattr(torch.ops.sgl_kernel, "convert_weight_packed")
    assert not [name for name in torch._C._dispatch_get_all_op_names() if "sgl_kernel" in name]


@pytest.mark.parametrize("distribution", ["sglang-kernel", "sgl-kernel"])
def test_import_beside_cuda_kernels_is_refused(distribution: str, tmp_path: Path) -> None:
    info = tmp_path / f"{distribution.replace('-', '_')}-0.4.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 0.4.9\n")
    package = Path(sgl_kernel.__file__).parents[1]
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(package)!r}]; import sgl_kernel"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: sgl-kernel-portable and " + distribution)
    assert "uninstall both" in last

"""The wheel: upstream's with our changes and metadata, reproducible, installable by pip."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
from fork.checkout import Checkout, here
from fork.errors import ForkError
from fork.pack import build_wheel
from small_upstream import write

INFO = "sglang-9.8.7+flashmap.1.dist-info"
ARGS = "sglang/srt/server_args.py"


@pytest.fixture
def wheel(patched: Checkout) -> zipfile.ZipFile:
    return zipfile.ZipFile(build_wheel(patched, patched.root / "dist"))


def test_wheel_twice_gives_the_same_bytes(patched: Checkout) -> None:
    first = build_wheel(patched, patched.root / "one")
    second = build_wheel(patched, patched.root / "two")
    assert first.name == second.name and first.name.startswith("sglang-9.8.7+flashmap.1-cp")
    assert first.read_bytes() == second.read_bytes()


def test_wheel_holds_patched_added_and_untouched_files(wheel: zipfile.ZipFile) -> None:
    assert b"OPTION_7 = 'ours'" in wheel.read(ARGS)
    assert wheel.read("sglang/srt/layers/drafter.py") == b"from .linear import Linear\n"
    assert wheel.read("sglang/srt/layers/linear.py") == b"class Linear:\n    pass\n"
    extension = wheel.getinfo("sglang/srt/fast.cpython-311-x86_64-linux-gnu.so")
    assert extension.external_attr >> 16 & 0o111
    assert b"sglang = sglang.version:main" in wheel.read(f"{INFO}/entry_points.txt")


def test_record_lists_every_file_with_its_hash(wheel: zipfile.ZipFile) -> None:
    rows = {
        row[0]: row[1:] for row in csv.reader(io.StringIO(wheel.read(f"{INFO}/RECORD").decode()))
    }
    assert sorted(rows) == sorted(wheel.namelist())
    for name, (digest, size) in rows.items():
        if name != f"{INFO}/RECORD":
            data = wheel.read(name)
            expected = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert (digest, int(size)) == (f"sha256={expected}", len(data)), name


def test_metadata_has_our_version_licence_and_dependency_sets(wheel: zipfile.ZipFile) -> None:
    metadata = HeaderParser().parsestr(wheel.read(f"{INFO}/METADATA").decode())
    assert (metadata["Name"], metadata["Version"]) == ("sglang", "9.8.7+flashmap.1")
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("Requires-Dist") == [
        "dill>=1",
        "torch==2.0",
        'gpu-kernels[cu13]==1.0; (sys_platform == "linux") and extra == "cuda"',
        'numpy; extra == "cuda"',
        'pytest; extra == "test"',
        'plots; extra == "train"',
    ]
    for name in metadata.get_all("License-File"):
        assert wheel.read(f"{INFO}/licenses/{name}")


def test_notice_names_modified_and_added_files(wheel: zipfile.ZipFile) -> None:
    notice = wheel.read(f"{INFO}/licenses/NOTICE").decode()
    modified, added = notice.split("Modified files of upstream:\n")[1].split("Added files:\n")
    assert modified.split() == ["sglang/_version.py", ARGS]
    assert added.split() == ["sglang/srt/flashmap/noise.py", "sglang/srt/layers/drafter.py"]


def test_base_name_that_upstream_does_not_require_is_refused(patched: Checkout) -> None:
    path = patched.root / "python/pyproject.toml"
    path.write_text(path.read_text().replace('"dill>=1"', '"dill"'))
    with pytest.raises(ForkError, match="'dill' in .* is not required by sglang 9.8.7"):
        build_wheel(patched, patched.root / "dist")


@pytest.mark.parametrize("editable", [False, True], ids=["wheel", "editable"])
def test_pip_installs_the_python_folder(patched: Checkout, tmp_path: Path, editable: bool) -> None:
    shutil.copytree(here().root / "scripts", patched.root / "scripts")
    shutil.copytree(here().root / "python/backend", patched.root / "python/backend")
    target = tmp_path / "site"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--target",
        str(target),
    ]
    if editable:
        # pip refuses --editable with --target, so its wheel is built and installed in two steps.
        code = "import fork_backend as b, sys; print(b.build_editable(sys.argv[1]))"
        built = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)],
            env={**os.environ, "PYTHONPATH": str(patched.root / "python/backend")},
            capture_output=True,
            text=True,
        )
        assert built.returncode == 0, built.stderr
        command.append(str(tmp_path / built.stdout.split()[-1]))
    else:
        command.append(str(patched.root / "python"))
    subprocess.run(command, check=True)
    code = f"import site; site.addsitedir({str(target)!r}); import sglang as s; "
    code += "print(s.__version__, s.__file__)"
    output = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, env={}
    )
    version, where = output.stdout.split()
    assert version == "9.8.7+flashmap.1"
    assert Path(where).is_relative_to(patched.build / "tree" if editable else target)


def test_pip_failure_ends_in_our_sentence(patched: Checkout, tmp_path: Path) -> None:
    shutil.copytree(here().root / "scripts", patched.root / "scripts")
    shutil.copytree(here().root / "python/backend", patched.root / "python/backend")
    write(patched.overlay / "srt/layers/linear.py", "mine = 1\n")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-index",
        "--target",
        str(tmp_path / "site"),
    ]
    result = subprocess.run(
        [*command, str(patched.root / "python")], capture_output=True, text=True
    )
    assert result.returncode != 0
    assert (
        "python/sglang/srt/layers/linear.py exists upstream; change it with a patch"
        in result.stderr
    )

"""The fork's distribution metadata: upstream's names and pins, sorted into our dependency sets.

`python/pyproject.toml` lists under [tool.fork] the names of the base set (text serving on CPU) and
of the extra `test`. A bare name takes upstream's own specifier, so pins never drift from the
release; a name with a specifier keeps it. Everything else that upstream requires becomes the extra
`cuda`, so `sglang[cuda]` is what upstream installs.
"""

from __future__ import annotations

import re
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

from .checkout import Checkout
from .errors import ForkError
from .upstream_wheel import fetch

_NAME = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)")


def canonical(requirement: str) -> str:
    """The requirement's distribution name in its canonical spelling."""
    match = _NAME.match(requirement)
    if not match:
        raise ForkError(f"'{requirement}' in python/pyproject.toml is not a requirement.")
    return re.sub(r"[-_.]+", "-", match[1].rstrip("-_.")).lower()


def read_wheel(wheel: Path, name: str) -> str:
    """Text of the file `name` in the .dist-info folder of `wheel`."""
    with zipfile.ZipFile(wheel) as archive:
        path = next(p for p in archive.namelist() if p.endswith(f".dist-info/{name}"))
        return archive.read(path).decode()


def dependency_sets(checkout: Checkout, upstream_metadata: str) -> dict[str, list[str]]:
    """Requirements by set: `base`, `cuda`, `test`, `train`, each sorted by name.

    Raises ForkError when a bare name of the base set is unknown to upstream.
    """
    tool = tomllib.loads((checkout.root / "python" / "pyproject.toml").read_text())["tool"]["fork"]
    lines = HeaderParser().parsestr(upstream_metadata).get_all("Requires-Dist") or []
    upstream = {canonical(line): line for line in lines if "extra ==" not in line}
    base = {}
    for requirement in tool["base"]:
        name = canonical(requirement)
        if requirement.strip() != _NAME.match(requirement)[1]:
            base[name] = requirement
        elif name in upstream:
            base[name] = upstream[name]
        else:
            raise ForkError(
                f"'{requirement}' in [tool.fork] base of python/pyproject.toml is not required by "
                f"sglang {checkout.pin.version}; give it a specifier of its own, e.g. "
                f"'{requirement}>=0'."
            )
    cuda = {name: line for name, line in upstream.items() if name not in base}
    sets = {"base": base, "cuda": cuda}
    for extra in ("test", "train"):
        sets[extra] = {canonical(requirement): requirement for requirement in tool[extra]}
    return {key: [found[name] for name in sorted(found)] for key, found in sets.items()}


def compose(checkout: Checkout, upstream_metadata: str) -> str:
    """The fork's METADATA file."""
    project = tomllib.loads((checkout.root / "python" / "pyproject.toml").read_text())["project"]
    sets = dependency_sets(checkout, upstream_metadata)
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {project['name']}",
        f"Version: {checkout.pin.fork_version}",
        f"Summary: {project['description']}",
        f"License-Expression: {project['license']}",
        "License-File: LICENSE",
        "License-File: LICENSE.upstream",
        "License-File: NOTICE",
        f"Requires-Python: {project['requires-python']}",
        *(f"Requires-Dist: {requirement}" for requirement in sets["base"]),
    ]
    for extra in ("cuda", "test", "train"):
        lines.append(f"Provides-Extra: {extra}")
        lines += [
            f"Requires-Dist: {_with_extra(requirement, extra)}" for requirement in sets[extra]
        ]
    return "\n".join(lines) + "\n"


def _with_extra(requirement: str, extra: str) -> str:
    specifier, _, marker = requirement.partition(";")
    condition = f"({marker.strip()}) and " if marker else ""
    return f'{specifier.strip()}; {condition}extra == "{extra}"'


def dist_info_name(checkout: Checkout) -> str:
    return f"sglang-{checkout.pin.fork_version}.dist-info"


def write_dist_info(checkout: Checkout, folder: Path) -> None:
    """Puts the fork's .dist-info beside the package in `folder`, for `importlib.metadata`."""
    wheel = fetch(checkout)
    target = folder / dist_info_name(checkout)
    target.mkdir(exist_ok=True)
    (target / "METADATA").write_text(compose(checkout, read_wheel(wheel, "METADATA")))
    for name in ("entry_points.txt", "top_level.txt"):
        (target / name).write_text(read_wheel(wheel, name))

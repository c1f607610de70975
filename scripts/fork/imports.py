"""Which sglang names exist in the fork, read from source without importing anything.

A new upstream release moves names; an overlay file that imports one that is gone would fail only
when it is loaded, perhaps on a GPU. A module's names are those its top level binds, in any branch.
Modules that make names at run time (`__getattr__`, `globals()`, extension modules) are taken to
have every name.
"""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath

_ROOT = "sglang"


class Source:
    """The fork's source by path: `wheel`, with the `replaced` files (patched or added) on top."""

    def __init__(self, wheel: Path, replaced: dict[str, bytes]):
        self._archive = zipfile.ZipFile(wheel)
        self._replaced = replaced
        self.paths = {name for name in self._archive.namelist() if not name.endswith("/")}
        self.paths |= set(replaced)
        self._folders = {
            str(parent) for name in self.paths for parent in PurePosixPath(name).parents
        }
        self._extensions = {
            name.split(".")[0] for name in self.paths if name.endswith(".so") and "/" in name
        }
        self.names = cache(self._names)

    def read(self, path: str) -> bytes:
        return self._replaced[path] if path in self._replaced else self._archive.read(path)

    def module_file(self, module: str) -> str | None:
        """Path of the module's source, `""` for one without, None where there is no such module."""
        stem = module.replace(".", "/")
        for path in (f"{stem}/__init__.py", f"{stem}.py"):
            if path in self.paths:
                return path
        return "" if stem in self._extensions or stem in self._folders else None

    def _names(self, module: str) -> frozenset[str] | None:
        """Names at the top level of an existing `module`; None when it may have any name."""
        path = self.module_file(module)
        if not path:
            return frozenset() if module.replace(".", "/") in self._folders else None
        found: set[str] = set()
        tree = ast.parse(self.read(path))
        for node in _top_level(tree.body):
            match node:
                case ast.FunctionDef(name="__getattr__"):
                    return None
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    found.add(node.name)
                case ast.Import():
                    found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
                case ast.ImportFrom():
                    origin = absolute(node, path)
                    for alias in node.names:
                        if alias.name != "*":
                            found.add(alias.asname or alias.name)
                        elif not inside(origin) or self.module_file(origin) is None:
                            return None
                        elif (more := self.names(origin)) is None:
                            return None
                        else:
                            found |= more
                case ast.Name(ctx=ast.Store()):
                    found.add(node.id)
        for node in ast.walk(tree):
            if isinstance(node, ast.Global):
                found.update(node.names)
            elif isinstance(node, ast.Name) and node.id == "globals":
                return None
        return frozenset(found | {"__file__", "__name__", "__doc__"})

    def missing(self, path: str, text: bytes) -> Iterator[tuple[int, str]]:
        """Line and name of each sglang import in `text`, the file at `path`, that is gone."""
        for node in _imports(ast.parse(text, path)):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if inside(alias.name) and self.module_file(alias.name) is None:
                        yield node.lineno, alias.name
                continue
            origin = absolute(node, path)
            if not inside(origin):
                continue
            if self.module_file(origin) is None:
                yield node.lineno, origin
                continue
            for alias in node.names:
                names = self.names(origin)
                known = names is None or alias.name == "*" or alias.name in names
                if not known and self.module_file(f"{origin}.{alias.name}") is None:
                    yield node.lineno, f"{origin}.{alias.name}"


def inside(module: str) -> bool:
    return module.split(".")[0] == _ROOT


def absolute(node: ast.ImportFrom, path: str) -> str:
    """The module a `from … import` in the file `path` names, relative dots resolved."""
    if not node.level:
        return node.module or ""
    package = PurePosixPath(path).parts[: -node.level]
    return ".".join([*package, *([node.module] if node.module else [])])


def _top_level(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Nodes that run in the module's own scope: everything outside function and class bodies."""
    stack: list[ast.AST] = list(body)
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            stack.extend(ast.iter_child_nodes(node))


def _imports(tree: ast.Module) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports anywhere, except those whose failure a `try` around them expects."""
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        children = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.Try) and any(_expects_import_error(h) for h in node.handlers):
            children = [child for child in children if child not in node.body]
        stack.extend(children)


def _expects_import_error(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    expected = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}
    return any(isinstance(name, ast.Name) and name.id in expected for name in caught)

"""Keeps the fork: `python scripts/upstream.py VERB`; see docs/fork.md."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from fork import bump, faults, pack, tree, upstream_wheel
from fork.checkout import Checkout, here
from fork.errors import ForkError


def main(arguments: list[str] | None = None) -> int:
    checkout = here()
    options = _parser(checkout).parse_args(arguments)
    try:
        for line in _run(checkout, options):
            print(line.replace(f"{checkout.root}/", ""), flush=True)
    except ForkError as error:
        print(f"error: {error}".replace(f"{checkout.root}/", ""), file=sys.stderr)
        return 1
    return 0


def _run(checkout: Checkout, options: argparse.Namespace) -> Iterator[str]:
    """Does what the verb says; yields what to print."""
    folder = options.dir.absolute() if "dir" in options else None
    if options.verb == "fetch":
        yield str(upstream_wheel.fetch(checkout))
    elif options.verb == "tree":
        yield tree.build_tree(checkout, folder, options.force, options.rebase)
    elif options.verb == "refresh":
        changed = tree.refresh(checkout, folder, options.force)
        yield from changed or ["python/patches is up to date"]
    elif options.verb == "check":
        found = faults.check(checkout)
        yield from (f"fault: {fault}" for fault in found)
        if found:
            raise ForkError(f"the fork has {len(found)} faults; see the lines above.")
        yield faults.summary(checkout)
    elif options.verb == "wheel":
        path = pack.build_wheel(checkout, folder)
        yield f"{path}  sha256 {upstream_wheel.sha256(path)}"
    elif options.verb == "bump":
        scratch = folder / f"bump-{options.version}"
        yield from bump.bump(checkout, options.version, scratch, options.write)


def _parser(checkout: Checkout) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/upstream.py", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, words: str, folder: Path | None = None) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=words, description=words)
        if folder:
            sub.add_argument("--dir", type=Path, default=folder, help="default: %(default)s")
        return sub

    verb("fetch", "download and verify the pinned upstream wheel")
    sub = verb(
        "tree", "build or update the tree: upstream + patches + overlay", checkout.build / "tree"
    )
    sub.add_argument("--force", action="store_true", help="discard what is not saved")
    sub.add_argument("--rebase", action="store_true", help="carry own commits over to a new series")
    sub = verb(
        "refresh", "write the tree's commits back to python/patches", checkout.build / "tree"
    )
    sub.add_argument("--force", action="store_true", help="overwrite patches the tree lacks")
    verb("check", "list every fault of the patches and the overlay")
    verb(
        "wheel", "repack upstream's wheel with the patches and the overlay", checkout.root / "dist"
    )
    sub = verb("bump", "port the series to another upstream release", checkout.build)
    sub.add_argument("version", help="e.g. 0.5.24")
    sub.add_argument("--write", action="store_true", help="make it the pinned release")
    return parser


if __name__ == "__main__":
    sys.exit(main())

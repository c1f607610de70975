"""Keeps the fork: `python scripts/upstream.py VERB`; see docs/fork.md."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fork import bump, faults, pack, tree, upstream_wheel
from fork.checkout import here
from fork.errors import ForkError


def main(arguments: list[str] | None = None) -> int:
    checkout = here()
    default_tree = checkout.build / "tree"
    parser = argparse.ArgumentParser(prog="scripts/upstream.py", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    verbs.add_parser("fetch", help="download and verify the pinned upstream wheel")
    for verb, words in (
        ("tree", "build or update the tree: upstream + patches + overlay"),
        ("refresh", "write the tree's commits back to python/patches"),
    ):
        sub = verbs.add_parser(verb, help=words)
        sub.add_argument("--dir", type=Path, default=default_tree, help="the tree (build/tree)")
        sub.add_argument("--force", action="store_true", help="discard what is not saved")
        if verb == "tree":
            words = "carry commits that are not refreshed over onto the changed series"
            sub.add_argument("--rebase", action="store_true", help=words)

    verbs.add_parser("check", help="list every fault of the patches and the overlay")
    sub = verbs.add_parser("wheel", help="repack upstream's wheel with the patches and the overlay")
    sub.add_argument("--dir", type=Path, default=checkout.root / "dist", help="where to (dist)")

    sub = verbs.add_parser("bump", help="port the series to another upstream release")
    sub.add_argument("version", help="e.g. 0.5.24")
    sub.add_argument("--dir", type=Path, help="the scratch repository (build/bump-VERSION)")
    sub.add_argument("--write", action="store_true", help="make the ported release the pinned one")

    options = parser.parse_args(arguments)
    try:
        match options.verb:
            case "fetch":
                print(upstream_wheel.fetch(checkout))
            case "tree":
                words = tree.build_tree(
                    checkout, options.dir.absolute(), options.force, options.rebase
                )
                print(words.replace(f"{checkout.root}/", ""))
            case "refresh":
                changed = tree.refresh(checkout, options.dir.absolute(), options.force)
                print("\n".join(changed) if changed else "python/patches is up to date")
            case "check":
                found = faults.check(checkout)
                for fault in found:
                    print(f"fault: {fault}".replace(f"{checkout.root}/", ""), file=sys.stderr)
                if found:
                    raise ForkError(f"{len(found)} faults in the fork; see the lines above.")
                print(faults.summary(checkout))
            case "bump":
                folder = options.dir or checkout.build / f"bump-{options.version}"
                for line in bump.bump(checkout, options.version, folder.absolute(), options.write):
                    print(line.replace(f"{checkout.root}/", ""), flush=True)
            case "wheel":
                path = pack.build_wheel(checkout, options.dir.absolute())
                print(f"{path}  sha256 {upstream_wheel.sha256(path)}")
    except ForkError as error:
        print(f"error: {error}".replace(f"{checkout.root}/", ""), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How the fork is kept: upstream wheel + patches + overlay, with the standard library and git only.

One module per noun: `checkout` (where things lie, what is pinned), `upstream_wheel` (download and
verify), `git` (run git with a fixed identity), `patches` (read, apply, write the series), `overlay`
(our files and their links), `tree` (the built tree), `metadata` and `pack` (the wheel), `faults`
and `imports` (what `check` refuses), `bump` (another upstream release).
"""

import sys

if sys.version_info < (3, 11):
    found = ".".join(map(str, sys.version_info[:2]))
    sys.exit(
        f"error: this is Python {found}; sglang needs 3.11, 3.12 or 3.13, e.g. make "
        "PYTHON=python3.12 with the goal you asked for."
    )

"""How the fork is kept: upstream wheel + patches + overlay, with the standard library and git only.

One module per noun: `checkout` (where things lie, what is pinned), `upstream_wheel` (download and
verify), `git` (run git with a fixed identity), `patches` (read, apply, write the series), `overlay`
(our files and their links), `tree` (the built tree), `metadata` and `pack` (the wheel), `faults`
and `imports` (what `check` refuses), `bump` (another upstream release).
"""

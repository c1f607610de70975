"""matplotlib, which training and measuring can do without."""

from __future__ import annotations

import sys
from types import ModuleType


def load_pyplot() -> ModuleType | None:
    """`matplotlib.pyplot` without a display; None where it is missing or broken, said on stderr.

    Whatever it raises: a picture is no reason to lose the numbers it would show.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        pyplot.switch_backend("Agg")  # now and not with the first figure
    except ModuleNotFoundError as error:
        print(f"no {error.name}, no plot: pip install matplotlib", file=sys.stderr)
    except Exception as error:  # noqa: BLE001 - an installation's own faults
        print(f"no plot: matplotlib cannot be loaded ({error!r})", file=sys.stderr)
    else:
        return pyplot
    return None

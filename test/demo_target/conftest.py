"""The demo target, converted once and shared with every other user of the cache."""

from pathlib import Path

import demo_target
import pytest
from fork.checkout import here


@pytest.fixture(scope="session")
def target() -> Path:
    return demo_target.demo_target(here().cache)

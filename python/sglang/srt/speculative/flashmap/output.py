"""``FlashMapOutputStreamer``: sends what a request's trees were like along with its answer.

As ``spec_tree`` of ``meta_info``, once, with the end of a request, like upstream's own ``spec_*``
keys. Requests of a server of chains have none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

KEY = "spec_tree"


class FlashMapOutputStreamer(SchedulerOutputStreamer):
    """Upstream's streamer; see the module's docstring."""

    has_additional_customized_info = True

    def __post_init__(self) -> None:
        """Upstream refuses to start with the Rust server, whose answers go without."""

    def should_build_additional_customized_info(self) -> bool:
        return self.rust_server is None

    def build_additional_customized_info(self, reqs: list["Req"]) -> dict[str, list[Any]]:
        trees = [req.spec_tree.averages() if _ends(req) else None for req in reqs]
        return {KEY: trees} if any(trees) else {}


def _ends(req: "Req") -> bool:
    return req.spec_tree is not None and req.finished()

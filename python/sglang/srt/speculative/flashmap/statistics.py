"""``TreeStatistics``: what the trees of a server look like, for its log and its metrics.

Counts ride on the step: three integers a request are copied to pinned memory behind the target's
forward, and read when the scheduler handles that step's result, for which it has waited itself.

Each request gets the averages over its own steps, ``spec_tree`` of its ``meta_info``
(``output.py``). The decode log line gets averages since the last one; ``/metrics`` gets counters
(``sglang:`` before their names), whose rates divide: ``flashmap_tree_nodes`` and
``flashmap_trie_nodes`` (distinct prefixes before the cut to ``W - 1``),
``flashmap_distinct_candidates``, and ``flashmap_verified_requests`` by ``rule``. Accepted depths
are the accept lengths that upstream reports, per request in ``spec_correct_drafts_histogram``.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.kernels.ops.speculative.flashmap.tree import TreePlan
from sglang.srt.speculative.flashmap.config import FlashMapServeConfig
from sglang.srt.speculative.flashmap.plan import RULES, StepRules, request_rule
from sglang.srt.utils.common import is_pin_memory_available

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

_COUNTS = ("tree_nodes", "trie_nodes", "distinct_candidates")


@dataclass
class RequestTrees:
    """The trees of one request: sums over its verify steps."""

    rule: str
    verified: str
    """Whether it is applied to a ``tree`` or a ``chain``."""
    steps: int = 0
    tree_nodes: int = 0
    trie_nodes: int = 0
    distinct_candidates: int = 0

    def add(self, *counts: int) -> None:
        self.steps += 1
        for name, count in zip(_COUNTS, counts, strict=True):
            setattr(self, name, getattr(self, name) + count)

    def averages(self) -> dict[str, Any]:
        """The rule, what it is applied to, and counts per step."""
        means = {name: getattr(self, name) / self.steps for name in _COUNTS}
        return dict(rule=self.rule, verified=self.verified, **means)


class TreeStatistics:
    """Counts of verified trees. ``model_name``: label of the metrics; None: no metrics."""

    def __init__(self, serve: FlashMapServeConfig, model_name: str | None) -> None:
        self._pending: deque[tuple[torch.Tensor, StepRules, list["Req"]]] = deque()
        self._serve = serve
        self._model_name = model_name
        self._counters: dict[str, Any] | None = None
        self._reset()

    def _reset(self) -> None:
        self._requests = 0
        self._totals = dict.fromkeys(_COUNTS, 0)
        self._by_rule = dict.fromkeys(RULES, 0)

    def launch(self, tree: TreePlan, rules: StepRules, reqs: list["Req"]) -> None:
        """Start the copy of the counts of a step of ``reqs``; every call is followed by one of
        ``collect``."""
        counts = tree.counts
        host = torch.empty(
            counts.shape, dtype=counts.dtype, pin_memory=is_pin_memory_available(counts.device)
        )
        self._pending.append((host.copy_(counts, non_blocking=True), rules, reqs))

    def collect(self) -> None:
        """Add the counts of the oldest step; its result is on the host, so its counts are."""
        if not self._pending:
            return
        counts, rules, reqs = self._pending.popleft()
        counts = counts.tolist()
        totals = dict(zip(_COUNTS, map(sum, zip(*counts, strict=True)), strict=True))
        by_rule = {rule: getattr(rules, rule) for rule in RULES}
        self._requests += len(reqs)
        for req, of_tree in zip(reqs, counts, strict=True):
            # As upstream counts verify steps: overlap scheduling runs one past the end.
            if not (req.is_retracted or req.finished()):
                if req.spec_tree is None:
                    req.spec_tree = self._request(req)
                req.spec_tree.add(*of_tree)
        for kept, new in ((self._totals, totals), (self._by_rule, by_rule)):
            for name, value in new.items():
                kept[name] += value
        if self._model_name is not None:
            self._count(totals, by_rule)

    def _request(self, req: "Req") -> RequestTrees:
        rule = request_rule(req.sampling_params, self._serve)
        chain = rule == "rejection" and not self._serve.draws_trees
        return RequestTrees(rule, "chain" if chain else "tree")

    def _count(self, totals: dict[str, int], by_rule: dict[str, int]) -> None:
        if self._counters is None:
            # Not at import: upstream sets the folder of its metrics first.
            from prometheus_client import Counter

            labels = ("model_name",)
            self._counters = {
                name: Counter(f"sglang:flashmap_{name}", f"FLASHMAP {name}, in all.", labels)
                for name in _COUNTS
            }
            self._counters["requests"] = Counter(
                "sglang:flashmap_verified_requests",
                "FLASHMAP requests verified, counted once a step.",
                (*labels, "rule"),
            )
        for name, value in totals.items():
            self._counters[name].labels(self._model_name).inc(value)
        for rule, value in by_rule.items():
            self._counters["requests"].labels(self._model_name, rule).inc(value)

    def log_suffix(self) -> str:
        """Averages per request and step since the last call, ``""`` if there was none."""
        if self._requests == 0:
            return ""
        nodes, trie, distinct = (self._totals[name] / self._requests for name in _COUNTS)
        rules = ", ".join(f"{n} {rule}" for rule, n in self._by_rule.items() if n)
        self._reset()
        return (
            f"tree nodes: {nodes:.1f} of {trie:.1f}, distinct candidates: {distinct:.1f}, "
            f"verified by: {rules}"
        )

"""Counts of trees in the decode log and in metrics."""

from __future__ import annotations

import torch
from prometheus_client import REGISTRY
from sglang.kernels.ops.speculative.flashmap.tree import TreePlan
from sglang.srt.speculative.flashmap.plan import StepRules
from sglang.srt.speculative.flashmap.statistics import TreeStatistics


def tree(num_nodes: list[int], trie_nodes: list[int], distinct: list[int]) -> TreePlan:
    plan = TreePlan.empty(len(num_nodes), 5, torch.device("cpu"))
    for tensor, values in (
        (plan.num_nodes, num_nodes),
        (plan.trie_nodes, trie_nodes),
        (plan.distinct, distinct),
    ):
        tensor.copy_(torch.tensor(values))
    return plan


def test_steps_are_counted_when_their_results_are() -> None:
    statistics = TreeStatistics(None)
    first = tree([5, 3], [9, 3], [4, 1])
    statistics.launch(first, StepRules(1, 1, 0, None))
    first.num_nodes.zero_()  # a graph's buffers are filled anew by the next step
    statistics.launch(tree([5], [7], [2]), StepRules(0, 0, 1, None))
    assert statistics.log_suffix() == ""
    statistics.collect()
    expected = "tree nodes: 4.0 of 6.0, distinct candidates: 2.5, verified by: 1 greedy, 1 match"
    assert statistics.log_suffix() == expected
    assert statistics.log_suffix() == ""
    statistics.collect()
    assert "5.0 of 7.0, distinct candidates: 2.0, verified by: 1 rejection" in (
        statistics.log_suffix()
    )
    statistics.collect()  # a chain's result
    assert statistics.log_suffix() == ""


def test_metrics() -> None:
    statistics = TreeStatistics("some-model")
    for _ in range(2):
        statistics.launch(tree([5, 3], [9, 3], [4, 1]), StepRules(2, 0, 0, None))
        statistics.collect()
    found = {
        name: REGISTRY.get_sample_value(
            f"sglang:flashmap_{name}_total", {"model_name": "some-model"}
        )
        for name in ("tree_nodes", "trie_nodes", "distinct_candidates")
    }
    assert found == dict(tree_nodes=16, trie_nodes=24, distinct_candidates=10)
    labels = dict(model_name="some-model", rule="greedy")
    assert REGISTRY.get_sample_value("sglang:flashmap_verified_requests_total", labels) == 4

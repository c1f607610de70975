"""Counts of trees in the decode log and in metrics."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from prometheus_client import REGISTRY
from sglang.kernels.ops.speculative.flashmap.tree import TreePlan
from sglang.srt.speculative.flashmap.config import FlashMapServeConfig
from sglang.srt.speculative.flashmap.output import KEY, FlashMapOutputStreamer
from sglang.srt.speculative.flashmap.plan import StepRules
from sglang.srt.speculative.flashmap.statistics import TreeStatistics

SERVE = FlashMapServeConfig(
    4, 5, (0.0, 1.0), 0, False, tree_candidates=4, tree_temperature=0.5
)


def request(temperature: float = 0.0, *, finished: bool = False, **fields: Any) -> SimpleNamespace:
    return SimpleNamespace(
        sampling_params=SimpleNamespace(
            temperature=temperature or 1.0, top_k=1 << 30 if temperature else 1
        ),
        spec_tree=None,
        is_retracted=False,
        finished=lambda: finished,
        **fields,
    )


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
    statistics = TreeStatistics(SERVE, None)
    first = tree([5, 3], [9, 3], [4, 1])
    statistics.launch(first, StepRules(1, 1, 0, None), [request(), request(0.5)])
    first.num_nodes.zero_()  # a graph's buffers are filled anew by the next step
    statistics.launch(tree([5], [7], [2]), StepRules(0, 0, 1, None), [request(1.0)])
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
    statistics = TreeStatistics(SERVE, "some-model")
    for _ in range(2):
        statistics.launch(tree([5, 3], [9, 3], [4, 1]), StepRules(2, 0, 0, None), [request()] * 2)
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


def test_each_request_gets_the_averages_over_its_own_steps() -> None:
    statistics = TreeStatistics(SERVE, None)
    greedy, cold, hot, done = request(), request(0.5), request(0.6), request(finished=True)
    rules = StepRules(2, 1, 1, None)
    first = tree([5, 4, 5, 5], [9, 6, 4, 9], [4, 2, 1, 4])
    statistics.launch(first, rules, [greedy, cold, hot, done])
    statistics.launch(tree([3, 5], [5, 4], [2, 1]), StepRules(1, 0, 1, None), [greedy, hot])
    for _ in range(2):
        statistics.collect()
    streamer = object.__new__(FlashMapOutputStreamer)
    reqs = [greedy, cold, hot, done]
    assert streamer.build_additional_customized_info(reqs) == {}  # none has ended
    for req in reqs:
        req.finished = lambda: True
    found = streamer.build_additional_customized_info(reqs)[KEY]
    names = "rule", "verified", "tree_nodes", "trie_nodes", "distinct_candidates"
    expected = (
        ("greedy", "tree", 4, 7, 3),
        ("match", "tree", 4, 6, 2),
        ("rejection", "chain", 5, 4, 1),
    )
    assert found == [*(dict(zip(names, values)) for values in expected), None]

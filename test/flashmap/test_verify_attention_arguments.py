"""`--speculative-flashmap-verify-attention`: what it becomes, what it moves, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.arg_groups import verify_attention_hook
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.arg_groups.verify_attention_hook import (
    expand_backend_name,
    resolve_verify_attention,
)
from sglang.srt.layers.attention import verify_crossover
from sglang.srt.layers.attention.verify_crossover import prefers_splitkv

FIELD = "speculative_flashmap_verify_attention"


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Resolves given fields as on a GPU whose default attention backend is `default`."""

    def run(default: str = "fa3", mla: bool = False, best: bool = False, **given: Any) -> Any:
        monkeypatch.setattr(verify_attention_hook, "_is_mla", lambda _: mla)
        monkeypatch.setattr(verify_attention_hook, "_is_best", lambda _: best)
        fields: dict[str, Any] = dict(
            speculative_algorithm="FLASHMAP",
            device="cuda",
            attention_backend=None,
            prefill_attention_backend=None,
            decode_attention_backend=None,
            speculative_attention_mode="prefill",
            enable_deterministic_inference=False,
            dcp_size=1,
            kv_cache_dtype="auto",
        )
        server_args = SimpleNamespace(**{**fields, FIELD: "auto", **given})
        expand_backend_name(server_args)
        if server_args.attention_backend is None:
            server_args._resolved_overrides = [("default", dict(attention_backend=default))]
        resolve_verify_attention(server_args)
        return resolving_view(server_args)

    return run


def test_auto_keeps_the_backend_where_nothing_was_measured(resolve: Callable) -> None:
    view = resolve()
    assert getattr(view, FIELD) == "backend" and view.decode_attention_backend is None


@pytest.mark.parametrize("asked", [dict(best=True), {FIELD: "splitkv"}], ids=["auto", "asked"])
def test_verify_alone_moves_to_triton(resolve: Callable, asked: dict) -> None:
    view = resolve(**asked)
    assert getattr(view, FIELD) == "splitkv"
    assert view.decode_attention_backend == "triton" and view.speculative_attention_mode == "decode"
    assert view.attention_backend == "fa3"


@pytest.mark.parametrize("algorithm", ["FLASHMAP", "EAGLE", "DFLASH", "NGRAM"])
@pytest.mark.parametrize(
    "given",
    [
        dict(attention_backend="triton", **{FIELD: "splitkv"}),
        dict(attention_backend="triton_splitkv"),
        dict(
            attention_backend="fa3",
            decode_attention_backend="triton_splitkv",
            speculative_attention_mode="decode",
        ),
    ],
    ids=["flag", "name", "name-for-decode"],
)
def test_any_algorithm_on_triton(resolve: Callable, algorithm: str, given: dict) -> None:
    view = resolve(speculative_algorithm=algorithm, **given)
    assert getattr(view, FIELD) == "splitkv"
    assert "triton_splitkv" not in (view.attention_backend, view.decode_attention_backend)


@pytest.mark.parametrize(
    "given",
    [
        dict(attention_backend="fa3"),
        dict(device="cpu"),
        dict(enable_deterministic_inference=True),
        dict(kv_cache_dtype="fp8_e5m2"),
        dict(mla=True),
    ],
    ids=lambda given: next(iter(given)),
)
def test_auto_never_refuses(resolve: Callable, given: dict) -> None:
    assert getattr(resolve(best=True, **given), FIELD) == "backend"


@pytest.mark.parametrize(
    "given, message",
    [
        (dict(attention_backend="fa3"), "but fa3 is to verify; pass --attention-backend triton"),
        (dict(speculative_algorithm="EAGLE"), "but fa3 is to verify"),
        (
            dict(attention_backend="fa3", decode_attention_backend="triton"),
            "--speculative-attention-mode decode",
        ),
        (dict(speculative_algorithm=None), "pass a --speculative-algorithm"),
        (dict(device="cpu"), "not on --device cpu; leave it out"),
        (dict(enable_deterministic_inference=True), "--enable-deterministic-inference"),
        (dict(dcp_size=2), "--dcp-size"),
        (dict(kv_cache_dtype="fp8_e5m2"), "pass --kv-cache-dtype"),
        (dict(mla=True), "MLA"),
    ],
    ids=["fa3", "eagle-on-fa3", "mode", "plain", "cpu", "deterministic", "dcp", "e5m2", "mla"],
)
def test_refused_in_one_sentence(resolve: Callable, given: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        resolve(**{FIELD: "splitkv", **given})
    assert str(error.value).startswith("--speculative-flashmap-verify-attention splitkv ")
    assert "\n" not in str(error.value)


def test_a_name_that_contradicts_the_flag_is_refused(resolve: Callable) -> None:
    with pytest.raises(ValueError, match="contradicts"):
        resolve(attention_backend="triton_splitkv", **{FIELD: "backend"})


def test_crossover_takes_measured_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    far = verify_crossover.FAR
    table = {
        (9, 0): {
            (True, 68): {far: 64},
            (True, 260): {2048: 16, far: 4},
            (False, 68): {far: 0},
            (True, 40): {2048: 64},
        }
    }
    monkeypatch.setattr(verify_crossover, "UP_TO", table)

    def prefers(
        capability=(9, 0), tree=True, rows=68, head_dim=128, requests=None, context=1 << 20
    ) -> bool:
        return prefers_splitkv(
            capability,
            tree=tree,
            rows=rows,
            head_dim=head_dim,
            requests=requests,
            context=context,
        )

    assert prefers() and prefers(rows=52) and prefers(requests=500)
    assert prefers(rows=200, requests=4) and not prefers(rows=200, requests=5)
    assert prefers(rows=260, requests=16, context=2048)
    assert not prefers(rows=260, requests=16, context=2049)
    # Not measured beyond.
    assert prefers(rows=40, context=2048) and not prefers(rows=40, requests=1, context=2049)
    assert not any(prefers(rows=rows, requests=1) for rows in (17, 69, 190, 261))
    assert not prefers(tree=False, requests=1)
    assert not prefers(capability=(8, 0)) and not prefers(head_dim=64)

"""Runs the triton backend's verify step with split-KV attention under Triton's interpreter.

A process of its own, because TRITON_INTERPRET has to be set before Triton is first imported:
`python interpreted_verify.py CASES RESULTS` loads a list of cases (see `verify`) and saves one
output for each. The backend is the one that is served; what it reads of a model runner is stood in
for.
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402
from sglang.srt.configs.model_config import AttentionArch  # noqa: E402
from sglang.srt.layers.attention.splitkv_backend import triton_backend_class  # noqa: E402
from sglang.srt.layers.radix_attention import AttentionType  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.runtime_context import get_context, get_parallel  # noqa: E402
from sglang.srt.speculative.dflash_info import DFlashVerifyInput  # noqa: E402
from sglang.srt.speculative.eagle_info import EagleVerifyInput  # noqa: E402
from sglang.srt.speculative.eagle_utils import TreeMaskMode  # noqa: E402
from sglang.srt.speculative.ngram_info import NgramVerifyInput  # noqa: E402
from transformers import PretrainedConfig  # noqa: E402


class Pool:
    """A one-layer KV pool."""

    start_layer = 0

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys, self.values = keys, values

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.keys

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.values


class Translator:
    """Slots as they are."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table

    def pack_read_stream(
        self, plan: Any, *, req_pool_indices, seq_lens, indptr, out, kv_start_idx=None, **_: Any
    ) -> bool:
        for b, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist())):
            start = 0 if kv_start_idx is None else int(kv_start_idx[b])
            first = int(indptr[b])
            out[first : first + length] = self.table[row, start : start + length]
        return True

    window_kv_kind = None


def model_runner(case: dict, batch: int, width: int) -> SimpleNamespace:
    _, heads, head_dim = case["q"].shape
    kv_heads = case["k"].shape[1]
    pool = Pool(case["key_buffer"], case["value_buffer"])
    return SimpleNamespace(
        device="cpu",
        gpu_id=0,
        dtype=torch.float32,
        page_size=1,
        is_draft_worker=False,
        sliding_window_size=case["window"],
        req_to_token_pool=SimpleNamespace(size=batch, req_to_token=case["table"]),
        token_to_kv_pool=pool,
        token_to_kv_pool_allocator=None,
        kv_index_translator=Translator(case["table"]),
        kv_cache_dtype=torch.float32,
        decode_num_tokens_per_req=lambda: width,
        model=torch.nn.Module(),
        model_config=SimpleNamespace(
            attention_arch=AttentionArch.MHA,
            head_dim=head_dim,
            v_head_dim=head_dim,
            swa_v_head_dim=head_dim,
            context_len=case["table"].shape[1],
            is_encoder_decoder=False,
            linear_attn_registry_result=None,
            hf_config=PretrainedConfig(architectures=["LlamaForCausalLM"]),
            get_max_num_attention_heads=lambda: heads,
            get_num_kv_heads=lambda *_: kv_heads,
        ),
    )


def verify_input(case: dict, width: int) -> Any:
    """As EAGLE, DFLASH and NGRAM give it; a tree's mask in the layout that the backend names."""
    mask = None if case["mask"] is None else case["mask"].flatten()
    common = dict(draft_token=None, positions=None, custom_mask=mask, draft_token_num=width)
    links = dict(retrieve_index=None, retrieve_next_token=None, retrieve_next_sibling=None)
    if case["algorithm"] == "DFLASH":
        return DFlashVerifyInput(**common)
    if case["algorithm"] == "NGRAM":
        return NgramVerifyInput(**common, **links)
    return EagleVerifyInput(
        **common,
        **links,
        retrieve_cum_len=None,
        spec_steps=width - 1,
        topk=2,
        capture_hidden_mode=None,
        seq_lens_sum=None,
        seq_lens_cpu=None,
    )


def verify(case: dict) -> torch.Tensor:
    """One layer's attention of ``case``: batch ``B`` with ``W`` drafts each.

    algorithm: whose verify input; q, k, v: ``(B * W, heads, dim)``; key_buffer, value_buffer: the
    pool; table: ``(rows, context)`` slots; rows, prefixes: ``(B,)``; mask: ``(B, W, W)`` or None;
    window: tokens or None; captured: through the buffers of a graph, filled as for capture first.
    """
    batch = len(case["prefixes"])
    width = case["q"].shape[0] // batch
    runner = model_runner(case, batch, width)
    backend = triton_backend_class(runner)(runner)
    assert backend.verify_mask.mode == TreeMaskMode.QLEN_ONLY
    layer = SimpleNamespace(
        layer_id=0,
        tp_q_head_num=case["q"].shape[1],
        tp_k_head_num=case["k"].shape[1],
        tp_v_head_num=case["v"].shape[1],
        qk_head_dim=case["q"].shape[2],
        v_head_dim=case["v"].shape[2],
        head_dim=case["q"].shape[2],
        scaling=0.3,
        logit_cap=0.0,
        logit_capping_method="tanh",
        xai_temperature_len=-1,
        k_scale=None,
        v_scale=None,
        is_cross_attention=False,
        attn_type=AttentionType.DECODER,
        sliding_window_size=-1 if case["window"] is None else case["window"],
    )
    forward_batch = SimpleNamespace(
        batch_size=batch,
        forward_mode=ForwardMode.TARGET_VERIFY,
        req_pool_indices=case["rows"],
        seq_lens=case["prefixes"],
        seq_lens_sum=None,
        spec_info=verify_input(case, width),
        kv_loc_plan=None,
        encoder_lens=None,
        out_cache_loc=None,
        mha_one_shot=False,
        extend_seq_lens_cpu=None,
    )
    if case["captured"]:
        backend.init_cuda_graph_state(batch + 1, (batch + 1) * width)
        if case["mask"] is not None:
            # Upstream's placeholder at capture is longer than the masks that follow.
            placeholder = torch.ones((2 * batch + batch * width) * width, dtype=torch.bool)
            forward_batch.spec_info.custom_mask = placeholder
        backend.init_forward_metadata_out_graph(forward_batch, in_capture=True)
        backend.init_forward_metadata_in_graph(forward_batch)
        forward_batch.spec_info = verify_input(case, width)
        backend.init_forward_metadata_out_graph(forward_batch)
        # Recorded when captured, so it runs again in a replay.
        backend.init_forward_metadata_in_graph(forward_batch)
    else:
        backend.init_forward_metadata(forward_batch)
    output = backend.forward_extend(
        case["q"].flatten(1), case["k"], case["v"], layer, forward_batch, save_kv_cache=False
    )
    return output.view(case["q"].shape)


if __name__ == "__main__":
    fields = dict(
        speculative_algorithm="EAGLE",
        speculative_num_steps=1,
        speculative_eagle_topk=2,
        speculative_flashmap_verify_attention="splitkv",
    )
    results = []
    for case in torch.load(sys.argv[1]):
        width = case["q"].shape[0] // len(case["prefixes"])
        context = get_context().override_server_args(**fields, speculative_num_draft_tokens=width)
        with context, get_parallel().override(attn_dcp_rank=0, attn_dcp_size=1, attn_tp_size=1):
            results.append(verify(case))
    torch.save(results, sys.argv[2])

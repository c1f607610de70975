"""Resolve ``--speculative-flashmap-verify-attention``, which any speculative algorithm may use.

``splitkv`` and ``backend`` are taken as said, or refused in one sentence. ``auto`` is for FLASHMAP:
split-KV where it was measured to be the best choice (``verify_crossover.py``), unless the user gave
another attention backend. Upstream's algorithms keep their backend's verify attention unless told
otherwise. Prefill stays on its own backend: only verify, which with speculation is all of decoding,
moves to triton, whose class with split-KV then serves it.

``triton_splitkv`` as an attention backend is short for triton with ``splitkv``.
"""

from __future__ import annotations

from typing import Any, Optional

from sglang.srt.arg_groups.overrides import (
    attention_backends_of,
    declare_resolution,
    model_config_of,
    resolved_view,
    resolving_view,
)
from sglang.srt.layers.attention.verify_crossover import prefers_splitkv

FLAG = "--speculative-flashmap-verify-attention"
BACKEND_NAME = "triton_splitkv"
_BACKEND_FIELDS = (
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
)
_POOL_DTYPES = ("auto", "bf16", "bfloat16", "fp8_e4m3", None)


def expand_backend_name(server_args: Any) -> None:
    """``triton_splitkv``, given as an attention backend: triton, with ``splitkv`` asked for."""
    cfg = resolving_view(server_args)
    named = [name for name in _BACKEND_FIELDS if getattr(cfg, name) == BACKEND_NAME]
    if not named:
        return
    if cfg.speculative_flashmap_verify_attention == "backend":
        raise ValueError(
            f"{FLAG} backend contradicts the attention backend {BACKEND_NAME}; leave one out."
        )
    declare_resolution(
        server_args,
        "expand_backend_name",
        speculative_flashmap_verify_attention="splitkv",
        **dict.fromkeys(named, "triton"),
    )


def resolve_verify_attention(server_args: Any) -> None:
    """Leave ``splitkv`` or ``backend`` in the field, and the backend that the former needs."""
    cfg = resolving_view(server_args)
    asked = cfg.speculative_flashmap_verify_attention
    reason = _refusal(server_args)
    if asked == "splitkv" and reason is not None:
        raise ValueError(f"{FLAG} splitkv {reason}.")
    if asked == "splitkv" or (asked == "auto" and reason is None and _is_best(server_args)):
        chosen: dict[str, Any] = dict(speculative_flashmap_verify_attention="splitkv")
        if _may_choose_backend(server_args):
            chosen |= dict(decode_attention_backend="triton", speculative_attention_mode="decode")
    else:
        chosen = dict(speculative_flashmap_verify_attention="backend")
    declare_resolution(server_args, "resolve_verify_attention", **chosen)


def _may_choose_backend(server_args: Any) -> bool:
    """Whether verify may move to triton: FLASHMAP, with no backend given by the user."""
    if resolving_view(server_args).speculative_algorithm != "FLASHMAP":
        return False
    # As given: resolution has filled in a default.
    return all(getattr(server_args, name) is None for name in _BACKEND_FIELDS)


def _refusal(server_args: Any) -> Optional[str]:
    """Why these arguments do not go with split-KV verify, after the words "FLAG splitkv"."""
    cfg = resolving_view(server_args)
    if cfg.speculative_algorithm is None:
        return "verifies drafts; pass a --speculative-algorithm, or leave it out"
    if str(cfg.device).split(":")[0] != "cuda":
        return f"runs on CUDA GPUs, not on --device {cfg.device}; leave it out"
    if cfg.enable_deterministic_inference:
        return "does not go with --enable-deterministic-inference; leave one out"
    if cfg.dcp_size > 1:
        return "does not go with --dcp-size above 1; leave one out"
    if cfg.kv_cache_dtype not in _POOL_DTYPES:
        return f"does not read a KV cache of {cfg.kv_cache_dtype}; pass --kv-cache-dtype auto"
    if _is_mla(server_args):
        return "does not serve targets with latent attention (MLA); pass backend"
    prefill, decode = attention_backends_of(resolved_view(server_args))
    verify = decode if cfg.speculative_attention_mode == "decode" else prefill
    if verify != "triton" and not _may_choose_backend(server_args):
        return (
            f"runs on the triton attention backend, but {verify} is to verify; pass "
            "--attention-backend triton, or --decode-attention-backend triton with "
            "--speculative-attention-mode decode"
        )
    return None


def _is_mla(server_args: Any) -> bool:
    from sglang.srt.configs.model_config import AttentionArch

    return model_config_of(server_args).attention_arch == AttentionArch.MLA


def _is_best(server_args: Any) -> bool:
    """What the measured crossover says of this GPU, target and verify width; False elsewhere."""
    import torch

    cfg = resolving_view(server_args)
    if cfg.speculative_algorithm != "FLASHMAP" or not torch.cuda.is_available():
        return False
    model_config = model_config_of(server_args)
    heads, kv_heads = model_config.num_attention_heads, model_config.num_key_value_heads
    return prefers_splitkv(
        torch.cuda.get_device_capability(),
        tree=cfg.speculative_eagle_topk > 1,
        rows=cfg.speculative_num_draft_tokens * heads // kv_heads,
        head_dim=model_config.head_dim,
        requests=cfg.max_running_requests,
        context=model_config.context_len,
    )

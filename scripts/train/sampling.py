"""Answers of the target, many at once.

`TransformersSampler` needs transformers alone: one left-padded batch, a temperature a row, rows
that ended are dropped when they are more than half. `EngineSampler` is our own engine offline,
which batches continuously and is the faster one wherever sglang is installed.
Both take the same requests and return the answers in their order, stop token included.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class Request:
    """Continue `ids` at `temperature` (0: greedy) for at most `max_new_tokens`."""

    ids: list[int]
    temperature: float
    max_new_tokens: int


class Sampler(Protocol):
    def answer(self, requests: list[Request], stop_ids: list[int], seed: int) -> list[list[int]]:
        """The new tokens of each request, up to and with the first of `stop_ids`."""


def stop_token_ids(model_or_folder: Any, tokenizer: Any) -> list[int]:
    """End-of-text tokens of a target."""
    from transformers import GenerationConfig

    try:
        eos = GenerationConfig.from_pretrained(model_or_folder).eos_token_id
    except OSError:
        eos = None
    eos = tokenizer.eos_token_id if eos is None else eos
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


class TransformersSampler:
    """Samples with a transformers model on its own device."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.inference_mode()
    def answer(self, requests: list[Request], stop_ids: list[int], seed: int) -> list[list[int]]:
        device = self._model.device
        generator = torch.Generator(device).manual_seed(seed)
        width = max(len(request.ids) for request in requests)
        ids = torch.zeros(len(requests), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, width - len(request.ids) :] = torch.tensor(request.ids)
            mask[row, width - len(request.ids) :] = 1
        ids, mask = ids.to(device), mask.to(device)
        temperature = torch.tensor([r.temperature for r in requests], device=device)
        limit = torch.tensor([r.max_new_tokens for r in requests], device=device)
        stops = torch.tensor(stop_ids, device=device, dtype=torch.int64)
        alive = torch.arange(len(requests), device=device)
        answers: list[list[int]] = [[] for _ in requests]
        columns: list[torch.Tensor] = []  # new tokens of the rows alive, not yet in `answers`
        ended = torch.zeros_like(alive, dtype=torch.bool)
        positions, past = (mask.cumsum(-1) - 1).clamp_min(0), None

        for step in range(int(limit.max())):
            out = self._model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=past,
                use_cache=True,
                logits_to_keep=1,
            )
            past = out.past_key_values
            token = _draw(out.logits[:, -1].float(), temperature, generator)
            columns.append(torch.where(ended, -1, token))
            ended = ended | torch.isin(token, stops) | (step + 1 >= limit)
            ids, positions = token[:, None], positions[:, -1:] + 1
            mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
            if step % 16 == 15 and int(ended.sum()) * 2 > len(ended):
                _collect(answers, alive, columns)
                kept = (~ended).nonzero()[:, 0]
                if not len(kept):
                    return answers
                columns, ended = [], ended[kept]
                alive, ids, positions, mask = alive[kept], ids[kept], positions[kept], mask[kept]
                temperature, limit = temperature[kept], limit[kept]
                past.batch_select_indices(kept)
        _collect(answers, alive, columns)
        return answers


def _draw(
    logits: torch.Tensor, temperature: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """One token a row of `logits (n, V)`: by Gumbel's trick, greedy where the temperature is 0."""
    uniform = torch.rand(logits.shape, generator=generator, device=logits.device)
    gumbel = -torch.log((-torch.log(uniform.clamp_min(1e-20))).clamp_min(1e-20))
    return (logits + temperature[:, None] * gumbel).argmax(-1)


def _collect(
    answers: list[list[int]], alive: torch.Tensor, columns: list[torch.Tensor]
) -> None:
    if not columns:
        return
    rows = torch.stack(columns, dim=1).tolist()
    for index, row in zip(alive.tolist(), rows):
        answers[index] += [token for token in row if token >= 0]


class EngineSampler:
    """Samples with `sglang.Engine`; `close` ends its processes."""

    def __init__(self, folder: Path, **server_arguments: Any) -> None:
        import sglang

        self._engine = sglang.Engine(
            model_path=str(folder), skip_tokenizer_init=True, log_level="warning",
            **server_arguments,
        )  # fmt: skip

    def answer(self, requests: list[Request], stop_ids: list[int], seed: int) -> list[list[int]]:
        # Without an order of its own the engine draws from its global seed.
        parameters = [
            {
                "temperature": request.temperature,
                "max_new_tokens": request.max_new_tokens,
                "stop_token_ids": stop_ids,
                "sampling_seed": (seed * 1_000_003 + index) % (1 << 31),
            }
            for index, request in enumerate(requests)
        ]
        outputs = self._engine.generate(
            input_ids=[request.ids for request in requests], sampling_params=parameters
        )
        return [list(output["output_ids"]) for output in outputs]

    def close(self) -> None:
        self._engine.shutdown()


def engine_available() -> bool:
    return importlib.util.find_spec("sglang") is not None

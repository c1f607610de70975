"""Custom logit processors of the tests, which the server imports too."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor


class Force(CustomLogitProcessor):
    """Always the token `token`."""

    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> torch.Tensor:
        logits[:] = float("-inf")
        for row, params in zip(logits, custom_param_list):
            row[params["token"]] = 0.0
        return logits


class Rhythm(CustomLogitProcessor):
    """Every fifth token is `token`, and no token follows itself."""

    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> torch.Tensor:
        for row, params in zip(logits, custom_param_list):
            req = params["__req__"]
            if len(req.output_ids) % 5 == 4:
                row[params["token"]] += 1000.0
            row[[*req.origin_input_ids, *req.output_ids][-1]] = float("-inf")
        return logits

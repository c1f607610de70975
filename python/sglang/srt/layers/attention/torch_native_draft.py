"""Draft attention of EAGLE-family drafts on the torch_native backend.

An autoregressive drafter runs `num_steps - 1` decode steps of `topk` branches a request without
committing anything. Branch t of a request reads the request's committed prefix, then its own run of
slots, which the worker reserved behind the prefix:

    page size 1 or topk 1:  prefix | branch 0: num_steps slots | branch 1: num_steps slots | ...
    otherwise:              every branch starts on pages of its own, which begin with a copy of the
                            prefix's last, partly filled page

References: upstream's `build_eagle_draft_forward_batch` (slot layout) and intel_amx backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.torch_native_verify import TorchNativeVerifyBackend

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.speculative.draft_utils import DraftBackendFactory


def decode_backend(factory: DraftBackendFactory) -> tuple[str, TorchNativeMultiStepDraftBackend]:
    """Backend name and multi-step backend for `DraftBackendFactory.create_decode_backend`."""
    backend = TorchNativeMultiStepDraftBackend(
        factory.draft_model_runner, factory.topk, factory.speculative_num_steps
    )
    return "torch_native", backend


def extend_backend(factory: DraftBackendFactory) -> tuple[str, TorchNativeVerifyBackend]:
    """Backend name and backend for `DraftBackendFactory.create_draft_extend_backend`."""
    return "torch_native", TorchNativeVerifyBackend(factory.draft_model_runner)


class TorchNativeMultiStepDraftBackend:
    """One torch_native backend for each consecutive draft decode step."""

    def __init__(self, model_runner: ModelRunner, topk: int, speculative_num_steps: int) -> None:
        self.topk = topk
        self.speculative_num_steps = speculative_num_steps
        self.page_size = model_runner.page_size
        self.attn_backends = [
            TorchNativeVerifyBackend(model_runner) for _ in range(speculative_num_steps - 1)
        ]

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan all steps; `forward_batch.seq_lens` are the committed lengths."""
        req_to_token = self.attn_backends[0].req_to_token_pool.req_to_token
        for backend in self.attn_backends:
            backend.query_rows = []
        rows = zip(forward_batch.req_pool_indices.tolist(), forward_batch.seq_lens.tolist())
        for request, (row, prefix) in enumerate(rows):
            for branch in range(self.topk):
                begin = self._branch_begin(prefix, branch)
                run = req_to_token[row, begin : begin + self.speculative_num_steps]
                slots = torch.cat((req_to_token[row, :prefix], run))
                query = request * self.topk + branch
                for step, backend in enumerate(self.attn_backends):
                    seen = slots[: prefix + step + 1]
                    backend.query_rows.append(
                        backend.rows_over(query, query + 1, prefix + step, seen)
                    )

    def _branch_begin(self, prefix: int, branch: int) -> int:
        """Index in the request's row of the slots of its `branch`-th branch."""
        filled = prefix % self.page_size
        pages = -(-(filled + self.speculative_num_steps) // self.page_size)
        return prefix + branch * pages * self.page_size

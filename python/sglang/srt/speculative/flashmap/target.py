"""``TargetVerifier``: one target forward over the ``W`` rows of every request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dspark_components.dspark_planner import VerifyWindow
from sglang.srt.speculative.flashmap.plan import VerifyBlock
from sglang.srt.speculative.flashmap.verify_input import TreeVerifyInput, backend_mask

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.utils import GenerationBatchResult


def logit_scale(target: Any, text_config: Any) -> float:
    """Factor of the target's logits after its LM head, which muP targets divide by a width.

    A cap on logits is not part of it: the draft's own stay uncapped, which changes what is drafted
    and not what is accepted of it.
    """
    scale = getattr(getattr(target, "logits_processor", None), "logit_scale", None) or 1.0
    return scale / (getattr(text_config, "logits_mup_width_multiplier", None) or 1.0)


class TargetVerifier:
    """Runs verify forwards of ``target_worker``, ``width`` rows a request."""

    def __init__(self, target_worker: TpModelWorker, width: int) -> None:
        self._target_worker = target_worker
        self._width = width

    def run(
        self,
        batch: "ScheduleBatch",
        block: VerifyBlock,
        window: VerifyWindow,
        lens_bound: torch.Tensor,
    ) -> "GenerationBatchResult":
        """Logits and hidden states of ``block`` in the slots of ``window``.

        ``lens_bound (B,)`` is a bound of ``batch.seq_lens`` on the host.
        """
        verify_input = self._verify_input(batch, block, window, lens_bound)
        batch.out_cache_loc = window.verify_cache_loc
        before = batch.seq_lens_cpu, batch.seq_lens_sum
        # Attention backends that plan on the host are told lengths with the verify window; a bound
        # that is not the lengths themselves has room for it.
        known = batch.seq_lens_cpu is not None
        batch.seq_lens_cpu = lens_bound + self._width if known else lens_bound
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        forward_batch, _ = verify_input.prepare_for_verify(batch, self._target_worker)
        batch.seq_lens_cpu, batch.seq_lens_sum = before
        return self._target_worker.forward_batch_generation(
            batch=None,
            forward_batch=forward_batch,
            is_verify=True,
            skip_attn_backend_init=True,
        )

    def _verify_input(
        self,
        batch: "ScheduleBatch",
        block: VerifyBlock,
        window: VerifyWindow,
        lens_bound: torch.Tensor,
    ) -> DFlashVerifyInput:
        fields: dict[str, Any] = dict(
            draft_token=block.tokens.reshape(-1),
            draft_token_num=self._width,
            live_seq_lens_cpu=batch.seq_lens_cpu,
            kv_loc_plan=window.kv_loc_plan,
        )
        if block.tree is None:
            return DFlashVerifyInput(positions=window.positions_2d.reshape(-1), **fields)
        return TreeVerifyInput(
            positions=(batch.seq_lens[:, None] + block.tree.depths).reshape(-1),
            custom_mask=backend_mask(
                block.tree,
                self._target_worker.model_runner.attn_backend,
                prefix_lens=batch.seq_lens,
                lens_bound=lens_bound,
            ),
            **fields,
        )

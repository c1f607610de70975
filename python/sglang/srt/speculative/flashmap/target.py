"""``TargetVerifier``: one target forward over the ``W`` rows of every request.

In CUDA graphs its logits stay in the LM head's 16 bits (``layers/verify_logits.py``), of which the
greedy rule needs an argmax; ``wide_logits`` is for all else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.kernels.ops.activation.softcap import cast_to_float32_logits
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.verify_logits import can_leave_narrow
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


def leave_logits_narrow(target: torch.nn.Module, head: torch.Tensor, rows: int) -> int:
    """Let verify forwards of up to ``rows`` rows leave logits in the dtype of ``head (V', H)``.

    To be called before they are captured. Returns the bytes of the buffer they are left in, 0 where
    ``target`` keeps float32.
    """
    processors = [m for m in target.modules() if isinstance(m, LogitsProcessor)]
    plain = len(processors) == 1 and can_leave_narrow(processors[0])
    if not plain or head.dtype not in (torch.bfloat16, torch.float16):
        return 0
    buffer = torch.empty(rows, head.shape[0], dtype=head.dtype, device=head.device)
    processors[0].verify_logits = buffer
    return buffer.nbytes


class TargetVerifier:
    """Runs verify forwards of ``target_worker``, ``width`` rows a request."""

    def __init__(self, target_worker: TpModelWorker, width: int) -> None:
        self._target_worker = target_worker
        self._width = width

    def wide_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """``logits (rows, V)`` of a verify forward in float32; valid until the next forward."""
        if logits.dtype == torch.float32:
            return logits
        runner = self._target_worker.model_runner
        rows, vocab = logits.shape
        # What captured forwards copy float32 logits to.
        buffer = runner.graph_shared_output.get_logits_buffer(vocab, rows=rows)
        return cast_to_float32_logits(logits, buffer)

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
        # The runner plans attention when it loads the batch, the only time that it does.
        forward_batch, _ = verify_input.prepare_for_verify(
            batch, self._target_worker, defer_metadata_init=True
        )
        batch.seq_lens_cpu, batch.seq_lens_sum = before
        return self._target_worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True
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

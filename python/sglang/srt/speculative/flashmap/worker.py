"""``FlashMapWorker``: the outline of a FLASHMAP step.

Prefill: the target's forward captures the hidden states of the draft's target layers, which are
written into the draft KV pool at the same slots as the target's KV. Decode: draft a block or
several, verify a chain or a tree of them with the target in one forward of ``W`` rows per request,
adjust the logits (penalties, grammar, bias, processors), accept, commit the accepted rows. Modules:
``drafter``, ``plan``, ``target``, ``penalties``, ``accept`` and ``verify``, ``commit``.
The state carried between steps is the bonus token and the committed length
(``DFlashDraftInputV2``), so the scheduler's overlap mode, radix cache, chunked prefill and
retraction work as for upstream's block drafters, whose hidden-state capture and placement are
reused.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Callable, Optional

import torch
from sglang.srt.arg_groups.refusal import StartRefused
from sglang.srt.environ import envs
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.layers.packed_linear import pack_model
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.managers.overlap_utils import FutureRelayBuffers, offer_future_relay_buffers
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.runtime_context import get_exec, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.draft_parallel import (
    model_draft_parallel_spec,
    resolve_draft_parallel_layout,
)
from sglang.srt.speculative.draft_worker_common import (
    build_block_pos_offsets,
    build_draft_tp_worker,
    make_draft_input_v2,
)
from sglang.srt.speculative.dspark_components.dspark_kv_inject import TargetHiddenKvInjector
from sglang.srt.speculative.dspark_components.dspark_planner import alloc_verify_window
from sglang.srt.speculative.flashmap.accept import Acceptor
from sglang.srt.speculative.flashmap.attention import select_context_attention
from sglang.srt.speculative.flashmap.commit import Committer, first_rows
from sglang.srt.speculative.flashmap.config import FlashMapServeConfig
from sglang.srt.speculative.flashmap.draft_sampling import draft_sampling
from sglang.srt.speculative.flashmap.drafter import DraftBlock, Drafter, DraftInputs
from sglang.srt.speculative.flashmap.first_token import FirstTokenSampler
from sglang.srt.speculative.flashmap.history import TokenHistory
from sglang.srt.speculative.flashmap.memory import GIB, DraftMemory
from sglang.srt.speculative.flashmap.noise import SeedTable
from sglang.srt.speculative.flashmap.penalties import (
    Penalties,
    penalize_block,
    penalize_resumed,
)
from sglang.srt.speculative.flashmap.plan import StepRules, VerifyBlock
from sglang.srt.speculative.flashmap.processors import process_block
from sglang.srt.speculative.flashmap.statistics import TreeStatistics
from sglang.srt.speculative.flashmap.target import (
    TargetVerifier,
    leave_logits_narrow,
    logit_scale,
)
from sglang.srt.speculative.flashmap.verify import Accepted
from sglang.srt.speculative.spec_utils import (
    GrammarTree,
    build_grammar_vocab_mask,
    draft_pp_context,
    draft_tp_context,
)
from sglang.srt.utils import get_available_gpu_memory

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

# Not looked up: the draft computes its attention without a registered backend.
_UNUSED_ATTENTION_BACKEND = "torch_native"
# Upstream's seed of requests without one, under --enable-deterministic-inference.
_DETERMINISTIC_SEED = 42


class FlashMapWorker(BaseSpecWorker):
    """Runs prefill and decode batches of a server with ``--speculative-algorithm FLASHMAP``."""

    def __init__(
        self,
        server_args: "ServerArgs",
        gpu_id: int,
        nccl_port: int,
        target_worker: TpModelWorker,
    ) -> None:
        super().__init__()
        self._target_worker = target_worker
        self.model_runner: "ModelRunner" = target_worker.model_runner
        self.device = target_worker.device
        self.gpu_id = gpu_id
        self.draft_parallel_layout = resolve_draft_parallel_layout(
            model_draft_parallel_spec(
                self.model_runner.spec_aux_config.draft_model_config,
                spec_algorithm=self.model_runner.spec_algorithm,
            )
        )
        with draft_pp_context(), draft_tp_context(self.draft_parallel_layout):
            bundle = build_draft_tp_worker(
                server_args=server_args,
                gpu_id=gpu_id,
                nccl_port=nccl_port,
                target_model_config=self.model_runner.model_config,
                algo_label="FLASHMAP",
                attention_backend_override=_UNUSED_ATTENTION_BACKEND,
                random_seed=target_worker.random_seed,
            )
        self._draft_worker = bundle.draft_worker
        self.draft_model_runner = bundle.draft_model_runner
        self.draft_model = bundle.draft_model
        self.serve = FlashMapServeConfig.from_spec(get_spec(), self.draft_model.config)
        self.speculative_num_draft_tokens = self.serve.verify_width
        self._position_offsets = build_block_pos_offsets(
            length=self.serve.verify_width, device=self.device
        )
        # Row j of a chain comes after tokens 0 … j.
        self._chain_path = torch.ones(
            self.serve.verify_width, self.serve.verify_width, dtype=torch.bool, device=self.device
        ).tril()
        model_name = server_args.served_model_name or server_args.model_path
        self._statistics = TreeStatistics(
            self.serve, model_name if server_args.enable_metrics else None
        )
        self.model_runner.sampler = FirstTokenSampler()
        self._attach_target()

    def _attach_target(self) -> None:
        target = self.model_runner.model
        if not hasattr(target, "set_dflash_layers_to_capture"):
            raise StartRefused(
                f"FLASHMAP cannot read hidden states of a {type(target).__name__} target; serve it "
                "with another --speculative-algorithm."
            )
        owner = target if hasattr(target, "get_input_embeddings") else target.model
        embedding = unwrap_lora_layer(owner.get_input_embeddings())
        head = unwrap_lora_layer(getattr(target, "lm_head", None))
        if head is None or not hasattr(head, "weight"):
            head = embedding  # tied embeddings
        text_config = self.model_runner.model_config.hf_text_config
        pool_dtype = self.draft_model_runner.kv_cache_dtype
        attention = select_context_attention(
            self.device, head_dim=self.draft_model.config.head_dim, pool_dtype=pool_dtype
        )
        self._head = head.weight.detach()
        self.draft_model.attach_target(
            embedding=embedding.weight.detach(),
            lm_head=self._head,
            lm_head_bias=getattr(head, "bias", None),
            logit_scale=logit_scale(target, text_config),
            serve=self.serve,
            attention=attention,
        )
        # The target's own weights are part of what is kept folded.
        target._derived_weight_cache_error = self.draft_model._derived_weight_cache_error
        logger.info(
            "FLASHMAP: K=%d drafts a block, %d verified, jumps %s, draft vocabulary %s, "
            "context attention %s, %.1f MB of precomputed weights.",
            self.serve.block_size,
            self.serve.num_drafts,
            list(self.serve.grid),
            self.serve.draft_vocab_size or "full",
            attention.name,
            self.draft_model.derived_bytes() / 1e6,
        )
        if torch.device(self.device).type == "cpu":
            self.draft_model.pack_weights()
            logger.info(
                "FLASHMAP: %.1f MB of the target's weights in oneDNN's layout for verify forwards.",
                pack_model(target) / 1e6,
            )

    # --- protocol of the scheduler -----------------------------------------------------------

    @property
    def spec_v2_attn_backends(self) -> tuple:
        return (self.model_runner.attn_backend,)

    def __getattr__(self, name: str):
        if name == "_target_worker":
            raise AttributeError(name)
        return getattr(self.target_worker, name)

    def weight_update_runners(self) -> list[tuple[str, "ModelRunner"]]:
        return [("draft", self.draft_model_runner)]

    def on_verify_complete_cpu(
        self, num_correct_drafts_per_req: list[int], batch_size: int = 0
    ) -> None:
        self._statistics.collect()

    def block_accept_estimate_log_suffix(self) -> str:
        """What the decode log line says of trees (upstream's name, of another algorithm's)."""
        return self._statistics.log_suffix()

    def alloc_memory_pool(
        self, memory_pool_config=None, req_to_token_pool=None, token_to_kv_pool_allocator=None
    ) -> None:
        self._draft_worker.alloc_memory_pool(
            memory_pool_config=memory_pool_config,
            req_to_token_pool=req_to_token_pool,
            token_to_kv_pool_allocator=token_to_kv_pool_allocator,
        )
        self._req_to_token = self.model_runner.req_to_token_pool.req_to_token
        deterministic = get_exec().deterministic.enable_deterministic_inference
        self._seed_table = SeedTable(
            self._req_to_token.shape[0],
            self.device,
            self.target_worker.random_seed,
            default_seed=_DETERMINISTIC_SEED if deterministic else None,
        )
        self._greedy_inputs = DraftInputs.greedy(self._req_to_token.shape[0], self.device)
        self._history = TokenHistory(*self._req_to_token.shape, self.device)
        self._drafter = Drafter(
            model=self.draft_model,
            serve=self.serve,
            seed_table=self._seed_table,
            req_to_token=self._req_to_token,
            pool=self.draft_model_runner.token_to_kv_pool,
        )
        self._kv_injector = TargetHiddenKvInjector(
            draft_model=self.draft_model,
            draft_model_runner=self.draft_model_runner,
            model_runner=self.model_runner,
            device=self.device,
            verify_num_draft_tokens=self.serve.verify_width,
            block_pos_offsets=self._position_offsets,
        )
        self._relay = FutureRelayBuffers(
            req_pool_size=self._req_to_token.shape[0], device=self.device
        )
        offer_future_relay_buffers(self._relay)
        self._verifier = TargetVerifier(self.target_worker, self.serve.verify_width)
        self._narrow_logits_bytes = 0
        if self._captures_graphs():
            self._narrow_logits_bytes = leave_logits_narrow(
                self.model_runner.model, self._head, self.model_runner.max_decode_logits_rows()
            )
        self._acceptor = Acceptor(
            self.serve,
            self.draft_model,
            self._seed_table,
            simulated_length=float(envs.SGLANG_SIMULATE_ACC_LEN.get()),
        )
        self._committer = Committer(
            self._kv_injector, token_to_kv_pool_allocator, self.serve.verify_width
        )

    def init_attention_backends(self) -> None:
        """Nothing to do: a draft needs no attention backend of the server's."""

    def init_cuda_graphs(self) -> None:
        self._capture_drafts()
        logger.info("FLASHMAP: memory of the draft: %s.", self.draft_memory())

    def draft_memory(self) -> DraftMemory:
        """What the draft takes of the device, its graphs as far as they are captured."""
        graph = self._additional_graph_memory_usage.get("flashmap_draft", 0.0)
        return DraftMemory(
            weight=self.draft_model.weight_bytes(),
            precomputed=self.draft_model.derived_bytes(),
            kvcache=self._drafter.pool_bytes(),
            graph=int(graph * GIB),
            scratch=self._drafter.scratch_bytes()
            + self._seed_table.seeds.nbytes
            + self._narrow_logits_bytes,
        )

    def _captures_graphs(self) -> bool:
        backend = get_exec().graph.cuda_graph_config.decode.backend
        return torch.device(self.device).type == "cuda" and backend != Backend.DISABLED

    def _capture_drafts(self) -> None:
        if not self._captures_graphs():
            return
        config = get_exec().graph.cuda_graph_config.decode
        before = get_available_gpu_memory(self.device, self.gpu_id)
        self._drafter.capture(config.bs, self.device)
        used = before - get_available_gpu_memory(self.device, self.gpu_id)
        self._additional_graph_memory_usage["flashmap_draft"] = used
        logger.info("FLASHMAP: captured draft graphs for batch sizes %s, %.2f GB.", config.bs, used)

    # --- steps -------------------------------------------------------------------------------

    def forward_batch_generation(
        self,
        batch: "ScheduleBatch",
        on_publish: Optional[Callable] = None,
        grammar_barrier: Optional[Callable] = None,
        **kwargs,
    ) -> GenerationBatchResult:
        if batch.forward_mode.is_idle():
            return self._idle_result(on_publish)
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            return self._prefill(batch, on_publish)
        return self._decode(batch, on_publish, grammar_barrier)

    def _idle_result(self, on_publish: Optional[Callable]) -> GenerationBatchResult:
        draft_input = DFlashDraftInputV2.create_idle_input(device=self.device)
        if on_publish is not None:
            on_publish(draft_input.new_seq_lens)
        return GenerationBatchResult(
            next_token_ids=torch.empty((0,), dtype=torch.int64, device=self.device),
            accept_lens=torch.empty((0,), dtype=torch.int32, device=self.device),
            next_draft_input=draft_input,
            speculative_num_draft_tokens=self.serve.verify_width,
            new_seq_lens=draft_input.new_seq_lens,
        )

    def _prefill(
        self, batch: "ScheduleBatch", on_publish: Optional[Callable]
    ) -> GenerationBatchResult:
        rows = batch.req_pool_indices.to(torch.int64)
        self._seed_table.place(batch.reqs, rows)
        batch.sampling_info = dataclasses.replace(
            batch.sampling_info, sampling_seed=self._seed_table.seeds[rows]
        )
        penalties = Penalties.of(batch, batch.seq_lens_cpu)
        if penalties is not None:
            penalize_resumed(batch, self._history, batch.seq_lens_cpu)
        # Reads tables that the scheduler may rewrite once the target's forward has read them.
        placement = self._kv_injector.place_prefill(batch)
        result = self.target_worker.forward_batch_generation(
            batch, capture_hidden_mode=CaptureHiddenMode.FULL
        )
        result.new_seq_lens = batch.seq_lens
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        output = result.logits_output
        # Before returning: the radix cache may move or free the slots afterwards.
        self._kv_injector.inject_prefill(
            placement,
            target_hidden=output.hidden_states,
            token_indices=output.hidden_states_token_indices,
            target_hidden_is_projected=False,
        )
        output.hidden_states = None
        output.hidden_states_token_indices = None
        self._record(penalties, batch.seq_lens, result.next_token_ids[:, None])
        result.next_draft_input = make_draft_input_v2(
            bonus_tokens=result.next_token_ids, new_seq_lens=result.new_seq_lens
        )
        return result

    def _decode(
        self,
        batch: "ScheduleBatch",
        on_publish: Optional[Callable],
        grammar_barrier: Optional[Callable],
    ) -> GenerationBatchResult:
        if batch.seq_lens.is_cuda:  # made on the scheduler's stream
            batch.seq_lens.record_stream(torch.cuda.current_stream())
        width = self.serve.verify_width
        draft_input: DFlashDraftInputV2 = batch.spec_info
        prefix_lens = batch.seq_lens
        bonus = draft_input.bonus_tokens.view(-1)
        lens_bound = (
            batch.seq_lens_cpu if batch.seq_lens_cpu is not None else draft_input.nxt_kv_lens_cpu
        )
        penalties = Penalties.of(batch, lens_bound)
        size = prefix_lens.shape[0]
        # Rows of a chain; of those of a tree only the anchor's is known here.
        tokens = bonus.new_empty(size, 1 if self.serve.trees else width)
        window = alloc_verify_window(
            batch=batch,
            bs=size,
            device=self.device,
            verify_num_draft_tokens=width,
            block_pos_offsets=self._position_offsets,
            model_runner=self.model_runner,
            seq_lens_cpu=lens_bound,
            bonus=bonus,
            anchor_ids=tokens,
        )

        rules = StepRules.of(batch, self.serve)
        draft = self._drafter.draft(self._draft_inputs(batch, bonus, rules))
        block = self._block(tokens, draft)
        # The copy to the host must start before the target's forward.
        grammar_tree = block.grammar_tree() if batch.has_grammar else None

        verified = self._verifier.run(batch, block, window, lens_bound)
        output = verified.logits_output
        if self._needs_float32(batch, rules, penalties):
            output.next_token_logits = self._verifier.wide_logits(output.next_token_logits)
        logits = output.next_token_logits
        self._adjust(batch, logits, block, penalties, grammar_tree, grammar_barrier)
        relay = None
        if on_publish is not None and self._relay.adopted:
            rows = batch.req_pool_indices.to(torch.int64)
            relay = [rows, self._relay.new_seq_lens, self._relay.output_tokens]
        accepted = self._acceptor.accept(batch, rules, draft, block, logits, relay)
        if block.tree is not None:
            self._statistics.launch(block.tree, rules, list(batch.reqs))
        self._record(penalties, prefix_lens, accepted.tokens, after=1)
        end = accepted.end(prefix_lens)
        if batch.return_logprob:
            self._compute_logprobs(batch, output, accepted)
        self._committer.commit(window, output.hidden_states, accepted, end.commit_lens)
        output.hidden_states = None
        next_input = make_draft_input_v2(bonus_tokens=end.bonus, new_seq_lens=end.seq_lens)
        if end.relayed:  # what is published and stashed next need not be written again
            self._relay.published_seq_lens = end.seq_lens
            self._relay.published_bonus = next_input.bonus_tokens
        if on_publish is not None:
            on_publish(end.seq_lens)
        return GenerationBatchResult(
            logits_output=output,
            next_token_ids=accepted.tokens.reshape(-1),
            accept_lens=end.commit_lens,
            can_run_cuda_graph=verified.can_run_cuda_graph,
            next_draft_input=next_input,
            speculative_num_draft_tokens=width,
            speculative_output_stride=accepted.tokens.shape[1],
            new_seq_lens=end.seq_lens,
        )

    def _block(self, tokens: torch.Tensor, draft: DraftBlock) -> VerifyBlock:
        """What is verified; ``tokens (B, W)`` of chains hold the anchors already."""
        if draft.tree is not None:
            return VerifyBlock.of_tree(draft.tree)
        tokens[:, 1:].copy_(draft.tokens[:, : self.serve.num_drafts])
        return VerifyBlock.chain(tokens, self._chain_path)

    def _compute_logprobs(
        self, batch: "ScheduleBatch", output: "LogitsProcessorOutput", accepted: Accepted
    ) -> None:
        """Logprobs of the committed tokens, each from the logits of the row before it."""
        tokens, path = accepted.tokens, accepted.path
        if path is None:
            compute_spec_logprobs(
                batch, output, tokens.reshape(-1), chain_stride=self.serve.verify_width
            )
            return
        size, width = len(tokens), self.serve.verify_width
        rows = torch.where(path < 0, -1, path + first_rows(size, width, path.device)[:, None])
        # The last entry takes what lies after the ends of paths.
        chosen = tokens.new_zeros(size * width + 1)
        chosen[rows] = tokens
        compute_spec_logprobs(batch, output, chosen, accept_index=rows)

    def _needs_float32(
        self, batch: "ScheduleBatch", rules: StepRules, penalties: Optional[Penalties]
    ) -> bool:
        """Whether more is done with the logits of ``batch`` than to take their argmax."""
        info = batch.sampling_info
        adjusted = info is not None and (
            info.logit_bias is not None or info.has_custom_logit_processor
        )
        return bool(
            rules.match
            or rules.rejection
            or penalties is not None
            or batch.has_grammar
            or batch.return_logprob
            or adjusted
        )

    def _adjust(
        self,
        batch: "ScheduleBatch",
        logits: torch.Tensor,
        block: VerifyBlock,
        penalties: Optional[Penalties],
        grammar_tree: Optional[GrammarTree],
        grammar_barrier: Optional[Callable],
    ) -> None:
        """Penalties, grammar, bias, processors on ``logits (B · W, V)``, in the sampler's order."""
        if penalties is not None:
            penalize_block(
                logits,
                penalties,
                self._history,
                lens=batch.seq_lens.to(torch.int64),
                block=block.tokens,
                path=block.path,
            )
        info = batch.sampling_info
        if grammar_tree is not None:
            mask = build_grammar_vocab_mask(
                reqs=batch.reqs,
                tree=grammar_tree,
                sampling_info=info,
                device=logits.device,
                barrier=grammar_barrier,
            )
            if mask is not None:
                mask.apply(logits)
        if info is not None and info.logit_bias is not None:
            logits.view(*block.tokens.shape, -1).add_(info.logit_bias[:, None])
        if info is not None and info.has_custom_logit_processor:
            process_block(logits, batch, block=block.tokens, path=block.path)

    def _record(
        self,
        penalties: Optional[Penalties],
        lens: torch.Tensor,
        tokens: torch.Tensor,
        after: int = 0,
    ) -> None:
        """Remember output ``tokens (B, n)`` from positions ``lens (B,) + after`` on, if any
        counts."""
        if penalties is not None and penalties.counted is not None:
            who = penalties.counted
            starts = lens[who.index].to(torch.int64) + after
            self._history.write(who.rows, starts, tokens.to(lens.device)[who.index])

    def _draft_inputs(
        self, batch: "ScheduleBatch", bonus: torch.Tensor, rules: StepRules
    ) -> DraftInputs:
        size = bonus.shape[0]
        info = batch.sampling_info
        inputs = dataclasses.replace(
            self._greedy_inputs.head(size),
            anchors=bonus,
            seq_lens=batch.seq_lens.to(torch.int64),
            rows=batch.req_pool_indices.to(torch.int64),
        )
        if info is None or info.is_all_greedy:
            return inputs
        temperatures, filters = draft_sampling(info, self.serve.draft_temperature)
        return dataclasses.replace(
            inputs,
            temperatures=temperatures,
            filters=filters,
            rejected=rules.under_rejection(size, bonus.device),
        )

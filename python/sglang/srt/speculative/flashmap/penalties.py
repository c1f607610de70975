"""Penalties of a verified block, counted token by token as decoding without speculation does.

Row ``j`` of a block holds the logits after the anchor and the drafts on the path to ``j``. With
``c`` the number of times a token is in the request's output before that row (prompts do not count):

    l  ←  l - (f + f + … c times) - presence · [c > 0]           frequency f, presence penalty
    l  ←  l · r  if l < 0 else l / r,  where c > 0               repetition penalty r
    l  ←  -inf for stop tokens, while the output is shorter than min_new_tokens

This is the arithmetic of upstream's ``sampling/penaltylib``, in its order and in float32 (a
frequency penalty is a running sum, not a product), so greedy float32 text is equal. Grammar masks
and logit bias come after it. Upstream counts a step late under overlap scheduling and starts anew
when a request was retracted; here nothing is late or forgotten.

Tokens outside the output keep their logits, so only the columns of the output and the drafts are
touched, and only in rows of requests with penalties. Base counts come from ``TokenHistory``; what a
row's own path adds is worked out on the ``γ`` drafted columns alone. Nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Sequence

import torch
from sglang.srt.sampling.stop_tokens import stop_tokens
from sglang.srt.speculative.flashmap.history import TokenHistory
from sglang.srt.utils.common import is_pin_memory_available

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

# Elements of scratch at a time (64 MB of float32), whatever the batch and the length of its output.
_SCRATCH = 1 << 24


@dataclass(frozen=True)
class CountedRequests:
    """``P`` requests of a batch with frequency, presence or repetition penalties."""

    index: torch.Tensor
    """Their places in the batch ``(P,)`` int64."""
    rows: torch.Tensor
    """Their ``req_to_token`` rows ``(P,)`` int64."""
    starts: torch.Tensor
    """Positions of their first output tokens ``(P,)`` int64."""
    penalties: torch.Tensor
    """Frequency, presence and repetition penalty ``(P, 3)`` float32."""
    longest: int
    """A bound of their output lengths, at least 1."""

    @classmethod
    def at(
        cls, places: list[int], batch: "ScheduleBatch", lens_bound: torch.Tensor
    ) -> "CountedRequests":
        """The requests at ``places`` of ``batch``; ``lens_bound (B,)`` as in ``Penalties.of``."""
        device = batch.seq_lens.device
        reqs = [batch.reqs[place] for place in places]
        prompts = [len(req.origin_input_ids) for req in reqs]
        values = [
            (p.frequency_penalty, p.presence_penalty, p.repetition_penalty)
            for p in (req.sampling_params for req in reqs)
        ]
        index, starts = to_device([places, prompts], torch.int64, device)
        bounds = lens_bound.tolist()
        return cls(
            index,
            batch.req_pool_indices[index].to(torch.int64),
            starts,
            to_device(values, torch.float32, device),
            longest=max(1, *(bounds[i] - prompt + 1 for i, prompt in zip(places, prompts))),
        )

    def split(self, size: int) -> list["CountedRequests"]:
        """The same requests, ``size`` at a time."""
        tensors = (self.index, self.rows, self.starts, self.penalties)
        return [CountedRequests(*p, self.longest) for p in zip(*(t.split(size) for t in tensors))]


@dataclass(frozen=True)
class StopBans:
    """``Q`` pairs of a request that may be short of ``min_new_tokens`` and a token that ends it."""

    index: torch.Tensor
    """The request's place in the batch ``(Q,)`` int64."""
    tokens: torch.Tensor
    """``(Q,)`` int64."""
    ends: torch.Tensor
    """Position from which on the token is allowed ``(Q,)`` int64."""


@dataclass(frozen=True)
class Penalties:
    """What a batch's requests ask for; None where no request does."""

    counted: CountedRequests | None
    bans: StopBans | None

    @classmethod
    def of(cls, batch: "ScheduleBatch", lens_bound: torch.Tensor) -> "Penalties | None":
        """The penalties of ``batch``, or None.

        ``lens_bound (B,)`` is a bound of ``batch.seq_lens`` on the host.
        """
        info = batch.sampling_info
        # What the scheduler sets if some request has any; looking at every request would cost more.
        if info is None or info.acc_additive_penalties is None:
            return None
        counted = [place for place, req in enumerate(batch.reqs) if is_counted(req)]
        bans = [
            (place, token, len(req.origin_input_ids) + req.sampling_params.min_new_tokens)
            for place, req in enumerate(batch.reqs)
            # The host may be a step behind; the device decides.
            if len(req.output_ids) < req.sampling_params.min_new_tokens
            for token in stop_tokens(req, info.acc_additive_penalties.shape[1])
        ]
        device = batch.seq_lens.device
        return cls(
            CountedRequests.at(counted, batch, lens_bound) if counted else None,
            StopBans(*to_device(bans, torch.int64, device).unbind(1)) if bans else None,
        )


def to_device(values: Sequence, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """``values`` as a tensor on ``device``, without waiting for it."""
    host = torch.tensor(values, dtype=dtype, pin_memory=is_pin_memory_available(device))
    return host.to(device, non_blocking=True)


def is_counted(req: "Req") -> bool:
    """Whether ``req`` has a penalty that counts its output."""
    params = req.sampling_params
    return (
        params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
        or params.repetition_penalty != 1.0
    )


@dataclass(frozen=True)
class OutputCounts:
    """How much of some tokens is in the output of ``P`` requests."""

    spent: torch.Tensor
    """The frequency penalty so far, ``(P, …)`` float32."""
    said: torch.Tensor
    """Whether the token was said at all, bool like ``spent``."""

    @classmethod
    def before(
        cls, ends: torch.Tensor, who: CountedRequests, history: TokenHistory, vocab_size: int
    ) -> tuple["OutputCounts", torch.Tensor]:
        """Counts ``(P, V)`` of the output before positions ``ends (P,)``; its tokens ``(P, L)``.

        Equal terms sum to the same float in any order, so atomic additions are exact here.
        """
        tokens, valid = history.read(who.rows, who.starts, ends, who.longest)
        spent = torch.zeros(tokens.shape[0], vocab_size, device=tokens.device)
        said = torch.zeros_like(spent, dtype=torch.bool)
        spent.scatter_add_(1, tokens, torch.where(valid, who.penalties[:, :1], 0.0))
        return cls(spent, said.scatter_(1, tokens, True)), tokens

    def at(self, tokens: torch.Tensor) -> "OutputCounts":
        """Of counts ``(P, V)``, those of ``tokens (P, n)``: ``(P, 1, n)``."""
        return OutputCounts(
            self.spent.gather(1, tokens)[:, None], self.said.gather(1, tokens)[:, None]
        )

    def after(
        self, path: torch.Tensor, drafts: torch.Tensor, who: CountedRequests
    ) -> "OutputCounts":
        """Counts ``(P, W, γ)`` of ``drafts (P, γ)`` once the drafts of ``path (P, W, γ)`` are said.

        ``self`` holds their counts ``(P, 1, γ)`` before the block. A token drafted several times is
        counted in the place of its first slot.
        """
        same = drafts[:, :, None] == drafts[:, None, :]
        first = same.to(torch.int8).argmax(dim=2)[:, None].expand_as(path)
        spent = self.spent.expand_as(path).clone()
        spent.scatter_add_(2, first, torch.where(path, who.penalties[:, None, :1], 0.0))
        said = torch.matmul(path.float(), same.float()) > 0
        return OutputCounts(spent.gather(2, first), self.said | said)

    def additive(self, who: CountedRequests) -> torch.Tensor:
        """What is added to logits."""
        presence = who.penalties[:, 1].view(-1, *[1] * (self.said.dim() - 1))
        return -self.spent - torch.where(self.said, presence, 0.0)

    def factors(self, who: CountedRequests) -> torch.Tensor:
        """What negative logits are then multiplied by, and others divided."""
        repetition = who.penalties[:, 2].view(-1, *[1] * (self.said.dim() - 1))
        return torch.where(self.said, repetition, 1.0)

    def penalize(self, logits: torch.Tensor, who: CountedRequests) -> torch.Tensor:
        """``logits`` of the counted tokens with their penalties, rounded where upstream rounds."""
        logits = (logits + self.additive(who)).to(logits.dtype)
        factors = self.factors(who)
        return torch.where(logits < 0, logits * factors, logits / factors).to(logits.dtype)


def penalize_block(
    logits: torch.Tensor,
    penalties: Penalties,
    history: TokenHistory,
    *,
    lens: torch.Tensor,
    block: torch.Tensor,
    path: torch.Tensor,
) -> None:
    """Penalise the logits of a verify step in place.

    Args:
        logits: ``(B · W, V)``, as the target gave them.
        lens: committed lengths ``(B,)`` int64, the positions of the anchors. The history holds the
            outputs up to the anchors, these included.
        block: anchors and drafts ``(B, W)`` int64.
        path: ``(B, W, W)`` bool: the tokens of the block that row ``j`` comes after, its own and
            the anchor included.
    """
    width = block.shape[1]
    if (counted := penalties.counted) is not None:
        scratch = logits.shape[1] + width * (counted.longest + width)
        for who in counted.split(max(1, _SCRATCH // scratch)):
            _penalize_rows(
                logits,
                who,
                history,
                ends=lens[who.index] + 1,
                drafts=block[who.index, 1:],
                path=path[who.index, :, 1:],
            )
    if (bans := penalties.bans) is not None:
        # A row's own next token comes right after its path.
        positions = lens[bans.index, None] + path[bans.index].sum(dim=2)
        lines, columns = _lines(bans.index, width), bans.tokens[:, None]
        banned = positions < bans.ends[:, None]
        logits[lines, columns] = logits[lines, columns].masked_fill(banned, float("-inf"))


def _penalize_rows(
    logits: torch.Tensor,
    who: CountedRequests,
    history: TokenHistory,
    *,
    ends: torch.Tensor,
    drafts: torch.Tensor,
    path: torch.Tensor,
) -> None:
    counts, output = OutputCounts.before(ends, who, history, logits.shape[1])
    lines = _lines(who.index, path.shape[1])[..., None]
    of_output, of_drafts = (lines, output[:, None]), (lines, drafts[:, None])
    drafted = logits[of_drafts]
    logits[of_output] = counts.at(output).penalize(logits[of_output], who)
    # Last, because a draft that was said before counts for more in the rows after it.
    logits[of_drafts] = counts.at(drafts).after(path, drafts, who).penalize(drafted, who)


def _lines(index: torch.Tensor, width: int) -> torch.Tensor:
    """Rows ``(n, W)`` of block logits that belong to the requests ``index (n,)``."""
    return index[:, None] * width + torch.arange(width, device=index.device)


def penalize_resumed(
    batch: "ScheduleBatch", history: TokenHistory, lens_bound: torch.Tensor
) -> None:
    """Give a prefill's sampler the penalties of requests with output, and ``history`` that output.

    Retracted requests are prefilled with their output, and upstream's counts start anew; running
    ones join a mixed chunk with their last token, and the host may not know all of them yet, but
    ``history`` does. Replaces their rows of the accumulated penalties in ``batch.sampling_info``,
    which is the caller's own and has some, see ``Penalties.of``. Output ends at ``batch.seq_lens``.
    """
    info = batch.sampling_info
    resumed = [place for place, req in enumerate(batch.reqs) if len(req.output_ids) > 0]
    counted = [place for place in resumed if is_counted(batch.reqs[place])]
    additive = info.acc_additive_penalties
    for place in resumed:
        additive[place] = 0.0
    if not counted:
        # All factors are 1; applying them would only cost time.
        info.acc_scaling_penalties = None
    else:
        who = CountedRequests.at(counted, batch, lens_bound)
        outputs = [
            to_device(batch.reqs[place].output_ids, torch.int64, additive.device)
            for place in counted
        ]
        for i, output in enumerate(outputs):
            history.write(who.rows[i : i + 1], who.starts[i : i + 1], output[None])
        # What a chunk of a prompt alone samples is dropped.
        ends = torch.maximum(batch.seq_lens[who.index].to(torch.int64), who.starts + 1)
        counts, _ = OutputCounts.before(ends, who, history, additive.shape[1])
        additive[who.index] = counts.additive(who)
        if info.acc_scaling_penalties is not None:
            info.acc_scaling_penalties[who.index] = counts.factors(who)
    for place in resumed:
        req = batch.reqs[place]
        minimum = req.sampling_params.min_new_tokens
        if len(req.output_ids) < minimum:
            stops = to_device(stop_tokens(req, additive.shape[1]), torch.int64, additive.device)
            short = batch.seq_lens[place] < len(req.origin_input_ids) + minimum
            additive[place, stops] = additive[place, stops].masked_fill(short, float("-inf"))

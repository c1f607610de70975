"""The output tokens of requests with penalties, on the device.

A penalty counts what a request has said. The host knows that one step late under overlap
scheduling, and upstream's count tables are fed one token a step from there, so FLASHMAP keeps the
tokens themselves: a table indexed like ``req_to_token``, by absolute position. A step writes what
it committed before its lengths reach the host, and reads up to the device's own lengths, so that
rejected tokens, chunked prefill, prefix hits and reused rows need no clearing. Only a retracted
request comes back with outputs that the table may have lost with its row; its prefill writes them.

The table is made at the first request with penalties: 4 bytes for each position of each
``req_to_token`` row, 8 MB at 48 requests of 40k tokens.
"""

from __future__ import annotations

import torch


class TokenHistory:
    """Token ids by ``req_to_token`` row and absolute position, int32.

    Args:
        rows, width: shape of ``req_to_token``.
    """

    def __init__(self, rows: int, width: int, device: torch.device | str) -> None:
        # A step that fills a row commits one token more than it has slots.
        self._shape = (rows, width + 1)
        self._device = device
        self._tokens: torch.Tensor | None = None

    def write(self, rows: torch.Tensor, starts: torch.Tensor, tokens: torch.Tensor) -> None:
        """Write ``tokens (P, n)`` into ``rows (P,)`` from positions ``starts (P,)`` on.

        A tail that turns out not to be committed is replaced by what the request writes next.
        """
        if self._tokens is None:
            self._tokens = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        columns = starts[:, None] + torch.arange(tokens.shape[1], device=starts.device)
        self._tokens[rows[:, None], columns] = tokens.to(torch.int32)

    def read(
        self, rows: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, longest: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens ``(P, longest)`` int64 from ``starts`` on, and a mask of those before ``ends``.

        ``ends > starts``; ``longest`` is a bound of their differences that the host knows. Tokens
        outside the mask repeat the first one.
        """
        columns = starts[:, None] + torch.arange(longest, device=starts.device)
        valid = columns < ends[:, None]
        tokens = self._tokens[rows[:, None], torch.where(valid, columns, starts[:, None])]
        return tokens.to(torch.int64), valid

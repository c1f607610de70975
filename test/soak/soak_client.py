"""Clients of the soak: patient ones, ones that abort, and ones that vanish."""

from __future__ import annotations

import http.client
import json
import threading
from dataclasses import dataclass, field
from typing import Any

TIMEOUT = 120.0  # seconds without a byte before a request counts as lost


@dataclass
class Outcome:
    """What one request came to."""

    status: int | None
    """HTTP status; None: the connection failed or broke off."""
    answer: dict[str, Any] = field(default_factory=dict)
    """The decoded body; of a stream its last event, with the events' tokens joined."""
    error: str = ""
    events: int = 0
    left: bool = False
    """The client closed its connection before the end."""

    @property
    def finish(self) -> str | None:
        """The kind of the finish reason of a `/generate` answer."""
        reason = self.answer.get("meta_info", {}).get("finish_reason")
        return reason.get("type") if isinstance(reason, dict) else None


def ask(
    port: int,
    path: str,
    payload: dict[str, Any] | bytes,
    *,
    leave_after: int | None = None,
    started: threading.Event | None = None,
    timeout: float = TIMEOUT,
) -> Outcome:
    """POST `payload` to 127.0.0.1 and read the answer, streamed or not.

    `leave_after`: close the socket after that many events of a stream; 0 closes it without
    reading anything. `started` is set with the first event.
    """
    body = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        if leave_after == 0:
            return Outcome(None, left=True)
        response = connection.getresponse()
        kind = response.getheader("Content-Type", "")
        if kind.startswith("text/event-stream"):
            return _read_events(response, leave_after, started)
        text = response.read()
        try:
            answer = json.loads(text) if text else {}
        except ValueError:
            answer = {"body": text.decode(errors="replace")}
        return Outcome(response.status, answer if isinstance(answer, dict) else {"list": answer})
    except (OSError, http.client.HTTPException) as error:
        return Outcome(None, error=f"{type(error).__name__}: {error}")
    finally:
        connection.close()


def _read_events(
    response: http.client.HTTPResponse, leave_after: int | None, started: threading.Event | None
) -> Outcome:
    outcome = Outcome(response.status)
    complete = False
    for line in response:
        if line.startswith(b"data: [DONE]"):
            complete = True
        elif line.startswith(b"data: "):
            outcome.answer = json.loads(line[6:])
            outcome.events += 1
            if "error" in outcome.answer:
                outcome.status = int(outcome.answer["error"].get("code") or 500)
            if started is not None:
                started.set()
            if leave_after is not None and outcome.events >= leave_after:
                outcome.left = True
                return outcome
    if not complete:
        outcome.status, outcome.error = None, "the stream broke off"
    return outcome

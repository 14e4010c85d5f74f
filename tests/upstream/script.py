"""What the scripted model server does with one request, and how its dialects look on the wire."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.upstream.tokens import GREEDY

OPENAI = "openai"
LLAMA_CPP = "llama.cpp"

PING = b": ping\n\n"


class Ending(enum.Enum):
    """How a stream ends once its pieces are sent."""

    FINISH = enum.auto()  # in order: a finish reason, usage, [DONE]
    NO_REASON = enum.auto()  # [DONE], but no finish reason
    END = enum.auto()  # the body ends in order, with neither
    CLOSE = enum.auto()  # the connection is closed in the middle of the body
    RESET = enum.auto()  # the connection is reset: RST
    HANG = enum.auto()  # nothing more comes
    PINGS = enum.auto()  # nothing but comments comes
    FINISH_AND_HANG = enum.auto()  # a finish reason, and nothing more
    FINISH_AND_PINGS = enum.auto()  # a finish reason, and nothing but comments


@dataclass
class Recorded:
    """A completion that was asked for. Times are time.monotonic()'s."""

    path: str
    headers: Mapping[str, str]
    fields: dict[str, Any]
    came_at: float
    pieces: int = 0  # that were sent
    left_at: float | None = None  # when the client closed the connection before its answer had ended
    ended_at: float | None = None

    @property
    def prompt(self) -> str | list[int]:
        prompt: str | list[int] = self.fields["prompt"]
        return prompt

    @property
    def max_tokens(self) -> int:
        return int(self.fields.get("max_tokens", self.fields.get("n_predict", 16)))

    @property
    def seed(self) -> int:
        return GREEDY if self.fields.get("temperature") == 0 else int(self.fields.get("seed", GREEDY))


@dataclass(frozen=True)
class Script:
    """One request's fate. As it stands: all tokens that were asked for, each at the server's pace, then the end.

    With a `body`, or a status other than 200, it is a plain answer.
    """

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str | bytes | dict[str, Any] | None = None
    content_type: str | None = None  # None: text/event-stream, or application/json if plain

    before_head: Ending | None = None  # CLOSE, RESET or HANG: no byte of the answer comes
    head_delay_s: float = 0.0  # with the request in its slot, as while the prompt is computed
    pieces: int | None = None  # that are sent before the ending; None: as many as asked for
    token_us: int | None = None  # None: the server's pace
    pieces_per_write: int = 1
    bytes_per_write: int | None = None  # None: whole events; 1: byte by byte
    raw: Mapping[int, bytes] = field(default_factory=dict)  # sent as it is before piece k, or before the ending
    ending: Ending = Ending.FINISH
    finish_reason: str | None = None  # None: "length" if all came that were asked for, "stop" if less
    usage: str = "own event"  # or "with the finish reason", "none"
    has_done: bool = True  # whether [DONE] ends an OpenAI stream

    @property
    def is_plain(self) -> bool:
        """Whether it is an answer of one piece, and no stream."""
        return self.body is not None or self.status != 200

    @property
    def breaks_off(self) -> bool:
        """Whether the server is the one that closes the connection too early."""
        return bool({self.before_head, self.ending} & {Ending.CLOSE, Ending.RESET})

    def plain_body(self) -> bytes:
        if isinstance(self.body, bytes):
            return self.body
        return (self.body if isinstance(self.body, str) else json.dumps(self.body or {})).encode()


def refusal(status: int, message: str, **headers: str) -> Script:
    """An error in OpenAI's shape. Headers are given with underscores: Retry_After."""
    body = {"error": {"message": message, "type": "some_error", "code": status}}
    return Script(status, {name.replace("_", "-"): value for name, value in headers.items()}, body)


LOADING = refusal(503, "Loading model")


class OpenAIWire:
    """Events of /v1/completions."""

    path = "/v1/completions"

    def piece(self, text: str, token_id: int, index: int) -> bytes:
        return event({"choices": [{"index": 0, "text": text, "finish_reason": None}], "usage": None})

    def finish(self, reason: str, usage: tuple[int, int] | None, script: Script) -> bytes:
        told = usage and {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
        with_reason = told if script.usage == "with the finish reason" else None
        events = event({"choices": [{"index": 0, "text": "", "finish_reason": reason}], "usage": with_reason})
        if told and script.usage == "own event":
            events += event({"choices": [], "usage": told})
        return events

    def last(self, script: Script) -> bytes:
        return b"data: [DONE]\n\n" if script.has_done else b""


class LlamaCppWire:
    """Events of /completion."""

    path = "/completion"

    def piece(self, text: str, token_id: int, index: int) -> bytes:
        fields = {"index": 0, "content": text, "tokens": [token_id], "stop": False, "tokens_predicted": index + 1}
        return event(fields)

    def finish(self, reason: str, usage: tuple[int, int] | None, script: Script) -> bytes:
        stop_type = "limit" if reason == "length" else "eos"
        fields: dict[str, Any] = {"content": "", "tokens": [], "stop": True, "stop_type": stop_type}
        if usage and script.usage != "none":
            fields |= {"tokens_evaluated": usage[0], "tokens_predicted": usage[1]}
        return event(fields)

    def last(self, script: Script) -> bytes:
        return b""


def event(fields: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(fields).encode() + b"\n\n"

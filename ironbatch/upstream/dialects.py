"""The dialects: OpenAI-compatible completions, and llama.cpp's own, which tells the ids of tokens.

A strict server refuses fields that it does not know, so a request carries no field that it can do without.
"""

from typing import Any, Final

import msgspec

from ironbatch.limits import TOKEN_ID
from ironbatch.upstream.problems import UpstreamBroken, UpstreamProblem, UpstreamRefused, said
from ironbatch.upstream.types import (
    NO_TOKEN_ID,
    NOT_TOLD,
    CompletionRequest,
    Delta,
    DeltaReader,
    Dialect,
    Piece,
    Usage,
)

__all__ = [
    "REFUSALS",
    "UNREADABLE",
    "Delta",
    "DeltaReader",
    "Dialect",
    "LlamaCppDialect",
    "OpenAIDialect",
    "message_in",
    "root_of",
]

REFUSALS: Final = frozenset({400, 413, 422})  # HTTP's statuses for a request that is itself at fault

UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # what decoding foreign JSON may raise

_SEEDS: Final = 2**32 - 1  # llama.cpp takes 2**32-1 as "random"; others take 32 bits at least
_DONE: Final = b"[DONE]"
_END: Final = Delta([], None, None, True)  # noqa: FBT003 - a NamedTuple's field
_MAX_COUNT: Final = 2**31 - 1


def root_of(base_url: str) -> str:
    """Where llama.cpp's own paths begin: the base URL without the /v1 at its end."""
    return base_url.rstrip("/").removesuffix("/v1")


def message_in(value: Any, depth: int = 3) -> str | None:
    """The message of a decoded error answer, in any of the shapes that servers give it, or None.

    {"error": {"message": ...}}, {"error": "..."}, {"message": ...}, {"detail": ...} and FastAPI's
    {"detail": [{"msg": ...}]} are in use; `depth` is how many levels are looked into.
    """
    if isinstance(value, str):
        return value.strip() or None
    if depth == 0:
        return None
    if isinstance(value, list):
        return message_in(value[0], depth - 1) if value else None
    if isinstance(value, dict):
        inner = (message_in(value.get(key), depth - 1) for key in ("error", "message", "detail", "msg"))
        return next((message for message in inner if message is not None), None)
    return None


class _Choice(msgspec.Struct):
    text: str | None = None
    finish_reason: str | None = None


class _OpenAIEvent(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: Any = None  # counts are news, not tokens: an odd one is no reason to lose a stream
    error: Any = None


class _LlamaCppEvent(msgspec.Struct):
    content: str | None = None
    tokens: list[int] | None = None
    stop: bool = False
    stop_type: str | None = None
    tokens_predicted: Any = None
    tokens_evaluated: Any = None
    error: Any = None


_OPENAI_EVENTS: Final = msgspec.json.Decoder(_OpenAIEvent)
_LLAMA_CPP_EVENTS: Final = msgspec.json.Decoder(_LlamaCppEvent)


class OpenAIDialect:
    """POST {base}/completions, as OpenAI, vLLM, llama.cpp and most others have it. It tells no token ids."""

    name = "openai"

    def path_of(self, base_url: str) -> str:
        return base_url.rstrip("/") + "/completions"

    def body(self, request: CompletionRequest, model: str) -> bytes:
        fields: dict[str, Any] = {
            "model": model,
            "prompt": _prompt_of(request),
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "seed": request.seed % _SEEDS,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.top_k > 0:
            fields["top_k"] = request.top_k
        if request.ignore_eos:
            fields["ignore_eos"] = True
        return msgspec.json.encode(fields)

    def reader(self) -> DeltaReader:
        return _OpenAIReader()


class _OpenAIReader:
    """Needs no memory: every event stands for itself."""

    def read(self, data: bytes) -> Delta:
        if data == _DONE:
            return _END
        try:
            event = _OPENAI_EVENTS.decode(data)
        except UNREADABLE as error:
            raise _malformed(data, error) from None
        if event.error is not None:
            raise _error_event(event.error)
        pieces = []
        finish_reason = None
        for choice in event.choices or ():
            if choice.text:
                pieces.append(Piece(choice.text, NO_TOKEN_ID))
            if choice.finish_reason:
                finish_reason = "length" if choice.finish_reason == "length" else "stop"
        usage = None
        if isinstance(event.usage, dict):
            usage = Usage(_count(event.usage.get("prompt_tokens")), _count(event.usage.get("completion_tokens")))
        return Delta(pieces, finish_reason, usage, is_done=False)


class LlamaCppDialect:
    """POST {root}/completion, llama.cpp's own: it tells the ids of tokens, and closes the connection after a stream."""

    name = "llama.cpp"

    def path_of(self, base_url: str) -> str:
        return root_of(base_url) + "/completion"

    def body(self, request: CompletionRequest, model: str) -> bytes:
        return msgspec.json.encode(
            {
                "prompt": _prompt_of(request),
                "n_predict": request.max_tokens,
                "temperature": request.temperature,
                "top_p": request.top_p,
                "top_k": request.top_k,  # 0 is off here, too
                "min_p": 0,  # on by default, and not asked for
                "seed": request.seed % _SEEDS,
                "stream": True,
                "return_tokens": True,
                "ignore_eos": request.ignore_eos,
                "cache_prompt": True,
            }
        )

    def reader(self) -> DeltaReader:
        return _LlamaCppReader()


class _LlamaCppReader:
    """Remembers how many tokens there were: of a character made of several tokens, the event names only the last."""

    def __init__(self) -> None:
        self._tokens_predicted = 0

    def read(self, data: bytes) -> Delta:
        if data == _DONE:
            return _END
        try:
            event = _LLAMA_CPP_EVENTS.decode(data)
        except UNREADABLE as error:
            raise _malformed(data, error) from None
        if event.error is not None:
            raise _error_event(event.error)
        pieces = self._pieces_of(event)
        if not event.stop:
            return Delta(pieces, None, None, is_done=False)
        usage = Usage(_count(event.tokens_evaluated), _count(event.tokens_predicted))
        return Delta(pieces, "length" if event.stop_type == "limit" else "stop", usage, is_done=True)

    def _pieces_of(self, event: _LlamaCppEvent) -> list[Piece]:
        """The event's tokens; the text stands with the last, since only together they make it."""
        text, token_ids = event.content or "", event.tokens or []
        new_tokens = len(token_ids)
        if isinstance(event.tokens_predicted, int):
            new_tokens = event.tokens_predicted - self._tokens_predicted
            self._tokens_predicted = event.tokens_predicted
        if not token_ids or new_tokens > len(token_ids):
            return [Piece(text, NO_TOKEN_ID)] if text or token_ids else []
        pieces = [Piece("", _known(token_id)) for token_id in token_ids[:-1]]
        pieces.append(Piece(text, _known(token_ids[-1])))
        return pieces


def _prompt_of(request: CompletionRequest) -> str | list[int]:
    text, token_ids = request.prompt
    assert (text is None) != (token_ids is None), "a prompt is text or token ids"
    return text if text is not None else token_ids or []


def _known(token_id: int) -> int:
    return token_id if token_id in TOKEN_ID else NO_TOKEN_ID


def _count(count: object) -> int:
    is_count = isinstance(count, int) and not isinstance(count, bool)
    return count if is_count and 0 <= count <= _MAX_COUNT else NOT_TOLD  # type: ignore[operator, return-value]


def _malformed(data: bytes, error: Exception) -> UpstreamBroken:
    shown = data[:200].decode("utf-8", "replace")
    return UpstreamBroken(f"the model server sent an event that can't be read: {said(shown)} ({error})")


def _error_event(error: Any) -> UpstreamProblem:
    """The problem that an `error` event in a stream is: a refusal comes so if the stream's head was already sent."""
    message = message_in(error) or "no message"
    code = error.get("code") if isinstance(error, dict) else None
    if isinstance(code, int) and code in REFUSALS:
        return UpstreamRefused(message)
    return UpstreamBroken(f"the model server ended the stream with an error: {said(message)}")

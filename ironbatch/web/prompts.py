"""The prompt of a request, in whichever of three ways it is given: text, token ids, or their number alone."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from ironbatch import layout, limits
from ironbatch.text.tokenizer import Tokenizer
from ironbatch.text_rows import prompt_room
from ironbatch.web.json_body import RequestBody, check, invalid, shown

FIELDS = ("prompt", "prompt_tokens", "prompt_token_ids")

BYTES_PER_TOKEN = 4
"""Of English text, by rule of thumb."""

MOST_ENCODED_AT_ONCE = 4096
"""Characters. A tokenizer takes up to half a millisecond for so many, and 0.2 s for a body of the default limit: longer
texts are encoded in a thread, and the worker's streams go on meanwhile."""


class Prompt(NamedTuple):
    """A valid prompt: it fits by itself."""

    tokens: int
    flags: int = 0  # what of it stands in the slot's rows
    token_ids: NDArray[np.int32] | None = None  # int32[tokens]
    text: bytes | None = None  # UTF-8
    is_estimate: bool = False  # nobody has counted the tokens

    @property
    def length(self) -> str:
        """How a message says it."""
        if not self.is_estimate:
            return f"{self.tokens} tokens"
        assert self.text is not None
        return (
            f"about {self.tokens} tokens, estimated from its {len(self.text)} bytes; --tokenizer would count them"
            " exactly"
        )


class PromptReader:
    """Reads the prompts of one worker.

    Args:
        tokenizer: None for a backend that takes text.
        text_row_bytes: of the segment; 0 for a backend that has no text.
    """

    def __init__(self, tokenizer: Tokenizer | None, text_row_bytes: int) -> None:
        assert tokenizer is not None or text_row_bytes > 0, "a backend that takes ids alone has a tokenizer"
        self._tokenizer = tokenizer
        self._flags = layout.FLAG_TEXT if text_row_bytes else 0
        self._most_bytes = prompt_room(text_row_bytes) if text_row_bytes else None
        self._thread = ThreadPoolExecutor(1, "encode")  # starts with the first long text

    async def read(self, fields: RequestBody, max_request_tokens: int) -> Prompt:
        """The prompt that a body gives.

        Raises:
            RequestRejected: status 400; there is not exactly one, or it is empty, or too long, or holds wrong ids.
        """
        _check_one(fields)
        if isinstance(fields.prompt, str):
            return await self._of_text(fields.prompt, fields.max_new_tokens, max_request_tokens)
        if isinstance(fields.prompt_token_ids, list):
            return _of_ids(fields.prompt_token_ids, max_request_tokens)
        assert isinstance(fields.prompt_tokens, int)
        check("prompt_tokens", fields.prompt_tokens, 1, max_request_tokens)
        return Prompt(fields.prompt_tokens)

    async def _of_text(self, text: str, max_new_tokens: int, max_request_tokens: int) -> Prompt:
        data = text.encode()  # never fails: JSON with half a surrogate pair was refused
        if not data:
            raise invalid("prompt", "prompt is empty; give a text of at least 1 character")
        if self._most_bytes is not None:
            has_length = 0 <= max_new_tokens <= max_request_tokens  # else that is what is wrong
            self._check_room(len(data), max_new_tokens if has_length else 0)
        if self._tokenizer is None:
            tokens = -(-len(data) // BYTES_PER_TOKEN)
            prompt = Prompt(tokens, self._flags, text=data, is_estimate=True)
            _check_length(prompt, max_request_tokens)
            return prompt
        token_ids = await self._encode(self._tokenizer, text)
        if token_ids and max(token_ids) > limits.TOKEN_ID.high:
            raise invalid("prompt", f"prompt has a token of the id {max(token_ids)}; a token id is {limits.TOKEN_ID}")
        prompt = Prompt(len(token_ids), self._flags | layout.FLAG_TOKEN_IDS, text=data)
        _check_length(prompt, max_request_tokens)
        return prompt._replace(token_ids=np.array(token_ids, np.int32))

    def _check_room(self, prompt_bytes: int, max_new_tokens: int) -> None:
        """Prompt and output share a row. How long the output becomes nobody knows; it is given an average's room."""
        most_bytes = self._most_bytes
        assert most_bytes is not None
        for_output = min(max_new_tokens * limits.TEXT_BYTES, most_bytes)
        if prompt_bytes > most_bytes - for_output:
            raise invalid(
                "prompt",
                f"prompt has {prompt_bytes} bytes, over the {most_bytes - for_output} that this engine keeps of a"
                f" prompt beside an output of {max_new_tokens} tokens; shorten it, or give the engine a higher"
                " --max-model-len",
            )

    async def _encode(self, tokenizer: Tokenizer, text: str) -> list[int]:
        try:
            if len(text) <= MOST_ENCODED_AT_ONCE:
                return tokenizer.encode(text)
            return await asyncio.get_running_loop().run_in_executor(self._thread, tokenizer.encode, text)
        except ValueError as problem:
            raise invalid("prompt", f"prompt is not for this engine: {problem}; give another text") from None


def _check_one(fields: RequestBody) -> None:
    given = [name for name in FIELDS if getattr(fields, name) is not UNSET]
    if not given:
        raise invalid(
            "prompt_tokens", "the prompt is missing; give prompt (a text), prompt_tokens (a count) or prompt_token_ids"
        )
    if len(given) == len(FIELDS):
        raise invalid(given[-1], f"{FIELDS[0]}, {FIELDS[1]} and {FIELDS[2]} are all given; give one of them")
    if len(given) == 2:
        remedy = f"give one of {FIELDS[0]}, {FIELDS[1]} and {FIELDS[2]}"
        raise invalid(given[-1], f"{given[0]} and {given[1]} are both given; {remedy}")


def _check_length(prompt: Prompt, max_request_tokens: int) -> None:
    """Of a text."""
    if prompt.tokens == 0:
        raise invalid("prompt", "prompt has no token for this engine's tokenizer; give another text")
    if prompt.tokens > max_request_tokens:
        raise invalid(
            "prompt", f"prompt has {prompt.length}; this engine's limit is {max_request_tokens} a request; shorten it"
        )


def _of_ids(ids: list[int], max_request_tokens: int) -> Prompt:
    if not ids:
        raise invalid("prompt_token_ids", "prompt_token_ids is empty; a prompt has at least 1 token")
    if len(ids) > max_request_tokens:  # before the ids are looked at: their number is the client's to choose
        raise invalid(
            "prompt_token_ids",
            f"prompt_token_ids has {len(ids)} tokens, over this engine's limit of {max_request_tokens} a request",
        )
    if min(ids) < limits.TOKEN_ID.low or max(ids) > limits.TOKEN_ID.high:
        index = next(i for i, token in enumerate(ids) if token not in limits.TOKEN_ID)
        raise invalid(
            "prompt_token_ids",
            f"prompt_token_ids[{index}] is {shown(ids[index])}; a token id is {limits.TOKEN_ID}",
        )
    return Prompt(len(ids), layout.FLAG_TOKEN_IDS, np.array(ids, np.int32))

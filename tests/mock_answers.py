"""What a server with the mock answers to a request, computed from the request alone; and whether an answer is that."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ironbatch.backends.mock import EOS_TOKEN_ID, NO_EOS
from ironbatch.kernels.emission import EOS_SCALE, mock_token
from ironbatch.kernels.mock_kv import mock_kv_tokens
from ironbatch.kernels.slots import choice_seed

MAX_NEW_TOKENS_DEFAULT = 16


class Tokens(NamedTuple):
    """One choice of an answer."""

    token_ids: list[int]
    finish_reason: str


class Mock(NamedTuple):
    """How the server's mock is set up."""

    keeps_kv: bool = True
    eos_prob: float = 0.0

    def choices(self, body: dict[str, Any]) -> list[Tokens]:
        """All choices of the answer to a valid request."""
        seed = body.get("seed", 0)
        return [self._tokens(body, int(choice_seed(seed, index))) for index in range(body.get("n", 1))]

    def _tokens(self, body: dict[str, Any], seed: int) -> Tokens:
        prompt = body.get("prompt_token_ids")
        length = body["prompt_tokens"] if prompt is None else len(prompt)
        count = body.get("max_new_tokens", MAX_NEW_TOKENS_DEFAULT)
        threshold = round(self.eos_prob * EOS_SCALE)
        eos = EOS_TOKEN_ID if threshold else NO_EOS
        if self.keeps_kv:
            context = np.zeros(length + count, np.int32)
            context[:length] = 0 if prompt is None else prompt
            mock_kv_tokens(seed, context, length, count, eos, threshold)
            token_ids = context[length:].tolist()
        else:
            token_ids = [int(mock_token(seed, length + k, eos, threshold)) for k in range(count)]
        if eos in token_ids and not body.get("ignore_eos"):
            return Tokens(token_ids[: token_ids.index(eos) + 1], "stop")
        return Tokens(token_ids, "length")


@dataclass
class Verdict:
    """What of an answer has come, and what is wrong with it."""

    tokens: int = 0
    is_whole: bool = False  # every choice has its end
    errors: list[dict[str, Any]] = field(default_factory=list)  # of the choices that ended with one
    problem: str | None = None


def judge(body: dict[str, Any], received: bytes, mock: Mock) -> Verdict:
    """Compare what has come of the answer's lines with what must come: each token once, in order, and one end."""
    verdict = Verdict()
    expected = mock.choices(body)
    counts = [0] * len(expected)
    is_over = [False] * len(expected)
    for raw in received.split(b"\n")[:-1]:  # what follows the last newline is a line that was cut
        try:
            line = json.loads(raw)
            verdict.problem = _line_problem(line, body, expected, counts, is_over)
            index = line.get("choice", 0)
        except (ValueError, KeyError, TypeError, IndexError) as problem:
            verdict.problem = f"{type(problem).__name__}: {problem}"
        if verdict.problem is not None:
            verdict.problem += f", at {raw[:200]!r}"
            return verdict
        is_over[index] = line["done"]
        if "error" in line:
            verdict.errors.append(line["error"])
        else:
            counts[index] += 1
    verdict.tokens = sum(counts)
    verdict.is_whole = all(is_over)
    return verdict


def _line_problem(
    line: dict[str, Any], body: dict[str, Any], expected: list[Tokens], counts: list[int], is_over: list[bool]
) -> str | None:
    """What is wrong with the next line of an answer, or None."""
    if ("choice" in line) != (len(expected) > 1):
        return "a choice is named where there is one, or none where there are several"
    index = line.get("choice", 0)
    if index not in range(len(expected)):
        return f"there are {len(expected)} choices"
    token_ids, finish_reason = expected[index]
    count = counts[index]
    if is_over[index]:
        return "a line after the choice's end"
    if line["token_index"] != count:
        return f"token {count} is due"
    if "error" in line:
        error = line["error"]
        has_said_why = isinstance(error.get("type"), str) and error["type"] and error.get("message")
        return None if line["done"] is True and has_said_why else "an error that ends nothing or does not say why"
    if count >= len(token_ids):
        return "a token too many"
    if line["done"] is not (count == len(token_ids) - 1):
        return f"{len(token_ids)} tokens are expected"
    if not body.get("details"):
        return None
    if line["token_id"] != token_ids[count]:
        return f"the token is {token_ids[count]}"
    if line["done"] and line["finish_reason"] != finish_reason:
        return f"the finish reason is {finish_reason}"
    return None

"""The judge of answers: a whole one passes, and nothing that is lost, doubled, mixed up or changed does."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ironbatch import layout
from ironbatch.backends.mock_kv import MockKVBackend
from tests.mock_answers import Mock, judge
from tests.support import small_engine

MOCK = Mock(keeps_kv=True, eos_prob=0.05)
BODY: dict[str, Any] = {"prompt_token_ids": [5, 6, 7], "max_new_tokens": 12, "seed": 4, "details": True}


def answer(body: dict[str, Any], mock: Mock = MOCK) -> list[bytes]:
    """The lines of a whole answer, one choice after the other."""
    lines = []
    choices = mock.choices(body)
    for index, (token_ids, reason) in enumerate(choices):
        for k, token in enumerate(token_ids):
            line: dict[str, Any] = {"token_index": k, "done": k == len(token_ids) - 1}
            if len(choices) > 1:
                line["choice"] = index
            if body.get("details"):
                line["token_id"] = token
                line |= {"finish_reason": reason} if line["done"] else {}
            lines.append(json.dumps(line).encode() + b"\n")
    return lines


def changed(line: bytes, **fields: Any) -> bytes:
    return json.dumps(json.loads(line) | fields).encode() + b"\n"


@pytest.mark.parametrize("more", [{}, {"n": 3}, {"details": False}, {"n": 2, "details": False}, {"ignore_eos": True}])
def test_whole_answer_and_its_beginnings_pass(more: dict[str, Any]) -> None:
    body = BODY | more
    lines = answer(body)
    whole = judge(body, b"".join(lines), MOCK)
    assert (whole.problem, whole.is_whole, whole.errors, whole.tokens) == (None, True, [], len(lines))
    for k in range(len(lines)):
        part = judge(body, b"".join(lines[:k]) + lines[k][:7], MOCK)
        assert (part.problem, part.is_whole, part.tokens) == (None, False, k)


def test_choices_may_be_interleaved() -> None:
    body = BODY | {"n": 2, "ignore_eos": True}
    lines = answer(body)
    mixed = [line for pair in zip(lines[:12], lines[12:], strict=True) for line in pair]
    assert judge(body, b"".join(mixed), MOCK).problem is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda lines: lines[1:],  # the first is lost
        lambda lines: lines[:3] + lines[4:],
        lambda lines: lines[:4] + lines[3:],  # twice
        lambda lines: [lines[0], lines[2], lines[1], *lines[3:]],
        lambda lines: [*lines, lines[-1]],
        lambda lines: [changed(lines[0], token_id=json.loads(lines[0])["token_id"] ^ 1), *lines[1:]],
        lambda lines: [changed(lines[0], done=True)],
        lambda lines: [*lines[:-1], changed(lines[-1], done=False)],
        lambda lines: [*lines[:-1], changed(lines[-1], finish_reason="cancelled")],
        lambda lines: [changed(lines[0], choice=0), *lines[1:]],
        lambda lines: [b"nonsense\n", *lines],
        lambda lines: [b"{}\n", *lines],
        lambda lines: [lines[0], changed(lines[1], error={"type": "", "message": ""}, done=True)],
        lambda lines: [lines[0], changed(lines[1], error={"type": "x", "message": "y"}, done=False)],
    ],
)
def test_damaged_answer_does_not(damage: Any) -> None:
    body = BODY | {"ignore_eos": True}
    lines = answer(body)
    assert judge(body, b"".join(lines), MOCK).problem is None
    assert judge(body, b"".join(damage(lines)), MOCK).problem is not None


def test_error_that_says_why_is_an_end() -> None:
    error = {"type": "timeout", "message": "too late", "param": None}
    lines = answer(BODY)[:2]
    lines.append(json.dumps({"token_index": 2, "done": True, "error": error}).encode() + b"\n")
    verdict = judge(BODY, b"".join(lines), MOCK)
    assert (verdict.problem, verdict.is_whole, verdict.errors, verdict.tokens) == (None, True, [error], 2)


def test_another_requests_tokens_are_found_out() -> None:
    others = answer(BODY | {"prompt_token_ids": [5, 6, 8]})
    assert judge(BODY, b"".join(others), MOCK).problem is not None


@pytest.mark.parametrize("n", [1, 3])
def test_engine_gives_what_is_expected(n: int) -> None:
    """The control of all of the above: the same request to the real scheduler and mock."""
    body = BODY | {"n": n, "max_new_tokens": 30}
    with small_engine(MockKVBackend, mock_kv=True, mock_eos_prob=MOCK.eos_prob) as engine:
        worker = engine.worker()
        streams = worker.submit_group(3, 30, n, seed=4, prompt_token_ids=[5, 6, 7])
        engine.run(worker)
    names = {layout.FINISH_LENGTH: "length", layout.FINISH_STOP: "stop"}
    assert [(stream.token_ids, names[stream.reason]) for stream in streams] == MOCK.choices(body)

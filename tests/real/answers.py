"""Ironbatch's detailed answers, line by line, and as a whole."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tests.end_to_end.server import Server, generate_all

Line = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """A body of lines."""

    lines: list[Line]

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(line["text"] for line in self.lines)

    @property
    def token_ids(self) -> list[int | None]:
        """Those of all lines; None where it is not known. A line that only says that all is over is no token."""
        return [line["token_id"] for line in self.lines if "token_id" in line]

    @property
    def last(self) -> Line:
        """The line that says how it ended."""
        return self.lines[-1]

    @property
    def is_whole(self) -> bool:
        """Whether it ended as it should, each line in its place."""
        in_order = [line["token_index"] for line in self.lines] == list(range(len(self.lines)))
        ends_once = [line["done"] for line in self.lines] == [False] * (len(self.lines) - 1) + [True]
        return in_order and ends_once and "error" not in self.last


def answer_of(body: bytes) -> Answer:
    """The answer that a body holds."""
    return Answer([json.loads(line) for line in body.splitlines()])


def greedy(max_new_tokens: int, **fields: Any) -> dict[str, Any]:
    """A request for the likeliest tokens, with details."""
    return {"max_new_tokens": max_new_tokens, "temperature": 0, "details": True, **fields}


def generate(server: Server, *requests: dict[str, Any]) -> list[Answer]:
    """All of them at once; their answers."""
    return [answer_of(body) for body in generate_all(server.port, list(requests))]

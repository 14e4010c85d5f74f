"""What the scripted model server answers: a pure function of prompt and seed, so that any stream can be checked.

Token `t` reads "w<t> ". The next token follows from the end of what stands so far, prompt and answer together: from
the last characters of a text, from the last ids of a prompt of ids. So an answer that is continued, by asking again
with what came already behind the prompt, equals the answer that was never broken.
"""

from __future__ import annotations

import zlib

VOCABULARY = 1000
GREEDY = 0
"""The seed at temperature 0, whatever the request says: a greedy answer knows none."""

_LAST_CHARS = 64
_LAST_IDS = 16


def word(token_id: int) -> str:
    """A token as text."""
    return f"w{token_id} "


class Answer:
    """The tokens that follow a prompt, one after the other, without an end."""

    def __init__(self, prompt: str | list[int], seed: int = GREEDY) -> None:
        self._text = prompt[-_LAST_CHARS:] if isinstance(prompt, str) else None
        self._ids = [] if isinstance(prompt, str) else prompt[-_LAST_IDS:]
        self._seed = seed

    def next_token(self) -> int:
        tail = self._text if self._text is not None else ",".join(map(str, self._ids))
        token_id = zlib.crc32(f"{self._seed}:{tail}".encode()) % VOCABULARY
        if self._text is not None:
            self._text = (self._text + word(token_id))[-_LAST_CHARS:]
        else:
            self._ids = [*self._ids, token_id][-_LAST_IDS:]
        return token_id


def expected_token_ids(prompt: str | list[int], count: int, seed: int = GREEDY) -> list[int]:
    """The first `count` tokens after `prompt`. `seed` is the request's, mod 2**32-1; GREEDY at temperature 0."""
    answer = Answer(prompt, seed)
    return [answer.next_token() for _ in range(count)]


def expected_pieces(prompt: str | list[int], count: int, seed: int = GREEDY) -> list[str]:
    """As `expected_token_ids`, as text."""
    return [word(token_id) for token_id in expected_token_ids(prompt, count, seed)]


def prompt_tokens(prompt: str | list[int]) -> int:
    """How long the server says that a prompt is: its ids, or its words."""
    return len(prompt.split()) if isinstance(prompt, str) else len(prompt)

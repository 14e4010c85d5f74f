"""The text of a slot, for backends that have text: the prompt's, a piece for each token, and a note on its end.

A row is `layout.TEXT_HEAD`, the prompt, the pieces one behind the other, and at its end the note. A piece is its length
(one byte, or 255 and four more) and its UTF-8. So whoever reads or goes on with them walks from a place that it knows:
`first_piece`, or where it stopped before. As with tokens, what is published exists: the worker writes head and prompt
before it submits, the scheduler a piece before it publishes that token, and note and usage before it publishes the end.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ironbatch.layout import TEXT_HEAD, TEXT_NOTE_BYTES, WORD_BYTES, word

NOT_TOLD = -1
LONG = 255  # in the place of a length: it stands in the next four bytes
LONG_BYTES = 4
MAX_PIECE_HEAD_BYTES = 1 + LONG_BYTES

_PROMPT_BYTES = word(TEXT_HEAD, "prompt_bytes")
_NOTE_BYTES = word(TEXT_HEAD, "note_bytes")
_USAGE = word(TEXT_HEAD, "usage_prompt_tokens")
_USAGE_END = word(TEXT_HEAD, "usage_completion_tokens") + 1


class TokenUsage(NamedTuple):
    """What a model server says that a request took; NOT_TOLD where it does not."""

    prompt_tokens: int
    completion_tokens: int


NO_USAGE = TokenUsage(NOT_TOLD, NOT_TOLD)


def prompt_room(row_bytes: int) -> int:
    """Bytes that a row of `row_bytes` has for prompt and pieces together."""
    return row_bytes - TEXT_HEAD.itemsize - TEXT_NOTE_BYTES


def piece_bytes(text_bytes: int) -> int:
    """What a piece of so many bytes takes of its row."""
    return text_bytes + (1 if text_bytes < LONG else MAX_PIECE_HEAD_BYTES)


class TextRow:
    """One slot's row.

    Args:
        row: uint8[text_row_bytes], of `Segment.texts`.
    """

    __slots__ = ("_bytes", "_head", "pieces_end")

    def __init__(self, row: NDArray[np.uint8]) -> None:
        self._bytes = row.data
        self._head = row.data[: TEXT_HEAD.itemsize].cast("q")
        self.pieces_end = len(row) - TEXT_NOTE_BYTES
        assert self._head.itemsize == WORD_BYTES

    def write_prompt(self, text: bytes) -> None:
        """Begin a request: its prompt, no note, no usage. At most `prompt_room` bytes."""
        first = TEXT_HEAD.itemsize
        assert first + len(text) <= self.pieces_end, "the worker refuses a longer one"
        self._bytes[first : first + len(text)] = text
        self._head[_PROMPT_BYTES] = len(text)
        self._head[_NOTE_BYTES] = 0
        self.write_usage(NO_USAGE)

    @property
    def prompt(self) -> bytes:
        """The prompt, UTF-8."""
        first = TEXT_HEAD.itemsize
        return bytes(self._bytes[first : first + self._head[_PROMPT_BYTES]])

    @property
    def first_piece(self) -> int:
        """Where the pieces begin."""
        return TEXT_HEAD.itemsize + self._head[_PROMPT_BYTES]

    def append(self, place: int, text: bytes) -> int:
        """Write a piece at `place`, where the one before it has ended. Returns where the next begins."""
        size = len(text)
        end = place + piece_bytes(size)
        assert end <= self.pieces_end, "whoever appends knows the room"
        if size < LONG:
            self._bytes[place] = size
        else:
            self._bytes[place] = LONG
            self._bytes[place + 1 : place + MAX_PIECE_HEAD_BYTES] = size.to_bytes(LONG_BYTES, "little")
        self._bytes[end - size : end] = text
        return end

    def read(self, place: int, count: int) -> tuple[list[bytes], int]:
        """The `count` pieces from `place` on, which must have been published, and where the next begins."""
        pieces = []
        for _ in range(count):
            size = self._bytes[place]
            place += 1
            if size == LONG:
                size = int.from_bytes(self._bytes[place : place + LONG_BYTES], "little")
                place += LONG_BYTES
            pieces.append(bytes(self._bytes[place : place + size]))
            place += size
        return pieces, place

    def write_note(self, text: str) -> None:
        """Say why the sequence ends; what does not fit is cut."""
        note = text.encode()
        if len(note) > TEXT_NOTE_BYTES:
            cut = TEXT_NOTE_BYTES - len("…".encode())
            note = note[:cut].decode(errors="ignore").encode() + "…".encode()
        self._bytes[self.pieces_end : self.pieces_end + len(note)] = note
        self._head[_NOTE_BYTES] = len(note)

    @property
    def note(self) -> str:
        """What the scheduler has said of the end; empty if nothing."""
        return bytes(self._bytes[self.pieces_end : self.pieces_end + self._head[_NOTE_BYTES]]).decode()

    def write_usage(self, usage: TokenUsage) -> None:
        """Keep what the model server says that the request took."""
        for k, count in enumerate(usage):
            self._head[_USAGE + k] = count

    @property
    def usage(self) -> TokenUsage:
        """What the model server has said that the request took."""
        return TokenUsage(*self._head[_USAGE:_USAGE_END])

"""Where the text of a choice comes from: from its slot's text row, or from its token ids by a tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ironbatch.shm.segment import Segment
from ironbatch.text.tokenizer import Decoder, Tokenizer
from ironbatch.text_rows import TextRow, TokenUsage
from ironbatch.web.request import GenerateRequest


class TextSource(Protocol):
    """A choice's text, token by token."""

    note: str
    """Once the slot is left: what the backend says of the end; may be empty."""

    usage: TokenUsage | None
    """Once the slot is left: what the backend has counted; None from one that counts nothing."""

    def take(self, count: int) -> list[str]:
        """Of the next `count` tokens, which are published: the text that each completes."""

    def end(self) -> str:
        """What is left when all tokens are taken, and no more come."""

    def leave_slot(self, count: int) -> None:
        """Keep the `count` tokens that are published and not taken, and the end: the slot is given back."""


class RowTexts:
    """From a text row, where the scheduler writes a piece for each token.

    Args:
        row: whose prompt is written.
    """

    __slots__ = ("_kept", "_place", "_row", "note", "usage")

    def __init__(self, row: TextRow) -> None:
        self._row: TextRow | None = row
        self._place = row.first_piece
        self._kept: list[bytes] = []
        self.note = ""
        self.usage: TokenUsage | None = None

    def take(self, count: int) -> list[str]:
        """See `TextSource`."""
        if self._row is not None:
            pieces, self._place = self._row.read(self._place, count)
        else:
            pieces, self._kept = self._kept[:count], self._kept[count:]
        return [piece.decode() for piece in pieces]

    def end(self) -> str:
        """See `TextSource`: a piece has whole characters."""
        return ""

    def leave_slot(self, count: int) -> None:
        """See `TextSource`. What is kept is a row at most."""
        assert self._row is not None, "a slot is left once"
        self._kept, _ = self._row.read(self._place, count)
        self.note, self.usage = self._row.note, self._row.usage
        self._row = None


class DecodedTexts:
    """From token ids.

    Args:
        output_ids: int32[max_new_tokens], the slot's output.
        decoder: a new one.
    """

    __slots__ = ("_decoder", "_output_ids", "note", "usage")

    def __init__(self, output_ids: NDArray[np.int32], decoder: Decoder) -> None:
        self._output_ids = output_ids  # those not taken
        self._decoder = decoder
        self.note = ""
        self.usage: TokenUsage | None = None

    def take(self, count: int) -> list[str]:
        """See `TextSource`."""
        ids, self._output_ids = self._output_ids[:count].tolist(), self._output_ids[count:]
        return [*map(self._decoder.feed, ids)]

    def end(self) -> str:
        """See `TextSource`."""
        return self._decoder.end()

    def leave_slot(self, count: int) -> None:
        """See `TextSource`."""
        self._output_ids = self._output_ids[:count].copy()


class Texts:
    """The texts of one worker's requests.

    Args:
        segment: for its token rows and its text rows, if it has such.
        tokenizer: None for a backend that takes text.
    """

    def __init__(self, segment: Segment, tokenizer: Tokenizer | None) -> None:
        self._tokens = segment.tokens
        self._rows = segment.texts
        self.has_rows = segment.texts.size > 0
        self._tokenizer = tokenizer

    def has_lines(self, request: GenerateRequest) -> bool:
        """Whether the lines of this request have text."""
        return self.has_rows or request.text is not None

    def write_prompt(self, slots: Iterable[int], request: GenerateRequest) -> None:
        """Begin the text rows of a request's slots, before the submit; without a text its prompt there is empty."""
        if self.has_rows:
            for slot in slots:
                TextRow(self._rows[slot]).write_prompt(request.text or b"")

    def source(self, slot: int, request: GenerateRequest) -> TextSource | None:
        """For a choice whose prompt is written; None if its lines have no text."""
        if self.has_rows:
            return RowTexts(TextRow(self._rows[slot]))
        if request.text is None:
            return None
        assert self._tokenizer is not None, "it has made ids of the text"
        output_ids = self._tokens[slot, request.prompt_tokens :][: request.max_new_tokens]
        return DecodedTexts(output_ids, self._tokenizer.decoder())

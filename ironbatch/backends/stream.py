"""One sequence's upstream stream, as the scheduler's thread and the event loop's thread share it.

The loop's thread appends and says so; the scheduler's thread takes. Both rely on this alone: a `deque` may be appended
to and popped from by two threads, and each writes its own words.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from ironbatch.text_rows import NO_USAGE, TextRow, TokenUsage, piece_bytes
from ironbatch.upstream.types import CompletionRequest, Enough, Piece, Prompt


class StreamEnd(NamedTuple):
    """Why there is no more."""

    finish_reason: int  # as in `StepOutput.finish_reasons`
    usage: TokenUsage = NO_USAGE
    note: str = ""


class StreamFailed(Exception):
    """A stream has ended without its sequence's end; `end` is what to make of it."""

    def __init__(self, end: StreamEnd) -> None:
        super().__init__(end.note)
        self.end = end


class Stream:
    """One sequence from its first piece here to its end.

    Args:
        sequence: its id.
        request: what to ask for.
        row: where its text stands.
        place: where the row's next piece goes; the scheduler's thread moves it on.
        can_continue: whether the rest may be asked for when it breaks off.
    """

    __slots__ = (
        "_can_continue",
        "_held",
        "_is_continued",
        "_kept",
        "_request",
        "_room_bytes",
        "_was_begun",
        "end",
        "has_told",
        "is_cancelled",
        "is_full",
        "place",
        "received_count",
        "row",
        "sequence",
        "unread",
    )

    def __init__(
        self, sequence: int, request: CompletionRequest, row: TextRow, place: int, *, can_continue: bool
    ) -> None:
        self.sequence = sequence
        self.row = row
        self.place = place
        self._request = request
        self._can_continue = can_continue
        self._is_continued = False
        self._was_begun = place > row.first_piece
        # The loop's thread:
        self.unread: deque[tuple[bytes, int]] = deque()  # text, token id
        self.end: StreamEnd | None = None
        self.received_count = 0
        self._kept: list[Piece] = []  # those received, if the rest may have to be asked for
        self._held: tuple[bytes, int] | None = None
        self.is_full = False  # the row has no room for what came
        self._room_bytes = row.pieces_end - place
        # Set by the loop's thread before it says that there is something to take, cleared by the other before it takes.
        self.has_told = False
        # The scheduler's thread:
        self.is_cancelled = False

    def deliver(self, piece: Piece) -> bool:
        """Take a piece from upstream. Returns whether there is something to tell.

        The last one that was asked for is held back: with it the sequence ends, and the finish that is about to come
        has the usage.

        Raises:
            Enough: upstream sends more than it was asked for, or than the row can hold.
        """
        if self._held is not None:
            raise Enough
        text = piece.text.encode(errors="replace")
        self._room_bytes -= piece_bytes(len(text))
        if self._room_bytes < 0:
            self.is_full = True
            raise Enough
        self.received_count += 1
        if self._can_continue:
            self._kept.append(piece)
        if self.received_count >= self._request.max_tokens:
            self._held = text, piece.token_id
            return False
        self.unread.append((text, piece.token_id))
        return True

    @property
    def has_begun(self) -> bool:
        """Whether a client may have seen something of it: from here, or from the scheduler before this one."""
        return self.received_count > 0 or self._was_begun

    @property
    def is_whole(self) -> bool:
        """Whether one answer of the server has all of it, so that its usage is the sequence's."""
        return not self._was_begun and not self._is_continued

    @property
    def is_complete(self) -> bool:
        """Whether all that was asked for is here, but for the finish."""
        return self._held is not None

    def finish(self, end: StreamEnd) -> None:
        """There is no more; what was held back goes out with it."""
        if self._held is not None:
            self.unread.append(self._held)
            self._held = None
        self.end = end

    def request_now(self) -> CompletionRequest:
        """What is still to be asked for: the prompt and all that was received, and as many tokens less."""
        self._is_continued |= bool(self._kept)
        prompt = self._request.prompt
        if prompt.text is not None:
            prompt = Prompt(prompt.text + "".join(piece.text for piece in self._kept), None)
        elif prompt.token_ids is not None:
            prompt = Prompt(None, prompt.token_ids + [piece.token_id for piece in self._kept])
        return self._request._replace(prompt=prompt, max_tokens=self._request.max_tokens - len(self._kept))

    @property
    def can_continue(self) -> bool:
        """Whether the rest could be asked for: upstream must be told all that there is so far."""
        ids = self._request.prompt.token_ids
        if ids is None:
            return self._can_continue
        return self._can_continue and min(ids) >= 0 and all(piece.token_id >= 0 for piece in self._kept)

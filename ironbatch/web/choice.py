"""The sequences of one answer: how far each has come, and which of its lines the client lacks.

What they have in common is `LineSource`; the connection that the lines leave by is `web/stream.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ironbatch import layout
from ironbatch.errors import RequestRejected
from ironbatch.web.lines import (
    SequenceStats,
    error_answer,
    finish_part,
    id_part,
    last_line,
    plain_lines,
    problem_part,
)


class LineSource(Protocol):
    """The lines of an answer, of one choice or of several."""

    is_over: bool
    """Whether the last line was taken."""

    def take(self, most_tokens: int) -> bytes:
        """The next lines that the client lacks, of at most so many tokens; empty when it lacks none."""

    @property
    def refusal(self) -> RequestRejected | None:
        """The answer if there can be no other: everything has failed, and before any token."""

    @property
    def has_begun(self) -> bool:
        """Whether anything is there but failures before a token."""


class Choice:
    """One sequence of an answer. The collector tells it how far its slot has come.

    Args:
        slot: whose tokens these are.
        tag: names the choice in its lines; empty for an only one.
    """

    __slots__ = (
        "_error_code",
        "_has_bare_end",
        "_problem",
        "_produced",
        "_reason",
        "_sent",
        "_tag",
        "is_over",
        "slot",
    )

    def __init__(self, slot: int, tag: bytes = b"") -> None:
        self.slot = slot
        self.is_over = False
        self._tag = tag
        self._produced = 0
        self._sent = 0
        self._reason = layout.FINISH_NONE
        self._error_code = layout.ERROR_NONE
        self._has_bare_end = False
        self._problem: RequestRejected | None = None

    def advance(self, produced: int, reason: int, error_code: int) -> None:
        """The slot now has `produced` tokens. With a finish `reason` this is the last call: the slot is given away."""
        self._produced = produced
        if reason != layout.FINISH_NONE:
            self._reason = reason & ~layout.FINISH_WITHOUT_TOKEN
            self._has_bare_end = reason & layout.FINISH_WITHOUT_TOKEN != 0
            self._error_code = error_code
            self._leave_slot()

    def fail(self, problem: RequestRejected) -> None:
        """End it here, with the tokens that it has. What its slot still publishes is not for this choice any more."""
        self._reason = layout.FINISH_ERROR
        self._problem = problem
        self._leave_slot()

    def take(self, most_tokens: int) -> bytes:
        """See `LineSource`."""
        before, after = self._sent, self._produced
        if after - before > most_tokens:
            after = before + most_tokens
        elif self._reason != layout.FINISH_NONE:
            self._sent = after
            self.is_over = True
            return self._last_lines(before, after)
        elif after == before:
            return b""
        self._sent = after
        return self._lines(before, after)

    @property
    def lacks(self) -> int:
        """The tokens whose lines were not taken."""
        return self._produced - self._sent

    @property
    def note(self) -> str:
        """What its backend says of its end, once that is known; mostly nothing."""
        return ""

    @property
    def is_failure(self) -> bool:
        """Whether the sequence has ended with an error."""
        return self._reason == layout.FINISH_ERROR

    @property
    def refusal(self) -> RequestRejected | None:
        """See `LineSource`."""
        if not self.is_failure or self._produced > 0:
            return None
        return self._problem or error_answer(self._error_code)

    @property
    def has_begun(self) -> bool:
        """See `LineSource`."""
        return self._produced > 0 or self._reason not in {layout.FINISH_NONE, layout.FINISH_ERROR}

    def _lines(self, before: int, after: int) -> bytes:
        lines = plain_lines(before, after)
        return lines.replace(b',"done"', self._tag + b',"done"') if self._tag else lines

    def _last_lines(self, before: int, after: int) -> bytes:
        has_token = not (self.is_failure or self._has_bare_end)
        last = after - 1 if has_token else after
        lines = self._lines(before, last)
        return lines + last_line(last, self._tag + self._last_fields(last, has_token=has_token), self._end_part())

    def _last_fields(self, index: int, *, has_token: bool) -> bytes:
        """What the last line says of its token before its `done`."""
        return b""

    def _end_part(self) -> bytes:
        """What the last line says of the sequence after its `done`."""
        return problem_part(self._problem or error_answer(self._error_code)) if self.is_failure else b""

    def _leave_slot(self) -> None:
        """The slot is about to be somebody else's: keep what lines that are still to be written need of it."""


class GivenUpChoice(Choice):
    """Stands for one that has failed before its slot's end was published: it hears of that and says nothing."""

    __slots__ = ()

    def advance(self, produced: int, reason: int, error_code: int) -> None:
        pass


class DetailedChoice(Choice):
    """One whose lines carry token ids, and the last one how the sequence fared.

    Args:
        slot, tag: as of any.
        output_ids: int32[max_new_tokens], the slot's output.
        record: STATS_FIELDS of the slot.
    """

    __slots__ = ("_format", "_output_ids", "_record", "_stats")

    def __init__(self, slot: int, tag: bytes, output_ids: NDArray[np.int32], record: Any) -> None:
        super().__init__(slot, tag)
        self._format = b'{"token_index":%%d%b,"token_id":%%d,"done":false}\n' % tag
        self._output_ids = output_ids
        self._record = record

    def _leave_slot(self) -> None:
        self._output_ids = self._output_ids[: self._produced].copy()
        self._stats = SequenceStats.read(self._record)
        self._record = None

    def _lines(self, before: int, after: int) -> bytes:
        line = self._format
        ids = self._output_ids[before:after].tolist()
        return b"".join([line % (index, token) for index, token in enumerate(ids, before)])

    def _last_fields(self, index: int, *, has_token: bool) -> bytes:
        return id_part(int(self._output_ids[index])) if has_token else b""

    def _end_part(self) -> bytes:
        return (super()._end_part() or finish_part(self._reason)) + self._stats.part


class Choices:
    """Several sequences that go out as one answer, which ends with the last of them."""

    __slots__ = ("_open", "is_over")

    def __init__(self, choices: Sequence[Choice]) -> None:
        self._open = list(choices)
        self.is_over = False

    def take(self, most_tokens: int) -> bytes:
        """See `LineSource`. What is ready of one choice comes before what is ready of the next."""
        parts = []
        room = most_tokens
        for choice in self._open:
            lacked = choice.lacks
            parts.append(choice.take(room))
            room -= lacked - choice.lacks
            if room == 0:
                break
        self._open = [choice for choice in self._open if not choice.is_over]
        self.is_over = not self._open
        return b"".join(parts)

    @property
    def refusal(self) -> RequestRejected | None:
        """See `LineSource`: the first choice's, once all have one."""
        refusals = [choice.refusal for choice in self._open]
        return refusals[0] if all(refusals) else None

    @property
    def has_begun(self) -> bool:
        """See `LineSource`."""
        return any(choice.has_begun for choice in self._open)

"""Choices whose lines have text."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ironbatch.web.choice import Choice, DetailedChoice
from ironbatch.web.lines import error_answer, id_part, text_part, usage_part
from ironbatch.web.texts import TextSource

_quoted = msgspec.json.Encoder().encode


class _WithText(Choice):
    """What the two have in common; a mixin, since either adds to another class."""

    __slots__ = ()

    _texts: TextSource

    def _leave_slot(self) -> None:
        super()._leave_slot()
        self._texts.leave_slot(self.lacks)
        if self.is_failure and self._problem is None and self._texts.note:
            self._problem = error_answer(self._error_code, self._texts.note)

    @property
    def note(self) -> str:
        return self._texts.note

    def _last_fields(self, index: int, *, has_token: bool) -> bytes:
        text = "".join(self._texts.take(int(has_token))) + self._texts.end()
        return super()._last_fields(index, has_token=has_token) + text_part(text)


class TextChoice(_WithText):
    """One whose lines carry the text of each token.

    Args:
        slot, tag: as of any.
        texts: where it comes from.
    """

    __slots__ = ("_format", "_texts")

    def __init__(self, slot: int, tag: bytes, texts: TextSource) -> None:
        super().__init__(slot, tag)
        self._format = b'{"token_index":%%d%b,"text":%%b,"done":false}\n' % tag
        self._texts = texts

    def _lines(self, before: int, after: int) -> bytes:
        line = self._format
        texts = self._texts.take(after - before)
        return b"".join([line % (index, _quoted(text)) for index, text in enumerate(texts, before)])


class DetailedTextChoice(_WithText, DetailedChoice):
    """One whose lines carry token ids and text, and the last one how the sequence fared.

    Args:
        slot, tag, output_ids, record: as of any with details.
        texts: as of any with text.
    """

    __slots__ = ("_texts",)

    def __init__(self, slot: int, tag: bytes, output_ids: NDArray[np.int32], record: Any, texts: TextSource) -> None:
        super().__init__(slot, tag, output_ids, record)
        self._format = b'{"token_index":%%d%b%%b,"text":%%b,"done":false}\n' % tag
        self._texts = texts

    def _lines(self, before: int, after: int) -> bytes:
        line = self._format
        ids = self._output_ids[before:after].tolist()
        texts = map(_quoted, self._texts.take(after - before))
        both = enumerate(zip(ids, texts, strict=True), before)
        return b"".join([line % (index, id_part(token), text) for index, (token, text) in both])

    def _end_part(self) -> bytes:
        usage = self._texts.usage
        return super()._end_part() + (b"" if usage is None else usage_part(usage))

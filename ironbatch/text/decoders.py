"""Token ids of a tokenizer.json to text, one at a time, as the library's `decode` would show them all at once.

The library has a `DecodeStream`, but from a byte that is no UTF-8 on it withholds everything, and at the end it gives
nothing back.
"""

from __future__ import annotations

import codecs

from ironbatch.text.vocabulary import Vocabulary

REPLACEMENT = "\ufffd"
WINDOW_TOKENS = 4
"""A character has up to four bytes, and so as many tokens at most."""


def _characters() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")


class ByteLevelDecoder:
    """For vocabularies of bytes (GPT-2, Llama 3, Qwen): what a token is does not depend on its neighbours."""

    __slots__ = ("_bytes_of", "_characters")

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._bytes_of = vocabulary.byte_level
        self._characters = _characters()

    def feed(self, token_id: int) -> str:
        """See `Decoder`."""
        return self._characters.decode(self._bytes_of(token_id))

    def end(self) -> str:
        """See `Decoder`."""
        return self._characters.decode(b"", final=True)


class WindowDecoder:
    """For all others, of which the library alone knows how they join tokens (SentencePiece, WordPiece).

    A token's text is by how much it makes that of the few before it longer: most of these vocabularies treat the first
    token of a text in its own way, and none looks far back.

    Byte tokens (<0xE4>) are decoded here. The library turns a run of them that is not valid UTF-8 as a whole into
    U+FFFD, a byte each, which would take back characters that were sent: here only what is invalid is replaced.
    """

    __slots__ = ("_characters", "_shown", "_vocabulary", "_window")

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._characters = _characters()
        self._window: list[int] = []  # the last tokens; empty only at the beginning
        self._shown = ""  # their text, as far as it was returned

    def feed(self, token_id: int) -> str:
        """See `Decoder`."""
        token = self._vocabulary.token(token_id)
        if token is None:
            return ""
        byte = self._vocabulary.byte(token)
        if byte is not None:
            return self._end_window() + self._feed_byte(byte, token_id)
        return self._end_bytes() + self._feed_token(token_id)

    def end(self) -> str:
        """See `Decoder`."""
        return self._end_window() + self._end_bytes()

    def _feed_token(self, token_id: int) -> str:
        text = self._certain_text([*self._window, token_id])
        added = text[len(self._shown) :]
        self._look_from([*self._window, token_id][-WINDOW_TOKENS:])
        return added

    def _feed_byte(self, byte: int, token_id: int) -> str:
        text = self._characters.decode(bytes((byte,)))
        if text == " " and not self._window:  # which the library may remove from the beginning
            text = self._vocabulary.decode([token_id])
            self._leave_beginning()
        elif text:
            self._leave_beginning()
        return text

    def _end_bytes(self) -> str:
        """The bytes are over: a character that lacks some is replaced."""
        text = self._characters.decode(b"", final=True)
        if text:
            self._leave_beginning()
        return text

    def _end_window(self) -> str:
        """What was withheld of the window, which no token will complete."""
        if not self._window:
            return ""
        withheld = self._vocabulary.decode(self._window)[len(self._shown) :]
        self._shown += withheld
        return withheld

    def _leave_beginning(self) -> None:
        """There is text, if only of bytes: the next token is not the first."""
        if not self._window:
            assert self._vocabulary.any_byte_token is not None
            self._look_from([self._vocabulary.any_byte_token])

    def _look_from(self, window: list[int]) -> None:
        self._window = window
        self._shown = self._certain_text(window)

    def _certain_text(self, token_ids: list[int]) -> str:
        """All but a U+FFFD at the end, which may be the beginning of a character."""
        text = self._vocabulary.decode(token_ids)
        return text[:-1] if text.endswith(REPLACEMENT) else text

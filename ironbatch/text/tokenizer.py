"""What a tokenizer is to the web workers, and which one a configuration asks for."""

from __future__ import annotations

from typing import Protocol

from ironbatch.config import BYTE_TOKENIZER, Config
from ironbatch.text.byte_level import ByteTokenizer
from ironbatch.text.json_file import JsonTokenizer


class Decoder(Protocol):
    """One output's way from token ids to text.

    What `feed` has returned and what `end` returns make up the whole text: nothing is ever taken back.
    """

    def feed(self, token_id: int) -> str:
        """The text that this token completes; empty while a character lacks bytes, and for an id that is unknown."""

    def end(self) -> str:
        """What is left when there are no more tokens: U+FFFD for an incomplete character, or nothing."""


class Tokenizer(Protocol):
    """Text to token ids, and a `Decoder` for each output. May be used by several threads at once."""

    vocab_size: int
    """The ids that it knows; they need not be the lowest ones."""

    def encode(self, text: str) -> list[int]:
        """The prompt's token ids, with those that the tokenizer itself puts around it.

        Raises:
            ValueError: it cannot; the message says why.
        """

    def decoder(self) -> Decoder:
        """For one output, from its beginning."""


def create_tokenizer(config: Config) -> Tokenizer | None:
    """The configuration's tokenizer; None where there is none, since the backend takes text and gives text.

    Raises:
        StartError: the file, or the library for it, cannot be loaded.
    """
    path = config.tokenizer or ("" if config.has_text else BYTE_TOKENIZER)
    if not path:
        return None
    if path == BYTE_TOKENIZER:
        return ByteTokenizer(is_readable=not config.has_text)
    return JsonTokenizer.load(path)

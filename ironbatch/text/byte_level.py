"""The built-in tokenizer: a token for each byte of UTF-8, so nothing has to be downloaded."""

from __future__ import annotations

import codecs

from ironbatch.text.words import WordDecoder, word

BYTES = 256


class ByteTokenizer:
    """Ids 0 to 255 are bytes; larger ones are read as words.

    Args:
        is_readable: decode all ids as words. The mock's tokens are numbers from 1 on that mean nothing, and those below
            256 would be control characters and halves of characters.
    """

    vocab_size = BYTES

    def __init__(self, *, is_readable: bool) -> None:
        self._is_readable = is_readable

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer`; never fails."""
        return list(text.encode())

    def decoder(self) -> ByteDecoder | WordDecoder:
        """See `Tokenizer`."""
        return WordDecoder() if self._is_readable else ByteDecoder()


class ByteDecoder:
    """Bytes to text; what is not valid UTF-8 becomes U+FFFD, one for each maximal part of a character.

    That is the practice of the Unicode Standard (section 3.9), which Python and Rust follow alike.
    """

    __slots__ = ("_characters",)

    def __init__(self) -> None:
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        """See `Decoder`."""
        if 0 <= token_id < BYTES:
            return self._characters.decode(bytes((token_id,)))
        return self.end() + word(token_id)

    def end(self) -> str:
        """See `Decoder`."""
        return self._characters.decode(b"", final=True)

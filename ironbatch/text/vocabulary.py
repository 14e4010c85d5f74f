"""What a tokenizer.json says of single tokens."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ironbatch import limits

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
ANY_BYTE_TOKEN = "<0x41>"  # noqa: S105 - the letter A


def _stand_ins() -> dict[int, int]:
    """Byte-level vocabularies show each byte as a printable character (GPT-2's `bytes_to_unicode`), turned around."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    return {byte: byte for byte in printable} | {0x100 + k: byte for k, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _stand_ins()


class Vocabulary:
    """The tokens of a library's tokenizer, by id.

    Args:
        library: the tokenizer.
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        self._special = {id_ for id_, token in library.get_added_tokens_decoder().items() if token.special}
        self._byte_level: dict[int, bytes] = {}  # of known tokens alone, so the vocabulary bounds it
        decoder = library.decoder
        self._has_byte_tokens = decoder is not None and b'"ByteFallback"' in decoder.__getstate__()
        self.any_byte_token = library.token_to_id(ANY_BYTE_TOKEN) if self._has_byte_tokens else None

    def token(self, token_id: int) -> str | None:
        """As the vocabulary writes it; None for an id that is unknown, or of a special token."""
        if token_id not in limits.TOKEN_ID or token_id in self._special:
            return None
        return self._library.id_to_token(token_id)

    def byte(self, token: str) -> int | None:
        """The byte that a token such as <0xE4> stands for, where the vocabulary has such for rare characters."""
        found = _BYTE_TOKEN.fullmatch(token) if self._has_byte_tokens else None
        return int(found[1], 16) if found else None

    def byte_level(self, token_id: int) -> bytes:
        """A token's bytes in a byte-level vocabulary; none for one that is unknown or special."""
        known = self._byte_level.get(token_id)
        if known is None:
            token = self.token(token_id)
            if token is None:
                return b""
            known = self._byte_level[token_id] = _bytes_of(token)
        return known

    def decode(self, token_ids: list[int]) -> str:
        """Known tokens that are not special, as the library shows them when they are a whole text."""
        return self._library.decode(token_ids)


def _bytes_of(token: str) -> bytes:
    """What its characters stand for; a token with any other one, such as an added token with a space, is itself."""
    try:
        return bytes([_BYTE_OF_CHARACTER[ord(character)] for character in token])
    except KeyError:
        return token.encode()

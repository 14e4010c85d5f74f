"""Readable text for tokens that mean nothing, such as the mock's: the same word for the same id, always."""

from __future__ import annotations

_TEXT = (
    "the of and to in a is that for it as was with be by on not he this are or his from at which but have an had they "
    "you were their one all we can her has there been if more when will would who so no she other its may these what "
    "them than some him time into only do such my new about out also two any up first could our then most see me even "
    "made after must well back through years where much your way down should because each just those people how too "
    "little state good very make world still own work long get here between both life being under never day same "
    "another know while last might us great old year off come since against go came right used take three house use "
    "again few water small found place part home number high open always door side light far turn hand keep end "
    "thing night given white name line set around once upon near city stone river green road field summer winter early "
    "late quiet slow warm cold clear deep wide bright soft tree leaf rain wind snow cloud hill lake sea ship boat "
    "island garden window table letter paper story song bird horse friend child mother father brother sister family "
    "morning evening silver golden yellow purple simple gentle careful steady distant hidden ancient modern common "
    "market station bridge tower village forest valley mountain harbour meadow orchard kitchen library engine signal "
    "pattern measure balance answer question reason memory season journey moment corner circle shadow mirror candle"
)
WORDS = tuple(_TEXT.split())

COMMA_EVERY = 13
FULL_STOP_EVERY = 29


def word(token_id: int) -> str:
    """An id's word, after a space, and before a comma or a full stop if the id has one; empty for no token's id."""
    if token_id < 0:
        return ""
    mark = "." if token_id % FULL_STOP_EVERY == 0 else "," if token_id % COMMA_EVERY == 0 else ""
    return f" {WORDS[token_id % len(WORDS)]}{mark}"


class WordDecoder:
    """Every id is a word."""

    __slots__ = ()

    def feed(self, token_id: int) -> str:
        """See `Decoder`."""
        return word(token_id)

    def end(self) -> str:
        """See `Decoder`: a word is never incomplete."""
        return ""

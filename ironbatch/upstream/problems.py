"""What can go wrong with a model server, sorted by what can be done about it.

Each problem has a `message`: one line for an operator or a client, at most MAX_MESSAGE_CHARS long. What the upstream
says is quoted, because it is not to be trusted with a line or a terminal.
"""

from typing import Final

from ironbatch.errors import IronbatchError

MAX_MESSAGE_CHARS: Final = 400
MAX_SAID_CHARS: Final = 150  # of what the upstream says: leaves room for an address and a remedy beside it

NOTHING_READABLE: Final = "the model server gave an error without a readable message"


def one_line(text: str, limit: int) -> str:
    """Foreign text as one line of at most `limit` characters: control characters and runs of blanks become a blank.

    `isprintable` is false for what could move a cursor, reverse a line or break an encoder: C0, C1, bidirectional
    overrides, lone surrogates.
    """
    head = text[: 4 * limit]  # bounds the work; blanks are squeezed before the line is cut
    line = " ".join("".join(char if char.isprintable() else " " for char in head).split())
    is_whole = len(line) <= limit and len(head) == len(text)
    return line if is_whole else line[: limit - 1] + "…"


def said(text: str) -> str:
    """What the upstream says, for the inside of a message: one line in quotation marks."""
    return f'"{one_line(text, MAX_SAID_CHARS)}"'


class UpstreamProblem(IronbatchError):
    """Base of all that can go wrong with a model server."""

    def __init__(self, message: str) -> None:
        self.message = one_line(message, MAX_MESSAGE_CHARS) or NOTHING_READABLE
        super().__init__(self.message)


class UpstreamAway(UpstreamProblem):
    """Nobody answers, or it still loads: nothing was computed. To be tried again when it is back."""


class UpstreamBusy(UpstreamProblem):
    """It takes no more at the moment. `retry_after_s`: seconds until it may, as it says; None: it does not say."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UpstreamRefused(UpstreamProblem):
    """The request's own fault; the message is the upstream's own."""


class UpstreamMisset(UpstreamProblem):
    """The operator's error: trying again does not help. The message names the option to look at."""


class UpstreamBroken(UpstreamProblem):
    """It failed at this request, or in the middle of it. It may be tried again."""

"""What is asked of a model server and what it answers, whatever dialect it speaks."""

from typing import Final, NamedTuple, Protocol

NO_TOKEN_ID: Final = -2  # of a piece whose token ids the upstream does not tell; layout.NO_TOKEN_ID
NOT_TOLD: Final = -1  # a count that the upstream does not tell


class Enough(Exception):
    """Raised by whoever takes the pieces: no more is wanted. The stream is closed, and has finished for its length."""


class Prompt(NamedTuple):
    """A prompt as text or as token ids: exactly one of the two is not None."""

    text: str | None
    token_ids: list[int] | None


class CompletionRequest(NamedTuple):
    """One completion to be streamed. `top_k` 0 is off; `seed` lies in 0..2**63-1."""

    prompt: Prompt
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    ignore_eos: bool


class Piece(NamedTuple):
    """The text that came as one: of one token if `token_id` is known, of one or more if it is NO_TOKEN_ID."""

    text: str
    token_id: int


class Usage(NamedTuple):
    """The upstream's own counts; NOT_TOLD where it does not tell."""

    prompt_tokens: int
    completion_tokens: int


UNKNOWN_USAGE: Final = Usage(NOT_TOLD, NOT_TOLD)


class Finish(NamedTuple):
    """How a stream has ended: `reason` is "stop" or "length".

    `is_cut`: the server had not ended it yet, and its connection was closed here: it takes a moment to notice.
    """

    reason: str
    usage: Usage
    is_cut: bool = False


class Delta(NamedTuple):
    """What one event of a stream says. `is_done`: nothing that matters comes after it."""

    pieces: list[Piece]
    finish_reason: str | None
    usage: Usage | None
    is_done: bool


class DeltaReader(Protocol):
    """Reads the events of one stream, in order."""

    def read(self, data: bytes) -> Delta:
        """What an event's data says.

        Raises UpstreamRefused if the event is the upstream's refusal of the request, UpstreamBroken if it is another
        error, or malformed.
        """


class Dialect(Protocol):
    """How a kind of model server is asked for a completion, and how its stream is read."""

    @property
    def name(self) -> str:
        """For the log and for messages."""

    def path_of(self, base_url: str) -> str:
        """The URL that completions are posted to."""

    def body(self, request: CompletionRequest, model: str) -> bytes:
        """The JSON that is posted."""

    def reader(self) -> DeltaReader:
        """A reader for one stream."""


class Found(NamedTuple):
    """What a model server tells about itself. 0 slots or context tokens: it does not tell.

    `context_tokens` is the longest sequence, prompt and output together: of one slot, where there are slots.
    """

    model: str
    slots: int
    context_tokens: int
    dialect: Dialect
    is_listed: bool = True  # False: the server lists models, and the one that is asked for is not among them

    def is_like(self, other: "Found") -> bool:
        """Whether two looks have found the same."""
        return self._replace(dialect=other.dialect) == other and self.dialect.name == other.dialect.name

"""The flags of `ironbatch bench`: name, default, bounds and help, each said once."""

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from ironbatch import limits
from ironbatch.errors import ConfigError
from ironbatch.limits import Bound, quoted

CONCURRENCY: Final = Bound(1, 16_384)  # one connection each, all from one address to one port
TOTAL_REQUESTS: Final = Bound(1, 100_000_000)
PROMPT_TOKENS: Final = Bound(1, limits.MAX_MODEL_LEN.high)
MAX_NEW_TOKENS: Final = Bound(0, limits.MAX_MODEL_LEN.high)
TIMEOUT_MIN_S: Final = 0.001
TIMEOUT_MAX_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag: how `--help` shows it, and a reader that raises ValueError with the value and its bound."""

    name: str
    default: str | None
    metavar: str
    help: str
    read: Callable[[str], object]

    @property
    def text(self) -> str:
        """Such as `--total-requests`."""
        return "--" + self.name.replace("_", "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """The parameters of a run, valid. `url` has no trailing slash; `json` is a path or None."""

    url: str
    concurrency: int
    total_requests: int
    prompt_tokens: int
    max_new_tokens: int
    timeout_s: float
    json: str | None

    @classmethod
    def read(cls, arguments: argparse.Namespace) -> "BenchOptions":
        """Read what `add_arguments` had parsed. Raises ConfigError with all problems, by flag."""
        values: dict[str, Any] = {}
        problems = []
        for flag in FLAGS:
            text = getattr(arguments, flag.name)
            try:
                values[flag.name] = None if text is None else flag.read(str(text))
            except ValueError as error:
                problems.append(f"{flag.text}: {error}")
        if problems:
            raise ConfigError(problems)
        return cls(**values)


def _read_timeout(text: str) -> float:
    bound = f"between {TIMEOUT_MIN_S:g} and {TIMEOUT_MAX_S:g}"
    if re.fullmatch(r"-?([0-9]+\.?[0-9]*|\.[0-9]+)", text) is None:
        raise ValueError(f"{quoted(text)} is not a number of seconds {bound}")
    if not TIMEOUT_MIN_S <= float(text) <= TIMEOUT_MAX_S:
        raise ValueError(f"{quoted(text)} is not {bound} seconds")
    return float(text)


def _read_url(text: str) -> str:
    wanted = "use one such as http://127.0.0.1:8080"
    if len(text) > limits.MAX_URL_CHARS:
        raise ValueError(f"{len(text)} characters are over the limit of {limits.MAX_URL_CHARS}")
    if "@" in text:
        # Not quoted: a password would reach the terminal and the log.
        raise ValueError(f"it holds an @, and /generate takes no user name or password; {wanted}")
    if re.fullmatch(r"[\x21-\x7e]+", text) is None:
        raise ValueError(f"{quoted(text)} is empty or holds a space or a character outside ASCII; {wanted}")
    try:
        parts = urlsplit(text)
        port = parts.port  # raises for one that is no port
    except ValueError as error:
        raise ValueError(f"{quoted(text)} is not a URL ({error}); {wanted}") from None
    if parts.scheme not in {"http", "https"} or not parts.hostname or port == 0:
        raise ValueError(f"{quoted(text)} is not an http:// or https:// URL with a host; {wanted}")
    if "?" in text or "#" in text:
        raise ValueError(f"{quoted(text)} holds a query or a fragment, but /generate follows it; {wanted}")
    return text.rstrip("/")


def _read_path(text: str) -> str:
    if not text or "\0" in text:
        raise ValueError(f"{quoted(text)} is not the path of a file")
    return text


FLAGS: Final = (
    Flag("url", "http://127.0.0.1:8080", "URL", "the server; requests go to URL/generate", _read_url),
    Flag(
        "concurrency",
        "128",
        "COUNT",
        f"requests in flight at a time; {CONCURRENCY.low}..{CONCURRENCY.high}",
        CONCURRENCY.read,
    ),
    Flag(
        "total_requests",
        "2000",
        "COUNT",
        f"requests to send; {TOTAL_REQUESTS.low}..{TOTAL_REQUESTS.high}",
        TOTAL_REQUESTS.read,
    ),
    Flag(
        "prompt_tokens",
        "128",
        "TOKENS",
        f"length of each prompt; {PROMPT_TOKENS.low}..{PROMPT_TOKENS.high}",
        PROMPT_TOKENS.read,
    ),
    Flag(
        "max_new_tokens",
        "64",
        "TOKENS",
        f"tokens to ask for in each request; {MAX_NEW_TOKENS.low}..{MAX_NEW_TOKENS.high}",
        MAX_NEW_TOKENS.read,
    ),
    Flag(
        "timeout_s",
        "60",
        "SECONDS",
        f"a request without progress for so long has failed; {TIMEOUT_MIN_S:g}..{TIMEOUT_MAX_S:g}",
        _read_timeout,
    ),
    Flag("json", None, "FILE", "also write the figures to this file, as JSON", _read_path),
)

"""Readers of the bench flags' values. Each raises ValueError naming the value, its bound and the remedy."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from ironbatch import limits
from ironbatch.bench.lengths import NUMBER_PATTERN
from ironbatch.limits import quoted

MAX_PERCENTILES = 10
PLOT_SUFFIXES = (".svg", ".png", ".pdf")


@dataclass(frozen=True, slots=True)
class FloatBound:
    """The numbers from `low` to `high`, both included, in `unit`."""

    low: float
    high: float
    unit: str = ""

    def __str__(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        return f"between {self.low:g} and {self.high:g}{unit}"

    def read(self, text: str) -> float:
        """The number that `text` says: digits and a point."""
        if NUMBER_PATTERN.fullmatch(text.removeprefix("-")) is None:
            raise ValueError(f"{quoted(text)} is not a number; give one {self}")
        if not self.low <= float(text) <= self.high:
            raise ValueError(f"{quoted(text)} is not {self}; use {self.low:g} or more, {self.high:g} or less")
        return float(text)


@dataclass(frozen=True, slots=True)
class RampRange:
    """The request rates, a second, between which a ramp searches."""

    low: float
    high: float


def ramp_reader(bound: FloatBound) -> Callable[[str], RampRange]:
    """A reader of LOW:HIGH, both in the bound."""

    def read(text: str) -> RampRange:
        low_text, colon, high_text = text.partition(":")
        if not colon:
            raise ValueError(f"{quoted(text)} does not have the form LOW:HIGH; use one such as 1:200")
        low, high = bound.read(low_text), bound.read(high_text)
        if low >= high:
            raise ValueError(f"{quoted(text)} has a LOW that is not under its HIGH; use one such as 1:200")
        return RampRange(low, high)

    return read


def read_percentiles(text: str) -> tuple[float, ...]:
    """Percentiles in ascending order, each once."""
    bound = FloatBound(0, 100)
    words = text.split(",")
    if len(words) > MAX_PERCENTILES:
        raise ValueError(f"{len(words)} percentiles are over the limit of {MAX_PERCENTILES}; leave some out")
    return tuple(sorted({bound.read(word.strip()) for word in words}))


def read_url(text: str) -> str:
    """An http or https URL without its trailing slash."""
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


def read_path(text: str) -> str:
    """The path of a file, which need not exist."""
    if not text or "\0" in text:
        raise ValueError(f"{quoted(text)} is not the path of a file")
    return text


def read_plot_path(text: str) -> str:
    """The path of a file whose suffix says how to draw it."""
    path = read_path(text)
    if os.path.splitext(path)[1].lower() not in PLOT_SUFFIXES:
        raise ValueError(f"{quoted(text)} does not end in {', '.join(PLOT_SUFFIXES)}; give it one of these suffixes")
    return path

"""Token counts of requests: one number for all, or drawn from a distribution."""

import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ironbatch.limits import Bound, quoted

NUMBER_PATTERN: Final = re.compile(r"[0-9]{1,20}(\.[0-9]{0,20})?|\.[0-9]{1,20}")
"""Digits and a point: no sign, exponent, underscore or space."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """A distribution of whole numbers: drawn, rounded, and clamped to `bound`.

    `text` is what the user wrote, such as `lognormal:512:0.8`; a bare number is the constant distribution.
    """

    text: str
    kind: str
    parameters: tuple[float, ...]
    bound: Bound

    def sample(self, generator: random.Random) -> int:
        """The next length, in tokens."""
        drawn = _KINDS[self.kind].draw(generator, self.parameters)
        # Compared before it is rounded: a lognormal draw may be infinite.
        return round(min(max(drawn, self.bound.low), self.bound.high))

    @property
    def json_value(self) -> int | str:
        """A constant as a number, all others as the user wrote them."""
        return round(self.parameters[0]) if self.kind == CONSTANT else self.text


@dataclass(frozen=True, slots=True)
class _Kind:
    """The parameters' names, and how to draw."""

    parameters: tuple[str, ...]
    draw: Callable[[random.Random, tuple[float, ...]], float]


def _lognormal(generator: random.Random, parameters: tuple[float, ...]) -> float:
    median, sigma = parameters
    try:
        return median * math.exp(sigma * generator.gauss(0.0, 1.0))
    except OverflowError:
        return math.inf


CONSTANT: Final = "constant"

_KINDS: Final = {
    CONSTANT: _Kind(("TOKENS",), lambda _, parameters: parameters[0]),
    "uniform": _Kind(("LOW", "HIGH"), lambda generator, ends: generator.randint(round(ends[0]), round(ends[1]))),
    "normal": _Kind(("MEAN", "STDDEV"), lambda generator, parameters: generator.gauss(*parameters)),
    "lognormal": _Kind(("MEDIAN", "SIGMA"), _lognormal),
    "exponential": _Kind(("MEAN",), lambda generator, parameters: generator.expovariate(1.0 / parameters[0])),
}

FORMS: Final = tuple(":".join((kind, *_KINDS[kind].parameters)) for kind in _KINDS if kind != CONSTANT)
"""The distributions as `--help` and messages show them."""

_MAX_SIGMA: Final = 10.0


def read_distribution(text: str, bound: Bound) -> Distribution:
    """Read a number or a distribution. Raises ValueError naming the value, the bound and the remedy."""
    kind, colon, rest = text.partition(":")
    if not colon:
        return Distribution(text, CONSTANT, (float(bound.read(text)),), bound)
    if kind == CONSTANT or kind not in _KINDS:
        raise ValueError(f"{quoted(text)} is no distribution; use a number {bound}, or one of {', '.join(FORMS)}")
    names, words = _KINDS[kind].parameters, rest.split(":")
    if len(words) != len(names):
        raise ValueError(f"{quoted(text)} does not have the form {kind}:{':'.join(names)}; use that form")
    parameters = tuple(_read_parameter(name, word, text, bound) for name, word in zip(names, words, strict=True))
    if kind == "uniform" and parameters[0] > parameters[1]:
        raise ValueError(f"{quoted(text)} has a LOW over its HIGH; use uniform:{words[1]}:{words[0]}")
    return Distribution(text, kind, parameters, bound)


def _read_parameter(name: str, word: str, text: str, bound: Bound) -> float:
    """One parameter: those that are a length lie in the bound, a spread lies between 0 and its own limit."""
    if NUMBER_PATTERN.fullmatch(word) is None:
        raise ValueError(f"{quoted(text)}: its {name} {quoted(word)} is not a number; give one such as 128 or 0.8")
    value = float(word)
    low, high = float(bound.low), float(bound.high)
    if name == "STDDEV":
        low = 0.0
    elif name == "SIGMA":
        low, high = 0.0, _MAX_SIGMA
    elif name in {"MEAN", "MEDIAN"}:
        low = max(low, 1.0)  # an exponential or lognormal distribution around 0 is none
    elif value != round(value):
        raise ValueError(f"{quoted(text)}: its {name} {word} is not a whole number; use {round(value)}")
    if not low <= value <= high:
        raise ValueError(
            f"{quoted(text)}: its {name} {word} is not between {low:.10g} and {high:.10g}; use one that is"
        )
    return value

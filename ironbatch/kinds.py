"""Kinds of options: how the text of a flag or a variable is read, and how a value is written."""

import dataclasses
import re
from collections.abc import Callable
from typing import Final

from ironbatch.limits import Bound, is_power_of_two, nearest_powers_of_two, quoted


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """How an option's text is read: its good values in few words, and a reader.

    The reader raises ValueError naming the value, the bound and the remedy. A value `v` is good if and only if
    `read(as_text(v)) == v`: what passes the check also survives the way through an environment variable.
    """

    bounds: str
    read: Callable[[str], object]


def as_text(value: object) -> str:
    """A value as flags, variables and reports have it: true and false in small letters."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def whole_number(bound: Bound) -> Kind:
    """A whole number within `bound`."""
    return Kind(f"{bound.low}..{bound.high}", bound.read)


def power_of_two(bound: Bound) -> Kind:
    """A power of two within `bound`."""

    def read(text: str) -> int:
        value = bound.read(text)
        if is_power_of_two(value):
            return value
        remedy = " or ".join(map(str, nearest_powers_of_two(value, bound)))
        raise ValueError(f"{value} is not a power of two {bound}; use {remedy}")

    return Kind(f"{bound.low}..{bound.high}, a power of two", read)


def choice(*words: str) -> Kind:
    """One of some words, in small or capital letters."""

    def read(text: str) -> str:
        if text.lower() not in words:
            raise ValueError(f"{quoted(text)} is none of its values; use {' or '.join(words)}")
        return text.lower()

    return Kind(", ".join(words), read)


_SWITCH_WORDS: Final = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}


def _read_switch(text: str) -> bool:
    if text.lower() not in _SWITCH_WORDS:
        raise ValueError(f"{quoted(text)} is neither true nor false; use one of these")
    return _SWITCH_WORDS[text.lower()]


def _read_probability(text: str) -> float:
    if re.fullmatch(r"-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text) is None:
        raise ValueError(f"{quoted(text)} is not a number; give one between 0 and 1, such as 0.02")
    if not 0 <= float(text) <= 1:
        raise ValueError(f"{quoted(text)} is not between 0 and 1; use a probability such as 0.02")
    return float(text) + 0.0  # -0.0 becomes 0.0


SWITCH: Final = Kind("true or false", _read_switch)
PROBABILITY: Final = Kind("0..1", _read_probability)

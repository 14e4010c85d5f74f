"""Kinds of options: what is written can be read again. What each refuses is in test_config.py, option by option."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ironbatch.kinds import PROBABILITY, SWITCH, Kind, as_text, choice, power_of_two, whole_number
from ironbatch.limits import Bound

KINDS: dict[str, tuple[Kind, st.SearchStrategy[Any]]] = {
    "whole number": (whole_number(Bound(-50, 50)), st.integers(-50, 50)),
    "power of two": (power_of_two(Bound(1, 64)), st.sampled_from([1, 2, 4, 8, 16, 32, 64])),
    "choice": (choice("one", "two"), st.sampled_from(["one", "two"])),
    "switch": (SWITCH, st.booleans()),
    "probability": (PROBABILITY, st.floats(0, 1)),
}


@pytest.mark.parametrize("name", KINDS)
@given(draw=st.data())
def test_good_value_survives_the_way_through_text(name: str, draw: Any) -> None:
    kind, values = KINDS[name]
    value = draw.draw(values)
    read = kind.read(as_text(value))
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize("name", KINDS)
@given(text=st.text())
def test_other_text_is_refused_with_a_remedy(name: str, text: str) -> None:
    kind, _ = KINDS[name]
    if is_good(kind, text):
        value = kind.read(text)
        assert kind.read(as_text(value)) == value
        return
    with pytest.raises(ValueError, match=r"; (use|give) ") as caught:
        kind.read(text)
    assert "\n" not in str(caught.value)


def is_good(kind: Kind, text: str) -> bool:
    try:
        kind.read(text)
    except ValueError:
        return False
    return True


def test_text_of_a_value() -> None:
    assert [as_text(value) for value in (True, False, 1, 0.5, "x", "")] == ["true", "false", "1", "0.5", "x", ""]

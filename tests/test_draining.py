"""What whoever stops an engine says in the segment, and when all its workers have said that nothing is left."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ironbatch import layout
from ironbatch.draining import announce_drain, is_drained

NS_PER_S = 1_000_000_000
NOW_NS = 77 * NS_PER_S


def a_header() -> Any:
    return np.zeros(1, layout.HEADER)[0]


@given(st.integers(0, 86_400))
def test_streams_end_before_the_timeout_and_not_much_before(timeout_s: int) -> None:
    header = a_header()
    announce_drain(header, NOW_NS, timeout_s)
    assert header["draining"] == 1
    runs_s = (int(header["streams_end_ns"]) - NOW_NS) / NS_PER_S
    assert runs_s < timeout_s or timeout_s == runs_s == 0
    assert runs_s >= 0.9 * timeout_s - 1e-6
    assert runs_s >= timeout_s - 0.5 - 1e-6


def test_it_may_be_said_again_to_have_it_sooner() -> None:
    header = a_header()
    announce_drain(header, NOW_NS, 30)
    announce_drain(header, NOW_NS + 1, 0)
    assert header["streams_end_ns"] == NOW_NS + 1


def lanes(*words: tuple[int, int, int, int]) -> np.ndarray:  # type: ignore[type-arg]
    """Rows of (generation, dead, serving, drained)."""
    rows = np.zeros(len(words), layout.LANE)
    for row, values in zip(rows, words, strict=True):
        row["generation"], row["dead_generation"], row["serving_generation"], row["drained_generation"] = values
    return rows


@pytest.mark.parametrize(
    ("words", "drained"),
    [
        ([], True),
        ([(0, 0, 0, 0)], True),  # never held
        ([(1, 0, 1, 0)], False),
        ([(1, 0, 1, 1)], True),
        ([(2, 1, 2, 1)], False),  # its predecessor had said so
        ([(2, 2, 2, 0)], True),  # dead
        ([(3, 2, 2, 2)], True),  # starting: it has taken nothing yet
        ([(1, 0, 1, 1), (1, 0, 1, 0)], False),
        ([(1, 0, 1, 1), (4, 3, 4, 4), (0, 0, 0, 0)], True),
    ],
)
def test_all_that_serve_must_have_said_so(words: list[tuple[int, int, int, int]], drained: bool) -> None:  # noqa: FBT001
    assert is_drained(lanes(*words)) is drained

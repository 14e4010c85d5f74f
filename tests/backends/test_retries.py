"""How long the pauses between tries are."""

from __future__ import annotations

import pytest

from ironbatch.backends.retries import PAUSE_FIRST_S, PAUSE_MOST_S, pause_before
from ironbatch.upstream.problems import UpstreamBroken, UpstreamBusy


def pauses(problem: UpstreamBroken | UpstreamBusy, try_number: int) -> list[float]:
    return [pause_before(try_number, problem) for _ in range(200)]


@pytest.mark.parametrize("advised_s", [None, 0.0])
def test_pauses_grow_to_a_bound_and_are_never_nothing(advised_s: float | None) -> None:
    """Advice of no time at all is no advice: all would come back at once."""
    for try_number in (0, 1, 5, 50, 10_000):
        found = pauses(UpstreamBusy("full", advised_s), try_number)
        assert min(found) >= PAUSE_FIRST_S / 2
        assert max(found) <= PAUSE_MOST_S
    assert max(pauses(UpstreamBroken("x"), 0)) < min(pauses(UpstreamBroken("x"), 3))


def test_advice_is_followed_and_nobody_comes_back_at_the_same_moment() -> None:
    found = pauses(UpstreamBusy("full", 3.0), 0)
    assert 3.0 <= min(found) < max(found) <= 3.6
    assert len(set(found)) > 100

"""When the engine is healthy, and when its scheduler makes progress."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from ironbatch import layout
from ironbatch.health import HEALTH_GRACE_NS, NS_PER_S, health_problem, progress_problem

LONGEST_NS = 3 * NS_PER_S
NOW_NS = 1000 * NS_PER_S


def a_header(**words: int) -> Any:
    header = np.zeros(1, layout.HEADER)[0]
    healthy = {"scheduler_ready": 1, "heartbeat_ns": NOW_NS, "longest_step_ns": LONGEST_NS}
    for name, value in (healthy | words).items():
        header[name] = value
    return header


def test_a_scheduler_that_beats_is_healthy() -> None:
    assert health_problem(a_header(), NOW_NS) is None


@pytest.mark.parametrize(
    ("draining", "ready", "has_beaten", "is_late", "call"),
    list(itertools.product(*[[0, 1]] * 4, [layout.CALL_NONE, layout.CALL_STEP, layout.CALL_OPENING])),
)
def test_every_combination(draining: int, ready: int, has_beaten: int, is_late: int, call: int) -> None:
    header = a_header(
        draining=draining,
        scheduler_ready=ready,
        heartbeat_ns=NOW_NS - (LONGEST_NS + HEALTH_GRACE_NS + is_late) if has_beaten else 0,
        in_device_call=call,
    )
    problem = health_problem(header, NOW_NS)
    if draining:
        assert problem == "the engine is shutting down"
    elif not ready:
        assert problem is not None
        assert problem.startswith("the scheduler is starting, or opens its backend (start ")
    elif has_beaten and not is_late:
        assert problem is None
    else:
        silence_s = "5.0" if has_beaten else "1000.0"
        silence = f"the scheduler has made no progress for {silence_s} s"
        assert (
            problem
            == {
                layout.CALL_NONE: f"{silence}, outside its backend",
                layout.CALL_STEP: f"device hung: {silence}, in a call to its backend",
                layout.CALL_OPENING: f"the scheduler has lost its backend, and opens it anew for {silence_s} s",
            }[call]
        )


@pytest.mark.parametrize(("ready", "is_late"), list(itertools.product([0, 1], repeat=2)))
def test_a_device_that_hangs_is_called_so(ready: int, is_late: int) -> None:
    late_ns = (LONGEST_NS + HEALTH_GRACE_NS + 1) * is_late
    header = a_header(device_hung=1, scheduler_ready=ready, heartbeat_ns=NOW_NS - late_ns, scheduler_pid=4711)
    problem = health_problem(header, NOW_NS)
    assert problem is not None
    assert problem.startswith("device hung: the scheduler (process 4711) was killed and does not end")


@pytest.mark.parametrize("longest_ns", [0, 1, LONGEST_NS, 3_600 * NS_PER_S])
def test_a_step_may_take_as_long_as_its_backend_says_and_a_grace(longest_ns: int) -> None:
    last = NOW_NS - longest_ns - HEALTH_GRACE_NS
    header = a_header(longest_step_ns=longest_ns, heartbeat_ns=max(last, 0))
    at = int(header["heartbeat_ns"]) + longest_ns + HEALTH_GRACE_NS
    assert health_problem(header, at) is None
    assert health_problem(header, at + 1) is not None


@pytest.mark.parametrize(("draining", "ready"), list(itertools.product([0, 1], repeat=2)))
def test_progress_is_the_hearts_business_alone(draining: int, ready: int) -> None:
    header = a_header(draining=draining, scheduler_ready=ready)
    assert progress_problem(header, NOW_NS + LONGEST_NS + HEALTH_GRACE_NS) is None
    problem = progress_problem(header, NOW_NS + LONGEST_NS + HEALTH_GRACE_NS + 1)
    assert problem == "the scheduler has made no progress for 5.0 s, outside its backend"

"""When the engine is healthy, and what /metrics shows."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np
import pytest

from ironbatch import layout
from ironbatch.clock import FakeClock
from ironbatch.shm.segment import Segment
from ironbatch.web.status import HEALTH_GRACE_NS, HealthResource, MetricsResource, health_problem
from tests.support import small_config
from tests.web.fakes import in_loop

NS_PER_S = 1_000_000_000
LONGEST_NS = 3 * NS_PER_S
NOW_NS = 1000 * NS_PER_S


class FakeResponse:
    """What a resource writes to."""

    status: Any = 200
    content_type: str
    data: bytes
    retry_after: int | None = None


def a_header(**words: int) -> Any:
    header = np.zeros(1, layout.HEADER)[0]
    healthy = {"scheduler_ready": 1, "heartbeat_ns": NOW_NS, "longest_step_ns": LONGEST_NS}
    for name, value in (healthy | words).items():
        header[name] = value
    return header


def test_a_scheduler_that_beats_is_healthy() -> None:
    assert health_problem(a_header(), NOW_NS) is None


@pytest.mark.parametrize(
    ("draining", "ready", "has_beaten", "is_late", "in_device"), list(itertools.product([0, 1], repeat=5))
)
def test_every_combination(draining: int, ready: int, has_beaten: int, is_late: int, in_device: int) -> None:
    header = a_header(
        draining=draining,
        scheduler_ready=ready,
        heartbeat_ns=NOW_NS - (LONGEST_NS + HEALTH_GRACE_NS + is_late) if has_beaten else 0,
        in_device_call=in_device,
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
        where = "in a call to its backend" if in_device else "outside its backend"
        silent_s = "5.0" if has_beaten else "1000.0"
        assert problem == f"the scheduler has made no progress for {silent_s} s, {where}"


@pytest.mark.parametrize("longest_ns", [0, 1, LONGEST_NS, 3_600 * NS_PER_S])
def test_a_step_may_take_as_long_as_its_backend_says_and_a_grace(longest_ns: int) -> None:
    last = NOW_NS - longest_ns - HEALTH_GRACE_NS
    header = a_header(longest_step_ns=longest_ns, heartbeat_ns=max(last, 0))
    at = int(header["heartbeat_ns"]) + longest_ns + HEALTH_GRACE_NS
    assert health_problem(header, at) is None
    assert health_problem(header, at + 1) is not None


@in_loop
async def test_health_over_http() -> None:
    segment = Segment.create(small_config(), 0)
    clock = FakeClock(NOW_NS)
    resource = HealthResource(segment, clock)
    segment.header["scheduler_ready"] = 1
    segment.header["heartbeat_ns"] = NOW_NS
    answer: Any = FakeResponse()
    await resource.on_get(None, answer)  # type: ignore[arg-type]
    assert (answer.status, answer.data, answer.retry_after) == (200, b'{"status":"ok"}', None)
    clock.advance_ns(HEALTH_GRACE_NS + 1)
    answer = FakeResponse()
    await resource.on_get(None, answer)  # type: ignore[arg-type]
    assert str(answer.status).startswith("503")
    assert answer.retry_after == 1
    assert msgspec.json.decode(answer.data)["reason"].startswith("the scheduler has made no progress for 2.0 s")
    segment.close()


@in_loop
async def test_metrics_begin_with_these_keys_and_are_whole_numbers() -> None:
    config = small_config()
    segment = Segment.create(config, 5 * NS_PER_S)
    segment.metrics[0]["tokens_generated"] = 100
    segment.metrics[2]["requests_completed"] = 3
    answer: Any = FakeResponse()
    await MetricsResource(segment, FakeClock(15 * NS_PER_S + 1)).on_get(None, answer)  # type: ignore[arg-type]
    found = msgspec.json.decode(answer.data)
    assert list(found)[:6] == [
        "elapsed_secs",
        "tokens_generated",
        "requests_completed",
        "tokens_per_sec",
        "ttft_p50_ms",
        "ttft_p99_ms",
    ]
    assert [found[name] for name in list(found)[:6]] == [10, 100, 3, 9, 0, 0]
    assert all(type(value) is int for value in found.values())
    assert {"running", "waiting", "kv_blocks_free", "preemptions", "steps"} <= found.keys()
    assert {f"inter_token_p{percent}_us" for percent in (50, 90, 99)} <= found.keys()
    assert found["kv_blocks_free"] == config.total_kv_blocks
    assert answer.content_type == "application/json"
    segment.close()

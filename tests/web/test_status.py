"""What /health and /metrics show; when the engine is healthy is tests/test_health.py's business."""

from __future__ import annotations

from typing import Any

import msgspec

from ironbatch.clock import FakeClock
from ironbatch.health import HEALTH_GRACE_NS
from ironbatch.shm.segment import Segment
from ironbatch.web.status import HealthResource, MetricsResource
from tests.support import small_config
from tests.web.fakes import in_loop

NS_PER_S = 1_000_000_000
NOW_NS = 1000 * NS_PER_S


class FakeResponse:
    """What a resource writes to."""

    status: Any = 200
    content_type: str
    data: bytes
    retry_after: int | None = None


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

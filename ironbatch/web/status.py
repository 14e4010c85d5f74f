"""`GET /health` and `GET /metrics`."""

from __future__ import annotations

from typing import Any

import falcon
import msgspec
from falcon.asgi import Request, Response

from ironbatch.clock import Clock
from ironbatch.errors import RETRY_AFTER_S
from ironbatch.metrics import snapshot
from ironbatch.shm.segment import Segment

NS_PER_S = 1_000_000_000
HEALTH_GRACE_NS = 2 * NS_PER_S
"""How long beyond the backend's declared longest step the heart may miss its beat."""


def health_problem(header: Any, now_ns: int) -> str | None:
    """Why the engine cannot serve now, or None when it can.

    It asks for progress, not for life: a scheduler that is stopped, or hangs in its device, still has a pid.
    """
    if header["draining"]:
        return "the engine is shutting down"
    if not header["scheduler_ready"]:
        return f"the scheduler is starting, or opens its backend (start {header['epoch']}); the server's log says more"
    silent_ns = now_ns - int(header["heartbeat_ns"])
    if silent_ns > int(header["longest_step_ns"]) + HEALTH_GRACE_NS:
        where = "in a call to its backend" if header["in_device_call"] else "outside its backend"
        return f"the scheduler has made no progress for {silent_ns / NS_PER_S:.1f} s, {where}"
    return None


class HealthResource:
    """200 while the scheduler makes progress, else 503 with the reason."""

    def __init__(self, segment: Segment, clock: Clock) -> None:
        self._header = segment.header
        self._clock = clock

    async def on_get(self, req: Request, resp: Response) -> None:
        """GET or HEAD /health."""
        problem = health_problem(self._header, self._clock.now_ns())
        resp.content_type = falcon.MEDIA_JSON
        if problem is None:
            resp.data = b'{"status":"ok"}'
            return
        resp.status = falcon.HTTP_503
        resp.retry_after = RETRY_AFTER_S
        resp.data = msgspec.json.encode({"status": "unavailable", "reason": problem})

    on_head = on_get


class MetricsResource:
    """The counters of all processes."""

    def __init__(self, segment: Segment, clock: Clock) -> None:
        self._segment = segment
        self._clock = clock

    async def on_get(self, req: Request, resp: Response) -> None:
        """GET or HEAD /metrics."""
        elapsed_ns = self._clock.now_ns() - int(self._segment.header["created_ns"])
        resp.content_type = falcon.MEDIA_JSON
        resp.data = msgspec.json.encode(snapshot(self._segment.metrics, elapsed_ns))

    on_head = on_get

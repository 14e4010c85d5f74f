"""`GET /health` and `GET /metrics`."""

from __future__ import annotations

import falcon
import msgspec
from falcon.asgi import Request, Response

from ironbatch.clock import Clock
from ironbatch.errors import RETRY_AFTER_S
from ironbatch.health import health_problem
from ironbatch.metrics import snapshot
from ironbatch.shm.segment import Segment


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

"""`POST /generate`: one request in, a line a token out."""

from __future__ import annotations

from falcon.asgi import Request, Response

from ironbatch.clock import Clock
from ironbatch.config import Config
from ironbatch.errors import EngineUnavailable, RequestRejected
from ironbatch.health import health_problem
from ironbatch.layout import FINISH_LENGTH
from ironbatch.shm.segment import Segment
from ironbatch.web.body import read_body
from ironbatch.web.collector import TokenCollector
from ironbatch.web.request import GenerateRequest, parse_request
from ironbatch.web.stream import FINISH_NAMES, NDJSON, Exit, TokenStream, last_line

EXIT_KEY = "ironbatch.exit"
"""Where the request's `Exit` stands in its ASGI scope."""


class GenerateResource:
    """Streams tokens as they are published.

    Args:
        config: limits of a request.
        segment: for the engine's state.
        collector: this worker's half of the protocol.
        clock: where "now" comes from.
    """

    def __init__(self, config: Config, segment: Segment, collector: TokenCollector, clock: Clock) -> None:
        self._max_request_tokens = config.max_request_tokens
        self._max_body_bytes = config.max_body_bytes
        self._default_seed = config.seed
        self._header = segment.header
        self._collector = collector
        self._counters = collector.counters
        self._clock = clock

    async def on_post(self, req: Request, resp: Response) -> None:
        """POST /generate. Raises RequestRejected, which becomes a JSON error."""
        self._counters["requests_received"] += 1
        way_out: Exit = req.scope[EXIT_KEY]
        try:
            if problem := health_problem(self._header, self._clock.now_ns()):
                raise EngineUnavailable(problem)
            body = await read_body(req, self._max_body_bytes)
            request = parse_request(body, self._max_request_tokens, self._default_seed)
            if request.max_new_tokens == 0:
                self._answer_without_tokens(request, resp)
                return
            stream = self._collector.submit(request, way_out)
        except RequestRejected as problem:
            self._counters["requests_unavailable" if problem.retry_after_s else "requests_rejected"] += 1
            raise
        await self._follow(stream)

    async def _follow(self, stream: TokenStream) -> None:
        """Wait for the stream's end; whatever ends the wait before that frees the slot."""
        outcome = "requests_failed"
        try:
            await stream.ended
            outcome = "requests_failed" if stream.is_failure else "requests_completed"
        except RequestRejected:  # the sequence ended with an error before its first token
            raise
        except Exception:
            self._collector.cancel(stream)
            raise
        except BaseException:  # the server cancels a request whose client has gone
            outcome = "requests_cancelled"
            self._collector.cancel(stream)
            raise
        finally:
            self._counters[outcome] += 1

    def _answer_without_tokens(self, request: GenerateRequest, resp: Response) -> None:
        resp.content_type = NDJSON
        resp.data = last_line(0)
        if request.details:
            resp.data = b'{"token_index":0,"done":true,"finish_reason":"%b"}\n' % FINISH_NAMES[FINISH_LENGTH].encode()
        self._counters["requests_completed"] += 1

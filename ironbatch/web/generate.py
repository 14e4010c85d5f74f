"""`POST /generate`: one request in, a line a token out."""

from __future__ import annotations

import asyncio

from falcon.asgi import Request, Response

from ironbatch.clock import Clock
from ironbatch.config import Config
from ironbatch.errors import EngineUnavailable, RequestRejected
from ironbatch.health import health_problem
from ironbatch.layout import FINISH_LENGTH
from ironbatch.shm.segment import Segment
from ironbatch.text.tokenizer import Tokenizer
from ironbatch.text_rows import NO_USAGE
from ironbatch.web.body import read_body
from ironbatch.web.collector import TokenCollector
from ironbatch.web.json_body import decode_body
from ironbatch.web.lines import NO_STATS, choice_tag, finish_part, last_line, text_part, usage_part
from ironbatch.web.prompts import PromptReader
from ironbatch.web.request import GenerateRequest, RequestLimits, parse_request
from ironbatch.web.stream import NDJSON, Exit, TokenStream
from ironbatch.web.timeouts import Timeouts

EXIT_KEY = "ironbatch.exit"
"""Where the request's `Exit` stands in its ASGI scope."""


class GenerateResource:
    """Streams tokens as they are published.

    Args:
        config: limits of a request.
        segment: for the engine's state.
        collector: this worker's half of the protocol.
        tokenizer: of prompts that are text; None for a backend that takes them as they are.
        clock: where "now" comes from.
    """

    def __init__(
        self, config: Config, segment: Segment, collector: TokenCollector, tokenizer: Tokenizer | None, clock: Clock
    ) -> None:
        self._limits = RequestLimits(
            config.max_request_tokens, config.num_slots, config.total_kv_blocks, config.kv_block_size
        )
        self._max_body_bytes = config.max_body_bytes
        self._default_seed = config.seed
        self._prompts = PromptReader(tokenizer, int(segment.header["text_row_bytes"]))
        self._header = segment.header
        self._collector = collector
        self._timeouts = Timeouts(collector, config.queue_timeout_s, clock)
        self._counters = collector.counters
        self._clock = clock

    async def on_post(self, req: Request, resp: Response) -> None:
        """POST /generate. Raises RequestRejected, which becomes a JSON error."""
        self._counters["requests_received"] += 1
        way_out: Exit = req.scope[EXIT_KEY]
        try:
            # Read first: an answer before the body's end would be lost where its rest meets a closed connection.
            body = await read_body(req, self._max_body_bytes)
            if problem := health_problem(self._header, self._clock.now_ns()):
                raise EngineUnavailable(problem)
            fields, limits = decode_body(body), self._limits_now()
            prompt = await self._prompts.read(fields, limits.max_request_tokens)
            request = parse_request(fields, prompt, limits, self._default_seed)
            if request.max_new_tokens == 0:
                self._answer_without_tokens(request, resp)
                return
            stream = self._collector.submit(request, way_out)
        except RequestRejected as problem:
            self._counters["requests_unavailable" if problem.retry_after_s else "requests_rejected"] += 1
            raise
        await self._follow(stream, self._timeouts.start(stream, request, way_out.arrival_ns))

    def _limits_now(self) -> RequestLimits:
        """The configuration's limits, and narrower ones of a device that is open."""
        configured = self._limits
        longest = int(self._header["longest_request_tokens"]) or configured.max_request_tokens
        most = int(self._header["most_choices"]) or configured.most_choices
        return configured._replace(
            max_request_tokens=min(configured.max_request_tokens, longest),
            most_choices=min(configured.most_choices, most),
        )

    async def _follow(self, stream: TokenStream, timers: list[asyncio.TimerHandle]) -> None:
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
            for timer in timers:
                timer.cancel()
            self._counters[outcome] += 1

    def _answer_without_tokens(self, request: GenerateRequest, resp: Response) -> None:
        texts = self._collector.texts
        text = text_part("") if texts.has_lines(request) else b""
        usage = usage_part(NO_USAGE) if texts.has_rows else b""
        more = finish_part(FINISH_LENGTH) + NO_STATS.part + usage if request.details else b""
        tags = (choice_tag(index, request.choices) for index in range(request.choices))
        resp.content_type = NDJSON
        resp.data = b"".join(last_line(0, tag + text, more) for tag in tags)
        self._counters["requests_completed"] += 1

"""The ASGI application of one web worker: `gunicorn -c deploy/gunicorn.conf.py ironbatch.web.app:app`.

gunicorn imports this module in each worker, after the fork; what the worker is to use stands in its environment.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import falcon
import falcon.asgi
import msgspec
from falcon.asgi import Request, Response, WebSocket

from ironbatch.clock import Clock, MonotonicClock
from ironbatch.config import Config
from ironbatch.errors import EngineUnavailable, RequestRejected, StartError
from ironbatch.shm.engine import Engine
from ironbatch.text.tokenizer import create_tokenizer
from ironbatch.web.body import announced_problem, body_missing
from ironbatch.web.collector import TokenCollector
from ironbatch.web.drain import WORKER_KEY, Drain
from ironbatch.web.generate import EXIT_KEY, GenerateResource
from ironbatch.web.json_body import error_body
from ironbatch.web.lanes import LANE_VARIABLE
from ironbatch.web.request_id import RequestIds
from ironbatch.web.status import HealthResource, MetricsResource
from ironbatch.web.stream import Exit, Send
from ironbatch.web.wire import Wire

_log = logging.getLogger("ironbatch.web")

FalconApp = falcon.asgi.App[Request, Response]
Application = Callable[[dict[str, Any], Callable[[], Awaitable[Any]], Send], Awaitable[None]]


LANELESS_LIFE_S = 1.0
"""How long a worker without a lane answers 503 before it makes room for one that may get a lane."""


class ShortLife:
    """Falcon middleware: this worker ends soon, and its successor is given a lane if one has become free."""

    async def process_startup(self, scope: Mapping[str, Any], event: Mapping[str, Any]) -> None:
        """Before the worker listens."""
        asyncio.get_running_loop().call_later(LANELESS_LIFE_S, os.kill, os.getpid(), signal.SIGTERM)


class Lifespan:
    """Falcon middleware: the collector lives as long as the worker's event loop, and so does the watch for its end."""

    def __init__(self, collector: TokenCollector, drain: Drain) -> None:
        self._collector = collector
        self._drain = drain

    async def process_startup(self, scope: Mapping[str, Any], event: Mapping[str, Any]) -> None:
        """Before the worker listens."""
        loop = asyncio.get_running_loop()
        self._drain.start(loop, scope.get("state", {}).pop(WORKER_KEY, None))
        self._collector.start(loop, os.getpid())

    async def process_shutdown(self, scope: Mapping[str, Any], event: Mapping[str, Any]) -> None:
        """After the last connection."""
        self._drain.stop()
        self._collector.stop(asyncio.get_running_loop())


def create_app(environ: Mapping[str, str], clock: Clock) -> Application:
    """The application of the worker that `environ` describes; one that answers 503 when there is no engine for it."""
    try:
        engine = Engine.from_environ(environ)
    except StartError as problem:
        _log.error("this worker can serve nothing: %s; restart the server", problem)
        return _unavailable(str(problem))
    if LANE_VARIABLE not in environ:
        return _unavailable("this worker holds no lane; it ends, and the next may have one", ShortLife())
    config = Config.load({}, environ)
    try:
        tokenizer = create_tokenizer(config)
    except StartError as problem:  # its file has changed since the server's start
        _log.error("this worker can serve nothing: %s", problem)
        return _unavailable(str(problem))
    engine.segment.populate()
    lane, generation = map(int, environ[LANE_VARIABLE].split(":"))
    collector = TokenCollector(engine, lane, generation, clock, tokenizer)
    falcon_app = _falcon_app()
    drain = Drain(collector, engine.segment.header, clock, config.drain_timeout_s)
    falcon_app.add_middleware(Lifespan(collector, drain))
    falcon_app.add_route("/generate", GenerateResource(config, engine.segment, collector, tokenizer, clock))
    falcon_app.add_route("/metrics", MetricsResource(engine.segment, clock))
    falcon_app.add_route("/health", HealthResource(engine.segment, clock))
    return _with_exits(falcon_app, config.max_body_bytes, clock, drain)


def _unavailable(reason: str, *middleware: ShortLife) -> Application:
    """Answers everything with 503."""

    async def answer(req: Request, resp: Response | None, ws: WebSocket | None = None, **parts: str) -> None:
        if ws is not None:
            await ws.close()
            return
        raise EngineUnavailable(reason)

    falcon_app = _falcon_app()
    falcon_app.add_middleware(middleware)
    falcon_app.add_sink(answer)
    request_ids = RequestIds()

    async def application(scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], send: Send) -> None:
        way_out = Exit(send, 0, headers=request_ids.begin(scope)) if scope["type"] == "http" else send
        await falcon_app(scope, receive, way_out)

    return application


def _with_exits(falcon_app: FalconApp, max_body_bytes: int, clock: Clock, drain: Drain) -> Application:
    """Give each HTTP request its id, and its `Exit`, which a stream may take past Falcon; count them for the drain.

    Falcon waits for the beginning of the body before it does anything. So a body that is announced as too large is
    refused here, and so is one that never comes: the server ends the wait for it, and Falcon then answers nothing.
    """
    request_ids = RequestIds()

    async def application(scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], send: Send) -> None:
        if scope["type"] != "http":
            await falcon_app(scope, receive, send)
            return
        headers = request_ids.begin(scope)
        way_out = scope[EXIT_KEY] = Exit(send, clock.now_ns(), Wire.of(scope, receive), headers)
        drain.begun += 1
        try:
            problem = announced_problem(scope["headers"], max_body_bytes)
            if problem is None:
                problem = await _run(falcon_app, scope, receive, way_out)
            if problem is not None:
                await _answer_directly(way_out, problem, has_body=scope["method"] != "HEAD")
        finally:
            drain.ended += 1
            if _log.isEnabledFor(logging.DEBUG):
                _log.debug("%s %s: %s", scope["method"], scope["path"], way_out.status or "the client has gone")

    return application


async def _run(
    falcon_app: FalconApp, scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], way_out: Exit
) -> RequestRejected | None:
    """What is left to answer when Falcon is done."""
    try:
        await falcon_app(scope, receive, way_out)
    except RequestRejected as refusal:  # `receive` has it of the connection: the body will not come
        return refusal
    return None if way_out.has_answered else body_missing()


async def _answer_directly(way_out: Exit, problem: RequestRejected, *, has_body: bool) -> None:
    body = msgspec.json.encode(error_body(problem.type, problem.message, problem.param))
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await way_out({"type": "http.response.start", "status": problem.status, "headers": headers})
    await way_out({"type": "http.response.body", "body": body if has_body else b"", "more_body": False})


def _falcon_app() -> FalconApp:
    app: FalconApp = falcon.asgi.App()
    app.add_error_handler(RequestRejected, _answer_rejected)
    app.add_error_handler(Exception, _answer_bug)
    app.set_error_serializer(_answer_http_error)
    return app


async def _answer_rejected(req: Request, resp: Response, problem: RequestRejected, params: dict[str, Any]) -> None:
    resp.status = problem.status
    resp.content_type = falcon.MEDIA_JSON
    resp.data = msgspec.json.encode(error_body(problem.type, problem.message, problem.param))
    if problem.retry_after_s is not None:
        resp.retry_after = problem.retry_after_s


async def _answer_bug(req: Request, resp: Response, problem: Exception, params: dict[str, Any]) -> None:
    _log.error("%s %s failed", req.method, req.path, exc_info=problem)
    resp.status = 500
    resp.content_type = falcon.MEDIA_JSON
    resp.data = msgspec.json.encode(error_body("internal_error", "a fault of the server; its log says more"))


def _answer_http_error(req: Request, resp: Response, problem: falcon.HTTPError) -> None:
    kinds = {400: "bad_request", 404: "not_found", 405: "method_not_allowed"}
    messages = {
        404: f"there is no {req.path[:200]}; POST /generate, GET /metrics and GET /health are here",
        405: f"{req.method[:20]} is not allowed on {req.path[:200]}; use {resp.get_header('allow')}",
    }
    error_type = kinds.get(problem.status_code, "http_error")
    message = messages.get(problem.status_code) or problem.description or problem.title or str(problem.status)
    resp.content_type = falcon.MEDIA_JSON
    resp.data = msgspec.json.encode(error_body(error_type, message))


app = create_app(os.environ, MonotonicClock())

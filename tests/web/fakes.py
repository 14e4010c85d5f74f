"""An ASGI server in the test's hands: its `send`, one request through an application, and the loop they run on."""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import uvloop
from gunicorn.config import Config

DEADLINE_S = 20.0


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test on uvloop, as the web workers do; one that hangs fails."""

    def run(*args: Any, **options: Any) -> None:
        async def bounded() -> None:
            await asyncio.wait_for(test(*args, **options), DEADLINE_S)

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(bounded())

    functools.update_wrapper(run, test)
    run.__signature__ = inspect.signature(test)  # type: ignore[attr-defined]
    return run


async def until(condition: Callable[[], Any], what: str = "the condition") -> None:
    """Let the loop turn until `condition()` is true; fail after the deadline."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + DEADLINE_S / 2
    while not condition():
        assert loop.time() < deadline, f"{what} did not come true"
        await asyncio.sleep(0)


async def turn(times: int = 5) -> None:
    """Let everything that is ready run. Only where the claim is that nothing happens."""
    for _ in range(times):
        await asyncio.sleep(0)


class FakeSend:
    """What a server calls `send`. As gunicorn's, it writes first, then waits while the socket's buffer is full."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.problem: BaseException | None = None
        self._writable: asyncio.Future[None] | None = None

    async def __call__(self, message: dict[str, Any]) -> None:
        if self.problem is not None:
            raise self.problem
        self.messages.append(message)
        if message["type"] == "http.response.body" and self._writable is not None:
            await self._writable

    def stall(self) -> None:
        """The client stops reading: the next chunk is written, and waits."""
        if self._writable is None:
            self._writable = asyncio.get_running_loop().create_future()

    def resume(self) -> None:
        """The client reads again."""
        if self._writable is not None:
            writable, self._writable = self._writable, None
            if not writable.done():
                writable.set_result(None)

    def break_off(self, problem: BaseException) -> None:
        """A chunk that waits, and all later ones, fail."""
        self.problem = problem
        if self._writable is not None:
            self._writable.set_exception(problem)
            self._writable = None

    @property
    def starts(self) -> list[dict[str, Any]]:
        return [message for message in self.messages if message["type"] == "http.response.start"]

    @property
    def chunks(self) -> list[bytes]:
        return [message.get("body", b"") for message in self.messages if message["type"] == "http.response.body"]

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    @property
    def is_complete(self) -> bool:
        """Whether the body has ended."""
        last = self.messages[-1] if self.messages else {"type": ""}
        return last["type"] == "http.response.body" and not last.get("more_body", False)


def assert_well_formed(send: FakeSend) -> None:
    """One start, then the body, of which only the last message is the last."""
    assert [message["type"] for message in send.messages[:1]] == ["http.response.start"]
    assert len(send.starts) == 1
    more = [message.get("more_body", False) for message in send.messages[1:]]
    assert more == [True] * (len(more) - 1) + [False]


def expected_lines(count: int, *, last_is_done: bool = True) -> bytes:
    """A stream of `count` tokens, written out the slow way."""
    lines = [f'{{"token_index":{index},"done":false}}\n' for index in range(count)]
    if last_is_done:
        lines[-1] = lines[-1].replace("false", "true")
    return "".join(lines).encode()


def parsed(body: bytes) -> list[dict[str, Any]]:
    """Every line as JSON; the last ends with a newline too."""
    assert body.endswith(b"\n")
    return [msgspec.json.decode(line) for line in body[:-1].split(b"\n")]


@dataclass
class Answer:
    """What a client of the application received."""

    send: FakeSend = field(default_factory=FakeSend)
    task: asyncio.Task[None] | None = None

    @property
    def status(self) -> int:
        assert len(self.send.starts) == 1
        return int(self.send.starts[0]["status"])

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.send.starts[0]["headers"])

    @property
    def body(self) -> bytes:
        return self.send.body

    @property
    def json(self) -> Any:
        assert self.headers[b"content-type"].startswith(b"application/json")
        return msgspec.json.decode(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error of the one shape that there is."""
        assert list(self.json) == ["error"]
        error: dict[str, Any] = self.json["error"]
        assert list(error) == ["type", "message", "param"]
        assert isinstance(error["type"], str)
        assert isinstance(error["message"], str)
        return error


Application = Callable[[dict[str, Any], Callable[[], Awaitable[Any]], Any], Awaitable[None]]


class Body:
    """A request's body as the server hands it on, part by part; counts the parts that were asked for."""

    def __init__(self, parts: Iterable[bytes], *, is_cut_off: bool = False, problem: Exception | None = None) -> None:
        self._parts: Iterator[bytes] = iter(parts)
        self._is_cut_off = is_cut_off
        self._problem = problem
        self._is_over = False
        self.taken = 0

    async def receive(self) -> dict[str, Any]:
        if self._is_over:
            await asyncio.Event().wait()  # a client that stays and says nothing more
        part = next(self._parts, None)
        if part is not None:
            self.taken += 1
            return {"type": "http.request", "body": part, "more_body": True}
        self._is_over = True
        if self._problem is not None:
            raise self._problem
        if self._is_cut_off:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": b"", "more_body": False}


def http_scope(method: str, path: str, headers: Iterable[tuple[bytes, bytes]] = ()) -> dict[str, Any]:
    """A request's scope as gunicorn 27 makes it."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": b"",
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": list(headers),
        "client": ("127.0.0.1", 40_000),
        "server": ("127.0.0.1", 8080),
    }


def request(
    app: Application,
    method: str,
    path: str,
    body: bytes | Body = b"",
    headers: Iterable[tuple[bytes, bytes]] | None = None,
) -> Answer:
    """Start one request. Its Content-Length is right unless `headers` are given."""
    if headers is None:
        headers = [(b"content-length", str(len(body)).encode())] if isinstance(body, bytes) else []
    source = body if isinstance(body, Body) else Body([body])
    answer = Answer()
    call = app(http_scope(method, path, headers), source.receive, answer.send)
    answer.task = asyncio.ensure_future(call)
    return answer


async def fetch(app: Application, method: str, path: str, *args: Any, **options: Any) -> Answer:
    """One request, and its whole answer."""
    answer = request(app, method, path, *args, **options)
    assert answer.task is not None
    await answer.task
    assert answer.send.is_complete
    return answer


class Lifetime:
    """The lifespan protocol: `async with` it, and the application has started."""

    def __init__(self, app: Application) -> None:
        self._app = app
        self._events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._answers: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def __aenter__(self) -> None:
        scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}}
        self._task = asyncio.ensure_future(self._app(scope, self._events.get, self._answers.put))
        await self._events.put({"type": "lifespan.startup"})
        assert await self._answers.get() == {"type": "lifespan.startup.complete"}

    async def __aexit__(self, *problem: object) -> None:
        await self._events.put({"type": "lifespan.shutdown"})
        assert await self._answers.get() == {"type": "lifespan.shutdown.complete"}
        await self._task


async def leave(answer: Answer) -> None:
    """The client goes: the server cancels the request, and waits for it."""
    assert answer.task is not None
    answer.task.cancel()
    await asyncio.wait([answer.task])
    assert answer.task.cancelled()


def _ignore(*words: object, **options: object) -> None:
    pass


def gunicorn_worker(
    app: Any,
    problems: list[object],
    note: Callable[..., None] = _ignore,
    *,
    keepalive_s: int = 2,
    has_access_log: bool = False,
) -> Any:
    """Gunicorn's web worker, as far as its ASGI protocol knows it, on the running loop.

    Args:
        app: the ASGI application.
        problems: gets the words of each error that is logged.
        note: gets those of each warning and information.
        keepalive_s: its setting.
        has_access_log: likewise.
    """
    config = Config()
    config.set("asgi_disconnect_grace_period", 0)
    config.set("keepalive", keepalive_s)
    log = SimpleNamespace(access_log_enabled=has_access_log, debug=_ignore, warning=note, info=note)
    for name in ("error", "exception", "access"):
        setattr(log, name, lambda *words, **options: problems.append(words))
    return SimpleNamespace(
        cfg=config,
        log=log,
        asgi=app,
        nr_conns=0,
        nr=0,
        max_requests=sys.maxsize,
        alive=True,
        loop=asyncio.get_running_loop(),
    )

"""Every answer has its request's id, and so has every line that is logged about it."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest

from ironbatch import logs
from ironbatch.clock import FakeClock
from ironbatch.logs import TextFormatter
from ironbatch.web import generate
from ironbatch.web.app import create_app
from ironbatch.web.request_id import HEADER, MAX_CHARS, RequestIds
from tests.web.fakes import Body, Lifetime, fetch, in_loop, request
from tests.web.test_app import MAX_BODY_BYTES, Server, a_server

MINE = b"trace-4711/abc:DEF.~_"
BODY = b'{"prompt_tokens": 2, "max_new_tokens": 3}'


def id_of(answer: Any) -> bytes:
    found = [value for name, value in answer.send.starts[0]["headers"] if name == HEADER]
    assert len(found) == 1
    return found[0]


def with_id(value: bytes, *more: tuple[bytes, bytes], length: int = len(BODY)) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"x"), (HEADER, value), (b"content-length", b"%d" % length), *more]


@pytest.mark.parametrize("value", [b"a", b"a" * MAX_CHARS, MINE, b"!#$%&()*+,-./:;<=>?@[]^_`{|}~"])
def test_a_good_id_is_kept(value: bytes) -> None:
    assert RequestIds().of([(b"accept", b"*/*"), (HEADER, value)]) == value


@pytest.mark.parametrize(
    "value", [b"", b"a" * (MAX_CHARS + 1), b"a b", b'a"', b"a'", b"a\\", b"a\tb", b"a\nb", b"\x7f", b"caf\xe9", b"\0"]
)
def test_another_is_replaced(value: bytes) -> None:
    made = RequestIds().of([(HEADER, value)])
    assert re.fullmatch(rb"[0-9a-f]{16}-1", made)


def test_new_ids_differ_within_a_worker_and_between_workers() -> None:
    workers = [RequestIds() for _ in range(3)]
    made = [ids.of([]) for ids in workers for _ in range(100)]
    assert len(set(made)) == 300


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/health", b"", 200),
        ("HEAD", "/health", b"", 200),
        ("GET", "/metrics", b"", 200),
        ("GET", "/nowhere", b"", 404),
        ("GET", "/generate", b"", 405),
        ("OPTIONS", "/generate", b"", 200),
        ("POST", "/generate", b"{", 400),
        ("POST", "/generate", b'{"prompt_tokens": 0}', 400),
        ("POST", "/generate", b'{"prompt_tokens": 2, "max_new_tokens": 0}', 200),
        ("POST", "/generate", b" " * (MAX_BODY_BYTES + 1), 413),
    ],
)
@in_loop
async def test_every_route_answers_with_it(method: str, path: str, body: bytes, status: int) -> None:
    with a_server() as server:
        async with Lifetime(server.app):
            server.small.step()
            answer = await fetch(server.app, method, path, body, headers=with_id(MINE, length=len(body)))
            assert answer.status == status
            assert id_of(answer) == MINE
            assert re.fullmatch(rb"[0-9a-f]{16}-[0-9a-f]+", id_of(await fetch(server.app, method, path, body)))


@in_loop
async def test_a_stream_begins_with_it() -> None:
    with a_server() as server:
        async with Lifetime(server.app):
            answers = [request(server.app, "POST", "/generate", BODY, headers=with_id(b"r%d" % k)) for k in range(3)]
            await server.finish(*answers)
            assert [id_of(answer) for answer in answers] == [b"r0", b"r1", b"r2"]
            assert all(b"x-accel-buffering" in answer.headers for answer in answers)


@in_loop
async def test_503_and_408_have_it() -> None:
    with a_server() as server:
        async with Lifetime(server.app):
            server.segment.header["draining"] = 1
            for path in ("/health", "/generate"):
                answer = await fetch(server.app, "POST" if path == "/generate" else "GET", path, BODY, with_id(MINE))
                assert (answer.status, id_of(answer)) == (503, MINE)
            late = await fetch(server.app, "POST", "/generate", Body([], is_cut_off=True), with_id(MINE))
            assert (late.status, id_of(late)) == (408, MINE)


@in_loop
async def test_a_worker_without_an_engine_has_it() -> None:
    app = create_app({}, FakeClock(0))
    async with Lifetime(app):
        answer = await fetch(app, "POST", "/generate", BODY, headers=with_id(MINE))
        assert (answer.status, id_of(answer)) == (503, MINE)


class Lines(logging.Handler):
    """What a web worker would have logged at level debug."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.setFormatter(TextFormatter())
        self.formatter.hides_text = True  # type: ignore[union-attr]
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Any:
    handler, logger = Lines(), logging.getLogger("ironbatch")
    monkeypatch.setattr(logger, "level", logging.DEBUG)
    logging.getLogger("ironbatch.web").manager._clear_cache()  # type: ignore[attr-defined]  what isEnabledFor remembers
    logger.addHandler(handler)
    yield handler.lines
    logger.removeHandler(handler)
    monkeypatch.undo()
    logging.getLogger("ironbatch.web").manager._clear_cache()  # type: ignore[attr-defined]


SECRET = "UNMISTAKABLE-4711"


@in_loop
async def fault(server: Server, body: bytes) -> Any:
    async with Lifetime(server.app):
        answer = await fetch(server.app, "POST", "/generate", body, headers=with_id(MINE, length=len(body)))
        assert (answer.status, id_of(answer)) == (500, MINE)
        assert SECRET.encode() not in answer.body


def test_a_handlers_fault_is_logged_with_the_id_and_without_the_request(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(body: bytes, *others: object) -> None:
        raise ValueError(f"cannot make anything of {body!r}")

    monkeypatch.setattr(generate, "parse_request", broken)
    with a_server() as server:
        fault(server, b'{"prompt": "%b"}' % SECRET.encode())
    (told,) = [line for line in lines if "ERROR" in line]
    assert f"POST /generate failed request_id={MINE.decode()}\n" in told
    assert "ValueError (its text is not logged" in told
    assert "in broken" in told
    assert SECRET not in "".join(lines)


def test_at_debug_each_answer_is_a_line_with_the_id(lines: list[str]) -> None:
    @in_loop
    async def ask() -> None:
        with a_server() as server:
            async with Lifetime(server.app):
                for path in ("/metrics", "/x\n2026-01-01T00:00:00Z CRITICAL forged"):
                    await fetch(server.app, "GET", path, headers=with_id(MINE))

    ask()
    first, second = lines
    assert first.endswith(f"GET /metrics: 200 request_id={MINE.decode()}")
    assert r"GET /x\n2026-01-01T00:00:00Z CRITICAL forged: 404" in second
    assert "\n" not in second


def test_the_id_of_a_request_does_not_outlive_it(lines: list[str]) -> None:
    test_at_debug_each_answer_is_a_line_with_the_id(lines)
    assert logs.request_id.get() == ""

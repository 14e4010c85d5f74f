"""A stop: what is new is refused, what runs may end, and what takes too long is told so; nothing is cut."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import time
from collections.abc import Iterator

import pytest

from ironbatch.draining import STOP_BEYOND_DRAIN_S
from tests.end_to_end.clients import Kept, fetch
from tests.end_to_end.server import FORMS, RawStream, Server, plain_body, running, wait_until

pytestmark = pytest.mark.end_to_end

SLOW = {"mock_token_latency_us": 20_000}
ENDLESS = {"prompt_tokens": 1, "max_new_tokens": 8000}  # 160 s of it
LONG = {
    "max_model_len": 65_536,
    "total_kv_blocks": 32_768,
    "max_running_seqs": 8,
    "max_queued_requests": 8,
    "mock_token_latency_us": 0,
}
LENGTH, CHOICES = 60_000, 4
MUCH = {"prompt_tokens": 1, "max_new_tokens": LENGTH, "n": CHOICES}  # 12 MB, more than the sockets take
SLACK_S = 10.0  # for a machine that is busy with other tests


@contextlib.contextmanager
def stopped_within(server: Server, limit_s: float) -> Iterator[None]:
    """From here on the server ends, well, and leaves nothing."""
    server.remember_family()
    start_s = time.monotonic()
    yield
    assert server.process.wait(limit_s + 60) == 0
    assert time.monotonic() - start_s < limit_s
    server.assert_nothing_left()
    assert "Traceback" not in "".join(server.output)


def read_error(stream: RawStream) -> dict[str, str]:
    """The stream ends with a whole body, whose last line has this error."""
    *lines, last = map(json.loads, stream.read_all().splitlines())
    assert not any(line["done"] for line in lines)
    assert last["done"] is True
    error: dict[str, str] = last["error"]
    return error


def refuses(port: int) -> bool:
    """Whether a fresh connection is refused."""
    try:
        socket.create_connection(("127.0.0.1", port), 20).close()
    except ConnectionRefusedError:
        return True
    return False


def test_serve_says_that_it_drains_before_it_listens_no_more() -> None:
    with running("serve", **SLOW) as server:
        kept = [Kept(server.port) for _ in range(4)]
        for connection in kept:
            assert connection.fetch("GET", "/health").status == 200
        stream = RawStream(server.port, {"prompt_tokens": 1, "max_new_tokens": 200})
        body = stream.read_chunk()
        with stopped_within(server, 30 + STOP_BEYOND_DRAIN_S + SLACK_S):
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: server.header()["draining"], "the drain")
            paths = [("GET", "/health"), ("POST", "/generate"), ("GET", "/metrics"), ("GET", "/nothing")]
            statuses = []
            for (method, path), connection in zip(paths, kept, strict=True):
                for answer in (
                    connection.fetch(method, path, {"prompt_tokens": 1}),
                    fetch(server.port, method, path, {"prompt_tokens": 1}),
                ):
                    assert answer.announces_close
                    statuses.append(answer.status)
                    if path == "/generate":
                        assert answer.headers["retry-after"] == "1"
                        assert "shutting down" in answer.error["message"]
                connection.assert_closed()
                connection.close()
            assert statuses == [503, 503, 503, 503, 200, 200, 404, 404]
            assert body + stream.read_all() == plain_body(200)
            stream.close()


def test_gunicorn_refuses_connections_while_its_streams_run_and_answers_kept_ones_with_503() -> None:
    with running("gunicorn", **SLOW) as server:
        kept = Kept(server.port)
        assert kept.fetch("GET", "/health").status == 200
        stream = RawStream(server.port, {"prompt_tokens": 1, "max_new_tokens": 400})
        body = stream.read_chunk()
        with stopped_within(server, 30 + STOP_BEYOND_DRAIN_S + SLACK_S):
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: server.header()["draining"], "the drain")
            answer = kept.fetch("POST", "/generate", {"prompt_tokens": 1})
            assert (answer.status, answer.announces_close) == (503, True)
            kept.assert_closed()
            kept.close()
            wait_until(lambda: refuses(server.port), "the end of listening")
            assert body + stream.read_all() == plain_body(400)
            stream.close()


@pytest.mark.parametrize("form", FORMS)
def test_what_has_not_ended_at_the_drain_timeout_gets_an_error_line_before_it(form: str) -> None:
    with running(form, drain_timeout_s=3, max_running_seqs=2, max_batch_tokens=2, workers=1, **SLOW) as server:
        streams = [RawStream(server.port, ENDLESS) for _ in range(2)]
        for stream in streams:
            stream.read_chunk()
        queued = RawStream(server.port, ENDLESS)
        wait_until(lambda: server.metrics()["waiting"] == 1, "one that waits")
        with stopped_within(server, 3 + STOP_BEYOND_DRAIN_S + SLACK_S):
            server.process.send_signal(signal.SIGTERM)
            for stream in streams:
                error = read_error(stream)
                assert error["type"] == "shutting_down"
                assert "--drain-timeout-s" in error["message"]
                stream.close()
            assert queued.read_head() == 503
            assert b"retry-after: 1" in queued.headers.lower()
            assert b"connection: close" in queued.headers.lower()
            queued.close()
        assert "is shutting down" in "".join(server.output)


@pytest.mark.parametrize(
    ("form", "signals"),
    [
        ("serve", [signal.SIGINT]),
        ("serve", [signal.SIGTERM, signal.SIGTERM]),
        ("serve", [signal.SIGTERM, signal.SIGINT]),
        ("gunicorn", [signal.SIGINT]),
        ("gunicorn", [signal.SIGQUIT]),
        ("gunicorn", [signal.SIGTERM, signal.SIGINT]),
    ],
    ids=lambda value: "-".join(number.name for number in value) if isinstance(value, list) else value,
)
def test_a_quick_stop_still_ends_streams_with_an_error_line(form: str, signals: list[signal.Signals]) -> None:
    with running(form, drain_timeout_s=120, **SLOW) as server:
        streams = [RawStream(server.port, ENDLESS) for _ in range(4)]
        for stream in streams:
            stream.read_chunk()
        with stopped_within(server, STOP_BEYOND_DRAIN_S + SLACK_S):
            for number in signals:
                server.process.send_signal(number)
                wait_until(lambda: server.header()["draining"], "the drain")
            for stream in streams:
                assert read_error(stream)["type"] == "shutting_down"
                stream.close()


@pytest.mark.parametrize("form", FORMS)
def test_idle_and_silent_connections_do_not_delay_a_stop(form: str) -> None:
    """Long before the drain time-out, and before gunicorn would close an idle connection."""
    with running(form, drain_timeout_s=120) as server:
        silent = [socket.create_connection(("127.0.0.1", server.port), 20) for _ in range(20)]
        partial = [socket.create_connection(("127.0.0.1", server.port), 20) for _ in range(20)]
        for connection in partial:
            connection.sendall(b"POST /generate HTTP/1.1\r\nHost: te")
        kept = [Kept(server.port) for _ in range(20)]
        for idle in kept:
            assert idle.fetch("POST", "/generate", {"prompt_tokens": 1}).status == 200
        with stopped_within(server, STOP_BEYOND_DRAIN_S + SLACK_S):
            server.process.send_signal(signal.SIGTERM)
        for idle in kept:
            idle.assert_closed()
            idle.close()
        for connection in silent + partial:
            connection.close()


@pytest.mark.parametrize("form", FORMS)
def test_readers_that_stall_do_not_hold_up_a_stop(form: str) -> None:
    with running(form, drain_timeout_s=2, **LONG) as server:
        stalled = [RawStream(server.port, MUCH, receive_buffer_bytes=4096)]
        wait_until(lambda: server.scheduler_tokens() == LENGTH * CHOICES, "the first one's last token", 60)
        stalled.append(RawStream(server.port, MUCH, receive_buffer_bytes=4096))
        for stream in stalled:
            stream.read_head()
        with stopped_within(server, 2 + STOP_BEYOND_DRAIN_S + SLACK_S):
            server.process.send_signal(signal.SIGTERM)
        assert "are cut: their clients do not read" in "".join(server.output)
        for stream in stalled:
            stream.close()


@pytest.mark.parametrize("form", FORMS)
def test_a_slow_reader_gets_the_end_of_its_answer_during_the_drain(form: str) -> None:
    with running(form, **LONG) as server:
        stream = RawStream(server.port, MUCH, receive_buffer_bytes=4096)
        stream.read_head()
        wait_until(lambda: server.scheduler_tokens() == LENGTH * CHOICES, "its last token", 60)
        with stopped_within(server, 30 + STOP_BEYOND_DRAIN_S + SLACK_S):
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: server.header()["draining"], "the drain")
            lines = stream.read_all().splitlines(keepends=True)
            for choice in range(CHOICES):
                tag = b',"choice":%d' % choice
                assert b"".join(line for line in lines if tag in line).replace(tag, b"") == plain_body(LENGTH)
            stream.close()


def test_a_drain_timeout_of_zero_waits_for_nobody() -> None:
    with running("serve", drain_timeout_s=0, **SLOW) as server:
        stream = RawStream(server.port, ENDLESS)
        stream.read_chunk()
        with stopped_within(server, STOP_BEYOND_DRAIN_S + SLACK_S):
            server.process.send_signal(signal.SIGTERM)
            assert read_error(stream)["type"] == "shutting_down"
            stream.close()


@pytest.mark.parametrize("form", FORMS)
def test_streams_survive_the_schedulers_death_during_a_drain(form: str) -> None:
    with running(form, **SLOW) as server:
        stream = RawStream(server.port, {"prompt_tokens": 1, "max_new_tokens": 200})
        body = stream.read_chunk()
        with stopped_within(server, 30 + STOP_BEYOND_DRAIN_S + SLACK_S):
            doomed = server.scheduler()
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: server.header()["draining"], "the drain")
            doomed.kill()
            assert body + stream.read_all() == plain_body(200)
            stream.close()

"""More than the engine can hold, and requests that wait or run for too long: an answer each time, and nothing lost."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.clients import Answer, Kept, fetch
from tests.end_to_end.plugin import install_stalling
from tests.end_to_end.server import FORMS, RawStream, Server, plain_body, running, wait_until

pytestmark = pytest.mark.end_to_end

RUNNING, QUEUED, BEYOND = 8, 24, 50
SMALL = {"backend": "stalling", "max_running_seqs": RUNNING, "max_queued_requests": QUEUED, "workers": 2}
TOKENS = 24


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The backend stands still while this file is there."""
    return install_stalling(tmp_path, monkeypatch)


def all_at_once(port: int, bodies: list[dict[str, Any]], then: Callable[[list[Future[Answer]]], None]) -> list[Answer]:
    """Each request on a connection and a thread of its own; `then` is called while they wait. The answers."""
    barrier = threading.Barrier(len(bodies))

    def ask(body: dict[str, Any]) -> Answer:
        kept = Kept(port)
        barrier.wait()
        try:
            return kept.fetch("POST", "/generate", body)
        finally:
            kept.close()

    with ThreadPoolExecutor(len(bodies)) as pool:
        futures = [pool.submit(ask, body) for body in bodies]
        then(futures)
        return [future.result() for future in futures]


@pytest.mark.parametrize("form", FORMS)
def test_what_is_beyond_the_queue_is_refused_and_all_else_completes_once_the_backend_goes_on(
    form: str, gate: Path
) -> None:
    # Blocks for half of those that may run, at their full length: some must be preempted, and none of them refused.
    blocks = RUNNING // 2 * (4 + TOKENS)
    with running(form, total_kv_blocks=blocks, kv_block_size=1, no_prefix_cache="on", **SMALL) as server:
        gate.touch()

        def then(futures: list[Future[Answer]]) -> None:
            wait_until(lambda: sum(f.done() for f in futures) >= BEYOND, "the refusals", 60)
            assert sum(future.done() for future in futures) == BEYOND
            gate.unlink()

        bodies = [{"prompt_tokens": 4, "max_new_tokens": TOKENS}] * (RUNNING + QUEUED + BEYOND)
        answers = all_at_once(server.port, bodies, then)
        refused = [answer for answer in answers if answer.status != 200]
        assert len(refused) == BEYOND
        for answer in refused:
            assert answer.status == 503
            assert answer.headers["retry-after"] == "1"
            assert answer.error["type"] == "queue_full"
            assert "--max-queued-requests" in answer.error["message"]
        assert [answer.body for answer in answers if answer.status == 200] == [plain_body(TOKENS)] * (RUNNING + QUEUED)
        metrics = server.wait_idle()
        assert metrics["preemptions"] > 0
        assert metrics["requests_completed"] == RUNNING + QUEUED
        assert metrics["requests_unavailable"] == BEYOND
        assert metrics["requests_failed"] == 0


@pytest.mark.parametrize("form", FORMS)
def test_who_waits_for_longer_than_the_queue_timeout_is_refused_and_who_runs_is_not(form: str, gate: Path) -> None:
    with running(form, queue_timeout_s=1, **(SMALL | {"max_running_seqs": 1})) as server:
        gate.touch()
        first = RawStream(server.port, {"prompt_tokens": 1, "max_new_tokens": TOKENS})
        wait_until(lambda: server.header()["in_device_call"], "the first request's step")
        waiting = fetch(server.port, "POST", "/generate", {"prompt_tokens": 1})
        assert waiting.status == 503
        assert waiting.headers["retry-after"] == "1"
        assert waiting.error["type"] == "queue_timeout"
        assert "--queue-timeout-s" in waiting.error["message"]
        assert "1 s" in waiting.error["message"]
        gate.unlink()
        assert first.read_all() == plain_body(TOKENS)
        first.close()
        metrics = server.wait_idle()
        assert (metrics["requests_completed"], metrics["requests_failed"], metrics["requests_timed_out"]) == (1, 1, 1)
        assert fetch(server.port, "POST", "/generate", {"prompt_tokens": 1}).status == 200


@pytest.mark.parametrize("form", FORMS)
def test_a_request_that_has_begun_ends_at_its_own_timeout_with_an_error_line(form: str) -> None:
    with running(form, mock_token_latency_us=20_000) as server:
        kept = Kept(server.port)
        body = {"prompt_tokens": 1, "max_new_tokens": 8000, "timeout_s": 0.5}
        answer = kept.fetch("POST", "/generate", body)
        assert answer.status == 200
        assert_ends_with_error(answer.body, "timeout", "timeout_s of 0.5 s")
        # The body has ended as it should: the connection is good for another request.
        plain = kept.fetch("POST", "/generate", {"prompt_tokens": 1, "max_new_tokens": 2, "timeout_s": 60})
        assert plain.body == plain_body(2)
        several = kept.fetch("POST", "/generate", body | {"n": 3, "details": True})
        kept.close()
        last = {line["choice"]: line for line in map(json.loads, several.body.splitlines()) if line["done"]}
        assert sorted(last) == [0, 1, 2]
        assert {line["error"]["type"] for line in last.values()} == {"timeout"}
        metrics = server.wait_idle()
        assert (metrics["requests_completed"], metrics["requests_failed"], metrics["requests_timed_out"]) == (1, 2, 2)


@pytest.mark.parametrize("form", FORMS)
def test_the_timeout_holds_while_the_backend_stands_still(form: str, gate: Path) -> None:
    """Nothing was sent yet, so that it is a status of its own."""
    with running(form, **SMALL) as server:
        gate.touch()
        bodies = [{"prompt_tokens": 1, "timeout_s": 0.5}, {"prompt_tokens": 1, "timeout_s": 0.5, "n": 4}]
        for answer in all_at_once(server.port, bodies, lambda futures: None):
            assert answer.status == 504
            assert answer.error["type"] == "timeout"
            assert answer.error["param"] == "timeout_s"
            assert "retry-after" not in answer.headers
        gate.unlink()
        assert server.wait_idle()["requests_timed_out"] == 2
        wait_until(lambda: completes(server), "slots that are free again")


@pytest.mark.parametrize("form", FORMS)
def test_the_timeout_holds_while_the_scheduler_hangs(form: str) -> None:
    with running(form, mock_token_latency_us=5_000) as server:
        begun = RawStream(server.port, {"prompt_tokens": 1, "max_new_tokens": 8000, "timeout_s": 3})
        first_lines = begun.read_chunk()
        scheduler = server.scheduler()
        scheduler.suspend()
        try:
            assert fetch(server.port, "POST", "/generate", {"prompt_tokens": 1, "timeout_s": 0.2}).status == 504
            assert_ends_with_error(first_lines + begun.read_all(), "timeout", "timeout_s of 3 s")
        finally:
            scheduler.resume()
        begun.close()
        server.wait_idle()
        wait_until(lambda: completes(server), "a healthy server")


def assert_ends_with_error(body: bytes, error_type: str, text: str) -> None:
    """The lines are complete and in order, and the last one says what went wrong."""
    *lines, last = map(json.loads, body.splitlines())
    assert [line["token_index"] for line in lines] == list(range(len(lines)))
    assert not any(line["done"] for line in lines)
    assert last["token_index"] == len(lines)
    assert last["done"] is True
    assert last["error"]["type"] == error_type
    assert text in last["error"]["message"]


def completes(server: Server) -> bool:
    """Whether a request is answered as it should be."""
    answer = fetch(server.port, "POST", "/generate", {"prompt_tokens": 1, "max_new_tokens": 1})
    return (answer.status, answer.body) == (200, plain_body(1))

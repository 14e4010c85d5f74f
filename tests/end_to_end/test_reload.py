"""New workers for old: at HUP, TTIN and TTOU no stream is cut and no connection refused."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.end_to_end.clients import Answer, Kept, crowd
from tests.end_to_end.server import FORMS, RawStream, Server, plain_body, running, wait_until
from tests.end_to_end.test_drain import ENDLESS, SLOW, read_error, refuses

pytestmark = pytest.mark.end_to_end

TOKENS = 20
BODY = {"prompt_tokens": 4, "max_new_tokens": TOKENS}


def worker_pids(server: Server) -> set[int]:
    return {worker.pid for worker in server.processes("web worker")}


def reload(server: Server) -> None:
    """HUP, and wait until all workers are new."""
    old = worker_pids(server)
    server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: len(worker_pids(server) - old) == 2, "new workers", 60)
    wait_until(lambda: not worker_pids(server) & old, "the old workers' end", 60)


@pytest.mark.parametrize("keeps", [False, True], ids=["fresh connections", "kept connections"])
@pytest.mark.parametrize("form", FORMS)
def test_many_clients_see_nothing_of_reloads(form: str, keeps: bool) -> None:  # noqa: FBT001
    with running(form, mock_token_latency_us=1_000) as server:
        with crowd(server.port, BODY, clients=8, keeps=keeps) as found:
            found.wait_for(50)
            for _ in range(3):
                reload(server)
                found.wait_for(50)
        assert not found.problems
        assert {answer.status for answer in found.answers} == {200}
        assert {answer.body for answer in found.answers} == {plain_body(TOKENS)}
        if keeps:
            assert sum(answer.announces_close for answer in found.answers) >= 8, "each was told to go elsewhere"
        metrics = server.wait_idle()
        assert metrics["requests_completed"] == len(found.answers)
        assert metrics["requests_lost"] == metrics["requests_failed"] == 0


@pytest.mark.parametrize("form", FORMS)
def test_streams_of_the_old_workers_end_as_they_should(form: str) -> None:
    with running(form, **SLOW) as server:
        streams = [RawStream(server.port, {"prompt_tokens": 1, "max_new_tokens": 400}) for _ in range(6)]
        bodies = [stream.read_chunk() for stream in streams]
        old = worker_pids(server)
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: len(worker_pids(server) - old) == 2, "new workers", 60)
        for stream, body in zip(streams, bodies, strict=True):
            assert body + stream.read_all() == plain_body(400)
            stream.close()
        wait_until(lambda: not worker_pids(server) & old, "the old workers' end", 60)


@pytest.mark.parametrize("form", FORMS)
def test_a_head_that_promised_to_keep_the_connection_is_believed(form: str) -> None:
    """The answer began before the reload; whoever sends the next request after its end gets an answer to that too."""
    with running(form, **SLOW) as server, ThreadPoolExecutor(4) as pool:

        def ask_twice() -> list[Answer]:
            kept = Kept(server.port)
            answers = [kept.fetch("POST", "/generate", BODY | {"max_new_tokens": count}) for count in (300, TOKENS)]
            kept.assert_closed()
            kept.close()
            return answers

        old = worker_pids(server)
        pairs = [pool.submit(ask_twice) for _ in range(4)]
        wait_until(lambda: server.metrics()["tokens_delivered"] > 4, "streams")
        server.process.send_signal(signal.SIGHUP)
        for pair in pairs:
            first, second = pair.result()
            assert (first.status, first.body, first.announces_close) == (200, plain_body(300), False)
            assert (second.status, second.body, second.announces_close) == (200, plain_body(TOKENS), True)
        wait_until(lambda: not worker_pids(server) & old, "the old workers' end", 60)


@pytest.mark.parametrize("form", FORMS)
def test_a_kept_connection_gets_one_more_answer_from_a_worker_that_leaves(form: str) -> None:
    with running(form, workers=1, **SLOW) as server:
        kept = Kept(server.port)
        assert not kept.fetch("POST", "/generate", BODY).announces_close
        stream = RawStream(server.port, {"prompt_tokens": 1, "max_new_tokens": 400})
        stream.read_chunk()
        (old,) = worker_pids(server)
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: len(worker_pids(server)) == 2, "the new worker", 60)
        answer = kept.fetch("POST", "/generate", BODY)
        assert (answer.status, answer.body, answer.announces_close) == (200, plain_body(TOKENS), True)
        kept.assert_closed()
        kept.close()
        assert old in worker_pids(server)
        assert stream.read_all().endswith(b'{"token_index":399,"done":true}\n')
        stream.close()


@pytest.mark.parametrize("form", FORMS)
def test_a_stream_that_outlasts_the_drain_timeout_of_a_reload_gets_an_error_line(form: str) -> None:
    with running(form, drain_timeout_s=2, **SLOW) as server:
        streams = [RawStream(server.port, ENDLESS) for _ in range(4)]
        for stream in streams:
            stream.read_chunk()
        reload(server)
        for stream in streams:
            error = read_error(stream)
            assert error["type"] == "shutting_down"
            assert "replaces this web worker" in error["message"]
            assert "--drain-timeout-s" in error["message"]
            stream.close()
        assert server.is_healthy()
        assert server.wait_idle()["requests_failed"] == 4


@pytest.mark.parametrize("form", FORMS)
def test_more_and_fewer_workers(form: str) -> None:
    with running(form, **SLOW) as server:
        for count in (3, 4):
            server.process.send_signal(signal.SIGTTIN)
            wait_until(lambda count=count: len(worker_pids(server)) == count, f"{count} workers", 60)
        wait_until(lambda: int((server.lanes()["serving_generation"] > 0).sum()) == 4, "four that serve")
        server.process.send_signal(signal.SIGTTIN)
        wait_until(lambda: "TTIN is refused: 4 web workers" in "".join(server.output), "no lane for a fifth")
        with crowd(server.port, BODY, clients=4, keeps=False) as found:
            streams = [RawStream(server.port, {"prompt_tokens": 1, "max_new_tokens": 400}) for _ in range(12)]
            bodies = [stream.read_chunk() for stream in streams]
            handled = "Handling signal: ttou"
            for count in (1, 2):
                server.process.send_signal(signal.SIGTTOU)
                wait_until(lambda count=count: "".join(server.output).count(handled) == count, "a worker that leaves")
            for stream, body in zip(streams, bodies, strict=True):
                assert body + stream.read_all() == plain_body(400)
                stream.close()
            wait_until(lambda: len(worker_pids(server)) == 2, "two workers", 60)
            found.wait_for(20)
            server.process.send_signal(signal.SIGTTIN)
            wait_until(lambda: len(worker_pids(server)) == 3, "one more", 60)
            old = worker_pids(server)
            server.process.send_signal(signal.SIGHUP)  # back to the configured number
            wait_until(lambda: len(worker_pids(server)) == 2 and not worker_pids(server) & old, "two new workers", 60)
            found.wait_for(20)
        assert not found.problems
        assert {answer.body for answer in found.answers} == {plain_body(TOKENS)}


@pytest.mark.parametrize("form", FORMS)
def test_a_stop_does_not_wait_for_a_reload_that_waits_for_its_streams(form: str) -> None:
    with running(form, drain_timeout_s=60, **SLOW) as server:
        stream = RawStream(server.port, ENDLESS)
        stream.read_chunk()
        old = worker_pids(server)
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: len(worker_pids(server) - old) == 2, "new workers", 60)
        server.remember_family()
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.header()["draining"], "the drain", 15)
        if form == "gunicorn":
            wait_until(lambda: refuses(server.port), "the end of listening", 15)
        server.process.send_signal(signal.SIGINT)
        assert read_error(stream)["type"] == "shutting_down"
        stream.close()
        assert server.process.wait(30) == 0
        server.assert_nothing_left()


@pytest.mark.parametrize("form", FORMS)
def test_a_new_worker_that_dies_while_a_reload_waits_is_replaced(form: str) -> None:
    with running(form, workers=1, drain_timeout_s=120, **SLOW) as server:
        stream = RawStream(server.port, ENDLESS)
        stream.read_chunk()
        (old,) = server.processes("web worker")
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: len(worker_pids(server)) == 2, "the new worker", 60)
        _, new = server.processes("web worker")
        new.kill()
        wait_until(lambda: worker_pids(server) - {old.pid, new.pid}, "another one", 60)
        kept = Kept(server.port)
        assert kept.fetch("POST", "/generate", BODY).body == plain_body(TOKENS)
        kept.close()
        assert old.is_running()
        stream.close()

"""Whole servers in front of a scripted model server: what clients get, whoever dies, and how a start goes."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ironbatch.errors import EXIT_USAGE
from tests.end_to_end.clients import fetch
from tests.end_to_end.server import (
    FORMS,
    STOP_S,
    RawStream,
    Server,
    command,
    generate_all,
    run_to_end,
    running,
    wait_until,
)
from tests.upstream.scripted import LLAMA_CPP, OPENAI, Ending, Script, ScriptedServer, refusal
from tests.upstream.tokens import expected_pieces, expected_token_ids

pytestmark = pytest.mark.end_to_end

forms = pytest.mark.parametrize("form", FORMS)
PROMPT = "once upon a time "
SLOW = Script(token_us=5_000)


@pytest.fixture
def model() -> Iterator[ScriptedServer]:
    with ScriptedServer(LLAMA_CPP, slots=4) as scripted:
        yield scripted


def options(model: ScriptedServer, **more: Any) -> dict[str, Any]:
    return {"backend": "real", "backend_url": model.url, "workers": 2, "max_model_len": 1024} | more


def body(k: int = 0, max_new_tokens: int = 20, **more: Any) -> dict[str, Any]:
    return {"prompt": f"{PROMPT}{k} ", "max_new_tokens": max_new_tokens, "temperature": 0} | more


def lines_of(received: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in received.splitlines()]


def texts(received: bytes) -> list[str]:
    """The pieces of a stream; a last line without a token adds none."""
    return [text for line in lines_of(received) if (text := line["text"])]


class Clients:
    """Some bodies at once, on threads."""

    def __init__(self, server: Server, bodies: list[dict[str, Any]]) -> None:
        self.bodies = bodies
        self.answers: list[bytes] = []
        self._thread = threading.Thread(target=lambda: self.answers.extend(generate_all(server.port, bodies)))
        self._thread.start()

    def join(self) -> list[bytes]:
        self._thread.join()
        assert len(self.answers) == len(self.bodies)
        return self.answers


@forms
def test_streams_are_the_model_servers_own(form: str, model: ScriptedServer) -> None:
    with running(form, **options(model)) as server:
        bodies = [body(k, 5 + k % 7, details=True) for k in range(40)]
        for k, received in enumerate(generate_all(server.port, bodies)):
            lines = lines_of(received)
            count = 5 + k % 7
            assert [line["text"] for line in lines] == expected_pieces(f"{PROMPT}{k} ", count)
            assert [line["token_id"] for line in lines] == expected_token_ids(f"{PROMPT}{k} ", count)
            assert lines[-1]["usage"] == {"prompt_tokens": 5, "completion_tokens": count}
            assert (lines[-1]["done"], lines[-1]["finish_reason"]) == (True, "length")
        assert model.most_open <= 4
        assert model.most_waiting == 0
        metrics = server.wait_idle()
        assert metrics["requests_completed"] == 40
        assert metrics["pieces_without_id"] == 0


def test_without_ids_the_lines_say_so() -> None:
    with ScriptedServer(OPENAI) as model, running(**options(model)) as server:
        lines = lines_of(fetch(server.port, "POST", "/generate", body(1, 4, details=True, n=2, temperature=1)).body)
        assert len(lines) == 8
        assert {line["token_id"] for line in lines} == {None}
        assert server.wait_idle()["pieces_without_id"] == 8


def test_refusals_and_faults_have_statuses_and_words(model: ScriptedServer) -> None:
    with running(**options(model, backend_retries=0)) as server:
        cases = [
            (refusal(400, "context exceeded: 9 > 8"), 400, "backend_refused", "9 > 8"),
            (refusal(500, "out of memory"), 500, "backend_error", "out of memory"),
            (refusal(429, "slow down", Retry_After="1"), 503, "engine_unavailable", "slow down"),
        ]
        for script, status, kind, words in cases:
            model.script(script)
            answer = fetch(server.port, "POST", "/generate", body())
            error = json.loads(answer.body)["error"]
            assert (answer.status, error["type"]) == (status, kind)
            assert words in error["message"]
        model.script(Script(pieces=3, ending=Ending.RESET))
        *lines, last = lines_of(fetch(server.port, "POST", "/generate", body()).body)
        assert [line["text"] for line in lines] == expected_pieces(f"{PROMPT}0 ", 3)
        assert last["done"]
        assert last["error"]["type"] == "backend_error"
        assert "broke off" in last["error"]["message"]


@forms
@pytest.mark.parametrize("continues", ["false", "true"])
def test_the_scheduler_is_killed_in_mid_stream(form: str, continues: str, model: ScriptedServer) -> None:
    model.decide = lambda _: SLOW
    with running(form, **options(model, backend_continue=continues)) as server:
        clients = Clients(server, [body(k, 60) for k in range(12)])
        wait_until(lambda: server.scheduler_tokens() > 40, "streams")
        server.scheduler().send_signal(signal.SIGKILL)
        restarted = 0
        for k, received in enumerate(clients.join()):
            whole = expected_pieces(f"{PROMPT}{k} ", 60)
            if continues == "false" and "error" in (last := lines_of(received)[-1]):
                assert last["error"]["type"] == "engine_restarted"
                assert texts(received) == whole[: len(texts(received))]
                restarted += 1
            else:
                assert texts(received) == whole
        assert restarted == (4 if continues == "false" else 0), "those that had begun"
        server.wait_idle()


def test_a_web_worker_is_killed_and_its_streams_are_closed(model: ScriptedServer) -> None:
    model.decide = lambda _: Script(pieces=2, ending=Ending.HANG)
    with running(**options(model, workers=1)) as server:
        with closing(RawStream(server.port, body())) as stream:
            stream.read_chunk()
            server.processes("web worker")[0].kill()
            wait_until(lambda: model.left, "the upstream stream to be closed")
        server.wait_idle()


@forms
def test_a_client_that_leaves_frees_the_slot_upstream(form: str, model: ScriptedServer) -> None:
    model.decide = lambda _: Script(pieces=2, ending=Ending.HANG)
    with running(form, **options(model)) as server:
        streams = [RawStream(server.port, body(k)) for k in range(4)]
        for stream in streams:
            stream.read_chunk()
        for stream in streams:
            stream.close()
        left_s = time.monotonic()
        wait_until(lambda: len(model.left) == 4, "all four to be closed upstream")
        assert max(request.left_at or 0.0 for request in model.left) - left_s < 2.0, "a bound for a busy machine"
        server.wait_idle()


def test_the_queue_counts_from_the_servers_slots(model: ScriptedServer) -> None:
    """And not from --max-running-seqs, of which nobody has thought."""
    model.decide = lambda _: Script(pieces=2, ending=Ending.HANG)
    with running(**options(model, max_queued_requests=2)) as server:
        streams = [RawStream(server.port, body(k)) for k in range(6)]
        wait_until(lambda: server.metrics()["waiting"] == 2, "a full queue")
        refused = fetch(server.port, "POST", "/generate", body())
        assert refused.status == 503
        error = json.loads(refused.body)["error"]
        assert error["type"] == "queue_full"
        assert "all 6 places" in error["message"]
        for stream in streams:
            stream.close()
        server.wait_idle()


def test_a_model_server_that_restarts_is_waited_for(model: ScriptedServer) -> None:
    model.decide = lambda _: SLOW
    with running(**options(model)) as server:
        clients = Clients(server, [body(k, 40) for k in range(12)])
        wait_until(lambda: server.scheduler_tokens() > 20, "streams")
        model.kill()
        _, told = wait_until(lambda: (health := server.get("/health"))[0] == 503 and health, "health to say so")
        assert "model server" in told["reason"]
        refused = fetch(server.port, "POST", "/generate", body())
        assert refused.status == 503
        assert json.loads(refused.body)["error"]["type"] == "engine_unavailable"
        model.start()
        begun = 0
        for k, received in enumerate(clients.join()):
            if "error" in lines_of(received)[-1]:
                begun += 1
            else:
                assert texts(received) == expected_pieces(f"{PROMPT}{k} ", 40)
        assert 0 < begun <= 4
        wait_until(server.is_healthy, "health")


# ---------------------------------------------------------------------------------------------------------- the start


def started(words: list[str], environ: dict[str, str]) -> subprocess.Popen[str]:
    """A start whose output is read as it comes."""
    ends = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(words, env=environ, cwd="/", text=True, **ends)  # type: ignore[call-overload, no-any-return]


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@forms
def test_started_before_the_model_server_it_waits_and_says_so(form: str, model: ScriptedServer) -> None:
    model.kill()
    words, environ = command(form, options(model))
    with started(words, environ) as process:
        try:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            waiting = next(line for line in lines if "waiting up to" in line)
            assert model.url in waiting
            assert "ERROR" not in waiting
            model.start()
            assert any(f"{model.url} serves model scripted (llama.cpp), 4 at once" in line for line in lines)
            process.send_signal(signal.SIGTERM)
            rest = process.stdout.read()
            assert "Traceback" not in rest
        finally:
            process.terminate()
            process.wait(STOP_S)


@forms
def test_a_stop_while_it_waits_is_quick(form: str) -> None:
    words, environ = command(form, {"backend": "real", "backend_url": f"http://127.0.0.1:{free_port()}/v1"})
    with started(words, environ) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert any("waiting up to" in line for line in lines)
        process.send_signal(signal.SIGTERM)
        told_s = time.monotonic()
        rest = process.stdout.read()
        assert process.wait(STOP_S) == 0
        assert time.monotonic() - told_s < 10.0, "a bound for a busy machine"
        assert "Traceback" not in rest


@forms
def test_a_model_server_that_never_comes_ends_the_start(form: str) -> None:
    url = f"http://127.0.0.1:{free_port()}/v1"
    code, output = run_to_end(form, backend="real", backend_url=url, backend_wait_s=1)
    assert code == 1
    assert f"no model server at {url} within 1 s (--backend-wait-s)" in output
    assert "Traceback" not in output


@forms
def test_a_wrong_key_file_is_told_before_anything_starts(form: str, model: ScriptedServer, tmp_path: Path) -> None:
    code, output = run_to_end(form, **options(model, backend_api_key_file=tmp_path / "none"))
    assert code == EXIT_USAGE
    assert "--backend-api-key-file" in output
    assert "Traceback" not in output
    assert model.asked == []


def test_an_idle_engine_sleeps_and_looks_after_its_model_server(model: ScriptedServer) -> None:
    with running(**options(model)) as server:
        fetch(server.port, "POST", "/generate", body())
        scheduler = server.scheduler()
        before, began_s = sum(scheduler.cpu_times()[:2]), time.monotonic()
        asked = len(model.asked)
        wait_until(lambda: len(model.asked) > asked, "a look at the idle model server")
        used = sum(scheduler.cpu_times()[:2]) - before
        assert used < 0.1 * max(time.monotonic() - began_s, 1.0)
        model.kill()
        wait_until(lambda: not server.is_healthy(), "health to notice")

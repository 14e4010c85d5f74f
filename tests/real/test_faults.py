"""The model server is not there yet, dies in the middle of streams, and comes back."""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.end_to_end.server import RawStream, Server, generate_all, running, wait_until
from tests.real.answers import Answer, answer_of, generate, greedy
from tests.real.model import ModelServer, OwnAnswer, free_port, model_server, skip_without_model_server
from tests.real.prompts import LONG_PROMPT, MARGIN

skip_without_model_server()

SLOTS = 2
LONG_TOKENS = 600
SEEN_TOKENS = 50  # when the model server is killed
LONG = greedy(LONG_TOKENS, prompt=LONG_PROMPT, ignore_eos=True)
OpenStream = Callable[[Server], RawStream]
AWAY = "the model server cannot be reached"


@pytest.fixture
def model() -> Iterator[ModelServer]:
    """One of the test's own, that it may kill."""
    with model_server(slots=SLOTS, context=4096) as found:
        yield found


@pytest.fixture
def open_stream() -> Iterator[OpenStream]:
    """Opens long streams, which are closed at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda server: stack.enter_context(contextlib.closing(RawStream(server.port, LONG)))


def read_tokens(stream: RawStream, count: int) -> bytes:
    """So many lines, or some more."""
    body = b""
    while body.count(b"\n") < count:
        chunk = stream.read_chunk()
        assert chunk, body
        body += chunk
    return body


def wait_away(server: Server) -> None:
    """Until /health says that the model server is gone."""
    wait_until(lambda: AWAY in json.dumps(server.get("/health")[1]), "the reason in /health")
    assert server.get("/health")[0] == 503


def test_stream_whose_model_server_dies_ends_with_an_error_line(model: ModelServer, open_stream: OpenStream) -> None:
    """All that had come before it stays; once the model server is there again, requests are served."""
    with running("serve", backend="real", backend_url=model.url) as server:
        own = model.ask(LONG_PROMPT, SEEN_TOKENS)
        stream = open_stream(server)
        begun = read_tokens(stream, SEEN_TOKENS)
        model.kill()
        answer = answer_of(begun + stream.read_all())
        assert answer.last["done"]
        assert answer.last["error"]["type"] == "backend_error"
        assert "model server" in answer.last["error"]["message"]
        assert answer.text.startswith(own.text)
        wait_away(server)
        model.start()
        wait_until(server.is_healthy, "health")
        assert generate(server, greedy(8, prompt="1, 2, 3,"))[0].is_whole
        server.wait_idle()


def test_request_that_has_no_token_yet_is_served_by_the_next_model_server(
    model: ModelServer, open_stream: OpenStream
) -> None:
    """It waits in the queue while the slots are taken, and goes on waiting while there is nobody to ask."""
    with running("serve", backend="real", backend_url=model.url) as server, ThreadPoolExecutor() as pool:
        streams = [open_stream(server) for _ in range(SLOTS)]
        for stream in streams:
            read_tokens(stream, 1)
        pending: Future[list[Answer]] = pool.submit(generate, server, greedy(8, prompt="1, 2, 3,"))
        wait_until(lambda: server.metrics()["waiting"] == 1, "the request to wait")
        model.kill()
        for stream in streams:
            stream.read_all()
        wait_away(server)
        model.start()
        (answer,) = pending.result()
        assert answer.is_whole, answer.last


def test_streams_go_on_with_backend_continue(model: ModelServer, open_stream: OpenStream) -> None:
    """Prompt and output so far are sent anew; where the model is sure of each token the text is the same."""
    own: OwnAnswer = model.ask(LONG_PROMPT, LONG_TOKENS)
    assert own.margin > MARGIN
    options: dict[str, Any] = {"backend": "real", "backend_url": model.url, "backend_continue": True}
    with running("serve", **options) as server:
        streams = [open_stream(server) for _ in range(SLOTS)]
        begun = [read_tokens(stream, SEEN_TOKENS) for stream in streams]
        model.kill()
        wait_away(server)
        model.start()
        for stream, body in zip(streams, begun, strict=True):
            answer = answer_of(body + stream.read_all())
            assert answer.is_whole, answer.last
            assert answer.text == own.text
            assert answer.token_ids == own.token_ids
        server.wait_idle()


def test_scheduler_killed_in_mid_stream_ends_what_has_begun(model: ModelServer, open_stream: OpenStream) -> None:
    """Its successor asks the same model server, whose slots are free again."""
    with running("serve", backend="real", backend_url=model.url) as server:
        stream = open_stream(server)
        begun = read_tokens(stream, SEEN_TOKENS)
        server.scheduler().kill()
        answer = answer_of(begun + stream.read_all())
        assert answer.last["error"]["type"] == "engine_restarted"
        answers = [answer_of(body) for body in generate_all(server.port, [greedy(8, prompt="1, 2, 3,")] * SLOTS)]
        assert all(answer.is_whole for answer in answers)
        wait_until(lambda: model.busy_slots() == 0, "the model server's slots to be free")


def test_start_before_the_model_server_waits_and_says_why() -> None:
    model, port = ModelServer(slots=SLOTS, context=4096), free_port()

    def start_model_once_told() -> str:
        said: str = wait_until(lambda: health_problem(port), "a reason in /health", 60)
        model.start()
        return said

    with ThreadPoolExecutor() as pool:
        told = pool.submit(start_model_once_told)
        try:
            options: dict[str, Any] = {"addr": f"127.0.0.1:{port}", "backend": "real", "backend_url": model.url}
            with running("serve", **options) as server:
                assert AWAY in told.result()
                assert generate(server, greedy(8, prompt="1, 2, 3,"))[0].is_whole
        finally:
            model.kill()


def health_problem(port: int) -> str:
    """What /health says while it is 503 because of the model server; else nothing."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
            return ""
    except urllib.error.HTTPError as answer:
        with answer:
            said = answer.read().decode()
        return said if AWAY in said else ""
    except OSError:
        return ""

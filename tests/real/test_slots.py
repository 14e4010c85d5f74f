"""The model server's slots are used, all of them and no more, and are free again soon."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor

import psutil

from ironbatch.upstream.client import ASKING_CONNECTIONS
from tests.end_to_end.server import RawStream, Server, generate_all, running, wait_until
from tests.real.answers import generate, greedy
from tests.real.model import ModelServer, OwnAnswer, skip_without_model_server, watched
from tests.real.prompts import LONG_PROMPT, OUTPUT_TOKENS

skip_without_model_server()

SLOTS = 8
REQUESTS = 40
LONG = greedy(1500, prompt=LONG_PROMPT, ignore_eos=True)
FREE_S = 5.0  # far less than the stream would take; how soon it is closed is tested with the scripted model server


def test_forty_requests_over_eight_slots_complete_and_none_queues_upstream(
    server: Server, model: ModelServer, own_answers: dict[str, OwnAnswer]
) -> None:
    prompts = (list(own_answers) * REQUESTS)[:REQUESTS]
    with watched(model, server.scheduler()) as seen:
        answers = generate(server, *(greedy(OUTPUT_TOKENS, prompt=prompt) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.is_whole, answer.last
        assert answer.text == own_answers[prompt].text
    assert seen.most_busy == SLOTS
    assert seen.most_deferred == 0
    assert seen.most_connections <= SLOTS + ASKING_CONNECTIONS
    assert seen.looks > 20


def test_more_requests_than_slots_asked_directly_do_queue(model: ModelServer) -> None:
    """The control: what the test above looks at is seen when it happens."""
    with watched(model, psutil.Process()) as seen, ThreadPoolExecutor(2 * SLOTS) as pool:
        list(pool.map(lambda prompt: model.ask(prompt, OUTPUT_TOKENS), [LONG_PROMPT] * 2 * SLOTS))
    assert seen.most_connections > SLOTS + ASKING_CONNECTIONS


def test_client_that_leaves_frees_the_slot(server: Server, model: ModelServer) -> None:
    with contextlib.closing(RawStream(server.port, LONG)) as stream:
        for _ in range(5):
            assert stream.read_chunk()
        assert model.busy_slots() == 1
    wait_until(lambda: model.busy_slots() == 0, "the model server's slot to be free", FREE_S)
    server.wait_idle()


def test_slot_that_a_client_has_left_serves_who_waits(server: Server, model: ModelServer) -> None:
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(contextlib.closing(RawStream(server.port, LONG))) for _ in range(SLOTS)]
        for stream in streams:
            assert stream.read_chunk()
        waiting = stack.enter_context(contextlib.closing(RawStream(server.port, greedy(2, prompt="1, 2, 3,"))))
        wait_until(lambda: server.metrics()["waiting"] == 1, "the ninth request to wait")
        streams[0].close()
        assert waiting.read_all().count(b"\n") == 2
    server.wait_idle()
    wait_until(lambda: model.busy_slots() == 0, "all slots to be free")


def test_fewer_slots_than_the_model_server_has_can_be_told(model: ModelServer) -> None:
    with running("serve", backend="real", backend_url=model.url, backend_slots=2) as server:
        with watched(model, server.scheduler()) as seen:
            generate_all(server.port, [greedy(32, prompt=LONG_PROMPT, ignore_eos=True)] * 6)
        assert seen.most_busy == 2
        assert seen.most_connections <= 2 + ASKING_CONNECTIONS

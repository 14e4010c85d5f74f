"""The real backend in a scheduler, against a scripted model server: what clients get, and what the server sees."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest

from ironbatch import layout
from ironbatch.backends import real, retries, stream_pool, upstream_watch
from ironbatch.backends.real import FILLER_TOKEN_ID, RealBackend
from ironbatch.errors import StartError
from ironbatch.health import health_problem
from ironbatch.layout import FINISH_ERROR, FINISH_LENGTH, FINISH_STOP, FINISH_WITHOUT_TOKEN
from ironbatch.metrics import SCHEDULER_ROW
from ironbatch.processes import StopRequested
from tests.support import FakeWorker, SmallEngine, Stream, small_config, small_engine
from tests.upstream.script import LOADING
from tests.upstream.scripted import LLAMA_CPP, OPENAI, Ending, Script, ScriptedServer, refusal
from tests.upstream.tokens import expected_pieces, expected_token_ids

DEADLINE_S = 20.0
PROMPT = "once upon a time "
IDS = [11, 12, 13]


@pytest.fixture(autouse=True)
def _keep_switch_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "PAUSE_FIRST_S", 0.01)
    monkeypatch.setattr(stream_pool, "FINISH_WAIT_S", 0.2)
    monkeypatch.setattr(real, "LOOK_S", 0.02)


@pytest.fixture(params=[OPENAI, LLAMA_CPP])
def server(request: pytest.FixtureRequest) -> Iterator[ScriptedServer]:
    with ScriptedServer(request.param, slots=4) as scripted:
        yield scripted


@contextmanager
def engine_at(server: ScriptedServer, **options: Any) -> Iterator[SmallEngine]:
    defaults = {"total_kv_blocks": 256, "max_running_seqs": 8, "max_queued_requests": 40, "max_model_len": 256}
    defaults |= {"backend_wait_s": 5, "scheduler_timeout_s": 0}
    with small_engine(RealBackend, backend="real", backend_url=server.url, **defaults | options) as engine:
        yield engine


def step_until(engine: SmallEngine, worker: FakeWorker, condition: Callable[[], object]) -> None:
    """Step as the scheduler's process does, asleep where it would be."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it has not come to this in time"
        count = engine.step()
        worker.collect(engine.clock.now_ns())
        if count == 0 or engine.scheduler.is_waiting:
            assert engine.backend.news is not None
            engine.backend.news.wait(5)


def finish(engine: SmallEngine, worker: FakeWorker, *streams: Stream) -> None:
    step_until(engine, worker, lambda: all(stream.is_over for stream in streams))
    engine.assert_nothing_held()


def only(worker: FakeWorker, max_new_tokens: int = 5, **fields: Any) -> Stream:
    return worker.submit(4, max_new_tokens, **{"prompt_text": PROMPT, "temperature": 0.0, **fields})


def produced(engine: SmallEngine, stream: Stream) -> int:
    return int(engine.sequence(stream)["produced_tokens"])


# ---------------------------------------------------------------------------------------------------- what clients get


@pytest.mark.parametrize("prompt", ["text", "ids", "both", "count"])
def test_a_stream_is_the_servers_own(server: ScriptedServer, prompt: str) -> None:
    asked: dict[str, Any] = {
        "text": {"prompt_text": PROMPT},
        "ids": {"prompt_token_ids": IDS},
        "both": {"prompt_text": PROMPT, "prompt_token_ids": IDS},  # with a tokenizer: the server gets the text
        "count": {},
    }[prompt]
    sent: str | list[int] = {"ids": IDS, "count": [FILLER_TOKEN_ID] * 3}.get(prompt, PROMPT)  # type: ignore[assignment]
    with engine_at(server) as engine:
        worker = engine.worker()
        stream = worker.submit(3, 7, temperature=1.0, top_p=0.5, top_k=3, seed=5, **asked)
        finish(engine, worker, stream)
        assert stream.texts == expected_pieces(sent, 7, 5)
        assert stream.reason == FINISH_LENGTH
        ids = expected_token_ids(sent, 7, 5) if server.dialect == LLAMA_CPP else [layout.NO_TOKEN_ID] * 7
        assert stream.token_ids == ids
        assert stream.usage == ((4 if isinstance(sent, str) else 3), 7)
        (request,) = server.requests
        assert request.prompt == sent
        assert (request.fields["top_p"], request.fields["top_k"]) == (0.5, 3)
        without_id = engine.segment.metrics[SCHEDULER_ROW]["pieces_without_id"]
        assert without_id == ids.count(layout.NO_TOKEN_ID)


@pytest.mark.parametrize("pieces", [0, 1, 4])
def test_a_stream_that_stops_early_has_stopped(server: ScriptedServer, pieces: int) -> None:
    server.script(Script(pieces=pieces))
    with engine_at(server) as engine:
        worker = engine.worker()
        stream = only(worker)
        finish(engine, worker, stream)
        assert (len(stream.texts), stream.reason & ~FINISH_WITHOUT_TOKEN) == (pieces, FINISH_STOP)


@pytest.mark.parametrize("chunk", [1, 3, 4, 5])
def test_every_length_of_a_last_chunk_is_sent(server: ScriptedServer, chunk: int) -> None:
    """A last chunk of one token is planned among the decodes."""
    with engine_at(server, max_batch_tokens=8) as engine:
        worker = engine.worker()
        stream = worker.submit(8 + chunk, 3, prompt_text=PROMPT, temperature=0.0)
        finish(engine, worker, stream)
        assert stream.texts == expected_pieces(PROMPT, 3)


def test_many_at_once_each_get_their_own_and_none_queues_upstream(server: ScriptedServer) -> None:
    server.decide = lambda request: Script(token_us=2000, pieces_per_write=1 + len(server.requests) % 3)
    with engine_at(server) as engine:
        worker = engine.worker()
        streams = [only(worker, 1 + k % 9, prompt_text=f"{PROMPT}{k} ") for k in range(40)]
        finish(engine, worker, *streams)
        for k, stream in enumerate(streams):
            assert stream.texts == expected_pieces(f"{PROMPT}{k} ", 1 + k % 9)
        assert server.most_open <= 4
        if server.dialect == LLAMA_CPP:
            assert server.most_waiting == 0, "its slots are known"


def test_slots_may_be_said(server: ScriptedServer) -> None:
    server.decide = lambda _: Script(token_us=2000)
    with engine_at(server, backend_slots=2) as engine:
        worker = engine.worker()
        finish(engine, worker, *[only(worker) for _ in range(10)])
        assert (server.most_open, server.most_waiting) == (2, 0)


# --------------------------------------------------------------------------------------------------------------- faults

FAULTS = {
    "before head": Script(before_head=Ending.RESET),
    "status 500": refusal(500, "out of memory"),
    "no stream": Script(body="hello", content_type="text/html"),
    "junk": Script(pieces=0, raw={0: b"data: {nonsense\n\n"}),
    "no reason": Script(pieces=0, ending=Ending.NO_REASON),
    "closed": Script(pieces=0, ending=Ending.CLOSE),
    "reset": Script(pieces=0, ending=Ending.RESET),
    "busy": refusal(429, "slow down", Retry_After="0"),
    "loading": LOADING,
}
RETRIED = [name for name in FAULTS if name != "no stream"]


@pytest.mark.parametrize("fault", RETRIED)
def test_before_a_token_it_is_sent_again(server: ScriptedServer, fault: str) -> None:
    server.script(FAULTS[fault], FAULTS[fault])
    with engine_at(server) as engine:
        worker = engine.worker()
        stream = only(worker)
        finish(engine, worker, stream)
        assert stream.texts == expected_pieces(PROMPT, 5)
        assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("status 500", layout.ERROR_BACKEND),
        ("junk", layout.ERROR_BACKEND),
        ("no reason", layout.ERROR_BACKEND),
        ("busy", layout.ERROR_UNAVAILABLE),
    ],
)
def test_but_only_so_often(server: ScriptedServer, fault: str, code: int) -> None:
    server.decide = lambda _: FAULTS[fault]
    with engine_at(server, backend_retries=3) as engine:
        worker = engine.worker()
        stream = only(worker)
        finish(engine, worker, stream)
        assert (stream.reason, stream.error_code, stream.texts) == (FINISH_ERROR, code, [])
        assert stream.note
        assert len(server.requests) == 4


def test_a_refusal_is_that_requests_alone_in_the_servers_words(server: ScriptedServer) -> None:
    server.script(refusal(400, "the context is too long: 9000 > 4096"))
    with engine_at(server) as engine:
        worker = engine.worker()
        refused, served = only(worker), only(worker)
        finish(engine, worker, refused, served)
        (bad,) = [stream for stream in (refused, served) if stream.reason == FINISH_ERROR]
        assert bad.error_code == layout.ERROR_REQUEST
        assert "9000 > 4096" in bad.note
        assert len(server.requests) == 2


@pytest.mark.parametrize(
    "script",
    [
        refusal(401, "bad key"),
        Script(status=302, headers={"Location": "http://elsewhere/"}),
        Script(body="<html>", content_type="text/html"),
    ],
)
def test_an_operators_mistake_is_told_at_once(server: ScriptedServer, script: Script) -> None:
    server.script(script)
    with engine_at(server) as engine:
        worker = engine.worker()
        stream = only(worker)
        finish(engine, worker, stream)
        assert (stream.reason, stream.error_code) == (FINISH_ERROR, layout.ERROR_BACKEND)
        assert stream.note == "", "addresses and options are the operator's, not the client's"
        assert len(server.requests) == 1


def test_a_server_of_another_kind_at_the_same_address_is_noticed() -> None:
    with ScriptedServer(LLAMA_CPP, slots=4) as old, engine_at(old) as engine:
        worker = engine.worker()
        finish(engine, worker, only(worker))
        old.kill()
        with ScriptedServer(OPENAI, port=old.port):
            stream = only(worker)
            finish(engine, worker, stream)
            assert stream.texts == expected_pieces(PROMPT, 5)


BREAKS = [Ending.CLOSE, Ending.RESET, Ending.END, Ending.NO_REASON]


@pytest.mark.parametrize("ending", BREAKS)
def test_after_a_token_it_ends_with_an_error(server: ScriptedServer, ending: Ending) -> None:
    server.script(Script(pieces=2, ending=ending))
    with engine_at(server) as engine:
        worker = engine.worker()
        stream = only(worker)
        finish(engine, worker, stream)
        assert (stream.reason, stream.error_code) == (FINISH_ERROR, layout.ERROR_BACKEND)
        assert stream.texts == expected_pieces(PROMPT, 2)
        assert "broke off" in stream.note
        assert len(server.requests) == 1


@pytest.mark.parametrize("ending", BREAKS)
@pytest.mark.parametrize("retries", [0, 2])
def test_after_a_token_it_may_be_continued(server: ScriptedServer, ending: Ending, retries: int) -> None:
    server.decide = lambda _: Script(pieces=2, ending=ending)
    with engine_at(server, backend_continue=True, backend_retries=retries) as engine:
        worker = engine.worker()
        stream = only(worker, 7)
        finish(engine, worker, stream)
        assert stream.texts == expected_pieces(PROMPT, 7)
        assert stream.reason == FINISH_LENGTH
        assert [request.max_tokens for request in server.requests] == [7, 5, 3, 1]
        assert stream.usage == (-1, -1), "no answer has counted all of it"


def test_ids_that_are_not_known_cannot_be_continued() -> None:
    with ScriptedServer(OPENAI) as server:
        server.script(Script(pieces=2, ending=Ending.RESET))
        with engine_at(server, backend_continue=True) as engine:
            worker = engine.worker()
            stream = worker.submit(3, 5, prompt_token_ids=IDS)
            finish(engine, worker, stream)
            assert (stream.reason, stream.error_code) == (FINISH_ERROR, layout.ERROR_BACKEND)
            assert len(server.requests) == 1


def test_more_than_was_asked_for_is_not_taken(server: ScriptedServer) -> None:
    server.script(Script(pieces=5_000, ending=Ending.HANG))
    with engine_at(server) as engine:
        worker = engine.worker()
        stream = only(worker)
        finish(engine, worker, stream)
        assert (stream.texts, stream.reason) == (expected_pieces(PROMPT, 5), FINISH_LENGTH)


@pytest.mark.parametrize("ending", [Ending.HANG, Ending.PINGS])
def test_a_server_that_forgets_to_finish_is_not_waited_for(server: ScriptedServer, ending: Ending) -> None:
    server.script(Script(ending=ending))
    with engine_at(server) as engine:
        worker = engine.worker()
        stream = only(worker)
        finish(engine, worker, stream)
        assert (stream.texts, stream.reason) == (expected_pieces(PROMPT, 5), FINISH_LENGTH)


@pytest.mark.parametrize("ending", [Ending.HANG, Ending.PINGS])
@pytest.mark.parametrize("pieces", [0, 2])
def test_silence_is_bounded(server: ScriptedServer, ending: Ending, pieces: int) -> None:
    server.decide = lambda _: Script(pieces=pieces, ending=ending)
    with engine_at(server, backend_timeout_s=1, backend_retries=0) as engine:
        worker = engine.worker()
        stream = only(worker)
        finish(engine, worker, stream)
        assert (stream.reason, stream.error_code) == (FINISH_ERROR, layout.ERROR_BACKEND)
        assert "silent" in stream.note


def test_text_that_fills_its_row_ends_the_stream(server: ScriptedServer) -> None:
    with engine_at(server, max_model_len=64) as engine:
        worker = engine.worker()
        stream = worker.submit(30, 30, prompt_text="x" * 1390, temperature=0.0)
        finish(engine, worker, stream)
        assert (stream.reason, stream.error_code) == (FINISH_ERROR, layout.ERROR_BACKEND)
        assert "--max-model-len" in stream.note
        assert stream.texts == expected_pieces("x" * 1390, 30)[: len(stream.texts)]
        assert 0 < len(stream.texts) < 30


@pytest.mark.parametrize("max_new_tokens", [1, 2])
def test_a_piece_that_its_row_cannot_hold_is_an_error_and_not_left_out(max_new_tokens: int) -> None:
    with ScriptedServer(OPENAI) as server:
        huge = json.dumps({"choices": [{"text": "y" * 5_000, "finish_reason": None}]})
        server.script(Script(pieces=0, raw={0: f"data: {huge}\n\n".encode()}))
        with engine_at(server, max_model_len=64) as engine:
            worker = engine.worker()
            stream = only(worker, max_new_tokens)
            finish(engine, worker, stream)
            assert (stream.reason, stream.error_code) == (FINISH_ERROR, layout.ERROR_BACKEND)
            assert "--max-model-len" in stream.note


CUT = {
    "more than was asked for": Script(pieces=5_000, ending=Ending.HANG),
    "no end after the finish": Script(ending=Ending.FINISH_AND_HANG),
    "pings after the finish": Script(ending=Ending.FINISH_AND_PINGS),
    "no finish": Script(ending=Ending.HANG),
}


@pytest.mark.parametrize("cut", CUT)
def test_a_place_is_another_streams_only_when_the_server_can_have_noticed(cut: str) -> None:
    """Whichever way a stream is closed on this side. This server notices within 20 ms."""
    with ScriptedServer(LLAMA_CPP, slots=2) as server:
        server.decide = lambda _: CUT[cut]
        with engine_at(server, max_running_seqs=8) as engine:
            worker = engine.worker()
            finish(engine, worker, *[only(worker, 3) for _ in range(10)])
            assert (server.most_open, server.most_waiting) == (2, 0)


def test_a_server_that_closes_before_it_answers_is_not_asked_in_a_loop() -> None:
    """One of many requests that upset it is no reason to say that it is away."""
    with ScriptedServer(OPENAI) as server:
        server.decide = lambda asked: Script(before_head=Ending.RESET) if "bad" in asked.prompt else Script()
        with engine_at(server) as engine:
            worker = engine.worker()
            bad, good = only(worker, prompt_text="bad "), only(worker)
            finish(engine, worker, bad, good)
            assert (bad.reason, bad.error_code) == (FINISH_ERROR, layout.ERROR_BACKEND)
            assert good.texts == expected_pieces(PROMPT, 5)
            assert 3 <= len([request for request in server.requests if "bad" in request.prompt]) <= 6
            assert engine.segment.header["backend_problem"] == layout.BACKEND_WELL


# ------------------------------------------------------------------------------------------------- cancels and restarts


def test_a_cancel_closes_the_stream_within_100_ms(server: ScriptedServer) -> None:
    server.script(Script(pieces=3, ending=Ending.HANG))
    with engine_at(server) as engine:
        worker = engine.worker()
        stream = only(worker)
        step_until(engine, worker, lambda: len(stream.texts) == 3)
        worker.cancel(stream)
        cancelled_s = time.monotonic()
        step_until(engine, worker, lambda: bool(server.left))
        assert server.left[0].left_at is not None
        assert server.left[0].left_at - cancelled_s < 0.1
        assert stream.reason == layout.FINISH_CANCELLED
        engine.assert_nothing_held()


@pytest.mark.parametrize("continues", [False, True])
def test_a_server_that_restarts(server: ScriptedServer, *, continues: bool) -> None:
    """Who waits is served afterwards; who has begun goes on or not, as was said."""
    server.decide = lambda _: Script(token_us=5_000)
    with engine_at(server, backend_continue=continues) as engine:
        worker = engine.worker()
        streams = [only(worker, 12, prompt_text=f"{PROMPT}{k} ") for k in range(12)]
        step_until(engine, worker, lambda: any(len(stream.texts) > 2 for stream in streams))
        server.kill()
        step_until(engine, worker, lambda: engine.segment.header["backend_problem"] == layout.BACKEND_AWAY)
        assert health_problem(engine.segment.header, engine.clock.now_ns())
        begun = [stream for stream in streams if stream.texts]
        server.start()
        finish(engine, worker, *streams)
        assert health_problem(engine.segment.header, engine.clock.now_ns()) is None
        for k, stream in enumerate(streams):
            if stream in begun and not continues:
                assert (stream.reason, stream.error_code) == (FINISH_ERROR, layout.ERROR_BACKEND)
            else:
                assert stream.texts == expected_pieces(f"{PROMPT}{k} ", 12)


def test_a_server_that_stays_away_is_an_answer(server: ScriptedServer) -> None:
    with engine_at(server, backend_wait_s=1) as engine:
        server.kill()
        worker = engine.worker()
        stream = only(worker)
        finish(engine, worker, stream)
        assert (stream.reason, stream.error_code) == (FINISH_ERROR, layout.ERROR_UNAVAILABLE)


def test_a_server_that_comes_back_with_fewer_slots_is_sent_fewer() -> None:
    with ScriptedServer(LLAMA_CPP, slots=4) as server:
        server.decide = lambda _: Script(token_us=2_000)
        with engine_at(server) as engine:
            worker = engine.worker()
            finish(engine, worker, *[only(worker) for _ in range(8)])
            server.kill()
            waiting = only(worker)
            step_until(engine, worker, lambda: engine.segment.header["backend_problem"])
            server.slots = 2
            server.start()
            server.most_open = server.most_waiting = 0
            finish(engine, worker, waiting, *[only(worker) for _ in range(12)])
            assert (server.most_open, server.most_waiting) == (2, 0)


@pytest.mark.parametrize("continues", [False, True])
def test_a_scheduler_that_dies(server: ScriptedServer, *, continues: bool) -> None:
    server.script(*[Script(pieces=3, ending=Ending.HANG)] * 2)
    with engine_at(server, backend_continue=continues, backend_slots=2) as engine:
        worker = engine.worker()
        begun = [only(worker), worker.submit(3, 5, prompt_token_ids=IDS, temperature=0.0)]
        waiting = only(worker)
        step_until(engine, worker, lambda: all(len(stream.texts) == 3 for stream in begun))
        engine.scheduler.close()
        engine.start_scheduler()
        finish(engine, worker, *begun, waiting)
        assert waiting.texts == expected_pieces(PROMPT, 5)
        has_ids = server.dialect == LLAMA_CPP
        for stream, prompt, can_continue in ((begun[0], PROMPT, True), (begun[1], IDS, has_ids)):
            if continues and can_continue:
                assert stream.texts == expected_pieces(prompt, 5)  # type: ignore[arg-type]
            else:
                assert (stream.reason, stream.error_code) == (FINISH_ERROR, layout.ERROR_LOST)
                assert stream.texts == expected_pieces(prompt, 3)  # type: ignore[arg-type]


def test_a_long_stream_is_waited_for_as_long_as_a_new_one(server: ScriptedServer) -> None:
    """What counts is how long the server is away, not how long ago the stream began."""
    server.decide = lambda _: Script(token_us=60_000)
    with engine_at(server, backend_continue=True, backend_wait_s=1) as engine:
        worker = engine.worker()
        stream = only(worker, 30)
        began_s = time.monotonic()
        step_until(engine, worker, lambda: time.monotonic() - began_s > 1.2)
        server.kill()
        step_until(engine, worker, lambda: engine.segment.header["backend_problem"])
        server.start()
        finish(engine, worker, stream)
        assert stream.texts == expected_pieces(PROMPT, 30)


def test_a_server_that_restarts_unseen_with_fewer_slots_is_sent_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_watch, "LOOK_EVERY_S", 0.02)
    with ScriptedServer(LLAMA_CPP, slots=4) as server:
        server.decide = lambda _: Script(token_us=2_000)
        with engine_at(server) as engine:
            worker = engine.worker()
            finish(engine, worker, *[only(worker) for _ in range(8)])
            server.kill()
            server.slots = 2
            server.start()
            assert isinstance(engine.backend, RealBackend)
            pool = engine.backend._pool
            assert pool is not None
            step_until(engine, worker, lambda: pool._server is not None and pool._server.slots == 2)
            server.most_open = server.most_waiting = 0
            finish(engine, worker, *[only(worker) for _ in range(12)])
            assert (server.most_open, server.most_waiting) == (2, 0)


def test_a_scheduler_that_dies_while_the_server_is_away(server: ScriptedServer) -> None:
    """Its successor takes over without the server: who waits gets an answer in time, and the next one is served."""
    server.script(Script(pieces=3, ending=Ending.HANG))
    with engine_at(server, backend_slots=1, backend_wait_s=1) as engine:
        worker = engine.worker()
        begun, waiting = only(worker), only(worker)
        step_until(engine, worker, lambda: len(begun.texts) == 3)
        server.kill()
        engine.scheduler.close()
        engine.start_scheduler()
        assert engine.segment.header["backend_problem"] == layout.BACKEND_AWAY
        finish(engine, worker, begun, waiting)
        assert begun.error_code == layout.ERROR_LOST
        assert waiting.error_code == layout.ERROR_UNAVAILABLE
        server.start()
        step_until(engine, worker, lambda: engine.segment.header["backend_problem"] == layout.BACKEND_WELL)
        last = only(worker)
        finish(engine, worker, last)
        assert last.texts == expected_pieces(PROMPT, 5)


# ---------------------------------------------------------------------------------------------------------------- start


def test_it_waits_for_a_server_that_loads(server: ScriptedServer) -> None:
    server.gets["/v1/models"] = LOADING
    problems: list[int] = []
    backend = RealBackend(small_config(backend="real", backend_url=server.url, backend_wait_s=5))

    def tell(problem: int) -> None:
        problems.append(problem)
        server.gets.clear()

    backend.tell_problem = tell
    backend.connect()
    backend.close()
    assert problems == [layout.BACKEND_AWAY, layout.BACKEND_WELL]


@pytest.mark.parametrize(
    ("answer", "told"),
    [(LOADING, "within 0 s"), (refusal(401, "who are you"), "--backend-api-key-file"), (refusal(404, "no"), "404")],
)
def test_a_start_that_cannot_be_says_why(server: ScriptedServer, answer: Script, told: str) -> None:
    server.gets["/v1/models"] = answer
    server.gets["/props"] = answer
    backend = RealBackend(small_config(backend="real", backend_url=server.url, backend_wait_s=0))
    with pytest.raises(StartError, match=told):
        backend.connect()
    backend.close()


def test_a_wait_at_the_start_ends_with_the_scheduler(server: ScriptedServer) -> None:
    server.gets["/v1/models"] = LOADING
    backend = RealBackend(small_config(backend="real", backend_url=server.url, backend_wait_s=60))
    backend.is_stopping = lambda: bool(server.asked)
    with pytest.raises(StopRequested):
        backend.connect()
    backend.close()


def test_a_key_is_sent_and_a_key_file_that_is_none_is_told(tmp_path: Any) -> None:
    key = tmp_path / "key"
    key.write_text("sesame\n")
    with ScriptedServer(OPENAI, api_key="sesame") as server:
        with engine_at(server, backend_api_key_file=str(key)) as engine:
            worker = engine.worker()
            stream = only(worker)
            finish(engine, worker, stream)
            assert stream.texts == expected_pieces(PROMPT, 5)
        key.write_text("")
        backend = RealBackend(
            small_config(backend="real", backend_url=server.url, backend_api_key_file=str(key), backend_wait_s=0)
        )
        with pytest.raises(StartError, match="--backend-api-key-file"):
            backend.connect()


# ---------------------------------------------------------------------------------------------------------------- storm


@pytest.mark.parametrize("continues", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_storm(server: ScriptedServer, seed: int, *, continues: bool) -> None:
    """Random faults, cancels and restarts: whatever a client has is the beginning of what it should have."""
    rng = Random(seed)
    kinds = [Script(), Script(token_us=1_000), *(FAULTS[name] for name in RETRIED)]
    kinds += [Script(pieces=2, ending=ending) for ending in BREAKS]
    server.decide = lambda _: rng.choice([Script(), *kinds])
    with engine_at(server, backend_continue=continues) as engine:
        worker = engine.worker()
        streams = []
        for k in range(60):
            if len(worker.streams) < 30:
                streams.append(only(worker, rng.randint(1, 9), prompt_text=f"{PROMPT}{k} "))
            if rng.random() < 0.2 and (live := [s for s in streams if not s.is_over]):
                worker.cancel(rng.choice(live))
            if rng.random() < 0.05:
                server.kill()
                server.start()
            step_until(engine, worker, lambda: len(worker.streams) < 30)
        finish(engine, worker, *streams)
        for stream in streams:
            prompt = f"{PROMPT}{streams.index(stream)} "
            assert stream.texts == expected_pieces(prompt, stream.max_new_tokens)[: len(stream.texts)]
            if stream.reason == FINISH_LENGTH:
                assert len(stream.texts) == stream.max_new_tokens
        assert server.most_waiting == 0 or server.dialect == OPENAI

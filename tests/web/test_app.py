"""The whole application by raw ASGI calls, with a real scheduler in the same process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

import numpy as np
import pytest

from ironbatch import layout
from ironbatch.backends.base import FINISH_STOP, Backend, BatchPlan
from ironbatch.backends.mock import MockBackend
from ironbatch.clock import FakeClock
from ironbatch.config import Config
from ironbatch.draining import announce_drain
from ironbatch.errors import RequestError
from ironbatch.kernels.emission import mock_token
from ironbatch.kernels.slots import choice_seed
from ironbatch.shm.engine import Engine
from ironbatch.shm.wakeup import Doorbell
from ironbatch.text.words import word
from ironbatch.web.app import create_app
from ironbatch.web.body import body_missing
from ironbatch.web.lanes import LANE_VARIABLE
from tests.support import ScriptedBackend, small_engine
from tests.text.small import KINDS
from tests.web.fakes import (
    Answer,
    Application,
    Body,
    Lifetime,
    assert_well_formed,
    expected_lines,
    fetch,
    http_scope,
    in_loop,
    leave,
    parsed,
    request,
    turn,
    until,
)
from tests.web.test_stream import UNADMITTED

LANE, GENERATION = 0, 3
MAX_BODY_BYTES = 4096


IDS_OF_HELLO = b"[104, 101, 108, 108, 111]"


class Server:
    """An application on a small engine; its scheduler steps when it is told to."""

    def __init__(self, backend: Callable[[Config], Backend], /, **options: Any) -> None:
        self._context = small_engine(backend, **({"max_body_bytes": MAX_BODY_BYTES} | options))
        self.small = self._context.__enter__()
        self.segment = self.small.segment
        self.bell = Doorbell.create()
        engine = Engine(self.segment, self.bell, self.small.bells)
        self.segment.lanes[LANE]["generation"] = GENERATION
        environ = {**self.small.config.to_environ(), **engine.to_environ(), LANE_VARIABLE: f"{LANE}:{GENERATION}"}
        self.app: Application = create_app(environ, self.small.clock)

    @property
    def metrics(self) -> Any:
        return self.segment.metrics[1 + LANE]

    def generate(self, body: bytes) -> Answer:
        return request(self.app, "POST", "/generate", body)

    async def finish(self, *answers: Answer) -> None:
        """Step until these are answered."""
        while not all(answer.task is not None and answer.task.done() for answer in answers):
            self.small.step()
            await asyncio.sleep(0)
        for answer in answers:
            assert answer.task is not None
            answer.task.result()

    async def is_submitted(self, count: int = 1) -> None:
        await until(lambda: (self.segment.slots["submitted"] > 0).sum() >= count, "the submission")

    def counts(self) -> dict[str, int]:
        names = ("received", "completed", "cancelled", "failed", "rejected", "unavailable")
        return {name: int(self.metrics[f"requests_{name}"]) for name in names if self.metrics[f"requests_{name}"]}

    def close(self) -> None:
        self.bell.close()
        self._context.__exit__(None, None, None)


@contextlib.contextmanager
def a_server(backend: Callable[[Config], Backend] = MockBackend, /, **options: Any) -> Iterator[Server]:
    server = Server(backend, **options)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def server() -> Iterator[Server]:
    with a_server() as found:
        yield found


# ------------------------------------------------------------------------------------------------------- /generate


@in_loop
async def test_a_request_streams_its_tokens(server: Server) -> None:
    async with Lifetime(server.app):
        assert server.segment.lanes[LANE]["serving_generation"] == GENERATION
        answer = server.generate(b'{"prompt_tokens": 5, "max_new_tokens": 6}')
        await server.finish(answer)
        assert answer.status == 200
        assert answer.headers[b"content-type"] == b"application/x-ndjson"
        assert answer.body == expected_lines(6)
        assert_well_formed(answer.send)
        assert server.counts() == {"received": 1, "completed": 1}
        server.small.assert_nothing_held()


@in_loop
async def test_many_at_once_with_details(server: Server) -> None:
    async with Lifetime(server.app):
        answers = [
            server.generate(b'{"prompt_token_ids": [1, %d], "max_new_tokens": 5, "seed": %d, "details": true}' % (k, k))
            for k in range(12)
        ]
        await server.finish(*answers)
        for answer in answers:
            lines = parsed(answer.body)
            assert [line["token_index"] for line in lines] == list(range(5))
            assert lines[-1]["finish_reason"] == "length"
            assert list(lines[0]) == ["token_index", "token_id", "done"]
        assert len({answer.body for answer in answers}) == 12
        assert server.counts() == {"received": 12, "completed": 12}


@in_loop
async def test_a_text_is_answered_with_text(server: Server) -> None:
    async with Lifetime(server.app):
        ask = b'{"prompt": "h\\u00e9llo", "max_new_tokens": 5, "details": %b, "n": 2}'
        plain, detailed = server.generate(ask % b"false"), server.generate(ask % b"true")
        await server.finish(plain, detailed)
        lines, told = parsed(plain.body), parsed(detailed.body)
        assert list(lines[0]) == ["token_index", "choice", "text", "done"]
        assert list(told[0]) == ["token_index", "choice", "token_id", "text", "done"]
        assert [line["text"] for line in told] == [word(line["token_id"]) for line in told]
        assert [line["text"] for line in lines] == [line["text"] for line in told]
        seeds = [server.small.config.seed, choice_seed(server.small.config.seed, 1)]
        for choice, seed in enumerate(seeds):
            mine = [line["token_id"] for line in told if line["choice"] == choice]
            assert mine == [mock_token(int(seed), len("héllo".encode()) + k, -1, 0) for k in range(5)]


@in_loop
async def test_a_text_is_its_tokens(server: Server) -> None:
    async with Lifetime(server.app):
        as_text = server.generate(b'{"prompt": "hello", "max_new_tokens": 5, "details": true}')
        as_ids = server.generate(b'{"prompt_token_ids": %b, "max_new_tokens": 5, "details": true}' % IDS_OF_HELLO)
        await server.finish(as_text, as_ids)
        ids = [[line["token_id"] for line in parsed(answer.body)] for answer in (as_text, as_ids)]
        assert ids[0] == ids[1]
        assert b'"text"' not in as_ids.body


@in_loop
async def test_a_tokenizer_json_makes_ids_and_text(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    library = KINDS["byte_level"]()
    library.save(str(path))
    with a_server(emits(library.encode("日本 dog").ids), tokenizer=str(path)) as server:
        async with Lifetime(server.app):
            answer = server.generate(b'{"prompt": "The quick", "max_new_tokens": 50}')
            await server.is_submitted()
            row = server.segment.tokens[0][: len(library.encode("The quick").ids)]
            assert row.tolist() == library.encode("The quick").ids
            await server.finish(answer)
            assert "".join(line["text"] for line in parsed(answer.body)) == "日本 dog"


def emits(ids: list[int]) -> Callable[[Config], Backend]:
    """A backend that gives these tokens and ends with the last."""

    def make(config: Config) -> Backend:
        backend = ScriptedBackend(config)
        left = list(ids)

        def script(plan: BatchPlan) -> list[list[int]]:
            tokens = [[left.pop(0)] if row["emits"] and left else [] for row in plan.rows]
            plan.output.finish_reasons[: len(plan)] = 0 if left else FINISH_STOP
            return tokens

        backend.script = script
        return backend

    return make


@in_loop
async def test_a_tokenizer_that_is_gone_when_the_worker_starts(caplog: pytest.LogCaptureFixture) -> None:
    with a_server(tokenizer="/nowhere/tokenizer.json") as server:
        answer = await fetch(server.app, "POST", "/generate", b"{}")
        assert answer.status == 503
        assert "is not a tokenizer.json: No such file" in answer.error["message"]
        assert "this worker can serve nothing" in caplog.text


@pytest.mark.parametrize(
    ("details", "line"),
    [
        (b"", b'{"token_index":0,"done":true}\n'),
        (b', "details": true', b'{"token_index":0,"done":true,"finish_reason":"length"%b}\n' % UNADMITTED.encode()),
        (b', "n": 2', b'{"token_index":0,"choice":0,"done":true}\n{"token_index":0,"choice":1,"done":true}\n'),
    ],
)
@in_loop
async def test_no_tokens_wanted_takes_no_slot(server: Server, details: bytes, line: bytes) -> None:
    async with Lifetime(server.app):
        answer = await fetch(server.app, "POST", "/generate", b'{"prompt_tokens": 5, "max_new_tokens": 0%b}' % details)
        assert (answer.status, answer.body) == (200, line)
        assert answer.headers[b"content-type"] == b"application/x-ndjson"
        assert not server.segment.slots["generation"].any()
        assert server.counts() == {"received": 1, "completed": 1}


@in_loop
async def test_no_tokens_wanted_of_a_text(server: Server) -> None:
    async with Lifetime(server.app):
        answer = await fetch(server.app, "POST", "/generate", b'{"prompt": "x", "max_new_tokens": 0}')
        assert answer.body == b'{"token_index":0,"text":"","done":true}\n'


@in_loop
async def test_no_tokens_wanted_of_a_backend_that_has_text() -> None:
    with a_server(backend="real", backend_url="http://127.0.0.1:9/v1") as server:
        async with Lifetime(server.app):
            body = b'{"prompt_tokens": 1, "max_new_tokens": 0, "details": true}'
            answer = await fetch(server.app, "POST", "/generate", body)
            (line,) = parsed(answer.body)
            assert (line["text"], line["usage"]) == ("", {"prompt_tokens": None, "completion_tokens": None})


@in_loop
async def test_a_client_that_goes_frees_what_it_held(server: Server) -> None:
    async with Lifetime(server.app):
        gone = server.generate(b'{"prompt_tokens": 9, "max_new_tokens": 40}')
        stays = server.generate(b'{"prompt_tokens": 2, "max_new_tokens": 9}')
        await server.is_submitted(2)
        server.small.step()
        await turn()
        await leave(gone)
        server.small.step()
        assert server.small.gauge("running_count") == 1, "within a step"
        await server.finish(stays)
        assert stays.body == expected_lines(9)
        server.small.assert_nothing_held()
        assert server.counts() == {"received": 2, "completed": 1, "cancelled": 1}


@in_loop
async def test_a_client_that_goes_before_its_first_token(server: Server) -> None:
    async with Lifetime(server.app):
        gone = server.generate(b'{"prompt_tokens": 9, "max_new_tokens": 40}')
        await server.is_submitted()
        await leave(gone)
        server.small.step()
        await turn()
        assert gone.send.messages == []
        server.small.assert_nothing_held()
        assert server.counts() == {"received": 1, "cancelled": 1}


@in_loop
async def test_a_client_that_goes_in_the_middle_of_its_body(server: Server) -> None:
    async with Lifetime(server.app):
        answer = request(server.app, "POST", "/generate", Body([b'{"prompt_tokens": 3'], is_cut_off=True))
        assert answer.task is not None
        await answer.task
        assert not server.segment.slots["owner"].any()


@in_loop
async def test_a_socket_that_breaks_cancels_its_request(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    async with Lifetime(server.app):
        answer = server.generate(b'{"prompt_tokens": 2, "max_new_tokens": 40}')
        await server.is_submitted()
        server.small.step()
        await turn()
        answer.send.break_off(ConnectionResetError("gone"))
        with caplog.at_level(logging.CRITICAL, "ironbatch.web"):
            await server.finish(answer)
        server.small.step()
        await turn()
        server.small.assert_nothing_held()
        assert server.counts() == {"received": 1, "failed": 1}


@in_loop
async def test_two_live_requests_that_a_client_gave_one_id_both_complete(server: Server) -> None:
    """Ids are the engine's own; what a client calls its requests is its affair."""
    async with Lifetime(server.app):
        body = b'{"prompt_tokens": 3, "max_new_tokens": 8, "id": "same", "seed": %d, "details": true}'
        answers = []
        for seed in (1, 2):
            text = body % seed
            headers = [(b"x-request-id", b"same"), (b"content-length", b"%d" % len(text))]
            answers.append(request(server.app, "POST", "/generate", text, headers))
        await server.is_submitted(2)
        await server.finish(*answers)
        for seed, answer in zip((1, 2), answers, strict=True):
            assert_well_formed(answer.send)
            lines = parsed(answer.body)
            assert [line["token_index"] for line in lines] == list(range(8))
            assert [line["token_id"] for line in lines] == [mock_token(seed, 3 + k, -1, 0) for k in range(8)]
        assert server.counts() == {"received": 2, "completed": 2}
        server.small.assert_nothing_held()


# --------------------------------------------------------------------------------------------------------- choices


def publish(server: Server, slot: int, produced: int, reason: int, error_code: int = layout.ERROR_NONE) -> None:
    """The scheduler's part."""
    row = server.segment.slots[slot]
    row["error_code"] = error_code
    row["published"] = (int(row["generation"]) << 32) | (reason << 24) | produced
    server.small.bells[LANE].ring()


@in_loop
async def test_choices_of_one_request_are_one_answer_and_one_count(server: Server) -> None:
    async with Lifetime(server.app):
        answer = server.generate(b'{"prompt_tokens": 2, "max_new_tokens": 3, "n": 3}')
        await server.is_submitted(3)
        slots = np.flatnonzero(server.segment.slots["owner"]).tolist()
        assert server.segment.slots["choice_index"][slots].tolist() == [0, 1, 2]
        publish(server, slots[2], 3, layout.FINISH_LENGTH)
        publish(server, slots[0], 3, layout.FINISH_LENGTH)
        await until(lambda: answer.send.chunks)
        assert not answer.send.is_complete
        publish(server, slots[1], 1, layout.FINISH_STOP)
        assert answer.task is not None
        await answer.task
        assert_well_formed(answer.send)
        found = [(line["choice"], line["token_index"], line["done"]) for line in parsed(answer.body)]
        whole = [(choice, k, k == 2) for choice in (0, 2) for k in range(3)]
        assert sorted(found) == sorted([*whole, (1, 0, True)])
        assert server.counts() == {"received": 1, "completed": 1}
        assert not server.segment.slots["owner"].any()


@pytest.mark.parametrize("failed", [1, 3])
@in_loop
async def test_a_request_of_which_choices_fail_has_failed_once(server: Server, failed: int) -> None:
    async with Lifetime(server.app):
        answer = server.generate(b'{"prompt_tokens": 2, "max_new_tokens": 3, "n": 3}')
        await server.is_submitted(3)
        for count, slot in enumerate(np.flatnonzero(server.segment.slots["owner"]).tolist()):
            if count < failed:
                publish(server, slot, 0, layout.FINISH_ERROR, layout.ERROR_NO_BLOCKS)
            else:
                publish(server, slot, 3, layout.FINISH_LENGTH)
        assert answer.task is not None
        await answer.task
        assert answer.status == (500 if failed == 3 else 200)
        if failed == 3:
            assert answer.error["type"] == "out_of_blocks"
        else:
            assert [line["choice"] for line in parsed(answer.body) if "error" in line] == [0]
        assert server.counts() == {"received": 1, "failed": 1}


@in_loop
async def test_a_client_that_goes_cancels_its_choices(server: Server) -> None:
    async with Lifetime(server.app):
        gone = server.generate(b'{"prompt_tokens": 2, "max_new_tokens": 30, "n": 3}')
        await server.is_submitted(3)
        slots = np.flatnonzero(server.segment.slots["owner"]).tolist()
        publish(server, slots[1], 1, layout.FINISH_STOP)
        await until(lambda: gone.send.chunks)
        await leave(gone)
        rows = server.segment.slots[slots]
        assert (rows["cancelled"] == rows["generation"]).tolist() == [True, False, True]
        assert server.counts() == {"received": 1, "cancelled": 1}


@in_loop
async def test_what_the_device_allows_is_a_limit_too(server: Server) -> None:
    async with Lifetime(server.app):
        header = server.segment.header
        header["longest_request_tokens"], header["most_choices"] = 40, 2
        long = await fetch(server.app, "POST", "/generate", b'{"prompt_tokens": 30, "max_new_tokens": 11}')
        assert (long.status, long.error["param"]) == (400, "max_new_tokens")
        assert "are 41, over this engine's limit of 40" in long.error["message"]
        many = await fetch(server.app, "POST", "/generate", b'{"prompt_tokens": 2, "n": 3}')
        assert (many.status, many.error["param"]) == (400, "n")
        assert "over the 2 sequences" in many.error["message"]
        header["longest_request_tokens"], header["most_choices"] = 10**6, 10**6
        still = await fetch(server.app, "POST", "/generate", b'{"prompt_tokens": 2, "n": 33}')
        assert "over the 32 sequences" in still.error["message"], "no more than there are slots"
        long = await fetch(server.app, "POST", "/generate", b'{"prompt_tokens": 65}')
        assert long.status == 400
        assert server.counts() == {"received": 4, "rejected": 4}


def refuses_after(steps: int) -> Callable[[Config], Backend]:
    def make(config: Config) -> Backend:
        backend = ScriptedBackend(config)
        taken = iter(range(1000))

        def script(plan: BatchPlan) -> None:
            if next(taken) >= steps:
                raise RequestError(plan.rows["sequence"].tolist(), "no")

        backend.script = script  # type: ignore[assignment]
        return backend

    return make


@in_loop
async def test_an_error_before_the_first_token_is_a_status() -> None:
    with a_server(refuses_after(0)) as server:
        async with Lifetime(server.app):
            answer = server.generate(b'{"prompt_tokens": 2, "max_new_tokens": 4}')
            await server.finish(answer)
            assert answer.status == 400
            assert answer.error["type"] == "backend_refused"
            assert answer.error["message"] == layout.ERROR_MESSAGES[layout.ERROR_REQUEST]
            assert server.counts() == {"received": 1, "failed": 1}


@in_loop
async def test_an_error_after_it_is_a_line() -> None:
    with a_server(refuses_after(2)) as server:
        async with Lifetime(server.app):
            answer = server.generate(b'{"prompt_tokens": 2, "max_new_tokens": 4}')
            await server.finish(answer)
            assert answer.status == 200
            assert_well_formed(answer.send)
            lines = parsed(answer.body)
            assert [line["done"] for line in lines] == [False, False, True]
            assert lines[-1]["token_index"] == 2
            assert list(lines[-1]["error"]) == ["type", "message", "param"]
            assert server.counts() == {"received": 1, "failed": 1}


@in_loop
async def test_full_is_503_with_retry_after() -> None:
    with a_server(max_running_seqs=1, max_queued_requests=1) as server:
        async with Lifetime(server.app):
            taken = [server.generate(b'{"prompt_tokens": 2, "max_new_tokens": 3}') for _ in range(2)]
            await server.is_submitted(2)
            refused = await fetch(server.app, "POST", "/generate", b'{"prompt_tokens": 2}')
            assert refused.status == 503
            assert refused.headers[b"retry-after"] == b"1"
            assert refused.error["type"] == "queue_full"
            await server.finish(*taken)
            again = server.generate(b'{"prompt_tokens": 2, "max_new_tokens": 3}')
            await server.finish(again)
            assert again.body == expected_lines(3)
            assert server.counts() == {"received": 4, "completed": 3, "unavailable": 1}


# ---------------------------------------------------------------------------------------------------------- bodies


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"[]", None),
        (b"\xff\xfe", None),
        (b'{"prompt_tokens": true}', "prompt_tokens"),
        (b'{"prompt_tokens": 1.5}', "prompt_tokens"),
        (b'{"prompt_tokens": 0}', "prompt_tokens"),
        (b'{"prompt_tokens": 1, "max_new_tokens": 1000}', "max_new_tokens"),
        (b'{"prompt_token_ids": [1, -1]}', "prompt_token_ids"),
        (b"[" * 4000, None),
    ],
)
@in_loop
async def test_a_bad_body_is_400_in_the_one_shape(server: Server, body: bytes, param: str | None) -> None:
    async with Lifetime(server.app):
        answer = await fetch(server.app, "POST", "/generate", body)
        assert answer.status == 400
        assert answer.error["type"] == "invalid_request"
        assert answer.error["param"] == param
        assert server.counts() == {"received": 1, "rejected": 1}
        assert not server.segment.slots["generation"].any()


@pytest.mark.parametrize("length", [MAX_BODY_BYTES + 1, 10**9, 10**30])
@in_loop
async def test_a_content_length_over_the_limit_is_413_before_a_byte_is_read(server: Server, length: int) -> None:
    async with Lifetime(server.app):
        body = Body([b"x"] * 10_000)
        answer = await fetch(server.app, "POST", "/generate", body, [(b"content-length", str(length).encode())])
        assert answer.status == 413
        assert answer.error["type"] == "body_too_large"
        assert f"{MAX_BODY_BYTES} bytes (--max-body-bytes)" in answer.error["message"]
        assert body.taken == 0
        assert server.counts() == {}


@pytest.mark.parametrize("coding", [b"gzip, chunked", b"chunked, chunked", b"gzip", b"identity"])
@in_loop
async def test_a_transfer_coding_that_nobody_undoes_is_501_before_a_byte_is_read(server: Server, coding: bytes) -> None:
    async with Lifetime(server.app):
        body = Body([b"x"] * 10)
        answer = await fetch(server.app, "POST", "/generate", body, [(b"transfer-encoding", coding)])
        assert answer.status == 501
        assert answer.error["type"] == "not_implemented"
        assert coding.decode() in answer.error["message"]
        assert body.taken == 0


@in_loop
async def test_a_body_that_never_comes_is_408(server: Server) -> None:
    async with Lifetime(server.app):
        for path in ("/generate", "/metrics", "/nope"):
            answer = await fetch(server.app, "POST", path, Body([], is_cut_off=True), [(b"content-length", b"10")])
            assert (answer.status, answer.error["type"]) == (408, "request_timeout")
        assert server.counts() == {}


@pytest.mark.parametrize("parts", [[], [b'{"prompt_tokens": 3'], [b"{", b'"prompt']])
@pytest.mark.parametrize("is_cut_off", [False, True])
@in_loop
async def test_a_body_that_stalls_is_408(server: Server, parts: list[bytes], *, is_cut_off: bool) -> None:
    """As our connection tells it; and as gunicorn's own does, by a client that seems to have gone."""
    async with Lifetime(server.app):
        body = Body(parts, is_cut_off=True) if is_cut_off else Body(parts, problem=body_missing())
        answer = await fetch(server.app, "POST", "/generate", body, [(b"content-length", b"100")])
        assert (answer.status, answer.error["type"]) == (408, "request_timeout")
        assert server.counts() == ({"received": 1, "rejected": 1} if parts else {})
        assert not server.segment.slots["owner"].any()


@in_loop
async def test_a_head_request_that_is_refused_has_no_body(server: Server) -> None:
    async with Lifetime(server.app):
        answer = await fetch(server.app, "HEAD", "/generate", Body([]), [(b"content-length", b"9" * 15)])
        assert (answer.status, answer.body) == (413, b"")


@pytest.mark.parametrize("part_bytes", [1, 100, MAX_BODY_BYTES, 65_536])
@in_loop
async def test_a_chunked_body_over_the_limit_is_413_with_flat_memory(server: Server, part_bytes: int) -> None:
    async with Lifetime(server.app):
        body = Body(b" " * part_bytes for _ in range(2**22 // part_bytes))
        tracemalloc.start()
        try:
            answer = await fetch(server.app, "POST", "/generate", body)
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert answer.status == 413
        assert answer.error["type"] == "body_too_large"
        assert body.taken * part_bytes <= MAX_BODY_BYTES + 2 * part_bytes, "it stops reading"
        assert peak_bytes < 10 * max(MAX_BODY_BYTES, part_bytes) + 2**20


@pytest.mark.parametrize("is_chunked", [False, True])
@in_loop
async def test_a_body_of_exactly_the_limit_is_read(server: Server, *, is_chunked: bool) -> None:
    async with Lifetime(server.app):
        body = b'{"prompt_tokens": 5, "max_new_tokens": 0}'.ljust(MAX_BODY_BYTES)
        parts = [body[k : k + 1000] for k in range(0, len(body), 1000)]
        answer = await fetch(server.app, "POST", "/generate", Body(parts) if is_chunked else body)
        assert answer.status == 200
        over = await fetch(server.app, "POST", "/generate", Body([*parts, b" "]) if is_chunked else body + b" ")
        assert over.status == 413


@in_loop
async def test_a_body_in_single_bytes(server: Server) -> None:
    async with Lifetime(server.app):
        body = b'{"prompt_tokens": 5, "max_new_tokens": 0}'
        answer = await fetch(server.app, "POST", "/generate", Body(bytes([byte]) for byte in body))
        assert answer.status == 200


@pytest.mark.parametrize("value", [b"-1", b"x", b"1.5", b"0x10", b"\xb2"])
@in_loop
async def test_a_content_length_that_is_no_number(server: Server, value: bytes) -> None:
    async with Lifetime(server.app):
        answer = await fetch(server.app, "POST", "/generate", Body([b"{}"]), [(b"content-length", value)])
        assert answer.status == 400
        assert "Content-Length" in answer.error["message"]


@in_loop
async def test_a_content_type_is_not_asked_for(server: Server) -> None:
    async with Lifetime(server.app):
        for kind in (b"text/plain", b"application/x-www-form-urlencoded", b"nonsense"):
            body = b'{"prompt_tokens": 5, "max_new_tokens": 0}'
            headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
            assert (await fetch(server.app, "POST", "/generate", body, headers)).status == 200


# --------------------------------------------------------------------------------------------------- paths, methods

WEIRD_PATHS = [
    "/",
    "",
    "/nope",
    "/generate/",
    "/generate/x",
    "/Generate",
    "/health%00",
    "/%ED%A0%80",  # a surrogate
    "/%FF%FE",
    "/%C0%AF",
    "/a%0d%0aset-cookie:%20x=1",
    "/%22%7D%5C",
    "/..%2f..%2fetc/passwd",
    "/{x}",
    "/%F0%9F%92%A9",
    "/" + "x" * 8000,
    "/" + "%E2%98%83" * 500,
]


@pytest.mark.parametrize("raw", WEIRD_PATHS)
@pytest.mark.parametrize("method", ["GET", "POST"])
@in_loop
async def test_a_wrong_path_is_404_in_the_one_shape(server: Server, method: str, raw: str) -> None:
    path = unquote_to_bytes(raw).decode("utf-8", "replace")  # as gunicorn does
    async with Lifetime(server.app):
        answer = await fetch(server.app, method, path)
        assert answer.status == 404
        assert answer.error["type"] == "not_found"
        assert "/generate" in answer.error["message"]
        assert len(answer.error["message"]) < 300
        assert server.counts() == {}


@pytest.mark.parametrize(("path", "allowed"), [("/generate", "POST"), ("/metrics", "GET"), ("/health", "GET")])
@in_loop
async def test_a_wrong_method_is_405_and_names_the_right_one(server: Server, path: str, allowed: str) -> None:
    async with Lifetime(server.app):
        for method in ("GET", "POST", "PUT", "PATCH", "DELETE", "TRACE", "CONNECT", "HEAD"):
            if method == allowed or (allowed == "GET" and method == "HEAD"):
                continue
            answer = await fetch(server.app, method, path)
            assert answer.status == 405, method
            assert allowed.encode() in answer.headers[b"allow"]
            if method != "HEAD":
                assert answer.error["type"] == "method_not_allowed"
                assert f"use {allowed}" in answer.error["message"]
        assert server.counts() == {}


@pytest.mark.parametrize("method", ["FOO", "get", "WEBSOCKET", "X" * 5000])
@in_loop
async def test_a_method_that_nobody_knows(server: Server, method: str) -> None:
    async with Lifetime(server.app):
        answer = await fetch(server.app, method, "/health")
        assert answer.status in {400, 405}
        assert len(answer.error["message"]) < 300


async def handshake(app: Application, path: str) -> list[dict[str, Any]]:
    """A client that asks for a WebSocket; what it is answered."""
    scope = http_scope("GET", path) | {"type": "websocket", "scheme": "ws", "subprotocols": []}
    del scope["method"]
    events = iter([{"type": "websocket.connect"}])
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return next(events, {"type": "websocket.disconnect", "code": 1006})

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent


@pytest.mark.parametrize("path", ["/generate", "/nope"])
@in_loop
async def test_a_websocket_is_closed(server: Server, path: str) -> None:
    async with Lifetime(server.app):
        (close,) = await handshake(server.app, path)
        assert close["type"] == "websocket.close"


# --------------------------------------------------------------------------------------------- health, metrics, 503


@in_loop
async def test_health_and_metrics_are_json(server: Server) -> None:
    async with Lifetime(server.app):
        health = await fetch(server.app, "GET", "/health")
        assert (health.status, health.json) == (200, {"status": "ok"})
        answer = server.generate(b'{"prompt_tokens": 5, "max_new_tokens": 6}')
        await server.finish(answer)
        metrics = await fetch(server.app, "GET", "/metrics")
        assert metrics.status == 200
        assert list(metrics.json)[:3] == ["elapsed_secs", "tokens_generated", "requests_completed"]
        assert (metrics.json["tokens_generated"], metrics.json["requests_completed"]) == (6, 1)
        assert metrics.json["kv_blocks_free"] == server.small.config.total_kv_blocks


@pytest.mark.parametrize(
    ("word", "value", "reason"),
    [("draining", 1, "shutting down"), ("scheduler_ready", 0, "opens its backend"), ("heartbeat_ns", 0, "no progress")],
)
@in_loop
async def test_while_the_engine_cannot_serve(server: Server, word: str, value: int, reason: str) -> None:
    async with Lifetime(server.app):
        server.small.clock.advance_ns(10 * 10**9)
        server.small.scheduler.beat()
        server.segment.header[word] = value
        refused = await fetch(server.app, "POST", "/generate", b'{"prompt_tokens": 2}')
        assert refused.status == 503
        assert refused.headers[b"retry-after"] == b"1"
        assert refused.error["type"] == "engine_unavailable"
        assert reason in refused.error["message"]
        health = await fetch(server.app, "GET", "/health")
        assert health.status == 503
        assert health.headers[b"retry-after"] == b"1"
        assert health.json["status"] == "unavailable"
        assert reason in health.json["reason"]
        assert (await fetch(server.app, "GET", "/metrics")).status == 200
        assert server.counts() == {"received": 1, "unavailable": 1}


@in_loop
async def test_a_stream_that_runs_outlives_the_beginning_of_the_shutdown(server: Server) -> None:
    async with Lifetime(server.app):
        answer = server.generate(b'{"prompt_tokens": 2, "max_new_tokens": 9}')
        await server.is_submitted()
        server.small.step()
        announce_drain(server.segment.header, server.small.clock.now_ns(), 30)
        await server.finish(answer)
        assert answer.body == expected_lines(9)


def without_engine() -> Application:
    return create_app({}, FakeClock())


@pytest.mark.parametrize("path", ["/generate", "/metrics", "/health", "/nope"])
@pytest.mark.parametrize("method", ["GET", "POST"])
@in_loop
async def test_without_an_engine_everything_is_503(method: str, path: str) -> None:
    app = without_engine()
    async with Lifetime(app):
        answer = await fetch(app, method, path, b'{"prompt_tokens": 2}')
        assert answer.status == 503
        assert answer.headers[b"retry-after"] == b"1"
        assert answer.error["type"] == "engine_unavailable"
        assert "ironbatch serve" in answer.error["message"]


@in_loop
async def test_without_a_lane_too(server: Server) -> None:
    engine = Engine(server.segment, server.bell, server.small.bells)
    app = create_app({**server.small.config.to_environ(), **engine.to_environ()}, server.small.clock)
    async with Lifetime(app):
        answer = await fetch(app, "POST", "/generate", b'{"prompt_tokens": 2}')
        assert answer.status == 503
        assert "lane" in answer.error["message"]


@in_loop
async def test_with_an_engine_that_has_ended(server: Server) -> None:
    engine = Engine(server.segment, server.bell, server.small.bells)
    environ = {**server.small.config.to_environ(), **engine.to_environ(), LANE_VARIABLE: "0:1"}
    environ["IRONBATCH_INTERNAL_SEGMENT"] = "ironbatch-that-was-never-there"
    app = create_app(environ, server.small.clock)
    async with Lifetime(app):
        answer = await fetch(app, "GET", "/health")
        assert answer.status == 503
        assert "does not exist" in answer.error["message"]


@in_loop
async def test_a_websocket_is_closed_without_an_engine_too() -> None:
    app = without_engine()
    async with Lifetime(app):
        (close,) = await handshake(app, "/generate")
        assert close["type"] == "websocket.close"


@in_loop
async def test_a_fault_of_ours_is_500_without_its_text(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    async with Lifetime(server.app):
        server.segment.header["heartbeat_ns"] = server.small.clock.now_ns()
        real = server.small.clock.now_ns
        server.small.clock.now_ns = lambda: "not a time"  # type: ignore[method-assign,return-value,assignment]
        answer = await fetch(server.app, "GET", "/health")
        server.small.clock.now_ns = real  # type: ignore[method-assign]
        assert answer.status == 500
        assert answer.error == {
            "type": "internal_error",
            "message": "a fault of the server; its log says more",
            "param": None,
        }
        assert "GET /health failed" in caplog.text
        assert "TypeError" in caplog.text

"""One stream against a fake `send`: which bytes leave, in how many writes, whatever the socket does."""

from __future__ import annotations

import asyncio
import gc
import itertools
import weakref
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ironbatch import layout
from ironbatch.errors import RETRY_AFTER_S, RequestRejected
from ironbatch.layout import FINISH_CANCELLED, FINISH_ERROR, FINISH_LENGTH, FINISH_NONE, FINISH_STOP
from ironbatch.web import stream as stream_module
from ironbatch.web.choice import Choice, DetailedChoice
from ironbatch.web.lines import CACHED_LINES, STATS_FIELDS, last_line, plain_lines
from ironbatch.web.stream import MAX_CHUNK_LINES, Exit, TokenStream
from ironbatch.web.wire import Wire
from tests.web.fakes import FakeSend, assert_well_formed, expected_lines, in_loop, parsed, turn, until


class FakeWire(Wire):
    """Takes chunks unless its socket is behind."""

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self.is_behind = False

    def try_write(self, body: bytes) -> bool:
        if not self.is_behind:
            self.chunks.append(body)
        return not self.is_behind


class Client:
    """A stream of one choice, the `send` it writes to, and how the slot would bring it news."""

    def __init__(self, output_ids: NDArray[np.int32] | None = None, wire: FakeWire | None = None) -> None:
        self.send = FakeSend()
        self.record = np.zeros(1, layout.SLOT)[0]
        choice = (
            Choice(3) if output_ids is None else DetailedChoice(3, b"", output_ids, self.record[list(STATS_FIELDS)])
        )
        self.stream = TokenStream(Exit(self.send, arrival_ns=0, wire=wire), [choice])
        self.produced = 0

    def more(self, count: int, reason: int = FINISH_NONE, error_code: int = layout.ERROR_NONE) -> None:
        self.produced += count
        if count == 0 and reason in (FINISH_LENGTH, FINISH_STOP):
            reason |= layout.FINISH_WITHOUT_TOKEN
        self.stream.choices[0].advance(self.produced, reason, error_code)
        self.stream.write()

    async def drained(self) -> None:
        """Wait until the stream has ended, and ended well."""
        await self.stream.ended
        assert_well_formed(self.send)


# ---------------------------------------------------------------------------------------------------------- lines


def test_a_line_is_exactly_these_bytes() -> None:
    assert plain_lines(0, 1) == b'{"token_index":0,"done":false}\n'
    assert last_line(0) == b'{"token_index":0,"done":true}\n'


@pytest.mark.parametrize("before", [0, 1, CACHED_LINES - 2, CACHED_LINES - 1, CACHED_LINES, CACHED_LINES + 1, 10**6])
@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_lines_on_both_sides_of_what_is_kept_ready_made(before: int, count: int) -> None:
    slow = "".join(f'{{"token_index":{index},"done":false}}\n' for index in range(before, before + count))
    assert plain_lines(before, before + count) == slow.encode()


# --------------------------------------------------------------------------------------------------- chunks, writes


@in_loop
async def test_each_look_is_one_write_of_all_that_is_ready() -> None:
    client = Client()
    for count in (1, 3, 2):
        writes = len(client.send.chunks)
        client.more(count)
        assert len(client.send.chunks) == writes + 1
    assert client.send.chunks == [plain_lines(0, 1), plain_lines(1, 4), plain_lines(4, 6)]
    assert not client.stream.ended.done()


@in_loop
async def test_the_last_chunk_ends_the_body() -> None:
    client = Client()
    client.more(2)
    client.more(2, FINISH_LENGTH)
    assert client.send.messages[1:] == [
        {"type": "http.response.body", "body": plain_lines(0, 2), "more_body": True},
        {"type": "http.response.body", "body": plain_lines(2, 3) + last_line(3), "more_body": False},
    ]
    assert client.stream.ended.done()
    await client.drained()


@in_loop
async def test_a_whole_answer_at_once_is_one_chunk() -> None:
    client = Client()
    client.more(64, FINISH_LENGTH)
    assert client.send.chunks == [expected_lines(64)]
    await client.drained()


@in_loop
async def test_one_token_is_one_line() -> None:
    client = Client()
    client.more(1, FINISH_LENGTH)
    assert client.send.body == b'{"token_index":0,"done":true}\n'
    await client.drained()


@in_loop
async def test_the_answer_starts_with_the_first_token() -> None:
    client = Client()
    assert client.send.messages == []
    client.more(1)
    (start,) = client.send.starts
    assert start["status"] == 200
    assert dict(start["headers"]) == {b"content-type": b"application/x-ndjson", b"x-accel-buffering": b"no"}
    client.more(1)
    assert len(client.send.starts) == 1


@in_loop
async def test_from_the_first_token_on_falcon_says_nothing_more() -> None:
    client = Client()
    way_out = client.stream._way_out
    await way_out({"type": "before"})
    client.more(1)
    written = len(client.send.messages)
    await way_out({"type": "http.response.start", "status": 500, "headers": []})
    await way_out({"type": "http.response.body", "body": b"late"})
    assert len(client.send.messages) == written
    assert client.send.messages[0] == {"type": "before"}


@in_loop
async def test_a_stop_without_a_token_of_its_own() -> None:
    client = Client()
    client.more(2)
    client.more(0, FINISH_STOP)
    assert client.send.chunks == [plain_lines(0, 2), b'{"token_index":2,"done":true}\n']
    await client.drained()


@in_loop
async def test_a_stop_before_any_token() -> None:
    client = Client()
    client.more(0, FINISH_STOP)
    assert client.send.chunks == [b'{"token_index":0,"done":true}\n']
    await client.drained()


@in_loop
async def test_a_long_backlog_leaves_in_pieces() -> None:
    client = Client()
    count = 2 * MAX_CHUNK_LINES + 5
    client.more(count, FINISH_LENGTH)
    assert [chunk.count(b"\n") for chunk in client.send.chunks] == [MAX_CHUNK_LINES, MAX_CHUNK_LINES, 5]
    assert client.send.body == expected_lines(count)
    await client.drained()


@pytest.mark.parametrize("count", [MAX_CHUNK_LINES - 1, MAX_CHUNK_LINES, MAX_CHUNK_LINES + 1])
@in_loop
async def test_a_backlog_about_as_long_as_a_chunk(count: int) -> None:
    client = Client()
    client.more(count, FINISH_LENGTH)
    assert len(client.send.chunks) == -(-count // MAX_CHUNK_LINES)
    assert client.send.body == expected_lines(count)
    await client.drained()


@in_loop
async def test_lines_beyond_those_kept_ready_made() -> None:
    client = Client()
    client.more(CACHED_LINES - 1)
    client.more(1)
    client.more(1)
    client.more(3)
    client.more(1, FINISH_LENGTH)
    assert client.send.body == expected_lines(CACHED_LINES + 5)
    assert [line["token_index"] for line in parsed(client.send.body)] == list(range(CACHED_LINES + 5))
    await client.drained()


# ---------------------------------------------------------------------------------------------------- slow readers


@in_loop
async def test_what_comes_during_a_stall_leaves_as_one_chunk_after_it() -> None:
    client = Client()
    client.more(1)
    client.send.stall()
    client.more(1)
    for _ in range(5):
        client.more(2)
        await turn()
    assert client.send.chunks == [plain_lines(0, 1), plain_lines(1, 2)], "one chunk waits, the rest is held back"
    client.send.resume()
    await until(lambda: len(client.send.chunks) == 3)
    assert client.send.chunks[2] == plain_lines(2, 12)
    client.more(1, FINISH_LENGTH)
    assert client.send.body == expected_lines(13)
    await client.drained()


@in_loop
async def test_a_stall_with_nothing_after_it() -> None:
    client = Client()
    client.send.stall()
    client.more(3)
    client.send.resume()
    await turn()
    assert client.send.chunks == [plain_lines(0, 3)]
    client.more(1, FINISH_LENGTH)
    await client.drained()


@in_loop
async def test_the_stream_ends_only_when_its_last_chunk_is_written() -> None:
    client = Client()
    client.send.stall()
    client.more(2, FINISH_LENGTH)
    await turn()
    assert client.send.is_complete
    assert not client.stream.ended.done()
    client.send.resume()
    await client.drained()
    assert client.send.body == expected_lines(2)


@in_loop
async def test_one_stall_after_another() -> None:
    client = Client()
    client.send.stall()
    client.more(1)
    for k in range(1, 20):
        client.more(2)
        client.send.resume()
        client.send.stall()
        await until(lambda k=k: len(client.send.chunks) == k + 1)
    client.more(1, FINISH_LENGTH)
    client.send.resume()
    await client.drained()
    assert client.send.body == expected_lines(40)


@in_loop
async def test_a_finish_during_a_stall_of_a_long_backlog() -> None:
    client = Client()
    client.send.stall()
    client.more(1)
    client.more(MAX_CHUNK_LINES + 7, FINISH_LENGTH)
    client.send.resume()
    await client.drained()
    assert [chunk.count(b"\n") for chunk in client.send.chunks] == [1, MAX_CHUNK_LINES, 7]
    assert client.send.body == expected_lines(MAX_CHUNK_LINES + 8)


@in_loop
async def test_a_broken_socket_is_the_exception_of_whoever_awaits_the_stream() -> None:
    client = Client()
    client.more(1)
    client.send.break_off(BrokenPipeError("gone"))
    with pytest.raises(BrokenPipeError):  # for the collector, which logs it and calls `fail`
        client.more(1)
    client.stream.fail(BrokenPipeError("gone"))
    client.more(1, FINISH_LENGTH)
    with pytest.raises(BrokenPipeError):
        await client.stream.ended


@in_loop
async def test_a_socket_that_breaks_during_a_stall() -> None:
    client = Client()
    client.send.stall()
    client.more(1)
    await turn()
    client.send.break_off(ConnectionResetError("gone"))
    with pytest.raises(ConnectionResetError):
        await client.stream.ended
    client.more(5)
    client.more(1, FINISH_LENGTH)
    await turn()
    assert client.send.chunks == [plain_lines(0, 1)], "nothing is written to a broken socket"


# ------------------------------------------------------------------------------- chunks that `send` is not needed for


@in_loop
async def test_the_first_and_the_last_chunk_are_for_send_and_those_between_for_the_wire() -> None:
    wire = FakeWire()
    client = Client(wire=wire)
    for count in (2, 1, 3):
        client.more(count)
    client.more(1, FINISH_LENGTH)
    assert client.send.chunks == [plain_lines(0, 2), last_line(6)]
    assert wire.chunks == [plain_lines(2, 3), plain_lines(3, 6)]
    await client.drained()


@in_loop
async def test_the_pieces_of_a_long_backlog() -> None:
    wire = FakeWire()
    client = Client(wire=wire)
    client.more(3 * MAX_CHUNK_LINES + 5, FINISH_LENGTH)
    assert [chunk.count(b"\n") for chunk in client.send.chunks] == [MAX_CHUNK_LINES, 5]
    assert [chunk.count(b"\n") for chunk in wire.chunks] == [MAX_CHUNK_LINES, MAX_CHUNK_LINES]
    await client.drained()


@in_loop
async def test_a_socket_that_is_behind_is_for_send_which_waits() -> None:
    wire = FakeWire()
    client = Client(wire=wire)
    client.more(1)
    wire.is_behind = True
    client.send.stall()
    client.more(1)
    client.more(1)
    assert client.send.chunks == [plain_lines(0, 1), plain_lines(1, 2)]
    wire.is_behind = False
    client.more(1)
    assert wire.chunks == [], "nothing overtakes the chunk that waits"
    client.send.resume()
    await until(lambda: wire.chunks)
    assert wire.chunks == [plain_lines(2, 4)]
    client.more(1, FINISH_LENGTH)
    await client.drained()


@in_loop
async def test_details_and_an_error_line_over_a_wire() -> None:
    wire = FakeWire()
    client = Client(np.array([5, 6, 7], np.int32), wire)
    client.more(1)
    client.more(1)
    client.more(1, FINISH_ERROR, layout.ERROR_LOST)
    assert wire.chunks == [b'{"token_index":1,"token_id":6,"done":false}\n']
    assert [line.get("token_id") for line in parsed(client.send.body)] == [5, 7, None]
    await client.drained()


@in_loop
async def test_a_client_that_has_gone_is_written_nothing_over_its_wire() -> None:
    wire = FakeWire()
    client = Client(wire=wire)
    client.more(1)
    client.more(1)
    client.stream.abandon()
    client.more(1)
    client.more(0, FINISH_CANCELLED)
    assert wire.chunks == [plain_lines(1, 2)]


# -------------------------------------------------------------------------------------------------------- cancels


@in_loop
async def test_a_stream_that_is_given_up_while_its_socket_is_full_is_let_go_at_once() -> None:
    """Not when the collector of cycles comes by: it holds its tokens."""
    client = Client()
    client.send.stall()
    client.more(2)
    await turn()
    assert client.stream._blocked is not None
    gone = weakref.ref(client.stream._blocked)  # its frames hold the stream
    client.stream.abandon()
    client.more(0, FINISH_CANCELLED)
    await turn()
    gc.disable()
    try:
        del client
        await turn()
        assert gone() is None
    finally:
        gc.enable()


@in_loop
async def test_a_client_that_has_gone_is_written_nothing() -> None:
    client = Client()
    client.more(2)
    client.stream.abandon()
    client.more(2)
    client.more(0, FINISH_CANCELLED)
    await turn()
    assert client.send.chunks == [plain_lines(0, 2)]


@in_loop
async def test_one_that_goes_before_its_first_token() -> None:
    client = Client()
    client.stream.abandon()
    client.more(0, FINISH_CANCELLED)
    assert client.send.messages == []


@pytest.mark.parametrize("is_finished", [False, True])
@in_loop
async def test_one_that_goes_while_its_socket_is_full(*, is_finished: bool) -> None:
    tasks = asyncio.all_tasks()
    client = Client()
    client.send.stall()
    client.more(1)
    client.more(3, FINISH_LENGTH if is_finished else FINISH_NONE)
    await turn()
    client.stream.abandon()
    await until(lambda: asyncio.all_tasks() == tasks, "the end of the task that waited")
    client.send.resume()
    if not is_finished:
        client.more(1, FINISH_CANCELLED)
    await turn()
    assert client.send.chunks == [plain_lines(0, 1)]


@in_loop
async def test_one_that_goes_before_the_loop_has_turned_once() -> None:
    tasks = asyncio.all_tasks()
    client = Client()
    client.send.stall()
    client.more(1)
    client.stream.abandon()
    await until(lambda: asyncio.all_tasks() == tasks, "the end of the task that waited")
    client.send.resume()
    client.more(3)
    await turn()
    assert client.send.chunks == [plain_lines(0, 1)]


@in_loop
async def test_one_that_goes_in_the_moment_its_socket_drains() -> None:
    client = Client()
    client.send.stall()
    client.more(1)
    await turn()
    client.send.resume()
    client.stream.abandon()
    client.more(4)
    await turn()
    assert client.send.chunks == [plain_lines(0, 1)]


# --------------------------------------------------------------------------------------------------------- errors

UNADMITTED = (
    ',"cached_tokens":0,"preemptions":0,"queue_us":0,"waited_us":{"step":0,"slots":0,"tokens":0,"blocks":0,"device":0}'
)
"""What details say of a sequence that was never admitted."""

ERRORS = [
    (layout.ERROR_BACKEND, "backend_error", 500, None),
    (layout.ERROR_LOST, "engine_restarted", 503, RETRY_AFTER_S),
    (layout.ERROR_REQUEST, "backend_refused", 400, None),
    (layout.ERROR_INVALID, "internal_error", 500, None),
    (layout.ERROR_NO_BLOCKS, "out_of_blocks", 500, None),
    (layout.ERROR_POISON, "scheduler_killed", 500, None),
    (layout.ERROR_UNAVAILABLE, "engine_unavailable", 503, RETRY_AFTER_S),
]


def test_every_error_code_is_tested_here() -> None:
    assert {code for code, *_ in ERRORS} == set(layout.ERROR_MESSAGES)


@pytest.mark.parametrize(("code", "kind", "status", "retry_after_s"), ERRORS)
@in_loop
async def test_an_error_before_the_first_token_is_an_ordinary_answer(
    code: int, kind: str, status: int, retry_after_s: int | None
) -> None:
    client = Client()
    client.more(0, FINISH_ERROR, code)
    with pytest.raises(RequestRejected) as caught:
        await client.stream.ended
    problem = caught.value
    assert (problem.type, problem.status, problem.retry_after_s) == (kind, status, retry_after_s)
    assert problem.message == layout.ERROR_MESSAGES[code]
    assert client.stream.is_failure
    assert client.send.messages == [], "Falcon answers"
    await client.stream._way_out({"type": "http.response.start", "status": status, "headers": []})
    assert client.send.starts, "its way out is free"


@pytest.mark.parametrize(("code", "kind", "status", "retry_after_s"), ERRORS)
@pytest.mark.parametrize("has_details", [False, True])
@pytest.mark.parametrize("last_tokens", [0, 2])
@in_loop
async def test_an_error_after_the_first_token_is_the_last_line(
    code: int, kind: str, status: int, retry_after_s: int | None, *, has_details: bool, last_tokens: int
) -> None:
    client = Client(np.arange(10, 20, dtype=np.int32) if has_details else None)
    client.more(3)
    client.more(last_tokens, FINISH_ERROR, code)
    await client.drained()
    count = 3 + last_tokens
    lines = parsed(client.send.body)
    assert [line["token_index"] for line in lines] == list(range(count + 1))
    assert [line["done"] for line in lines] == [False] * count + [True]
    assert (
        client.send.body.splitlines()[-1].decode() == f'{{"token_index":{count},"done":true,"error":{{"type":"{kind}",'
        f'"message":"{layout.ERROR_MESSAGES[code]}","param":null}}{UNADMITTED if has_details else ""}}}'
    )
    assert client.stream.is_failure
    assert len(client.send.chunks) == 2


@in_loop
async def test_an_error_with_the_first_tokens_is_an_error_line_too() -> None:
    client = Client()
    client.more(2, FINISH_ERROR, layout.ERROR_LOST)
    await client.drained()
    assert client.send.body.startswith(plain_lines(0, 2) + b'{"token_index":2,"done":true,"error":{')
    assert len(client.send.chunks) == 1


# -------------------------------------------------------------------------------------------------------- details


def detailed(ids: list[int], finish_reason: str, stats: str = UNADMITTED) -> bytes:
    lines = [f'{{"token_index":{index},"token_id":{token},"done":false}}\n' for index, token in enumerate(ids)]
    lines[-1] = lines[-1].replace('"done":false', f'"done":true,"finish_reason":"{finish_reason}"{stats}')
    return "".join(lines).encode()


@pytest.mark.parametrize(("reason", "name"), [(FINISH_LENGTH, "length"), (FINISH_STOP, "stop")])
@in_loop
async def test_details_name_the_tokens_and_why_it_ended(reason: int, name: str) -> None:
    ids = [0, 2**31 - 1, 17, 17]
    client = Client(np.array(ids, np.int32))
    client.more(1)
    client.more(3, reason)
    await client.drained()
    assert client.send.body == detailed(ids, name)
    assert client.send.chunks[0] == b'{"token_index":0,"token_id":0,"done":false}\n'


@in_loop
async def test_details_of_a_stop_without_a_token() -> None:
    client = Client(np.array([5, 6, 7], np.int32))
    client.more(1)
    client.more(0, FINISH_STOP)
    await client.drained()
    assert client.send.chunks[1].decode() == f'{{"token_index":1,"done":true,"finish_reason":"stop"{UNADMITTED}}}\n'


FARED = {
    "cached_tokens": 48,
    "preemptions": 2,
    "waited_step_ns": 1_999,
    "waited_slots_ns": 20_000,
    "waited_tokens_ns": 999,
    "waited_blocks_ns": 3_000_000_000_000,
    "waited_device_ns": 5_500,
}
FARED_PART = (
    ',"cached_tokens":48,"preemptions":2,"queue_us":3000000026'
    ',"waited_us":{"step":1,"slots":20,"tokens":0,"blocks":3000000000,"device":5}'
)


def fare(record: Any, generation: int, admitted_generation: int) -> None:
    """The scheduler's part."""
    record["generation"], record["admitted_generation"] = generation, admitted_generation
    for name, value in FARED.items():
        record[name] = value


@in_loop
async def test_details_say_how_the_sequence_fared() -> None:
    client = Client(np.array([5, 6], np.int32))
    client.more(1)
    fare(client.record, 9, 9)
    client.more(1, FINISH_LENGTH)
    await client.drained()
    assert client.send.body == detailed([5, 6], "length", FARED_PART)
    stats = parsed(client.send.body)[-1]
    assert stats["queue_us"] == sum(stats["waited_us"].values())


@in_loop
async def test_details_of_a_failure_say_it_too() -> None:
    client = Client(np.array([5, 6], np.int32))
    fare(client.record, 9, 9)
    client.more(1, FINISH_ERROR, layout.ERROR_LOST)
    await client.drained()
    assert client.send.body.endswith(f',"param":null}}{FARED_PART}}}\n'.encode())


@in_loop
async def test_what_an_earlier_request_has_left_in_the_slot_is_not_said() -> None:
    client = Client(np.array([5, 6], np.int32))
    fare(client.record, 9, 8)
    client.more(2, FINISH_LENGTH)
    await client.drained()
    assert client.send.body == detailed([5, 6], "length")


@in_loop
async def test_how_it_fared_is_read_before_the_slot_is_given_away() -> None:
    client = Client(np.array([5, 6], np.int32))
    client.send.stall()
    client.more(1)
    fare(client.record, 9, 9)
    client.more(1, FINISH_LENGTH)
    for name in STATS_FIELDS:
        client.record[name] = 10  # the next request's
    client.send.resume()
    await client.drained()
    assert client.send.body == detailed([5, 6], "length", FARED_PART)


@in_loop
async def test_a_finish_during_a_stall_keeps_the_ids_before_the_slot_is_given_away() -> None:
    slot = np.arange(100, 120, dtype=np.int32)
    client = Client(slot)
    client.send.stall()
    client.more(1)
    client.more(10)
    client.more(9, FINISH_LENGTH)
    slot[:] = -1  # the next request's tokens
    client.send.resume()
    await client.drained()
    assert client.send.body == detailed(list(range(100, 120)), "length")


@in_loop
async def test_so_does_a_finish_whose_backlog_is_longer_than_the_chunk_that_stalls() -> None:
    """At the finish nothing waits yet; the first of its own chunks does. Found by this test: another client's ids."""
    count = MAX_CHUNK_LINES + 10
    slot = np.arange(count, dtype=np.int32)
    client = Client(slot)
    client.send.stall()
    client.more(count, FINISH_LENGTH)
    slot[:] = -1
    client.send.resume()
    await client.drained()
    assert client.send.body == detailed(list(range(count)), "length")


@in_loop
async def test_tokens_that_come_during_a_stall_may_still_be_read_from_the_slot() -> None:
    slot = np.zeros(6, np.int32)
    client = Client(slot)
    client.send.stall()
    slot[0] = 40
    client.more(1)
    for k in range(1, 6):
        slot[k] = 40 + k
        client.more(1)
    client.send.resume()
    await until(lambda: len(client.send.chunks) == 2)
    client.more(0, FINISH_STOP)
    await client.drained()
    assert [line.get("token_id") for line in parsed(client.send.body)] == [40, 41, 42, 43, 44, 45, None]


# -------------------------------------------------------------------------------------------------- for any course

steps = st.lists(
    st.one_of(
        st.tuples(st.just("more"), st.integers(1, 9)),
        st.sampled_from([("stall", 0), ("resume", 0), ("turn", 0)]),
    ),
    max_size=30,
)
finishes = st.sampled_from(["length", "stop", "error"])


@given(steps, finishes, st.integers(1, 9), st.sampled_from([3, MAX_CHUNK_LINES]), st.booleans())
def test_whatever_the_socket_does_the_bytes_are_the_same(
    course: list[tuple[str, int]],
    finish: str,
    last_tokens: int,
    chunk_lines: int,
    has_details: bool,  # noqa: FBT001
) -> None:
    with patch.object(stream_module, "MAX_CHUNK_LINES", chunk_lines):
        run_course(course, finish, last_tokens, chunk_lines, has_details=has_details)


@in_loop
async def run_course(
    course: list[tuple[str, int]], finish: str, last_tokens: int, chunk_lines: int, *, has_details: bool
) -> None:
    slot = np.zeros(400, np.int32)
    client = Client(slot if has_details else None)
    ids = itertools.count(1000)

    def produce(count: int, reason: int = FINISH_NONE, code: int = layout.ERROR_NONE) -> None:
        slot[client.produced : client.produced + count] = list(itertools.islice(ids, count))
        writes = len(client.send.chunks)
        client.more(count, reason, code)
        assert len(client.send.chunks) - writes <= max(1, -(-client.produced // chunk_lines))
        if chunk_lines == MAX_CHUNK_LINES:
            assert len(client.send.chunks) - writes <= 1, "at most one write for one look"

    for what, count in course:
        if what == "more":
            produce(count)
        elif what == "turn":
            await turn(3)
        else:
            getattr(client.send, what)()
    if finish == "length":
        produce(last_tokens, FINISH_LENGTH)
    elif finish == "stop":
        produce(0, FINISH_STOP)
    else:
        produce(last_tokens, FINISH_ERROR, layout.ERROR_BACKEND)
    slot[:] = -7  # given away
    client.send.resume()
    await client.drained()
    assert max(chunk.count(b"\n") for chunk in client.send.chunks) <= chunk_lines + (finish != "length")
    lines = parsed(client.send.body)
    assert lines == oracle(client.produced, finish, has_details=has_details)
    if not has_details and finish == "length":
        assert client.send.body == expected_lines(client.produced)


def oracle(produced: int, finish: str, *, has_details: bool) -> list[dict[str, Any]]:
    """What the client must read, in full, from what was produced."""
    lines: list[dict[str, Any]] = []
    for index in range(produced):
        details = {"token_id": 1000 + index} if has_details else {}
        lines.append({"token_index": index} | details | {"done": False})
    stats = msgspec.json.decode(f"{{{UNADMITTED[1:]}}}") if has_details else {}
    why = {"finish_reason": finish} | stats if has_details else {}
    if finish == "error":
        error = {"type": "backend_error", "message": layout.ERROR_MESSAGES[layout.ERROR_BACKEND], "param": None}
        lines.append({"token_index": produced, "done": True, "error": error} | stats)
    elif finish == "stop":
        lines.append({"token_index": produced, "done": True} | why)
    else:
        lines[-1] |= {"done": True} | why
    return lines

"""A request for several choices: the bytes of its stream, and its slots, with the test in the scheduler's part."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ironbatch import layout
from ironbatch.backends.mock import MockBackend
from ironbatch.errors import RequestRejected, SlotsFull
from ironbatch.kernels.lanes import lane_drain
from ironbatch.kernels.slots import choice_seed
from ironbatch.layout import FINISH_CANCELLED, FINISH_ERROR, FINISH_LENGTH, FINISH_NONE, FINISH_STOP
from ironbatch.web import stream as stream_module
from ironbatch.web.choice import Choice, DetailedChoice
from ironbatch.web.lines import STATS_FIELDS, choice_tag
from ironbatch.web.stream import MAX_CHUNK_LINES, Exit, TokenStream
from tests.web.fakes import FakeSend, assert_well_formed, in_loop, parsed, turn, until
from tests.web.test_collector import LANE, NUM_SLOTS, Client, Worker
from tests.web.test_stream import FakeWire

ZEROS = {"step": 0, "slots": 0, "tokens": 0, "blocks": 0, "device": 0}
UNADMITTED = {"cached_tokens": 0, "preemptions": 0, "queue_us": 0, "waited_us": ZEROS}


def token_of(choice: int, index: int) -> int:
    return 1000 * choice + index


class Group:
    """A stream of several choices, and how their slots would bring it news."""

    def __init__(self, count: int, *, has_details: bool = False, wire: FakeWire | None = None) -> None:
        self.send = FakeSend()
        self.slots = np.zeros(count, layout.SLOT)
        self.tokens = np.array([[token_of(choice, k) for k in range(500)] for choice in range(count)], np.int32)
        self.produced = [0] * count
        self.finishes: dict[int, int] = {}
        choices = []
        for index in range(count):
            tag = choice_tag(index, count)
            record = self.slots[list(STATS_FIELDS)][index]
            choices.append(
                DetailedChoice(index, tag, self.tokens[index], record) if has_details else Choice(index, tag)
            )
        self.stream = TokenStream(Exit(self.send, arrival_ns=0, wire=wire), choices)

    def tell(self, choice: int, more: int, reason: int = FINISH_NONE) -> None:
        """The collector has found this; it has not yet said so."""
        self.produced[choice] += more
        if reason != FINISH_NONE:
            self.finishes[choice] = reason
        without_token = layout.FINISH_WITHOUT_TOKEN if more == 0 and reason in (FINISH_LENGTH, FINISH_STOP) else 0
        error_code = layout.ERROR_BACKEND if reason == FINISH_ERROR else layout.ERROR_NONE
        self.stream.choices[choice].advance(self.produced[choice], reason | without_token, error_code)

    def more(self, choice: int, count: int, reason: int = FINISH_NONE) -> None:
        self.tell(choice, count, reason)
        self.stream.write()

    async def drained(self) -> None:
        await self.stream.ended
        assert_well_formed(self.send)


# ----------------------------------------------------------------------------------------------------------- bytes


@in_loop
async def test_every_line_names_its_choice() -> None:
    group = Group(2)
    group.more(1, 2)
    group.more(0, 1, FINISH_LENGTH)
    group.more(1, 1, FINISH_STOP)
    await group.drained()
    assert group.send.chunks == [
        b'{"token_index":0,"choice":1,"done":false}\n{"token_index":1,"choice":1,"done":false}\n',
        b'{"token_index":0,"choice":0,"done":true}\n',
        b'{"token_index":2,"choice":1,"done":true}\n',
    ]


@in_loop
async def test_and_its_details() -> None:
    group = Group(2, has_details=True)
    group.more(0, 1)
    group.more(1, 0, FINISH_STOP)
    group.more(0, 1, FINISH_LENGTH)
    await group.drained()
    fared = b'"cached_tokens":0,"preemptions":0,"queue_us":0,"waited_us":'
    fared += b'{"step":0,"slots":0,"tokens":0,"blocks":0,"device":0}}\n'
    assert group.send.chunks == [
        b'{"token_index":0,"choice":0,"token_id":0,"done":false}\n',
        b'{"token_index":0,"choice":1,"done":true,"finish_reason":"stop",' + fared,
        b'{"token_index":1,"choice":0,"token_id":1,"done":true,"finish_reason":"length",' + fared,
    ]


@in_loop
async def test_what_is_ready_of_all_choices_is_one_chunk() -> None:
    wire = FakeWire()
    group = Group(5, wire=wire)
    for _ in range(3):
        for choice in range(5):
            group.tell(choice, 1)
        group.stream.write()
    for choice in range(5):
        group.tell(choice, 1, FINISH_LENGTH)
    group.stream.write()
    assert [chunk.count(b"\n") for chunk in group.send.chunks] == [5, 5]
    assert [chunk.count(b"\n") for chunk in wire.chunks] == [5, 5]
    await group.drained()


@in_loop
async def test_the_body_ends_after_the_last_choices_end() -> None:
    group = Group(3)
    for choice in (1, 2):
        group.more(choice, 1, FINISH_LENGTH)
    await turn()
    assert not group.send.is_complete
    assert not group.stream.ended.done()
    group.more(0, 2)
    group.more(0, 1, FINISH_STOP)
    await group.drained()


@in_loop
async def test_a_chunk_is_no_longer_than_of_one_choice() -> None:
    with patch.object(stream_module, "MAX_CHUNK_LINES", 10):
        group = Group(3)
        group.send.stall()
        group.more(2, 1)
        group.tell(0, 4)
        group.tell(1, 25, FINISH_LENGTH)
        group.tell(2, 3, FINISH_LENGTH)
        group.stream.write()
        group.send.resume()
        await until(lambda: len(group.send.chunks) == 5)
        assert [chunk.count(b"\n") for chunk in group.send.chunks] == [1, 10, 10, 10, 2]
        group.more(0, 1, FINISH_LENGTH)
        await group.drained()


# --------------------------------------------------------------------------------------------------------- errors


@in_loop
async def test_a_choice_that_fails_says_so_and_the_others_go_on() -> None:
    group = Group(2)
    group.more(0, 2)
    group.more(1, 0, FINISH_ERROR)
    group.more(0, 1, FINISH_LENGTH)
    await group.drained()
    assert group.send.chunks[1].startswith(b'{"token_index":0,"choice":1,"done":true,"error":{"type":"backend_error",')
    assert group.stream.is_failure


@in_loop
async def test_an_answer_is_not_begun_with_a_failure() -> None:
    group = Group(3)
    group.more(1, 0, FINISH_ERROR)
    await turn()
    assert group.send.messages == [], "the others may fail too, and then it is a status"
    group.more(2, 1)
    lines = parsed(group.send.body)
    assert [(line["choice"], line["done"]) for line in lines] == [(1, True), (2, False)]
    group.more(2, 0, FINISH_STOP)
    group.more(0, 0, FINISH_ERROR)
    await group.drained()


@in_loop
async def test_only_when_all_have_failed_before_any_token_it_is_a_status() -> None:
    group = Group(3)
    for choice in (2, 0, 1):
        assert not group.stream.ended.done()
        group.more(choice, 0, FINISH_ERROR)
    with pytest.raises(RequestRejected) as caught:
        await group.stream.ended
    assert (caught.value.type, caught.value.status) == ("backend_error", 500)
    assert group.send.messages == []
    assert group.stream.is_failure


@in_loop
async def test_an_end_without_a_token_is_an_answer() -> None:
    group = Group(2)
    group.more(0, 0, FINISH_ERROR)
    group.more(1, 0, FINISH_STOP)
    await group.drained()
    assert [(line["choice"], "error" in line) for line in parsed(group.send.body)] == [(0, True), (1, False)]


@in_loop
async def test_a_client_that_has_gone_is_written_nothing() -> None:
    group = Group(2)
    group.more(0, 1)
    group.stream.abandon()
    group.more(1, 3)
    group.more(0, 0, FINISH_CANCELLED)
    group.more(1, 0, FINISH_CANCELLED)
    assert len(group.send.chunks) == 1


# -------------------------------------------------------------------------------------------------- for any course

COUNT = 4
news = st.tuples(st.sampled_from(["tell", "more"]), st.integers(0, COUNT - 1), st.integers(1, 9))
socket = st.tuples(st.sampled_from(["stall", "resume", "turn"]), st.just(0), st.just(0))
ends = st.lists(
    st.tuples(st.sampled_from([FINISH_LENGTH, FINISH_STOP, FINISH_ERROR]), st.integers(0, 3), st.booleans()),
    min_size=COUNT,
    max_size=COUNT,
)


@given(
    st.lists(st.one_of(news, news, socket), max_size=40),
    ends,
    st.permutations(range(COUNT)),
    st.sampled_from([3, MAX_CHUNK_LINES]),
    st.booleans(),
)
def test_in_any_order_and_any_chunks_each_choice_gets_its_own_lines(
    course: list[tuple[str, int, int]],
    ends: list[tuple[int, int, bool]],
    order: list[int],
    chunk_lines: int,
    has_details: bool,  # noqa: FBT001
) -> None:
    """The ends come anywhere in the course, each as (reason, last tokens, whether the course was over)."""
    with patch.object(stream_module, "MAX_CHUNK_LINES", chunk_lines):
        run_course(course, ends, order, chunk_lines, has_details=has_details)


@in_loop
async def run_course(
    course: list[tuple[str, int, int]],
    ends: list[tuple[int, int, bool]],
    order: list[int],
    chunk_lines: int,
    *,
    has_details: bool,
) -> None:
    group = Group(COUNT, has_details=has_details)

    def finish(choice: int) -> None:
        reason, last_tokens, _ = ends[choice]
        group.more(choice, max(last_tokens, reason == FINISH_LENGTH), reason)
        group.tokens[choice] = -7  # its slot is given away
        group.slots[choice] = np.ones((), layout.SLOT)

    early = [choice for choice in order if not ends[choice][2]]
    for position, (what, choice, count) in enumerate(course):
        if early and position >= len(course) // 2:
            finish(early.pop())
        if what in ("tell", "more"):
            if choice not in group.finishes:
                writes = len(group.send.chunks)
                getattr(group, what)(choice, count)
                assert chunk_lines != MAX_CHUNK_LINES or len(group.send.chunks) <= writes + 1
        elif what == "turn":
            await turn(3)
        else:
            getattr(group.send, what)()
    for choice in order:
        if choice not in group.finishes:
            finish(choice)
    group.send.resume()
    if all(group.finishes[choice] == FINISH_ERROR and not group.produced[choice] for choice in range(COUNT)):
        with pytest.raises(RequestRejected):
            await group.stream.ended
        assert group.send.messages == []
        return
    await group.drained()
    assert max(chunk.count(b"\n") for chunk in group.send.chunks) <= chunk_lines + COUNT, "and as many ends"
    lines = parsed(group.send.body)
    for choice in range(COUNT):
        mine = [line for line in lines if line["choice"] == choice]
        assert mine == oracle(choice, group.produced[choice], group.finishes[choice], ends[choice][1], has_details)


def oracle(
    choice: int,
    produced: int,
    reason: int,
    last_tokens: int,
    has_details: bool,  # noqa: FBT001
) -> list[dict[str, Any]]:
    """What the client must read of one choice, in full, from what was produced."""
    lines: list[dict[str, Any]] = []
    for index in range(produced):
        details = {"token_id": token_of(choice, index)} if has_details else {}
        lines.append({"token_index": index, "choice": choice} | details | {"done": False})
    stats = UNADMITTED if has_details else {}
    if reason == FINISH_ERROR:
        error = {"type": "backend_error", "message": layout.ERROR_MESSAGES[layout.ERROR_BACKEND], "param": None}
        lines.append({"token_index": produced, "choice": choice, "done": True, "error": error} | stats)
        return lines
    name = "stop" if reason == FINISH_STOP else "length"
    if reason == FINISH_STOP and last_tokens == 0:
        lines.append({"token_index": produced, "choice": choice})
    lines[-1] |= {"done": True} | ({"finish_reason": name} | stats if has_details else {})
    return lines


# --------------------------------------------------------------------------------------------- slots of one request


@pytest.fixture
def worker() -> Iterator[Worker]:
    found = Worker(MockBackend, total_kv_blocks=256)
    try:
        yield found
    finally:
        found.close()


def publish(worker: Worker, slot: int, produced: int, reason: int = FINISH_NONE) -> None:
    """The scheduler's part."""
    row = worker.segment.slots[slot]
    row["error_code"] = layout.ERROR_BACKEND if reason == FINISH_ERROR else layout.ERROR_NONE
    row["published"] = (int(row["generation"]) << 32) | (reason << 24) | produced


def slots_of(client: Client) -> list[int]:
    return [choice.slot for choice in client.stream.choices]


def hints(worker: Worker) -> list[int]:
    """The slots that the worker has pointed to since the last call."""
    out = np.zeros(128, np.int64)
    count = int(lane_drain(worker.segment.address, LANE, out, 64))
    return [int(slot) for slot in out[: 2 * count : 2]]


@pytest.mark.parametrize("start", [0, NUM_SLOTS - 2])
@in_loop
async def test_what_stands_in_the_slots(worker: Worker, start: int) -> None:
    worker.collector._next_slot = start
    worker.small.clock.set_ns(777_000)
    ids = np.array([5, 0, 2**31 - 1], np.int32)
    fields = {"priority": -3, "seed": 2**63 - 1, "temperature": 0.25, "top_p": 0.5, "top_k": 40}
    flags = layout.FLAG_TOKEN_IDS | layout.FLAG_IGNORE_EOS
    client = worker.submit(3, 6, token_ids=ids, flags=flags, choices=5, salt=(-4, 9), **fields)
    slots = slots_of(client)
    assert slots == sorted(slots)
    assert len(set(slots)) == 5
    for index, slot in enumerate(slots):
        row = worker.segment.slots[slot]
        assert row["submitted"] == row["generation"] > 0
        assert (row["choice_index"], row["parent_slot"]) == (index, slots[0])
        assert row["next_choice"] == (slots[index + 1] if index < 4 else layout.NO_SLOT)
        assert row["seed"] == choice_seed(2**63 - 1, index)
        assert (row["arrival_ns"], row["prompt_tokens"], row["max_new_tokens"]) == (777_000, 3, 6)
        assert (row["flags"], row["salt_a"], row["salt_b"]) == (flags, -4, 9)
        for name in fields.keys() - {"seed"}:
            assert row[name] == fields[name]
        assert worker.segment.tokens[slot, :3].tolist() == ids.tolist()
    assert hints(worker) == slots[:1], "one hint, for the parent"
    assert len({int(worker.segment.slots[slot]["seed"]) for slot in slots}) == 5


@in_loop
async def test_of_a_prompt_without_ids_none_are_copied(worker: Worker) -> None:
    worker.segment.tokens[:] = 77
    client = worker.submit(9, 2, choices=3)
    assert (worker.segment.tokens[slots_of(client), :9] == 77).all()


@in_loop
async def test_full_is_all_or_none(worker: Worker) -> None:
    first = worker.submit(1, 2, choices=NUM_SLOTS - 3)
    generations = worker.segment.slots["generation"].tolist()
    with pytest.raises(SlotsFull, match=r"n is 4, and fewer of the engine's 32 places .* are free"):
        worker.submit(1, 2, choices=4)
    assert worker.owned_slots() == NUM_SLOTS - 3, "what it had claimed it gave back"
    second = worker.submit(1, 2, choices=3)
    assert sorted(slots_of(first) + slots_of(second)) == list(range(NUM_SLOTS))
    with pytest.raises(SlotsFull, match="all 32 places"):
        worker.submit(1, 2)
    claimed_before = sum(generations)
    assert worker.segment.slots["generation"].sum() == claimed_before + 3 + 3


@in_loop
async def test_one_look_is_one_write_for_all_choices(worker: Worker) -> None:
    client, other = worker.submit(1, 9, choices=4), worker.submit(1, 9)
    for produced in (1, 3, 4):
        for slot in [*slots_of(client), other.slot]:
            publish(worker, slot, produced)
        worker.collector.collect()
    assert [chunk.count(b"\n") for chunk in client.send.chunks] == [4, 8, 4]
    assert [chunk.count(b"\n") for chunk in other.send.chunks] == [1, 2, 1]


@in_loop
async def test_each_slot_is_free_when_its_choice_has_ended(worker: Worker) -> None:
    client = worker.submit(1, 9, choices=3)
    slots = slots_of(client)
    publish(worker, slots[1], 2, FINISH_STOP)
    publish(worker, slots[0], 1)
    worker.collector.collect()
    assert worker.owned_slots() == 2
    worker.collector._next_slot = slots[1]
    other = worker.submit(1, 3)
    assert other.slot == slots[1], "the next request may have it at once"
    publish(worker, other.slot, 1)
    publish(worker, slots[2], 0, FINISH_ERROR)
    publish(worker, slots[0], 4, FINISH_LENGTH)
    worker.collector.collect()
    assert client.is_over
    assert not other.is_over
    lines = parsed(client.send.body)
    assert [line["token_index"] for line in lines if line["choice"] == 0] == [0, 1, 2, 3]
    assert [line["token_index"] for line in lines if line["choice"] == 1] == [0, 1]
    assert [line["error"]["type"] for line in lines if line["choice"] == 2] == ["backend_error"]
    assert client.stream.is_failure


@in_loop
async def test_a_cancel_is_a_hint_for_each_choice_that_has_not_ended(worker: Worker) -> None:
    client = worker.submit(1, 9, choices=4)
    slots = slots_of(client)
    publish(worker, slots[2], 1, FINISH_STOP)
    worker.collector.collect()
    worker.collector._next_slot = slots[2]
    other = worker.submit(1, 3)
    assert hints(worker) == [slots[0], slots[2]]
    worker.collector.cancel(client.stream)
    assert hints(worker) == [slots[0], slots[1], slots[3]]
    cancelled = [int(row["cancelled"]) == int(row["generation"]) for row in worker.segment.slots[slots]]
    assert cancelled == [True, True, False, True], "one was given to somebody else"
    for slot in (slots[0], slots[1], slots[3]):
        publish(worker, slot, 1, FINISH_CANCELLED)
    worker.collector.collect()
    assert worker.owned_slots() == 1
    assert worker.collector._streams[other.slot] is other.stream


@in_loop
async def test_a_socket_that_breaks_holds_nobody_up(worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    broken, other = worker.submit(1, 9, choices=3), worker.submit(1, 2, choices=2)
    for client in (broken, other):
        for slot in slots_of(client):
            publish(worker, slot, 1)
    worker.collector.collect()
    broken.send.break_off(RuntimeError("a fault of one stream"))
    for slot in slots_of(broken):
        publish(worker, slot, 2)
    for slot in slots_of(other):
        publish(worker, slot, 2, FINISH_LENGTH)
    with caplog.at_level(logging.ERROR, "ironbatch.web"):
        worker.collector.collect()
    assert caplog.text.count("a fault of one stream") == 1
    with pytest.raises(RuntimeError):
        await broken.stream.ended
    assert other.stream.ended.result() is None


@in_loop
async def test_details_are_read_from_the_slot_of_each_choice(worker: Worker) -> None:
    client = worker.submit(2, 3, choices=2, details=True)
    for index, slot in enumerate(slots_of(client)):
        worker.segment.tokens[slot, 2:5] = [10 * index, 10 * index + 1, 10 * index + 2]
        row = worker.segment.slots[slot]
        row["admitted_generation"] = row["generation"]
        row["cached_tokens"], row["preemptions"] = 16 * index, index
        row["waited_blocks_ns"], row["waited_step_ns"] = 5_000 * index, 2_000
        publish(worker, slot, 3, FINISH_LENGTH)
    worker.collector.collect()
    lines = parsed(client.send.body)
    assert [line["token_id"] for line in lines] == [0, 1, 2, 10, 11, 12]
    ends = [line for line in lines if line["done"]]
    assert [end["cached_tokens"] for end in ends] == [0, 16]
    assert [end["preemptions"] for end in ends] == [0, 1]
    assert [end["queue_us"] for end in ends] == [2, 7]
    assert ends[1]["waited_us"] == ZEROS | {"step": 2, "blocks": 5}


@in_loop
async def test_the_first_token_is_timed_once_a_request_and_the_gaps_in_all_choices(worker: Worker) -> None:
    client = worker.submit(1, 9, choices=3)
    slots = slots_of(client)
    publish(worker, slots[1], 1)
    worker.collector.collect()
    assert worker.metrics["ttft_us"].sum() == 0, "it is that of choice 0"
    for slot in slots:
        publish(worker, slot, 2)
    worker.collector.collect()
    assert worker.metrics["ttft_us"].sum() == 1
    assert worker.metrics["inter_token_us"].sum() == 1
    for slot in slots:
        publish(worker, slot, 5)
    worker.collector.collect()
    assert worker.metrics["ttft_us"].sum() == 1
    assert worker.metrics["inter_token_us"].sum() == 10
    assert worker.metrics["tokens_delivered"] == 15

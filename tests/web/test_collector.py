"""The worker's half of the protocol, with a real scheduler in the same process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ironbatch import layout
from ironbatch.backends.base import Backend, BatchPlan
from ironbatch.backends.mock import MockBackend
from ironbatch.config import Config
from ironbatch.errors import RequestError, RequestRejected, SlotsFull
from ironbatch.kernels.emission import mock_token
from ironbatch.kernels.histogram import histogram_percentile
from ironbatch.kernels.lanes import arm_scheduler
from ironbatch.kernels.slots import REQUEST_FIELDS
from ironbatch.shm.engine import Engine
from ironbatch.shm.wakeup import Doorbell
from ironbatch.web.collector import TokenCollector
from ironbatch.web.request import NO_SALT, GenerateRequest
from ironbatch.web.stream import Exit, TokenStream
from tests.support import ScriptedBackend, small_engine
from tests.web.fakes import FakeSend, assert_well_formed, expected_lines, in_loop, parsed, turn, until

LANE, GENERATION = 1, 5
NUM_SLOTS = 32


def a_request(prompt_tokens: int = 3, max_new_tokens: int = 4, **fields: Any) -> GenerateRequest:
    plain: dict[str, Any] = {
        "token_ids": None,
        "priority": 0,
        "flags": 0,
        "seed": 7,
        "details": False,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "choices": 1,
        "salt": NO_SALT,
    }
    return GenerateRequest(prompt_tokens=prompt_tokens, max_new_tokens=max_new_tokens, **(plain | fields))


class Client:
    """One request that was handed in, and what comes of it."""

    def __init__(self, collector: TokenCollector, request: GenerateRequest, arrival_ns: int) -> None:
        self.request = request
        self.send = FakeSend()
        self.stream: TokenStream = collector.submit(request, Exit(self.send, arrival_ns))

    @property
    def slot(self) -> int:
        """Of its first choice."""
        return self.stream.choices[0].slot

    @property
    def is_over(self) -> bool:
        return self.stream.ended.done()

    def assert_got_all(self) -> None:
        assert self.stream.ended.result() is None
        assert_well_formed(self.send)
        assert self.send.body == expected_lines(self.request.max_new_tokens)


class Worker:
    """A collector on its own lane of a small engine."""

    def __init__(self, backend: Callable[[Config], Backend], /, **options: Any) -> None:
        self._context = small_engine(backend, **options)
        self.small = self._context.__enter__()
        self.segment = self.small.segment
        self.engine = Engine(self.segment, Doorbell.create(), self.small.bells)
        self.segment.lanes[LANE]["generation"] = GENERATION
        self.collector = TokenCollector(self.engine, LANE, GENERATION, self.small.clock)

    @property
    def metrics(self) -> Any:
        return self.segment.metrics[1 + LANE]

    def submit(self, *args: Any, **fields: Any) -> Client:
        return Client(self.collector, a_request(*args, **fields), self.small.clock.now_ns())

    def steps(self, count: int) -> None:
        """So many steps before the worker looks again."""
        for _ in range(count):
            assert self.small.step() > 0

    def run(self, most_steps: int = 1000) -> None:
        """Step and look until nothing is left to do."""
        for _ in range(most_steps):
            computed = self.small.step()
            self.collector.collect()
            if computed == 0:
                return
        raise AssertionError("the engine does not come to rest")

    def owned_slots(self) -> int:
        return int(np.count_nonzero(self.segment.slots["owner"]))

    def close(self) -> None:
        self.engine.scheduler_bell.close()
        self._context.__exit__(None, None, None)


@contextlib.contextmanager
def a_worker(backend: Callable[[Config], Backend] = MockBackend, **options: Any) -> Iterator[Worker]:
    worker = Worker(backend, **options)
    try:
        yield worker
    finally:
        worker.close()


@pytest.fixture
def worker() -> Iterator[Worker]:
    with a_worker(total_kv_blocks=256) as found:
        yield found


# ----------------------------------------------------------------------------------------------------- submitting


@in_loop
async def test_what_stands_in_the_slot(worker: Worker) -> None:
    fields = {"priority": -3, "seed": 2**63 - 1, "temperature": 0.25, "top_p": 0.5, "top_k": 40}
    worker.small.clock.set_ns(777_000)
    client = worker.submit(9, 5, flags=layout.FLAG_IGNORE_EOS, **fields)
    row = worker.segment.slots[client.slot]
    assert row["owner"] == layout.owner_word(LANE, GENERATION)
    assert row["submitted"] == row["generation"] > 0
    assert row["arrival_ns"] == 777_000
    assert (row["prompt_tokens"], row["max_new_tokens"]) == (9, 5)
    assert row["flags"] == layout.FLAG_IGNORE_EOS
    for name, value in fields.items():
        assert row[name] == value
    assert (row["choice_index"], row["parent_slot"]) == (0, client.slot)


@in_loop
async def test_a_request_writes_over_no_word_of_anybody_elses(worker: Worker) -> None:
    slots = worker.segment.slots
    idle = slots.copy()
    for name in slots.dtype.names:
        slots[name] = 0x55
    before = slots.copy()
    worker.collector._write_request(2, a_request(9, 5, priority=-3, temperature=0.5), 777)
    for name in set(slots.dtype.names) - set(REQUEST_FIELDS):
        assert slots[name].tolist() == before[name].tolist(), name
    others = [slot for slot in range(len(slots)) if slot != 2]
    assert slots[others].tolist() == before[others].tolist()
    assert slots[2]["arrival_ns"] == 777
    slots[:] = idle


@in_loop
async def test_the_prompts_ids_stand_in_the_token_row(worker: Worker) -> None:
    ids = np.array([5, 0, 2**31 - 1], np.int32)
    client = worker.submit(3, 2, token_ids=ids, flags=layout.FLAG_TOKEN_IDS)
    assert worker.segment.tokens[client.slot, :3].tolist() == ids.tolist()
    worker.run()
    assert worker.segment.tokens[client.slot, :3].tolist() == ids.tolist()
    client.assert_got_all()


@in_loop
async def test_only_a_sleeping_scheduler_is_rung(worker: Worker) -> None:
    bell = worker.engine.scheduler_bell
    worker.submit()
    assert not bell.wait(0)
    worker.small.scheduler.step()
    assert arm_scheduler(worker.segment.address) == 1
    second = worker.submit()
    assert bell.wait(0)
    worker.small.scheduler.step()
    assert arm_scheduler(worker.segment.address) == 1
    worker.collector.cancel(second.stream)
    assert bell.wait(0)
    worker.run()


@in_loop
async def test_full_is_an_answer_and_slots_come_back(worker: Worker) -> None:
    clients = [worker.submit(1, 2) for _ in range(NUM_SLOTS)]
    assert {client.slot for client in clients} == set(range(NUM_SLOTS))
    for _ in range(3):
        with pytest.raises(SlotsFull) as caught:
            worker.submit()
        assert (caught.value.status, caught.value.retry_after_s) == (503, 1)
        assert f"all {NUM_SLOTS} places" in caught.value.message
        assert "--max-running-seqs" in caught.value.message
        assert "--max-queued-requests" in caught.value.message
    worker.run()
    for client in clients:
        client.assert_got_all()
    worker.small.assert_nothing_held()
    again = [worker.submit(2, 3) for _ in range(NUM_SLOTS)]
    worker.run()
    for client in again:
        client.assert_got_all()
    worker.small.assert_nothing_held()


@in_loop
async def test_one_slot_used_a_hundred_times(worker: Worker) -> None:
    with a_worker(max_running_seqs=1, max_queued_requests=0) as narrow:
        for k in range(1, 101):
            client = narrow.submit(1 + k % 5, 1 + k % 4)
            assert client.slot == 0
            with pytest.raises(SlotsFull):
                narrow.submit()
            narrow.run()
            client.assert_got_all()
            assert narrow.segment.slots[0]["generation"] == k


# ----------------------------------------------------------------------------------------------------- collecting


@in_loop
async def test_many_streams_each_to_its_end(worker: Worker) -> None:
    clients = [worker.submit(1 + k % 7, 1 + k % 9) for k in range(NUM_SLOTS)]
    worker.run()
    for client in clients:
        client.assert_got_all()
    worker.small.assert_nothing_held()
    tokens = sum(client.request.max_new_tokens for client in clients)
    assert worker.metrics["tokens_delivered"] == tokens
    assert worker.metrics["ttft_us"].sum() == len(clients)
    assert worker.metrics["inter_token_us"].sum() == tokens - len(clients)
    assert worker.metrics["chunks_delivered"] == sum(len(client.send.chunks) for client in clients)
    assert worker.segment.metrics[0]["tokens_generated"] == tokens


@in_loop
async def test_one_write_a_stream_and_look_however_far_behind_the_worker_is(worker: Worker) -> None:
    clients = [worker.submit(1, 20) for _ in range(5)]
    produced = 0
    for behind in (1, 3, 7, 1, 5):
        worker.steps(behind)
        produced += behind
        before = [len(client.send.chunks) for client in clients]
        worker.collector.collect()
        for client, writes in zip(clients, before, strict=True):
            assert len(client.send.chunks) == writes + 1
            assert client.send.chunks[-1].count(b"\n") == behind
            assert client.send.body.count(b"\n") == produced
    worker.collector.collect()
    assert all(len(client.send.chunks) == 5 for client in clients), "nothing new, nothing written"
    worker.run()
    assert [len(client.send.chunks) for client in clients] == [8] * 5


@in_loop
async def test_a_whole_answer_behind_is_one_chunk_and_the_end(worker: Worker) -> None:
    client = worker.submit(1, 30)
    worker.steps(30)
    worker.collector.collect()
    assert [message["type"] for message in client.send.messages] == ["http.response.start", "http.response.body"]
    assert client.send.body == expected_lines(30)
    client.assert_got_all()
    assert worker.owned_slots() == 0


@in_loop
async def test_the_last_token_ends_the_body(worker: Worker) -> None:
    client = worker.submit(2, 3)
    worker.run()
    assert [chunk.count(b"\n") for chunk in client.send.chunks] == [1, 1, 1]
    assert client.send.messages[-1]["more_body"] is False


@in_loop
async def test_details_are_the_slots_own_tokens(worker: Worker) -> None:
    clients = [worker.submit(2 + k, 6, seed=k, details=True) for k in range(6)]
    worker.run()
    for client in clients:
        lines = parsed(client.send.body)
        assert [line["token_id"] for line in lines] == tokens_of(client.request)
        assert lines[-1]["finish_reason"] == "length"
    assert len({client.send.body for client in clients}) == 6


@in_loop
async def test_details_survive_the_reuse_of_the_slot() -> None:
    with a_worker(max_running_seqs=1, max_queued_requests=0) as narrow:
        slow = narrow.submit(2, 8, seed=1, details=True)
        slow.send.stall()
        narrow.run()
        ids = narrow.segment.tokens[0, 2:10].tolist()
        other = narrow.submit(2, 8, seed=2, details=True)
        narrow.run()
        assert narrow.segment.tokens[0, 2:10].tolist() != ids
        slow.send.resume()
        await slow.stream.ended
        assert [line["token_id"] for line in parsed(slow.send.body)] == ids
        assert len(slow.send.chunks) == 2
        assert other.is_over


@in_loop
async def test_a_slow_reader_holds_nobody_up(worker: Worker) -> None:
    slow, quick = worker.submit(1, 12), worker.submit(1, 12)
    slow.send.stall()
    worker.run()
    quick.assert_got_all()
    assert len(slow.send.chunks) == 1
    assert worker.owned_slots() == 0, "its tokens are in the worker's hands, the slot is free"
    slow.send.resume()
    await slow.stream.ended
    slow.assert_got_all()
    assert [chunk.count(b"\n") for chunk in slow.send.chunks] == [1, 11]


@in_loop
async def test_a_broken_stream_holds_nobody_up(worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    clients = [worker.submit(1, 6) for _ in range(4)]
    worker.steps(2)
    worker.collector.collect()
    clients[1].send.break_off(RuntimeError("a fault of one stream"))
    with caplog.at_level(logging.ERROR, "ironbatch.web"):
        worker.run()
    assert "a fault of one stream" in caplog.text
    with pytest.raises(RuntimeError, match="a fault of one stream"):
        await clients[1].stream.ended
    for client in (clients[0], clients[2], clients[3]):
        client.assert_got_all()
    worker.small.assert_nothing_held()


@in_loop
async def test_the_loop_collects_when_the_doorbell_rings(worker: Worker) -> None:
    loop = asyncio.get_running_loop()
    worker.collector.start(loop, pid=4711)
    record = worker.segment.lanes[LANE]
    assert (record["worker_pid"], record["serving_generation"]) == (4711, GENERATION)
    client = worker.submit(1, 3)
    for count in range(1, 4):
        worker.steps(1)
        await until(lambda count=count: client.send.body.count(b"\n") == count, "a chunk a step")
        assert not worker.small.bells[LANE].wait(0), "heard, so that the loop sleeps again"
    await client.stream.ended
    client.assert_got_all()
    worker.collector.stop(loop)
    late = worker.submit(1, 1)
    worker.small.step()
    await turn()
    assert late.send.messages == []
    worker.collector.collect()
    late.assert_got_all()


@in_loop
async def test_what_was_published_before_the_worker_listened_is_collected(worker: Worker) -> None:
    loop = asyncio.get_running_loop()
    client = worker.submit(1, 2)
    worker.steps(2)
    worker.small.bells[LANE].silence()
    worker.collector.start(loop, pid=1)
    client.assert_got_all()
    worker.collector.stop(loop)


# -------------------------------------------------------------------------------------------------------- cancels


@in_loop
async def test_a_cancel_frees_the_blocks_within_a_step_and_the_slot_at_the_next_look(worker: Worker) -> None:
    gone, other = worker.submit(9, 30), worker.submit(1, 30)
    worker.steps(3)
    worker.collector.collect()
    written = len(gone.send.messages)
    worker.collector.cancel(gone.stream)
    assert worker.owned_slots() == 2, "the scheduler still holds it"
    worker.steps(1)
    assert worker.small.running() == [other.slot]
    worker.collector.collect()
    assert worker.owned_slots() == 1
    worker.run()
    other.assert_got_all()
    assert len(gone.send.messages) == written
    worker.small.assert_nothing_held()
    assert worker.segment.metrics[0]["sequences_aborted"] == 1


@in_loop
async def test_a_cancel_before_the_scheduler_has_seen_the_request(worker: Worker) -> None:
    client = worker.submit()
    worker.collector.cancel(client.stream)
    worker.run()
    assert client.send.messages == []
    worker.small.assert_nothing_held()
    assert worker.metrics["tokens_delivered"] == 0


@in_loop
async def test_a_cancel_that_crosses_the_end(worker: Worker) -> None:
    client = worker.submit(1, 2)
    worker.steps(2)  # finished, not collected
    worker.collector.cancel(client.stream)
    worker.run()
    assert client.send.messages == []
    worker.small.assert_nothing_held()


@in_loop
async def test_a_cancel_after_the_end_does_not_touch_the_slots_next_request() -> None:
    with a_worker(max_running_seqs=1, max_queued_requests=0) as narrow:
        slow = narrow.submit(1, 3)
        slow.send.stall()
        narrow.run()
        narrow.collector.cancel(slow.stream)
        assert narrow.segment.slots[0]["cancelled"] == 0, "the slot is free: it may be anybody's"
        other = narrow.submit(1, 5)
        narrow.steps(1)
        narrow.collector.collect()
        narrow.collector.cancel(slow.stream)
        await turn()
        narrow.run()
        other.assert_got_all()
        assert narrow.segment.metrics[0]["sequences_aborted"] == 0


@in_loop
async def test_a_request_cancelled_twice(worker: Worker) -> None:
    client = worker.submit(1, 9)
    worker.steps(1)
    worker.collector.cancel(client.stream)
    worker.collector.cancel(client.stream)
    worker.run()
    worker.small.assert_nothing_held()
    assert worker.segment.metrics[0]["sequences_aborted"] == 1


# --------------------------------------------------------------------------------------------------------- errors


def refusing(from_step: int) -> Callable[[Config], Backend]:
    """A backend that refuses the sequence in slot 0 from its n-th step on."""

    def make(config: Config) -> Backend:
        backend = ScriptedBackend(config)
        steps = iter(range(1_000_000))

        def script(plan: BatchPlan) -> None:
            if next(steps) >= from_step and 0 in plan.rows["sequence"].tolist():
                raise RequestError([0], "not this one")

        backend.script = script  # type: ignore[assignment]
        return backend

    return make


def claimed_slot_0_first(narrow: Worker) -> Worker:
    narrow.collector._next_slot = 0
    return narrow


@in_loop
async def test_a_refusal_before_the_first_token() -> None:
    with a_worker(refusing(0)) as found:
        refused = claimed_slot_0_first(found).submit(1, 4)
        other = found.submit(1, 4)
        found.run()
        with pytest.raises(RequestRejected) as caught:
            await refused.stream.ended
        assert (caught.value.type, caught.value.status) == ("backend_refused", 400)
        assert refused.send.messages == []
        other.assert_got_all()
        found.small.assert_nothing_held()


@in_loop
async def test_a_refusal_after_two_tokens() -> None:
    with a_worker(refusing(2)) as found:
        refused = claimed_slot_0_first(found).submit(1, 4)
        other = found.submit(1, 4)
        found.run()
        await refused.stream.ended
        lines = parsed(refused.send.body)
        assert [line["token_index"] for line in lines] == [0, 1, 2]
        assert lines[-1]["error"]["type"] == "backend_refused"
        assert refused.stream.is_failure
        other.assert_got_all()
        found.small.assert_nothing_held()


# -------------------------------------------------------------------------------------------------------- metrics


@in_loop
async def test_ttft_runs_from_arrival_to_the_first_chunk_and_gaps_are_shared_out(worker: Worker) -> None:
    clock = worker.small.clock
    clock.set_ns(1_000_000_000)
    worker.submit(1, 9)
    clock.advance_ns(5_000_000)
    worker.steps(1)
    clock.advance_ns(2_000_000)  # the worker looks late: that is part of what the client waits
    worker.collector.collect()
    assert histogram_percentile(worker.metrics["ttft_us"], 0.5) == pytest.approx(7000, rel=0.02)
    assert worker.metrics["inter_token_us"].sum() == 0
    clock.advance_ns(8_000_000)
    worker.steps(4)
    worker.collector.collect()
    assert worker.metrics["inter_token_us"].sum() == 4
    assert histogram_percentile(worker.metrics["inter_token_us"], 1.0) == pytest.approx(2000, rel=0.02)
    assert worker.metrics["tokens_delivered"] == 5
    assert worker.metrics["chunks_delivered"] == 2


@in_loop
async def test_a_worker_counts_in_its_own_row_alone(worker: Worker) -> None:
    worker.submit(1, 5)
    worker.run()
    others = np.delete(worker.segment.metrics, [0, 1 + LANE])
    assert others["tokens_delivered"].sum() == 0
    assert others["ttft_us"].sum() == 0
    assert worker.metrics["tokens_delivered"] == 5


# -------------------------------------------------------------------------------------------------- for any course


def tokens_of(request: GenerateRequest) -> list[int]:
    """The mock's tokens, from the request alone."""
    return [mock_token(request.seed, request.prompt_tokens + k, -1, 0) for k in range(request.max_new_tokens)]


operations = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 12), st.integers(1, 12)),
        st.tuples(st.sampled_from(["cancel", "stall", "resume", "break"]), st.integers(0, 40), st.just(0)),
        st.tuples(st.sampled_from(["step", "step", "collect", "turn"]), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=60)
@given(operations, st.sampled_from([6, 64]))
def test_in_any_course_each_client_gets_its_own_lines_and_no_slot_is_lost(
    course: list[tuple[str, int, int]], blocks: int
) -> None:
    logging.getLogger("ironbatch.web").disabled = True
    try:
        run_course(course, blocks)
    finally:
        logging.getLogger("ironbatch.web").disabled = False


@in_loop
async def run_course(course: list[tuple[str, int, int]], blocks: int) -> None:
    with a_worker(total_kv_blocks=blocks, max_running_seqs=3, max_queued_requests=4) as found:
        clients: list[Client] = []
        broken: list[Client] = []
        for what, first, second in course:
            if what == "submit":
                assert_full = found.owned_slots() == 7
                try:
                    clients.append(found.submit(first, second, details=first % 2 == 0, seed=len(clients)))
                    assert not assert_full
                except SlotsFull:
                    assert assert_full
            elif what == "step":
                found.small.step()
            elif what == "collect":
                found.collector.collect()
            elif what == "turn":
                await turn(2)
            elif clients:
                act(found, clients[first % len(clients)], what, broken)
        found.run()
        for client in clients:
            client.send.resume()
        for client in clients:
            await check_end(client, is_broken=client in broken)
        found.small.assert_nothing_held()


def act(found: Worker, client: Client, what: str, broken: list[Client]) -> None:
    if what == "cancel":
        if not client.is_over:
            found.collector.cancel(client.stream)
    elif what == "break":
        broken.append(client)
        client.send.break_off(BrokenPipeError("gone"))
    else:
        getattr(client.send, what)()


async def check_end(client: Client, *, is_broken: bool) -> None:
    count = client.request.max_new_tokens
    if not client.stream.was_cancelled and not is_broken:
        await client.stream.ended
        assert_well_formed(client.send)
        lines = parsed(client.send.body)
        assert [line["token_index"] for line in lines] == list(range(count))
        assert [line["done"] for line in lines] == [False] * (count - 1) + [True]
        if client.request.details:
            assert [line["token_id"] for line in lines] == tokens_of(client.request)
        else:
            assert client.send.body == expected_lines(count)
        return
    if is_broken and not client.stream.was_cancelled:
        await asyncio.wait([client.stream.ended])
        client.stream.ended.exception()
    lines = parsed(client.send.body) if client.send.chunks else []
    assert [line["token_index"] for line in lines] == list(range(len(lines))), "what was sent is a beginning"
    assert [line["done"] for line in lines[:-1]] == [False] * (len(lines) - 1)

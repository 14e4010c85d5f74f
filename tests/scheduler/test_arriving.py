"""Backends whose tokens come by themselves: steps without news, sleep, and what a backend says of its own troubles."""

from __future__ import annotations

import random
from collections import defaultdict, deque

import numpy as np
import pytest
from numpy.typing import NDArray

from ironbatch import layout
from ironbatch.backends.base import (
    FINISH_ERROR,
    FINISH_STOP,
    Backend,
    BatchLimits,
    BatchPlan,
    EngineLimits,
    KVGeometry,
    SequenceRequest,
    StepOutput,
    finish_error,
)
from ironbatch.config import Config
from ironbatch.errors import StartError
from ironbatch.health import health_problem
from ironbatch.metrics import SCHEDULER_ROW
from ironbatch.shm.wakeup import Alarm, Doorbell
from tests.support import FakeWorker, SmallEngine, Stream, small_engine

MOST = 3


class Arriving(Backend):
    """Hands on what a test has let arrive."""

    resumable = False
    paged_kv = False
    reserves_output = True
    batch_limits = BatchLimits(max_tokens_per_step=MOST)

    def __init__(self, config: Config) -> None:
        self.news = Doorbell.create()
        self.arrived: dict[int, deque[int]] = defaultdict(deque)
        self.ends: dict[int, int] = {}
        self.requests: dict[int, SequenceRequest] = {}
        self.forgotten: list[int] = []

    def start(self, kv: KVGeometry, limits: EngineLimits) -> None:
        pass

    def arrive(self, stream: Stream, *tokens: int, end: int = 0) -> None:
        self.arrived[stream.slot].extend(tokens)
        if end:
            self.ends[stream.slot] = end
        self.news.ring()

    def execute(self, plan: BatchPlan) -> StepOutput:
        output, tokens = plan.output, []
        output.counts[: len(plan)] = 0
        for k, row in enumerate(plan.rows):
            sequence = int(row["sequence"])
            if row["emits"] and sequence not in self.requests:
                self.requests[sequence] = plan.request(sequence)
            queue = self.arrived[sequence]
            taken = [queue.popleft() for _ in range(min(len(queue), MOST))]
            tokens += taken
            output.counts[k] = len(taken)
            if not queue and sequence in self.ends:
                output.finish_reasons[k] = self.ends.pop(sequence)
        output.token_ids[: len(tokens)] = tokens
        return output

    def forget(self, sequences: NDArray[np.int32]) -> None:
        for sequence in sequences.tolist():
            self.forgotten.append(sequence)
            self.requests.pop(sequence, None)
            self.arrived.pop(sequence, None)


def backend_of(engine: SmallEngine) -> Arriving:
    assert isinstance(engine.backend, Arriving)
    return engine.backend


def settle(engine: SmallEngine, *workers: FakeWorker) -> None:
    """Step until the scheduler would sleep."""
    for _ in range(100):
        count = engine.step()
        for worker in workers:
            worker.collect(engine.clock.now_ns())
        if count == 0 or engine.scheduler.is_waiting:
            return
    raise AssertionError("it never sleeps")


def test_a_step_without_news_is_followed_by_sleep_and_one_with_news_is_not() -> None:
    with small_engine(Arriving) as engine:
        worker, backend = engine.worker(), backend_of(engine)
        stream = worker.submit(prompt_tokens=5, max_new_tokens=9)
        settle(engine, worker)
        assert engine.scheduler.is_waiting
        before = engine.segment.metrics[SCHEDULER_ROW]["steps"].item()
        assert engine.step() == 1
        assert engine.segment.metrics[SCHEDULER_ROW]["steps"] == before, "it has computed nothing"
        assert engine.segment.header["in_device_call"] == layout.CALL_NONE
        backend.arrive(stream, 7)
        assert Alarm([Doorbell.create(), backend.news]).wait(0)
        assert engine.step() == 1
        assert not engine.scheduler.is_waiting
        backend.arrive(stream, 8, 9, 10, 11, end=FINISH_STOP)
        settle(engine, worker)
        assert (stream.token_ids, stream.reason) == ([7, 8, 9, 10, 11], FINISH_STOP)
        assert engine.segment.metrics[SCHEDULER_ROW]["decode_tokens"] == 3, "the steps that had something of it"
        engine.assert_nothing_held()


def test_a_request_is_seen_whole_when_its_last_chunk_is_planned() -> None:
    with small_engine(Arriving, max_batch_tokens=4) as engine:
        worker, backend = engine.worker(), backend_of(engine)
        stream = worker.submit(prompt_tokens=5, prompt_token_ids=[5, 6, 7, 8, 9], max_new_tokens=3, seed=11)
        engine.step()
        assert backend.requests == {}
        settle(engine, worker)  # a last chunk of one token is planned as a decode
        request = backend.requests[stream.slot]
        assert request.prompt_ids is not None
        assert request.prompt_ids.tolist() == [5, 6, 7, 8, 9]
        assert (request.prompt_tokens, request.max_new_tokens, request.seed) == (5, 3, 11)
        assert (request.prompt_text, len(request.output_ids), request.ignore_eos) == (None, 0, False)


@pytest.mark.parametrize("code", [*layout.ERROR_MESSAGES, 0, 99])
def test_a_backend_says_which_error_it_is(code: int) -> None:
    with small_engine(Arriving) as engine:
        worker, backend = engine.worker(), backend_of(engine)
        stream = worker.submit(prompt_tokens=2, max_new_tokens=4)
        settle(engine, worker)
        backend.arrive(stream, 3, end=finish_error(code))
        settle(engine, worker)
        told = code if code in layout.ERROR_MESSAGES else layout.ERROR_REQUEST
        assert (stream.token_ids, stream.reason, stream.error_code) == ([3], FINISH_ERROR, told)
        engine.assert_nothing_held()


def test_tokens_without_an_id_are_counted() -> None:
    with small_engine(Arriving) as engine:
        worker, backend = engine.worker(), backend_of(engine)
        stream = worker.submit(prompt_tokens=2, max_new_tokens=3)
        settle(engine, worker)
        backend.arrive(stream, layout.NO_TOKEN_ID, 4, layout.NO_TOKEN_ID)
        settle(engine, worker)
        assert stream.token_ids == [layout.NO_TOKEN_ID, 4, layout.NO_TOKEN_ID]
        assert engine.segment.metrics[SCHEDULER_ROW]["pieces_without_id"] == 2
        assert engine.segment.metrics[SCHEDULER_ROW]["tokens_generated"] == 3


def test_nobody_is_ever_preempted_and_everything_ends() -> None:
    """Random arrivals, cancels and ends, in a pool that is far too small for all of them."""
    for seed in range(20):
        rng = random.Random(seed)
        with small_engine(Arriving, total_kv_blocks=12, kv_block_size=4, max_queued_requests=40) as engine:
            worker, backend = engine.worker(), backend_of(engine)
            streams = [
                worker.submit(prompt_tokens=rng.randint(1, 20), max_new_tokens=rng.randint(1, 20), priority=k % 5)
                for k in range(20)
            ]
            sent: dict[int, list[int]] = defaultdict(list)
            for _ in range(2_000):
                if all(stream.reason for stream in streams):
                    break
                for stream in streams:
                    if stream.slot not in backend.requests or stream.reason or rng.random() < 0.5:
                        continue
                    if rng.random() < 0.05:
                        worker.cancel(stream)
                        continue
                    tokens = [rng.randint(0, 99) for _ in range(rng.randint(0, 5))]
                    sent[id(stream)] += tokens
                    backend.arrive(stream, *tokens)
                settle(engine, worker)
            assert all(stream.reason for stream in streams), f"seed {seed}"
            for stream in streams:
                assert stream.token_ids == sent[id(stream)][: len(stream.token_ids)], f"seed {seed}"
            assert engine.segment.metrics[SCHEDULER_ROW]["preemptions"] == 0
            engine.assert_nothing_held()


# ------------------------------------------------------------------------------------------------------------- a start


class Connecting(Arriving):
    """Says what it waits for, and declares its limits only when it is connected."""

    def connect(self) -> None:
        self.tell_problem(layout.BACKEND_AWAY)
        self.beat()
        self.batch_limits = BatchLimits(max_sequences=2)


def test_a_backend_declares_its_limits_when_it_is_connected() -> None:
    with small_engine(Connecting) as engine:
        assert engine.segment.header["most_choices"] == 2


def test_health_says_what_the_backend_waits_for() -> None:
    with small_engine(Connecting) as engine:
        header, now_ns = engine.segment.header, engine.clock.now_ns()
        for code, told in layout.BACKEND_PROBLEMS.items():
            backend_of(engine).tell_problem(code)
            assert health_problem(header, now_ns) == told
        backend_of(engine).tell_problem(layout.BACKEND_WELL)
        assert health_problem(header, now_ns) is None


class NotThere(Arriving):
    def connect(self) -> None:
        raise StartError("nobody there")


def test_a_backend_that_cannot_connect_is_no_scheduler() -> None:
    with small_engine(Arriving) as engine:
        engine._make_backend = NotThere
        with pytest.raises(StartError, match="nobody there"):
            engine.start_scheduler()


def test_a_suspect_is_waited_for_alone() -> None:
    """A quarantine steps in a loop of its own, in which a stream without news is no end of it."""
    with small_engine(Arriving) as engine:
        worker = engine.worker()
        stream = worker.submit(prompt_tokens=3, max_new_tokens=2)
        settle(engine, worker)
        count = engine.scheduler._step_and_wait(lambda state, shared, now_ns: 0)
        assert count == 1
        assert stream.token_ids == []

"""The real scheduler in one process, workers in others: every stream gets its own tokens in order, and all is freed."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from functools import partial

import pytest

from ironbatch import layout
from ironbatch.backends.mock import MockBackend
from ironbatch.clock import MonotonicClock
from ironbatch.kernels.lanes import arm_scheduler, disarm_scheduler
from ironbatch.scheduler.step import Scheduler
from ironbatch.shm.segment import Segment
from ironbatch.shm.wakeup import Doorbell
from tests.race.processes import DEADLINE_S, race, shared_segment
from tests.support import FakeWorker, Stream, small_config

pytestmark = pytest.mark.race

WORKERS = 3
REQUESTS = 1_500  # a worker
MOST_STREAMS = 8  # at a time and worker, of 32 slots
CANCEL_CHANCE = 0.05
WAIT_MS = int(DEADLINE_S * 1000)


def schedule(bells: tuple[Doorbell, ...], segment: Segment) -> tuple[int, int]:
    """Step until all workers are done, asleep while there is nothing to do. Returns (free blocks, preemptions)."""
    scheduler_bell, *lane_bells = bells
    config = small_config()
    scheduler = Scheduler(config, segment, tuple(lane_bells), MockBackend(config), MonotonicClock())
    scheduler.open()
    while not segment.lanes["serving_generation"][:WORKERS].all():
        if scheduler.step() == 0 and arm_scheduler(segment.address):
            assert scheduler_bell.wait(WAIT_MS), "nobody has rung the scheduler"
            disarm_scheduler(segment.address)
    return int(scheduler.arena.header["free_count"]), int(segment.metrics[0]["preemptions"])


def serve(lane: int, bells: tuple[Doorbell, ...], segment: Segment) -> dict[int, int]:
    """Send all requests, some at a time, cancel a few, and check what comes. Returns the ends, counted by reason."""
    scheduler_bell, bell = bells[0], bells[1 + lane]
    rng = random.Random(lane)
    worker = FakeWorker(segment, lane)
    ends: Counter[int] = Counter()
    sent = 0
    while ends.total() < REQUESTS:
        while sent < REQUESTS and len(worker.streams) < MOST_STREAMS:
            stream = worker.submit(rng.randint(1, 12), rng.randint(1, 20), seed=rng.getrandbits(62))
            sent += 1
            if rng.random() < CANCEL_CHANCE:
                worker.cancel(stream)
            scheduler_bell.ring()  # the fake worker does not tell whether it must
        ended = [stream for stream in worker.collect() if stream.is_over]
        for stream in ended:
            check(stream)
            ends[stream.reason] += 1
        if not ended:
            assert bell.wait(WAIT_MS), "nobody has rung this worker"
    segment.lanes[lane]["serving_generation"] = 1
    scheduler_bell.ring()
    return dict(ends)


def check(stream: Stream) -> None:
    """Its tokens are its own, from the first on, and all of them unless it was cancelled."""
    assert stream.token_ids == stream.expected_token_ids(len(stream.token_ids))
    if stream.reason == layout.FINISH_LENGTH:
        assert len(stream.token_ids) == stream.max_new_tokens
    else:
        assert stream.reason == layout.FINISH_CANCELLED


def test_every_stream_gets_its_own_tokens_and_nothing_is_kept() -> None:
    with contextlib.ExitStack() as stack:
        segment = stack.enter_context(shared_segment())
        bells = tuple(stack.enter_context(contextlib.closing(Doorbell.create())) for _ in range(1 + len(segment.lanes)))
        jobs = [partial(schedule, bells), *(partial(serve, lane, bells) for lane in range(WORKERS))]
        (free_blocks, preemptions), *ends = race(segment, jobs)
        print(f"{preemptions} preemptions, ends by reason: {ends}")
        assert free_blocks == small_config().total_kv_blocks
        assert not segment.slots["owner"].any()
        assert [sum(each.values()) for each in ends] == [REQUESTS] * WORKERS
        assert preemptions > 0  # or the pool was no bottleneck

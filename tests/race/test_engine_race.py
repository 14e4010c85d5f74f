"""The real scheduler in one process, workers in others: every stream gets its own tokens in order, and all is freed."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest

from ironbatch import layout
from ironbatch.backends.mock import MockBackend
from ironbatch.clock import MonotonicClock
from ironbatch.config import Config
from ironbatch.kernels.atomics import load_acquire
from ironbatch.kernels.emission import token_at
from ironbatch.kernels.jit import kernel
from ironbatch.kernels.lanes import arm_scheduler, disarm_scheduler
from ironbatch.kernels.shared import (
    GENERATION,
    PUBLISHED,
    SLOT_WORDS,
    TOKEN_ROW_TOKENS,
    open_shared,
    published_generation,
    published_produced,
    published_reason,
)
from ironbatch.scheduler.step import Scheduler
from ironbatch.shm.segment import Segment
from ironbatch.shm.wakeup import Doorbell
from tests.race.processes import DEADLINE_S, Patience, race, shared_segment
from tests.support import FakeWorker, Stream, small_config

pytestmark = pytest.mark.race

WORKERS = 3
REQUESTS = 1_500  # a worker
MOST_STREAMS = 8  # at a time and worker, of 32 slots
CANCEL_CHANCE = 0.05
WAIT_MS = int(DEADLINE_S * 1000)


@contextlib.contextmanager
def open_bells(segment: Segment) -> Iterator[tuple[Doorbell, ...]]:
    """The scheduler's doorbell, and one a lane."""
    bells = tuple(Doorbell.create() for _ in range(1 + len(segment.lanes)))
    try:
        yield bells
    finally:
        for bell in bells:
            bell.close()


def schedule(config: Config, workers: int, bells: tuple[Doorbell, ...], segment: Segment) -> tuple[int, int]:
    """Step until all workers are done, asleep while there is nothing to do. Returns (free blocks, preemptions)."""
    scheduler_bell, *lane_bells = bells
    scheduler = Scheduler(config, segment, tuple(lane_bells), MockBackend(config), MonotonicClock())
    scheduler.open()
    while not segment.lanes["serving_generation"][:workers].all():
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
    config = small_config()
    with shared_segment() as segment, open_bells(segment) as bells:
        workers = [partial(serve, lane, bells) for lane in range(WORKERS)]
        (free_blocks, preemptions), *ends = race(segment, [partial(schedule, config, WORKERS, bells), *workers])
        print(f"{preemptions} preemptions, ends by reason: {ends}")
        assert free_blocks == config.total_kv_blocks
        assert not segment.slots["owner"].any()
        assert [sum(each.values()) for each in ends] == [REQUESTS] * WORKERS
        assert preemptions > 0  # or the pool was no bottleneck


# A reader that never sleeps looks at the slot in the very moment in which a commit publishes.

LONG = {"max_model_len": 4096, "total_kv_blocks": 1024}
LONG_REQUESTS = 10
SPINS = 2_000

ENDED = 0
WAIT = 1
STALE = 2


@kernel("int64(intp, int64, int64, int64, int64[::1])")
def follow(address, slot, prompt, seed, progress):
    """Check each token of a mock's sequence as soon as it is published; progress: how many. Answers as above."""
    shared = open_shared(address)
    row = slot * SLOT_WORDS
    output = slot * shared.header[TOKEN_ROW_TOKENS] + prompt
    for _ in range(SPINS):
        published = load_acquire(shared.slots, row + PUBLISHED)
        if published_generation(published) != shared.slots[row + GENERATION]:
            continue
        produced = published_produced(published)
        for k in range(progress[0], produced):
            if shared.tokens[output + k] != token_at(seed, prompt + k, -1, 0):
                return STALE
        progress[0] = produced
        if published_reason(published) != layout.FINISH_NONE:
            return ENDED
    return WAIT


def watch(scheduler_bell: Doorbell, segment: Segment) -> int:
    """One long request after the other. Returns how many tokens were seen in time."""
    worker = FakeWorker(segment, 0)
    patience = Patience("for tokens")
    seen = 0
    for seed in range(1, 1 + LONG_REQUESTS):
        stream = worker.submit(4, 4000, seed=seed)
        scheduler_bell.ring()
        progress = np.zeros(1, np.int64)
        while (answer := follow(segment.address, stream.slot, 4, seed, progress)) == WAIT:
            patience.wait()
        assert answer == ENDED, f"token {progress[0]} was not there when it was published"
        seen += int(progress[0])
        worker.collect()
    segment.lanes[0]["serving_generation"] = 1
    scheduler_bell.ring()
    return seen


def test_commit_publishes_a_token_after_writing_it() -> None:
    config = small_config(**LONG)
    with shared_segment(**LONG) as segment, open_bells(segment) as bells:
        _, seen = race(segment, [partial(schedule, config, 1, bells), partial(watch, bells[0])])
        assert seen == LONG_REQUESTS * 4000

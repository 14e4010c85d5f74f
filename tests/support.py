"""A small engine inside the test's process, and the web worker's half of the protocol, driven by hand."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import Phase, settings
from numpy.typing import NDArray

from ironbatch import layout
from ironbatch.backends.base import Backend, BatchPlan, EngineLimits, KVGeometry, StepOutput
from ironbatch.backends.mock import MockBackend
from ironbatch.clock import FakeClock
from ironbatch.config import Config
from ironbatch.kernels.audit import SOUND, VIOLATIONS, audit
from ironbatch.kernels.emission import mock_token
from ironbatch.kernels.lanes import mark_lane_dead
from ironbatch.kernels.slots import NEWS_WORDS, slot_cancel, slot_claim, slot_submit, slots_collect, slots_settle
from ironbatch.scheduler.step import Scheduler
from ironbatch.shm.segment import Segment
from ironbatch.shm.wakeup import Doorbell


def wait_until(condition: Callable[[], Any], timeout_s: float = 10.0, what: str = "the condition") -> None:
    """Return as soon as `condition()` is true; fail once `timeout_s` are over."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true within {timeout_s} s"
        time.sleep(0.001)


def machine_settings(max_examples: int, stateful_step_count: int) -> settings:
    """For a state machine. Its failures are not explained, since that traces every line and can take minutes."""
    phases = [phase for phase in Phase if phase is not Phase.explain]
    return settings(max_examples=max_examples, stateful_step_count=stateful_step_count, phases=phases)


def small_config(**options: Any) -> Config:
    """A valid configuration of a tiny engine whose mock takes no time."""
    small = {
        "total_kv_blocks": 16,
        "kv_block_size": 4,
        "max_batch_tokens": 16,
        "max_running_seqs": 8,
        "max_queued_requests": 24,
        "max_model_len": 64,
        "workers": 1,
        "mock_token_latency_us": 0,
    }
    return Config(**(small | options))


class ScriptedBackend(Backend):
    """Emits what `script(plan)` says: the tokens of each row, or None for token 1 from each row that emits."""

    script: Callable[[BatchPlan], list[list[int]] | None] = staticmethod(lambda plan: None)

    def __init__(self, config: Config) -> None:
        self.starts = 0
        self.closes = 0
        self.forgotten: list[list[int]] = []

    def start(self, kv: KVGeometry, limits: EngineLimits) -> None:
        self.starts += 1
        self.kv, self.limits = kv, limits

    def execute(self, plan: BatchPlan) -> StepOutput:
        tokens = self.script(plan)
        if tokens is None:
            tokens = [[1]] * len(plan)
        else:
            plan.output.counts[: len(plan)] = [len(row) for row in tokens]
        flat = [token for row in tokens for token in row]
        plan.output.token_ids[: len(flat)] = flat
        return plan.output

    def forget(self, sequences: NDArray[np.int32]) -> None:
        self.forgotten.append(sequences.tolist())

    def close(self) -> None:
        self.closes += 1


@dataclass
class Stream:
    """One request, and what its client has received."""

    slot: int
    generation: int
    prompt_tokens: int
    max_new_tokens: int
    seed: int
    flags: int = 0
    token_ids: list[int] = field(default_factory=list)
    reason: int = layout.FINISH_NONE
    error_code: int = layout.ERROR_NONE

    @property
    def is_over(self) -> bool:
        return self.reason != layout.FINISH_NONE

    @property
    def ignores_eos(self) -> bool:
        return bool(self.flags & layout.FLAG_IGNORE_EOS)

    def expected_token_ids(self, count: int, eos_token_id: int = -1, eos_threshold: int = 0) -> list[int]:
        """Its first `count` tokens, from the request alone."""
        return [mock_token(self.seed, self.prompt_tokens + k, eos_token_id, eos_threshold) for k in range(count)]


class FakeWorker:
    """A web worker that holds a lane: it claims, submits, cancels and collects through the kernels."""

    def __init__(self, segment: Segment, lane: int, generation: int = 1) -> None:
        self.segment = segment
        self.lane = lane
        self.generation = generation
        self.owner = (generation << layout.OWNER_LANE_BITS) | (lane + 1)
        self.streams: dict[int, Stream] = {}
        num_slots = int(segment.header["num_slots"])
        self._active = np.zeros(num_slots, np.int32)
        self._active_count = 0
        self._seen = np.zeros(num_slots, np.int64)
        self._news = np.zeros(num_slots * NEWS_WORDS, np.int64)
        self._last_ns = np.zeros(num_slots, np.int64)
        segment.lanes[lane]["generation"] = generation  # its parent's part

    def try_submit(self, prompt_tokens: int, max_new_tokens: int, **fields: Any) -> Stream | None:
        """Claim a slot, write the request and hand it over. None when all slots are taken."""
        slot = slot_claim(self.segment.address, self.owner, 0)
        if slot < 0:
            return None
        row = self.segment.slots[slot]
        token_ids = fields.pop("prompt_token_ids", None)
        request = {"arrival_ns": 0, "priority": 0, "seed": 0, "flags": 0} | fields
        if token_ids is not None:
            self.segment.tokens[slot, :prompt_tokens] = token_ids
            request["flags"] |= layout.FLAG_TOKEN_IDS
        for name, value in {"prompt_tokens": prompt_tokens, "max_new_tokens": max_new_tokens, **request}.items():
            row[name] = value
        stream = Stream(slot, int(row["generation"]), prompt_tokens, max_new_tokens, request["seed"], request["flags"])
        self.streams[slot] = stream
        self._seen[slot] = 0
        self._active[self._active_count] = slot
        self._active_count += 1
        assert slot_submit(self.segment.address, self.lane, slot) >= 0
        return stream

    def submit(self, prompt_tokens: int, max_new_tokens: int, **fields: Any) -> Stream:
        """As `try_submit`, where a slot must be free."""
        stream = self.try_submit(prompt_tokens, max_new_tokens, **fields)
        assert stream is not None, "all slots are taken"
        return stream

    def cancel(self, stream: Stream) -> None:
        """The client has gone."""
        assert self.streams[stream.slot] is stream
        assert slot_cancel(self.segment.address, self.lane, stream.slot) >= 0

    def collect(self, now_ns: int = 0) -> list[Stream]:
        """Hand all that is published to the streams; returns those with news. The finished give their slots back."""
        address, active, count = self.segment.address, self._active, self._active_count
        news_count = slots_collect(address, self.lane, active, count, self._seen, self._news)
        told = []
        for slot, before, produced, reason, error in self._news.reshape(-1, NEWS_WORDS)[:news_count].tolist():
            stream = self.streams[slot]
            start = stream.prompt_tokens
            stream.token_ids += self.segment.tokens[slot, start + before : start + produced].tolist()
            stream.reason, stream.error_code = reason, error
            if reason != layout.FINISH_NONE:
                del self.streams[slot]
            told.append(stream)
        self._active_count = slots_settle(
            address, self.lane, active, count, self._seen, self._news, news_count, self._last_ns, now_ns
        )
        return told

    def die(self) -> None:
        """Its parent has found it dead."""
        mark_lane_dead(self.segment.address, self.lane, self.generation)


class SmallEngine:
    """A segment, a clock and one scheduler at a time, in this process. Use as a context manager: `small_engine`."""

    def __init__(self, backend: Callable[[Config], Backend], config: Config) -> None:
        self.config = config
        self.clock = FakeClock(1_000)
        self.segment = Segment.create(config, self.clock.now_ns())
        self.bells = tuple(Doorbell.create() for _ in range(config.num_lanes))
        self._make_backend = backend
        self._scratch = np.zeros(config.total_kv_blocks, np.int32)
        self.start_scheduler()

    def start_scheduler(self) -> int:
        """A new scheduler on the same segment, as after the death of the one before. Returns how many wait."""
        self.backend = self._make_backend(self.config)
        self.scheduler = Scheduler(self.config, self.segment, self.bells, self.backend, self.clock)
        return self.scheduler.open()

    def worker(self, lane: int = 0, generation: int = 1) -> FakeWorker:
        return FakeWorker(self.segment, lane, generation)

    def step(self) -> int:
        """One step, after which every invariant holds."""
        count = self.scheduler.step()
        self.check()
        return count

    def check(self) -> None:
        violation = audit(self.scheduler.arena.address, self._scratch)
        assert violation == SOUND, VIOLATIONS[violation]

    def run(self, *workers: FakeWorker, most_steps: int = 10_000) -> int:
        """Step until nothing is left to do; the workers collect after each. Returns the number of steps."""
        for steps in range(most_steps):
            count = self.step()
            for worker in workers:
                worker.collect(self.clock.now_ns())
            if count == 0:
                return steps
        raise AssertionError(f"the engine still computes after {most_steps} steps")

    def gauge(self, name: str) -> int:
        """A word of the scheduler's private header, such as free_count."""
        return int(self.scheduler.arena.header[name])

    def sequence(self, stream: Stream) -> Any:
        """The scheduler's record of a stream."""
        return self.scheduler.arena.views["sequences"][stream.slot]

    def running(self) -> list[int]:
        """The running set, senior first."""
        running: list[int] = self.scheduler.arena.views["running"][: self.gauge("running_count")].tolist()
        return running

    def waiting(self) -> list[int]:
        """The waiting queue in the order of admission, as its links say."""
        views = self.scheduler.arena.views
        order: list[int] = []
        for head in views["queue_heads"].tolist():
            sequence = head
            while sequence >= 0:
                order.append(sequence)
                sequence = int(views["sequences"][sequence]["next"])
        return order

    def assert_nothing_held(self) -> None:
        """All blocks and all slots are free."""
        assert self.gauge("free_count") == self.config.total_kv_blocks
        assert not self.segment.slots["owner"].any()
        assert (self.gauge("running_count"), self.gauge("waiting_count")) == (0, 0)

    def close(self) -> None:
        self.scheduler.close()
        self.segment.close()
        for bell in self.bells:
            bell.close()


@contextlib.contextmanager
def small_engine(backend: Callable[[Config], Backend] = MockBackend, **options: Any) -> Iterator[SmallEngine]:
    """A small engine with `options` of the configuration; nothing of it is left in /dev/shm afterwards."""
    engine = SmallEngine(backend, small_config(**options))
    try:
        yield engine
    finally:
        engine.close()

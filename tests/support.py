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
from ironbatch.kernels.audit import audit
from ironbatch.kernels.emission import mock_token
from ironbatch.kernels.lanes import mark_lane_dead
from ironbatch.kernels.slots import (
    NEWS_WORDS,
    choice_seed,
    slot_cancel,
    slot_claim,
    slot_release,
    slot_submit,
    slots_collect,
    slots_settle,
)
from ironbatch.kernels.violations import SOUND, VIOLATIONS
from ironbatch.scheduler.step import Scheduler
from ironbatch.shm.segment import Segment
from ironbatch.shm.wakeup import Doorbell
from ironbatch.text_rows import NO_USAGE, TextRow, TokenUsage


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
    """One choice of a request, and what its client has received."""

    slot: int
    generation: int
    prompt_tokens: int
    max_new_tokens: int
    seed: int
    flags: int = 0
    prompt_token_ids: list[int] | None = None
    reads_kv: bool = False  # the mock's tokens come from its KV cache
    token_ids: list[int] = field(default_factory=list)
    reason: int = layout.FINISH_NONE
    error_code: int = layout.ERROR_NONE
    texts: list[str] = field(default_factory=list)  # of a backend that has text: a piece for each token
    note: str = ""
    usage: TokenUsage = NO_USAGE

    @property
    def is_over(self) -> bool:
        return self.reason != layout.FINISH_NONE

    @property
    def ignores_eos(self) -> bool:
        return bool(self.flags & layout.FLAG_IGNORE_EOS)

    def expected_token_ids(self, count: int, eos_token_id: int = -1, eos_threshold: int = 0) -> list[int]:
        """Its first `count` tokens, from the request alone."""
        if self.reads_kv:
            return mock_kv_token_ids(self, count, eos_token_id, eos_threshold)
        return [mock_token(self.seed, self.prompt_tokens + k, eos_token_id, eos_threshold) for k in range(count)]


def mock_kv_token_ids(stream: Stream, count: int, eos_token_id: int, eos_threshold: int) -> list[int]:
    """What the mock with --mock-kv emits if every position that it reads back is the one that was written."""
    from ironbatch.kernels.mock_kv import mock_kv_tokens  # noqa: PLC0415 - only tests of the KV mock need it

    # A prompt of which only the length is known counts as zeros, as in `BatchPlan.token_ids`.
    context = np.zeros(stream.prompt_tokens + count, np.int32)
    context[: stream.prompt_tokens] = stream.prompt_token_ids or 0
    mock_kv_tokens(stream.seed, context, stream.prompt_tokens, count, eos_token_id, eos_threshold)
    tokens: list[int] = context[stream.prompt_tokens :].tolist()
    return tokens


class FakeWorker:
    """A web worker that holds a lane: it claims, submits, cancels and collects through the kernels."""

    def __init__(self, segment: Segment, lane: int, generation: int = 1, *, reads_kv: bool = False) -> None:
        self.segment = segment
        self._reads_kv = reads_kv
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

    def try_submit_group(self, prompt_tokens: int, max_new_tokens: int, n: int, **fields: Any) -> list[Stream]:
        """Claim `n` slots, write the request's choices and hand them over at once. Empty if there are too few.

        `fields` are the slot's, and `prompt_token_ids`, `prompt_text` and `salt`.
        """
        slots = sorted(self._claim_many(n))
        text = fields.pop("prompt_text", None)
        if self.segment.texts.size:
            for slot in slots:
                TextRow(self.segment.texts[slot]).write_prompt(b"" if text is None else text.encode())
        token_ids = fields.pop("prompt_token_ids", None)
        request = {"arrival_ns": 0, "priority": 0, "seed": 0, "flags": 0} | fields
        request["salt_a"], request["salt_b"] = request.pop("salt", (0, 0))
        request["flags"] |= 0 if token_ids is None else layout.FLAG_TOKEN_IDS
        request["flags"] |= 0 if text is None else layout.FLAG_TEXT
        request |= {"prompt_tokens": prompt_tokens, "max_new_tokens": max_new_tokens}
        streams = []
        for index, slot in enumerate(slots):
            links = {
                "choice_index": index,
                "parent_slot": slots[0],
                "next_choice": slots[index + 1] if index + 1 < len(slots) else layout.NO_SLOT,
                "seed": int(choice_seed(request["seed"], index)) if index else request["seed"],
            }
            streams.append(self._write(slot, token_ids, request | links))
        if slots:
            assert slot_submit(self.segment.address, self.lane, slots[0]) >= 0
        return streams

    def _claim_many(self, n: int) -> list[int]:
        slots = [slot_claim(self.segment.address, self.owner, 0) for _ in range(n)]
        if -1 not in slots:
            return slots
        for slot in slots:
            if slot >= 0:
                slot_release(self.segment.address, slot)
        return []

    def _write(self, slot: int, token_ids: list[int] | None, request: dict[str, int]) -> Stream:
        row = self.segment.slots[slot]
        for name, value in request.items():
            row[name] = value
        sizes = (request["prompt_tokens"], request["max_new_tokens"])
        if token_ids is not None:
            self.segment.tokens[slot, : sizes[0]] = token_ids
        stream = Stream(slot, int(row["generation"]), *sizes, request["seed"], request["flags"], token_ids)
        stream.reads_kv = self._reads_kv
        self.streams[slot] = stream
        self._seen[slot] = 0
        self._active[self._active_count] = slot
        self._active_count += 1
        return stream

    def submit_group(self, prompt_tokens: int, max_new_tokens: int, n: int, **fields: Any) -> list[Stream]:
        """As `try_submit_group`, where `n` slots must be free."""
        streams = self.try_submit_group(prompt_tokens, max_new_tokens, n, **fields)
        assert streams, "too few slots are free"
        return streams

    def try_submit(self, prompt_tokens: int, max_new_tokens: int, **fields: Any) -> Stream | None:
        """A request for one choice. None when all slots are taken."""
        streams = self.try_submit_group(prompt_tokens, max_new_tokens, 1, **fields)
        return streams[0] if streams else None

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
            if self.segment.texts.size:
                row = TextRow(self.segment.texts[slot])
                pieces, _ = row.read(row.first_piece, produced)
                stream.texts = [piece.decode() for piece in pieces]
                stream.note, stream.usage = row.note, row.usage
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
        self.segment.header["epoch"] += 1  # as its keeper does
        self.backend = self._make_backend(self.config)
        self.scheduler = Scheduler(self.config, self.segment, self.bells, self.backend, self.clock)
        return self.scheduler.open()

    def worker(self, lane: int = 0, generation: int = 1) -> FakeWorker:
        return FakeWorker(self.segment, lane, generation, reads_kv=self.config.mock_kv)

    def step(self) -> int:
        """One step, after which every invariant holds."""
        count = self.scheduler.step()
        self.check()
        return count

    def check(self) -> None:
        violation = audit(self.scheduler.arena.address, self.segment.address, self._scratch)
        assert violation == SOUND, VIOLATIONS[violation]
        if not self.gauge("running_changed"):
            listed = self.segment.running[: int(self.segment.header["listed_count"])].tolist()
            assert sorted(listed) == sorted(self.running()), "a successor would suspect others than those that ran"

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
        """Nobody has a block or a slot; what is cached may be evicted."""
        assert self.gauge("free_count") + self.gauge("evictable_count") == self.config.total_kv_blocks
        assert self.gauge("reserved_count") == 0
        assert not self.segment.slots["owner"].any()
        assert (self.gauge("running_count"), self.gauge("waiting_count")) == (0, 0)

    def close(self) -> None:
        self.scheduler.close()
        self.segment.close()
        for bell in self.bells:
            bell.close()


@contextlib.contextmanager
def small_engine(backend: Callable[[Config], Backend] = MockBackend, /, **options: Any) -> Iterator[SmallEngine]:
    """A small engine with `options` of the configuration; nothing of it is left in /dev/shm afterwards."""
    engine = SmallEngine(backend, small_config(**options))
    try:
        yield engine
    finally:
        engine.close()

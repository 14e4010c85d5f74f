"""An engine in one process for the benchmarks: a real segment and scheduler, a backend that takes no time, no HTTP."""

from __future__ import annotations

import time
from typing import Any

from yardsticks import REPOSITORY  # noqa: F401  the path to the package

from ironbatch import layout
from ironbatch.backends.base import Backend, BatchPlan, EngineLimits, KVGeometry, StepOutput
from ironbatch.clock import MonotonicClock
from ironbatch.config import Config
from ironbatch.kernels import slots
from ironbatch.kernels.atomics import load_acquire, store_release
from ironbatch.kernels.jit import callable_in_kernels, kernel
from ironbatch.kernels.shared import (
    ARRIVAL_NS,
    FLAGS,
    MAX_NEW_TOKENS,
    NEXT_CHOICE,
    NUM_SLOTS,
    OWNER,
    PRIORITY,
    PROMPT_TOKENS,
    PUBLISHED,
    SEED,
    SLOT_WORDS,
    TOKEN_ROW_TOKENS,
    open_shared,
    published_produced,
)
from ironbatch.scheduler.step import Scheduler
from ironbatch.shm.engine import Engine

LANE = 0
GENERATION = 1
OWNER_WORD = int(layout.owner_word(LANE, GENERATION))
PROMPT = 16
MODEL_LEN = 4096
BLOCK_SIZE = 16

_claim = callable_in_kernels(slots.slot_claim)
_claim_group = callable_in_kernels(slots.slots_claim)
_share_request = callable_in_kernels(slots.slots_share_request)
_submit = callable_in_kernels(slots.slot_submit)


@kernel("int64(intp, int64, int64, int64, int64, int64, int64)")
def submit_many(address, count, prompt, max_new_tokens, owner, lane, now_ns):
    """As a web worker would: claim `count` slots, write a request without token ids, submit it."""
    shared = open_shared(address)
    for k in range(count):
        slot = _claim(address, owner, k)
        row = slot * SLOT_WORDS
        shared.slots[row + PROMPT_TOKENS] = prompt
        shared.slots[row + MAX_NEW_TOKENS] = max_new_tokens
        shared.slots[row + PRIORITY] = 0
        shared.slots[row + FLAGS] = 0
        shared.slots[row + SEED] = k
        shared.slots[row + ARRIVAL_NS] = now_ns + k
        shared.slots[row + NEXT_CHOICE] = layout.NO_SLOT
        _submit(address, lane, slot)
    return count


@kernel("int64(intp, int64, int64, int64, int64, int64, int64, int64, int64)")
def submit_group(  # noqa: PLR0913  a request's fields, as they stand in its slot
    address, choices, prompt, max_new_tokens, priority, first_token, owner, lane, now_ns
):
    """Likewise one request for `choices` choices, whose prompt is first_token, first_token + 1 ... Returns its slot."""
    shared = open_shared(address)
    parent = _claim_group(address, owner, 0, choices)
    row = parent * SLOT_WORDS
    shared.slots[row + PROMPT_TOKENS] = prompt
    shared.slots[row + MAX_NEW_TOKENS] = max_new_tokens
    shared.slots[row + PRIORITY] = priority
    shared.slots[row + FLAGS] = layout.FLAG_TOKEN_IDS
    shared.slots[row + SEED] = first_token
    shared.slots[row + ARRIVAL_NS] = now_ns
    for position in range(prompt):
        shared.tokens[parent * shared.header[TOKEN_ROW_TOKENS] + position] = first_token + position
    _share_request(address, parent)
    _submit(address, lane, parent)
    return parent


@kernel("int64(intp)")
def release_all(address):
    """Give back every slot; all have ended."""
    shared = open_shared(address)
    for slot in range(shared.header[NUM_SLOTS]):
        store_release(shared.slots, slot * SLOT_WORDS + OWNER, 0)
    return 0


@kernel("int64(intp, int64)")
def read_published(address, looks):
    """A reader on another core: look at every slot's progress and at its newest token, `looks` times over."""
    shared = open_shared(address)
    seen = 0
    for _ in range(looks):
        for slot in range(shared.header[NUM_SLOTS]):
            produced = published_produced(load_acquire(shared.slots, slot * SLOT_WORDS + PUBLISHED))
            seen += shared.tokens[slot * shared.header[TOKEN_ROW_TOKENS] + PROMPT + max(produced - 1, 0)]
    return seen


class NullBackend(Backend):
    """Emits the tokens that stand in the preset output."""

    def start(self, kv: KVGeometry, limits: EngineLimits) -> None:
        """Nothing to start."""

    def execute(self, plan: BatchPlan) -> StepOutput:
        """In no time."""
        return plan.output


class StepEngine:
    """`running` places, and a scheduler that is stepped by hand; `options` are the configuration's.

    By default nobody waits for blocks, and there is one place a slot.
    """

    def __init__(self, running: int, backend: Backend | None = None, *, prompt: int = PROMPT, **options: Any) -> None:
        self.running = running
        self.prompt = prompt
        defaults = {
            "total_kv_blocks": running * MODEL_LEN // BLOCK_SIZE,
            "kv_block_size": BLOCK_SIZE,
            "max_batch_tokens": running * prompt,
            "max_running_seqs": running,
            "max_queued_requests": 0,
            "max_model_len": MODEL_LEN,
            "workers": 1,
        }
        config = Config(**(defaults | options))
        clock = MonotonicClock()
        self.engine = Engine.create(config, clock.now_ns())
        self.address = self.engine.segment.address
        self.engine.segment.populate()
        self.engine.segment.lanes[LANE]["generation"] = GENERATION
        self.scheduler = Scheduler(config, self.engine.segment, self.engine.lane_bells, backend or NullBackend(), clock)
        self.scheduler.open()
        self.steps_left = 0

    def submit(self, max_new_tokens: int) -> None:
        """Submit a plain request for every place."""
        submit_many(self.address, self.running, self.prompt, max_new_tokens, OWNER_WORD, LANE, time.monotonic_ns())
        self.let_worker_be_awake()

    def submit_group(self, first_token: int, max_new_tokens: int, *, choices: int = 1, priority: int = 0) -> int:
        """Submit one request with token ids. Returns its slot."""
        slot: int = submit_group(
            self.address,
            choices,
            self.prompt,
            max_new_tokens,
            priority,
            first_token,
            OWNER_WORD,
            LANE,
            time.monotonic_ns(),
        )
        self.let_worker_be_awake()
        return slot

    def let_worker_be_awake(self) -> None:
        """What a wake costs is measured by itself."""
        self.engine.segment.lanes[LANE]["worker_sleeping"] = 0

    def make_steady(self) -> None:
        """All places decode, and go on for `steps_left` steps in which none ends."""
        self.finish()
        self.submit(MODEL_LEN - self.prompt)
        self.scheduler.step()
        self.steps_left = MODEL_LEN - self.prompt - 2

    def time_steps(self, loops: int) -> float:
        """Seconds of `loops` steady steps; `make_steady` comes in between where it must, and is not timed."""
        step = self.scheduler.step
        elapsed_s = 0.0
        while loops > 0:
            if self.steps_left == 0:
                self.make_steady()
            steps = range(min(loops, self.steps_left))
            start_s = time.perf_counter()
            for _ in steps:
                step()
            elapsed_s += time.perf_counter() - start_s
            self.steps_left -= len(steps)
            loops -= len(steps)
        return elapsed_s

    def finish(self) -> None:
        """End all that runs, and give all slots back. The last step does what is owed to the backend."""
        for slot in range(self.engine.segment.header["num_slots"]):
            slots.slot_cancel(self.address, LANE, slot)
        while self.scheduler.step() > 0:
            pass
        release_all(self.address)
        self.steps_left = 0

    def close(self) -> None:
        """Remove the segment."""
        self.scheduler.close()
        self.engine.close()

"""An engine in one process for the benchmarks: a real segment and scheduler, a backend that takes no time, no HTTP."""

from __future__ import annotations

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
_submit = callable_in_kernels(slots.slot_submit)


@kernel("int64(intp, int64, int64, int64, int64)")
def submit_many(address, count, max_new_tokens, owner, lane):
    """As a web worker would: claim `count` slots, write a request of PROMPT tokens without ids, submit it."""
    shared = open_shared(address)
    for k in range(count):
        slot = _claim(address, owner, k)
        row = slot * SLOT_WORDS
        shared.slots[row + PROMPT_TOKENS] = PROMPT
        shared.slots[row + MAX_NEW_TOKENS] = max_new_tokens
        shared.slots[row + PRIORITY] = 0
        shared.slots[row + FLAGS] = 0
        shared.slots[row + SEED] = k
        shared.slots[row + ARRIVAL_NS] = k
        _submit(address, lane, slot)
    return count


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
    """`running` places, and a scheduler that is stepped by hand."""

    def __init__(self, running: int) -> None:
        self.running = running
        config = Config(
            total_kv_blocks=running * MODEL_LEN // BLOCK_SIZE,
            kv_block_size=BLOCK_SIZE,
            max_batch_tokens=running * PROMPT,
            max_running_seqs=running,
            max_queued_requests=0,
            max_model_len=MODEL_LEN,
            workers=1,
        )
        clock = MonotonicClock()
        self.engine = Engine.create(config, clock.now_ns())
        self.address = self.engine.segment.address
        self.engine.segment.populate()
        self.engine.segment.lanes[LANE]["generation"] = GENERATION
        self.scheduler = Scheduler(config, self.engine.segment, self.engine.lane_bells, NullBackend(), clock)
        self.scheduler.open()
        self.steps_left = 0

    def submit(self, max_new_tokens: int) -> None:
        """Submit a request for every place. The worker counts as awake: what a wake costs is measured by itself."""
        submit_many(self.address, self.running, max_new_tokens, OWNER_WORD, LANE)
        self.engine.segment.lanes[LANE]["worker_sleeping"] = 0

    def make_steady(self) -> None:
        """All places decode, and go on for `steps_left` steps in which none ends."""
        self.finish()
        self.submit(MODEL_LEN - PROMPT)
        self.scheduler.step()
        self.steps_left = MODEL_LEN - PROMPT - 2

    def finish(self) -> None:
        """Step until nothing is left, and give all slots back. The last step does what is owed to the backend."""
        if self.steps_left > 0:
            for slot in range(self.running):
                slots.slot_cancel(self.address, LANE, slot)
        while self.scheduler.step() > 0:
            pass
        release_all(self.address)
        self.steps_left = 0

    def close(self) -> None:
        """Remove the segment."""
        self.scheduler.close()
        self.engine.close()

"""Kernels for the wake-up tests: one side publishes and may ring, the other looks and may sleep.

Each side has controls, which do the same as the real kernels but for one thing. A short delay before the critical
words, which differs from round to round, lets the two sides meet in every way.
"""

from __future__ import annotations

from numba import carray

from ironbatch import layout
from ironbatch.kernels import lanes
from ironbatch.kernels.atomics import address_to_words, exchange, load_acquire, store_release
from ironbatch.kernels.commit import gather_wakes
from ironbatch.kernels.jit import callable_in_kernels, inline, kernel
from ironbatch.kernels.lanes import lane_drain, must_ring_scheduler, push_hint
from ironbatch.kernels.shared import (
    HEAD,
    LANE_WORDS,
    PUBLISHED,
    SCHEDULER_SLEEPING,
    SLOT_WORDS,
    TAIL,
    WORKER_SLEEPING,
    open_shared,
    published_produced,
    published_word,
)
from ironbatch.kernels.slots import slots_collect
from ironbatch.kernels.state import open_state
from tests.race.processes import LINE_WORDS

arm_scheduler = callable_in_kernels(lanes.arm_scheduler)
disarm_scheduler = callable_in_kernels(lanes.disarm_scheduler)

LANE = 0
SLOT = 0
GENERATION = 1

# What a side's kernel answers.
DONE = 0
RING = 1  # its partner sleeps
SLEEP = 2  # it may sleep
WAIT = 3  # its partner is slow; let it run

# How a side behaves.
REAL = 0
UNFENCED = 1  # says that it sleeps, or publishes, and looks without a fence between the two
LOOKS_FIRST = 2  # looks, and then says that it sleeps

SPINS = 100_000  # longer than a wake-up takes: whoever yields beside a busy process waits for milliseconds
SLEEPER_SWEEP = 0xFFF  # steps, hence some 6 us
RINGER_SWEEP = 0x3FF
FORCED_STEPS = 5_000  # some 8 us, in which the partner surely publishes
SLEEPER = 0
RINGER = 1

# Scratch words, each on a cache line of its own.
SEEN = 0  # the sleeper: the last news that it has seen
AWAKE = 1 * LINE_WORDS  # the sleeper: how often it woke
DECIDED = 2 * LINE_WORDS  # the ringer: the last news of which it knows whether to ring, and has rung
STOPPED = 3 * LINE_WORDS  # the sleeper: a wake was lost, nobody need go on
NOISE = 4 * LINE_WORDS  # one a side
SCRATCH_WORDS = 6 * LINE_WORDS

# Words of a ringer's private progress.
SENT = 0
AWAKE_BEFORE = 1


@inline
def open_scratch(address):
    return carray(address_to_words(address), SCRATCH_WORDS)


@inline
def idle(scratch, side, steps):
    """Spend some 1.5 ns a step. The result is stored, or the compiler would spare us the work."""
    noise = steps
    for _ in range(steps):
        noise = noise * 0x5851F42D4C957F2D + 1
    store_release(scratch, NOISE + side * LINE_WORDS, noise)


@inline
def sweep(scratch, side, turn, mask):
    """Idle for up to `mask` steps, in each turn for others."""
    idle(scratch, side, ((turn * 0x9E3779B1 + side) >> 7) & mask)


# --------------------------------------------------------------------------- the scheduler sleeps, a worker rings


@inline
def arm_wrongly(shared, scratch, way):
    """As `arm_scheduler`, which it is the control of."""
    row = LANE * LANE_WORDS
    if way == UNFENCED:
        store_release(shared.header, SCHEDULER_SLEEPING, 1)
        is_empty = load_acquire(shared.lanes, row + TAIL) == shared.lanes[row + HEAD]
    else:
        is_empty = load_acquire(shared.lanes, row + TAIL) == shared.lanes[row + HEAD]
        idle(scratch, SLEEPER, FORCED_STEPS)
        exchange(shared.header, SCHEDULER_SLEEPING, 1 if is_empty else 0)
    if not is_empty:
        exchange(shared.header, SCHEDULER_SLEEPING, 0)
    return 1 if is_empty else 0


@kernel("int64(intp, intp, int64, int64, int64[::1])")
def take_hints(address, scratch_address, way, end, out):
    """The scheduler: disarm, drain the lane, sleep if it is empty. Answers DONE after `end` hints, else SLEEP."""
    shared = open_shared(address)
    scratch = open_scratch(scratch_address)
    disarm_scheduler(address)
    while True:
        lane_drain(address, LANE, out, 1)
        head = shared.lanes[LANE * LANE_WORDS + HEAD]
        store_release(scratch, SEEN, head)
        if head == end:
            return DONE
        sweep(scratch, SLEEPER, head, SLEEPER_SWEEP)
        may_sleep = arm_scheduler(address) if way == REAL else arm_wrongly(shared, scratch, way)
        if may_sleep:
            return SLEEP


@kernel("int64(intp, intp, int64, int64, int64[::1])")
def push_hints(address, scratch_address, way, end, progress):
    """A worker: push one hint whenever the last was taken. Answers DONE once `end` are, RING or WAIT."""
    shared = open_shared(address)
    scratch = open_scratch(scratch_address)
    while True:
        store_release(scratch, DECIDED, progress[SENT])
        spins = 0
        while load_acquire(scratch, SEEN) < progress[SENT]:
            spins += 1
            if spins == SPINS:
                return WAIT
        if progress[SENT] == end:
            return DONE
        sweep(scratch, RINGER, progress[SENT], RINGER_SWEEP)
        push_hint(shared, LANE, SLOT, GENERATION)
        progress[SENT] += 1
        if way == REAL:
            must_ring = must_ring_scheduler(shared)
        else:
            must_ring = load_acquire(shared.header, SCHEDULER_SLEEPING)
            if must_ring:
                must_ring = exchange(shared.header, SCHEDULER_SLEEPING, 0)
        if must_ring:
            return RING


# --------------------------------------------------------------------------- a worker sleeps, the scheduler rings


@inline
def collect_wrongly(shared, scratch, way):
    """As `slots_collect`, which it is the control of. Returns the tokens it sees."""
    sleeping = LANE * LANE_WORDS + WORKER_SLEEPING
    published = SLOT * SLOT_WORDS + PUBLISHED
    if way == UNFENCED:
        store_release(shared.lanes, sleeping, 1)
        return published_produced(load_acquire(shared.slots, published))
    produced = published_produced(load_acquire(shared.slots, published))
    idle(scratch, SLEEPER, FORCED_STEPS)
    exchange(shared.lanes, sleeping, 1)
    return produced


@kernel("int64(intp, intp, int64, int64, int32[::1], int64[::1], int64[::1])")
def collect_news(address, scratch_address, way, end, active, seen, news):
    """A worker that woke: one look. Answers SLEEP, or DONE after `end` tokens."""
    shared = open_shared(address)
    scratch = open_scratch(scratch_address)
    store_release(scratch, AWAKE, scratch[AWAKE] + 1)
    sweep(scratch, SLEEPER, scratch[AWAKE], SLEEPER_SWEEP)
    if way == REAL:
        count = slots_collect(address, LANE, active, 1, seen, news)
        if count > 0:
            seen[SLOT] = news[2]
    else:
        seen[SLOT] = collect_wrongly(shared, scratch, way)
    store_release(scratch, SEEN, seen[SLOT])
    return DONE if seen[SLOT] == end else SLEEP


@kernel("int64(intp, intp, intp, int64, int64, int64[::1])")
def publish_news(address, scratch_address, state_address, way, end, progress):
    """The scheduler: publish one token after the other. Answers DONE once `end` are seen, RING or WAIT.

    Every other one is published as soon as the worker wakes, hence while it says that it sleeps and looks. The next
    then waits until it is seen, so that no wake makes up for a lost one.
    """
    shared = open_shared(address)
    scratch = open_scratch(scratch_address)
    state = open_state(state_address)
    while True:
        sent = progress[SENT]
        store_release(scratch, DECIDED, sent)
        spins = 0
        while load_acquire(scratch, SEEN) < sent:
            if sent % 2 == 1 and load_acquire(scratch, AWAKE) != progress[AWAKE_BEFORE]:
                break
            spins += 1
            if spins == SPINS:
                return WAIT
        if sent == end:
            return DONE
        progress[AWAKE_BEFORE] = load_acquire(scratch, AWAKE)
        sweep(scratch, RINGER, sent, RINGER_SWEEP)
        store_release(
            shared.slots, SLOT * SLOT_WORDS + PUBLISHED, published_word(GENERATION, layout.FINISH_NONE, sent + 1)
        )
        progress[SENT] = sent + 1
        state.lane_news[LANE] = 1
        if way == REAL:
            must_ring = gather_wakes(state, shared)
        else:
            must_ring = load_acquire(shared.lanes, LANE * LANE_WORDS + WORKER_SLEEPING)
            if must_ring:
                must_ring = exchange(shared.lanes, LANE * LANE_WORDS + WORKER_SLEEPING, 0)
        if must_ring:
            return RING

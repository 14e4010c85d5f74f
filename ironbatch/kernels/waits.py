"""How long each sequence waits, and for what.

Nobody passes the head of the queue, so at any moment all who wait have the reason of the head. One clock a reason runs
while it is the present one; a sequence notes them when it begins to wait and is charged the differences when it ends.
So a step costs the same however many wait, and the sums are exact.
"""

from __future__ import annotations

from ironbatch import layout
from ironbatch.kernels.jit import inline, subroutine
from ironbatch.kernels.records import SEQ_GENERATION, SEQUENCE_WORDS, WAIT_CLOCKS, WAIT_SINCE, WAIT_WORDS
from ironbatch.kernels.shared import (
    ADMITTED_GENERATION,
    ARRIVAL_NS,
    CACHED_TOKENS,
    SLOT_PREEMPTIONS,
    SLOT_WORDS,
    SUSPICION,
    WAITED_NS,
)
from ironbatch.kernels.state import WAIT_CLOCK_NS, WAIT_NS, WAIT_REASON

METRIC_WAITED = layout.word(layout.METRICS, "waited_step_us")
REASONS = len(layout.WAIT_REASONS)
NS_PER_US = 1_000


@inline
def advance_clocks(state, now_ns):
    """Let the present reason's clock run up to now."""
    elapsed = now_ns - state.header[WAIT_CLOCK_NS]
    if elapsed > 0:
        state.header[WAIT_NS + state.header[WAIT_REASON]] += elapsed
        state.header[WAIT_CLOCK_NS] = now_ns


@inline
def begin_wait(state, sequence):
    """Note the clocks."""
    row = sequence * WAIT_WORDS
    for reason in range(REASONS):
        state.waits[row + WAIT_CLOCKS + reason] = state.header[WAIT_NS + reason]
    state.waits[row + WAIT_SINCE] = state.header[WAIT_CLOCK_NS]


@subroutine
def end_wait(state, shared, sequence):
    """Charge a sequence that waits no more. Returns 1 if it is the first time for its request.

    The time from a request's arrival to the step that saw it is charged to `step`, once.
    """
    wait = sequence * WAIT_WORDS
    slot = sequence * SLOT_WORDS
    generation = state.sequences[sequence * SEQUENCE_WORDS + SEQ_GENERATION]
    is_first = shared.slots[slot + ADMITTED_GENERATION] != generation
    if is_first:
        shared.slots[slot + ADMITTED_GENERATION] = generation
        shared.slots[slot + CACHED_TOKENS] = 0
        shared.slots[slot + SLOT_PREEMPTIONS] = 0
        shared.slots[slot + SUSPICION] = 0
        for reason in range(REASONS):
            shared.slots[slot + WAITED_NS + reason] = 0
        hand_over_ns = max(state.waits[wait + WAIT_SINCE] - shared.slots[slot + ARRIVAL_NS], 0)
        state.waits[wait + WAIT_CLOCKS + layout.WAIT_STEP] -= hand_over_ns
    for reason in range(REASONS):
        before = shared.slots[slot + WAITED_NS + reason]
        after = before + state.header[WAIT_NS + reason] - state.waits[wait + WAIT_CLOCKS + reason]
        shared.slots[slot + WAITED_NS + reason] = after
        shared.metrics[METRIC_WAITED + reason] += after // NS_PER_US - before // NS_PER_US
    return 1 if is_first else 0

"""Whose computing may have killed a scheduler, and who has to run alone until that is known.

A process that is killed cannot say what it died of. What it leaves in the segment is who ran, and whether a plan was
being computed; how far each has come is published anyway. From that its successor counts deaths by sequence, in the
slot's `suspicion`: a death counts against whoever ran and has published nothing since the last one that counted. So
somebody's kill or the kernel's for want of memory blames nobody for long, while a sequence that kills whoever computes
it is blamed each time, with all that it takes along.

After CROWD_DEATHS such a sequence is a suspect. Suspects are run alone (scheduler/quarantine.py) until each has emitted
a token, which clears it; one that kills a scheduler ALONE_DEATHS times while it runs alone is ended with an error.
"""

from __future__ import annotations

from ironbatch import layout
from ironbatch.kernels.atomics import load_acquire, store_release
from ironbatch.kernels.ending import KV_GOOD, detach, publish_end
from ironbatch.kernels.intake import accept
from ironbatch.kernels.jit import inline, kernel, subroutine
from ironbatch.kernels.recovery import gather_live, produced_before
from ironbatch.kernels.shared import (
    ADMITTED_GENERATION,
    CANCELLED,
    GENERATION,
    HEARTBEAT_NS,
    IN_DEVICE_CALL,
    IN_QUARANTINE,
    LISTED_COUNT,
    LISTED_EPOCH,
    NUM_SLOTS,
    OWNER,
    PUBLISHED,
    SLOT_WORDS,
    SUBMITTED,
    SUSPICION,
    open_shared,
    published_generation,
    published_reason,
)
from ironbatch.kernels.state import open_state
from ironbatch.kernels.waits import advance_clocks

CROWD_DEATHS = 3
"""Two kills from outside may well fall into one computation, that of all contexts anew after the first."""

ALONE_DEATHS = 2

MOST_DEATHS = layout.SUSPICION_DEATHS_MASK


@inline
def suspicion_word(epoch, produced, alone, crowd):
    """The one word of a slot's suspicion."""
    word = (epoch << layout.SUSPICION_EPOCH_SHIFT) | (produced << layout.SUSPICION_PRODUCED_SHIFT)
    return word | (alone << layout.SUSPICION_ALONE_SHIFT) | crowd


@inline
def suspected_epoch(word):
    """Of the scheduler whose death was counted last."""
    return word >> layout.SUSPICION_EPOCH_SHIFT


@inline
def suspected_produced(word):
    """How many tokens the sequence had then."""
    return (word >> layout.SUSPICION_PRODUCED_SHIFT) & layout.PUBLISHED_PRODUCED_MASK


@inline
def alone_deaths(word):
    """Deaths while it ran alone, as a suspect."""
    return (word >> layout.SUSPICION_ALONE_SHIFT) & layout.SUSPICION_DEATHS_MASK


@inline
def crowd_deaths(word):
    """Deaths while it ran with whoever else did."""
    return word & layout.SUSPICION_DEATHS_MASK


@inline
def has_run(shared, row):
    """Whether the slot's present request was ever admitted, is not over, and still has an owner."""
    generation = shared.slots[row + GENERATION]
    published = shared.slots[row + PUBLISHED]
    is_over = published_generation(published) == generation and published_reason(published) != layout.FINISH_NONE
    return (
        shared.slots[row + OWNER] != 0
        and load_acquire(shared.slots, row + SUBMITTED) == generation
        and shared.slots[row + ADMITTED_GENERATION] == generation
        and not is_over
    )


@subroutine
def count_death(shared):
    """Count a predecessor's death against those that it was computing; once, however often this is begun."""
    epoch = shared.header[LISTED_EPOCH]
    for k in range(min(max(shared.header[LISTED_COUNT], 0), shared.header[NUM_SLOTS])):
        slot = shared.running[k]
        if not 0 <= slot < shared.header[NUM_SLOTS]:  # it may have died of what it had done to its memory
            continue
        row = slot * SLOT_WORDS
        word = shared.slots[row + SUSPICION]
        if not has_run(shared, row) or suspected_epoch(word) == epoch:
            continue
        produced = produced_before(shared, slot)
        is_fruitless = produced == suspected_produced(word)
        alone = alone_deaths(word) if is_fruitless else 0
        crowd = crowd_deaths(word) if is_fruitless else 0
        if is_fruitless and shared.header[IN_QUARANTINE] != 0:
            alone = min(alone + 1, MOST_DEATHS)
        else:
            crowd = min(crowd + 1, MOST_DEATHS)
        shared.slots[row + SUSPICION] = suspicion_word(epoch, produced, alone, crowd)


@kernel("int64(intp, intp)")
def find_suspects(state_address, segment_address):
    """For a scheduler that starts, before `rebuild`: count its predecessor's death, and end whoever is convicted.

    A conviction explains the deaths so far: all others are given another chance together, but a last one.
    Returns the number of suspects; they stand in `forget`, in the order of their slots.
    """
    state = open_state(state_address)
    shared = open_shared(segment_address)
    if shared.header[IN_DEVICE_CALL] == layout.CALL_STEP:
        count_death(shared)
        store_release(shared.header, IN_DEVICE_CALL, 0)
    store_release(shared.header, IN_QUARANTINE, 0)
    slots = state.forget  # nothing is to be forgotten yet, so its memory serves as a list
    live = gather_live(shared, slots)
    convicted = 0
    for k in range(live):
        slot = slots[k]
        row = slot * SLOT_WORDS
        if has_run(shared, row) and alone_deaths(shared.slots[row + SUSPICION]) >= ALONE_DEATHS:
            produced = produced_before(shared, slot)
            publish_end(state, shared, slot, produced, layout.FINISH_ERROR, layout.ERROR_POISON)
            convicted += 1
    count = 0
    for k in range(live):
        slot = slots[k]
        row = slot * SLOT_WORDS
        word = shared.slots[row + SUSPICION]
        if not has_run(shared, row) or produced_before(shared, slot) != suspected_produced(word):
            continue
        if convicted > 0 and alone_deaths(word) == 0:
            crowd = min(crowd_deaths(word), CROWD_DEATHS - 1)
            word = suspicion_word(suspected_epoch(word), suspected_produced(word), 0, crowd)
            shared.slots[row + SUSPICION] = word
        is_cancelled = load_acquire(shared.slots, row + CANCELLED) == shared.slots[row + GENERATION]
        if not is_cancelled and (alone_deaths(word) > 0 or crowd_deaths(word) >= CROWD_DEATHS):
            slots[count] = slot
            count += 1
    return count


@kernel("int64(intp, intp, int64)")
def take_one(state_address, segment_address, slot):
    """Load a live slot, which shall run alone, into a state that holds no sequence. Returns its tokens so far."""
    state = open_state(state_address)
    shared = open_shared(segment_address)
    produced = produced_before(shared, slot)
    accept(state, shared, slot, produced)
    return produced


@kernel("int64(intp, intp, int64)")
def drop_one(state_address, segment_address, slot):
    """Take it out of the state again, if it is not over: its slot is as it would be after a preemption. Returns 0."""
    state = open_state(state_address)
    shared = open_shared(segment_address)
    detach(state, shared, slot, KV_GOOD)
    return 0


@kernel("int64(intp, intp, int64)")
def keep_shut(state_address, segment_address, now_ns):
    """In the place of `drain` while one runs alone: beat the heart, and take in nothing. Returns 0."""
    state = open_state(state_address)
    shared = open_shared(segment_address)
    shared.header[HEARTBEAT_NS] = now_ns
    advance_clocks(state, now_ns)
    return 0

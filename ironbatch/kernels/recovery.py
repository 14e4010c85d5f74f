"""After a failure: a new scheduler rebuilds its state, a backend has lost its own, or cannot compute a sequence."""

from __future__ import annotations

from ironbatch import layout
from ironbatch.kernels.atomics import load_acquire
from ironbatch.kernels.ending import KV_LOST, end_sequence, preempt, publish_end
from ironbatch.kernels.intake import accept, free_lost
from ironbatch.kernels.jit import inline, kernel, subroutine
from ironbatch.kernels.prefix import empty_cache
from ironbatch.kernels.records import (
    PRODUCED,
    ROW_SEQUENCE,
    ROW_WORDS,
    SEQUENCE_WORDS,
    STATUS,
    STATUS_NONE,
    STATUS_WAITING,
)
from ironbatch.kernels.shared import (
    ARRIVAL_NS,
    CANCELLED,
    DEAD_GENERATION,
    GENERATION,
    IN_DEVICE_CALL,
    LANE_GENERATION,
    LANE_WORDS,
    NUM_LANES,
    NUM_SLOTS,
    OWNER,
    PUBLISHED,
    SLOT_WORDS,
    SUBMITTED,
    lane_of_owner,
    open_shared,
    published_generation,
    published_produced,
    published_reason,
)
from ironbatch.kernels.state import ROW_COUNT, RUNNING_COUNT, WAIT_REASON, WAITING_COUNT, open_state
from ironbatch.kernels.waits import advance_clocks


@inline
def is_held_by_the_living(shared, owner):
    """Whether an owner word names a lane and its present holder, who has not died."""
    lane = lane_of_owner(owner)
    if not 0 <= lane < shared.header[NUM_LANES]:
        return False
    generation = owner >> layout.OWNER_LANE_BITS
    row = lane * LANE_WORDS
    is_dead = load_acquire(shared.lanes, row + DEAD_GENERATION) == generation
    return shared.lanes[row + LANE_GENERATION] == generation and not is_dead


@inline
def came_before(shared, a, b):
    """Whether slot `a` arrived before slot `b`; the order in which their classes' queues stand."""
    arrival_a = shared.slots[a * SLOT_WORDS + ARRIVAL_NS]
    arrival_b = shared.slots[b * SLOT_WORDS + ARRIVAL_NS]
    return arrival_a < arrival_b or (arrival_a == arrival_b and a < b)


@inline
def sift_down(slots, shared, root, end):
    """Let the slot at `root` sink to its place in the heap slots[:end], whose latest arrival is on top."""
    while 2 * root + 1 < end:
        child = 2 * root + 1
        if child + 1 < end and came_before(shared, slots[child], slots[child + 1]):
            child += 1
        if not came_before(shared, slots[root], slots[child]):
            return
        sinking = slots[root]
        slots[root] = slots[child]
        slots[child] = sinking
        root = child


@subroutine
def sort_by_arrival(slots, shared, count):
    """Sort slots[:count] in place (heapsort). Queued in this order, each goes to the end of its queue."""
    for root in range(count // 2 - 1, -1, -1):
        sift_down(slots, shared, root, count)
    for end in range(count - 1, 0, -1):
        latest = slots[0]
        slots[0] = slots[end]
        slots[end] = latest
        sift_down(slots, shared, 0, end)


@inline
def produced_before(shared, slot):
    """Tokens that the slot's present request has published."""
    published = shared.slots[slot * SLOT_WORDS + PUBLISHED]
    is_present = published_generation(published) == shared.slots[slot * SLOT_WORDS + GENERATION]
    return published_produced(published) if is_present else 0


@subroutine
def gather_live(shared, slots):
    """List in `slots` whose stream may go on. Slots of the dead are freed, those that are over or claimed are left."""
    count = 0
    for slot in range(shared.header[NUM_SLOTS]):
        row = slot * SLOT_WORDS
        owner = load_acquire(shared.slots, row + OWNER)
        if owner == 0:
            continue
        if not is_held_by_the_living(shared, owner):
            free_lost(shared, slot, owner)
            continue
        generation = load_acquire(shared.slots, row + SUBMITTED)
        published = shared.slots[row + PUBLISHED]
        is_over = published_generation(published) == generation and published_reason(published) != layout.FINISH_NONE
        if generation == shared.slots[row + GENERATION] and not is_over:
            slots[count] = slot
            count += 1
    return count


@kernel("int64(intp, intp)")
def end_begun(state_address, segment_address):
    """For a new scheduler whose backend is not resumable: end whoever has published tokens. Returns how many."""
    state = open_state(state_address)
    shared = open_shared(segment_address)
    slots = state.forget  # as in `rebuild`
    ended = 0
    for k in range(gather_live(shared, slots)):
        slot = slots[k]
        row = slot * SLOT_WORDS
        produced = produced_before(shared, slot)
        if produced > 0 and load_acquire(shared.slots, row + CANCELLED) != shared.slots[row + GENERATION]:
            publish_end(state, shared, slot, produced, layout.FINISH_ERROR, layout.ERROR_LOST)
            ended += 1
    return ended


@kernel("int64(intp, intp, int64)")
def rebuild(state_address, segment_address, now_ns):
    """Fill an empty state from the segment: every live slot waits as if it had just been preempted.

    Returns the number of sequences that wait.
    """
    state = open_state(state_address)
    shared = open_shared(segment_address)
    shared.header[IN_DEVICE_CALL] = 0
    advance_clocks(state, now_ns)
    slots = state.forget  # nothing is to be forgotten yet, so its memory serves as a list
    count = gather_live(shared, slots)
    sort_by_arrival(slots, shared, count)
    for k in range(count):
        slot = slots[k]
        row = slot * SLOT_WORDS
        produced = produced_before(shared, slot)
        if load_acquire(shared.slots, row + CANCELLED) == shared.slots[row + GENERATION]:
            publish_end(state, shared, slot, produced, layout.FINISH_CANCELLED, layout.ERROR_NONE)
        else:
            accept(state, shared, slot, produced)
    return state.header[WAITING_COUNT]


@kernel("int64(intp, intp, int64, int64)")
def end_one(state_address, segment_address, sequence, error_code):
    """End one live sequence with an error. Returns 1, or 0 if it was not live."""
    state = open_state(state_address)
    shared = open_shared(segment_address)
    shared.header[IN_DEVICE_CALL] = 0
    if state.sequences[sequence * SEQUENCE_WORDS + STATUS] == STATUS_NONE:
        return 0
    end_sequence(state, shared, sequence, layout.FINISH_ERROR, error_code)
    return 1


@kernel("int64(intp, intp, int64)")
def end_plan(state_address, segment_address, error_code):
    """End every sequence of the present plan with an error. Returns how many."""
    state = open_state(state_address)
    shared = open_shared(segment_address)
    shared.header[IN_DEVICE_CALL] = 0
    count = state.header[ROW_COUNT]
    for k in range(count):
        sequence = state.rows[k * ROW_WORDS + ROW_SEQUENCE]
        end_sequence(state, shared, sequence, layout.FINISH_ERROR, error_code)
    state.header[ROW_COUNT] = 0
    return count


@kernel("int64(intp, intp, int64)")
def preempt_all(state_address, segment_address, resumable):
    """The backend has lost all its state: preempt whoever runs. With `resumable` 0, end whoever has begun instead.

    Returns how many ran.
    """
    state = open_state(state_address)
    shared = open_shared(segment_address)
    shared.header[IN_DEVICE_CALL] = 0
    state.header[ROW_COUNT] = 0
    count = 0
    while state.header[RUNNING_COUNT] > 0:
        preempt(state, shared, state.running[state.header[RUNNING_COUNT] - 1], KV_LOST)
        count += 1
    empty_cache(state)
    state.header[WAIT_REASON] = layout.WAIT_DEVICE
    for sequence in range(shared.header[NUM_SLOTS] if resumable == 0 else 0):
        row = sequence * SEQUENCE_WORDS
        if state.sequences[row + STATUS] == STATUS_WAITING and state.sequences[row + PRODUCED] > 0:
            end_sequence(state, shared, sequence, layout.FINISH_ERROR, layout.ERROR_LOST)
    return count

"""What reaches the scheduler from outside: submissions, cancels, dead workers."""

from __future__ import annotations

from ironbatch import layout
from ironbatch.kernels.admission import admission_blocks, exceeds_cap
from ironbatch.kernels.atomics import load_acquire, store_release
from ironbatch.kernels.ending import KV_GOOD, detach, end_sequence, publish_end
from ironbatch.kernels.forks import group_size, is_in_group, leave_group, link_fork, own_blocks
from ironbatch.kernels.jit import inline, kernel, subroutine
from ironbatch.kernels.queues import enqueue
from ironbatch.kernels.records import (
    COMPUTED,
    FIRST_CLASS,
    LANE,
    MAX_NEW,
    PREEMPTIONS,
    PRIORITY_CLASS,
    PRODUCED,
    PROMPT,
    REQUEST_FLAGS,
    SEQ_FLAGS,
    SEQ_GENERATION,
    SEQUENCE_WORDS,
    STATUS,
    STATUS_NONE,
    STATUS_WAITING,
    USES_CACHE,
)
from ironbatch.kernels.shared import (
    ADMITTED_GENERATION,
    ARRIVAL_NS,
    CANCELLED,
    DEAD_GENERATION,
    ENTRY_WORDS,
    FLAGS,
    GENERATION,
    HEAD,
    HEARTBEAT_NS,
    LANE_ENTRIES,
    LANE_WORDS,
    MAX_NEW_TOKENS,
    NEXT_CHOICE,
    NUM_LANES,
    NUM_SLOTS,
    OWNER,
    PARENT_SLOT,
    PRIORITY,
    PROMPT_TOKENS,
    PUBLISHED,
    REAPED_GENERATION,
    SEED,
    SLOT_PREEMPTIONS,
    SLOT_WORDS,
    SUBMITTED,
    TAIL,
    lane_of_owner,
    open_shared,
    owner_word,
    published_generation,
)
from ironbatch.kernels.state import (
    MAX_REQUEST_TOKENS,
    NUM_BLOCKS,
    PREFIX_CACHE,
    RUNNING_COUNT,
    RUNNING_LIMIT,
    SHARES_KV,
    WAITING_COUNT,
    open_state,
)
from ironbatch.kernels.waits import advance_clocks
from ironbatch.limits import PRIORITY_CLASSES, PRIORITY_MIN

METRIC_ABORTED = layout.word(layout.METRICS, "sequences_aborted")
METRIC_LOST = layout.word(layout.METRICS, "requests_lost")


@subroutine
def accept(state, shared, slot, produced):
    """Load a submitted slot as a waiting sequence whose first `produced` tokens are published already."""
    row = slot * SLOT_WORDS
    prompt = shared.slots[row + PROMPT_TOKENS]
    max_new = shared.slots[row + MAX_NEW_TOKENS]
    if prompt < 1 or max_new < 1 or prompt + max_new > state.header[MAX_REQUEST_TOKENS]:
        publish_end(state, shared, slot, produced, layout.FINISH_ERROR, layout.ERROR_INVALID)
        return
    rank = min(max(shared.slots[row + PRIORITY] - PRIORITY_MIN, 0), PRIORITY_CLASSES - 1)
    flags = shared.slots[row + FLAGS] & REQUEST_FLAGS
    if flags & layout.FLAG_TOKEN_IDS and state.header[PREFIX_CACHE]:
        flags |= USES_CACHE
    sequence = slot * SEQUENCE_WORDS
    state.sequences[sequence + SEQ_GENERATION] = shared.slots[row + GENERATION]
    state.sequences[sequence + LANE] = lane_of_owner(shared.slots[row + OWNER])
    state.sequences[sequence + FIRST_CLASS] = rank
    state.sequences[sequence + PRIORITY_CLASS] = rank
    state.sequences[sequence + PROMPT] = prompt
    state.sequences[sequence + MAX_NEW] = max_new
    state.sequences[sequence + PRODUCED] = produced
    state.sequences[sequence + COMPUTED] = 0
    was_admitted = shared.slots[row + ADMITTED_GENERATION] == shared.slots[row + GENERATION]  # by a predecessor
    state.sequences[sequence + PREEMPTIONS] = shared.slots[row + SLOT_PREEMPTIONS] if was_admitted else 0
    state.sequences[sequence + SEQ_FLAGS] = flags
    state.arrival_ns[slot] = shared.slots[row + ARRIVAL_NS]
    state.seeds[slot] = shared.slots[row + SEED]
    enqueue(state, slot)


@subroutine
def accept_forks(state, shared, parent):
    """Take in the other choices of a request whose choice 0 was just accepted, and link them to it.

    They are known by their own words alone: a choice that a rebuild has taken in before is left as it is.
    """
    slot = shared.slots[parent * SLOT_WORDS + NEXT_CHOICE]
    previous = parent
    while previous < slot < shared.header[NUM_SLOTS]:  # in rising order, hence without end or circle
        row = slot * SLOT_WORDS
        if shared.slots[row + PARENT_SLOT] != parent or shared.slots[row + OWNER] == 0:
            break
        if is_new(state, shared, slot, shared.slots[row + GENERATION]):
            take_new(state, shared, slot)
            if state.sequences[slot * SEQUENCE_WORDS + STATUS] == STATUS_WAITING and may_share(state, parent):
                link_fork(state, parent, slot)
        previous = slot
        slot = shared.slots[row + NEXT_CHOICE]
    if is_in_group(state, parent) and not fits_at_all(state, parent):
        leave_group(state, shared, parent)


@inline
def may_share(state, parent):
    """Whether forks can share a parent's prompt: the backend can, and it waits itself."""
    return state.header[SHARES_KV] != 0 and state.sequences[parent * SEQUENCE_WORDS + STATUS] == STATUS_WAITING


@inline
def fits_at_all(state, parent):
    """Whether a group could be admitted if nobody else were there."""
    size = group_size(state, parent)
    blocks = admission_blocks(state, parent) + (size - 1) * own_blocks(state, parent)
    has_places = size <= state.header[RUNNING_LIMIT] and not exceeds_cap(state, parent, 0)
    return has_places and blocks <= state.header[NUM_BLOCKS]


@inline
def is_new(state, shared, slot, generation):
    """Whether this generation of a slot is submitted, not known yet and not over."""
    row = slot * SLOT_WORDS
    if load_acquire(shared.slots, row + SUBMITTED) != generation or shared.slots[row + GENERATION] != generation:
        return False
    if published_generation(shared.slots[row + PUBLISHED]) == generation:
        return False  # known before: it has finished and waits for its owner
    fields = slot * SEQUENCE_WORDS
    is_live = state.sequences[fields + STATUS] != STATUS_NONE
    return not is_live or state.sequences[fields + SEQ_GENERATION] != generation


@inline
def take_new(state, shared, slot):
    """Take in a new submission, unless it is cancelled already."""
    row = slot * SLOT_WORDS
    if load_acquire(shared.slots, row + CANCELLED) == shared.slots[row + GENERATION]:
        publish_end(state, shared, slot, 0, layout.FINISH_CANCELLED, layout.ERROR_NONE)
    else:
        accept(state, shared, slot, 0)


@inline
def take_hint(state, shared, slot, generation):
    """Act on one lane entry: a new submission, a cancel, or news that is old already."""
    row = slot * SLOT_WORDS
    status = state.sequences[slot * SEQUENCE_WORDS + STATUS]
    if status != STATUS_NONE and state.sequences[slot * SEQUENCE_WORDS + SEQ_GENERATION] == generation:
        if load_acquire(shared.slots, row + CANCELLED) == generation:
            end_sequence(state, shared, slot, layout.FINISH_CANCELLED, layout.ERROR_NONE)
    elif shared.slots[row + OWNER] != 0 and is_new(state, shared, slot, generation):
        take_new(state, shared, slot)
        if shared.slots[row + NEXT_CHOICE] != layout.NO_SLOT:
            accept_forks(state, shared, slot)


@inline
def is_same_request(shared, slot, other, owner):
    """Whether another slot is a choice of the same request, and still its owner's."""
    row = slot * SLOT_WORDS
    other_row = other * SLOT_WORDS
    return (
        shared.slots[other_row + OWNER] == owner
        and shared.slots[other_row + PARENT_SLOT] == shared.slots[row + PARENT_SLOT]
        and shared.slots[other_row + ARRIVAL_NS] == shared.slots[row + ARRIVAL_NS]
    )


@inline
def has_later_choice(shared, slot, owner):
    """Whether a choice of the same request stands behind this one. The next may have ended, and the link with it."""
    later = shared.slots[slot * SLOT_WORDS + NEXT_CHOICE]
    if not slot < later < shared.header[NUM_SLOTS]:
        return False
    for other in range(later, shared.header[NUM_SLOTS]):  # noqa: SIM110  a kernel has no any()
        if is_same_request(shared, slot, other, owner):
            return True
    return False


@inline
def free_lost(shared, slot, owner):
    """Free a slot whose owner is dead. A submitted request counts as lost once, with the last of its choices.

    Slots are freed in rising order, so another choice that stands behind this one still has its owner. What was
    cancelled is not lost: whoever cancels a request has counted its end.
    """
    row = slot * SLOT_WORDS
    generation = shared.slots[row + GENERATION]
    is_submitted = load_acquire(shared.slots, row + SUBMITTED) == generation
    is_cancelled = load_acquire(shared.slots, row + CANCELLED) == generation
    if is_submitted and not is_cancelled and not has_later_choice(shared, slot, owner):
        shared.metrics[METRIC_LOST] += 1
    store_release(shared.slots, row + OWNER, 0)


@subroutine
def reap_lane(state, shared, lane, generation):
    """The lane's holder has died: nobody will read its slots, claimed, live or finished. Free them all."""
    dead_owner = owner_word(lane, generation)
    for slot in range(shared.header[NUM_SLOTS]):
        row = slot * SLOT_WORDS
        if load_acquire(shared.slots, row + OWNER) != dead_owner:
            continue
        if state.sequences[slot * SEQUENCE_WORDS + STATUS] != STATUS_NONE:
            detach(state, shared, slot, KV_GOOD)
            shared.metrics[METRIC_ABORTED] += 1
        free_lost(shared, slot, dead_owner)
    store_release(shared.lanes, lane * LANE_WORDS + REAPED_GENERATION, generation)


@kernel("int64(intp, intp, int64)")
def drain(state_address, segment_address, now_ns):
    """Beat the heart and take in all that the lanes hold. Returns the number of waiting and running sequences."""
    state = open_state(state_address)
    shared = open_shared(segment_address)
    shared.header[HEARTBEAT_NS] = now_ns
    advance_clocks(state, now_ns)
    capacity = shared.header[LANE_ENTRIES]
    for lane in range(shared.header[NUM_LANES]):
        row = lane * LANE_WORDS
        dead = load_acquire(shared.lanes, row + DEAD_GENERATION)
        if dead != shared.lanes[row + REAPED_GENERATION]:
            reap_lane(state, shared, lane, dead)
        head = shared.lanes[row + HEAD]
        tail = load_acquire(shared.lanes, row + TAIL)
        for position in range(head, tail):
            entry = (lane * capacity + (position & (capacity - 1))) * ENTRY_WORDS
            take_hint(state, shared, shared.entries[entry], shared.entries[entry + 1])
        if head != tail:
            store_release(shared.lanes, row + HEAD, tail)
    return state.header[WAITING_COUNT] + state.header[RUNNING_COUNT]

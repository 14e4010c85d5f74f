"""What reaches the scheduler from outside: submissions, cancels, dead workers, and the rebuild at its start."""

from __future__ import annotations

from ironbatch import layout
from ironbatch.kernels.atomics import load_acquire, store_release
from ironbatch.kernels.blocks import release_blocks
from ironbatch.kernels.jit import inline, kernel, subroutine
from ironbatch.kernels.queues import dequeue, enqueue, note_forget, preempt_newest, remove_running
from ironbatch.kernels.shared import (
    ARRIVAL_NS,
    CANCELLED,
    DEAD_GENERATION,
    ENTRY_WORDS,
    ERROR_CODE,
    FLAGS,
    GENERATION,
    HEAD,
    HEARTBEAT_NS,
    IN_DEVICE_CALL,
    LANE_ENTRIES,
    LANE_GENERATION,
    LANE_WORDS,
    MAX_NEW_TOKENS,
    MAX_REQUEST_TOKENS,
    NUM_LANES,
    NUM_SLOTS,
    OWNER,
    PRIORITY,
    PROMPT_TOKENS,
    PUBLISHED,
    REAPED_GENERATION,
    SEED,
    SLOT_WORDS,
    SUBMITTED,
    TAIL,
    lane_of_owner,
    open_shared,
    owner_word,
    published_generation,
    published_produced,
    published_reason,
    published_word,
)
from ironbatch.kernels.state import (
    COMPUTED,
    LANE,
    MAX_NEW,
    PREEMPTIONS,
    PRIORITY_CLASS,
    PRODUCED,
    PROMPT,
    ROW_COUNT,
    ROW_SEQUENCE,
    ROW_WORDS,
    RUNNING_COUNT,
    SEQ_FLAGS,
    SEQ_GENERATION,
    SEQUENCE_WORDS,
    STATUS,
    STATUS_NONE,
    STATUS_RUNNING,
    STATUS_WAITING,
    WAITING_COUNT,
    open_state,
)
from ironbatch.limits import PRIORITY_CLASSES, PRIORITY_MIN

METRIC_ABORTED = layout.word(layout.METRICS, "sequences_aborted")
METRIC_LOST = layout.word(layout.METRICS, "requests_lost")
METRIC_FAILED = layout.word(layout.METRICS, "sequences_failed")
METRIC_STARTS = layout.word(layout.METRICS, "scheduler_starts")


@inline
def detach(state, sequence):
    """Take a live sequence out of the queue or the running set and free its blocks."""
    status = state.sequences[sequence * SEQUENCE_WORDS + STATUS]
    if status == STATUS_WAITING:
        dequeue(state, sequence)
    elif status == STATUS_RUNNING:
        remove_running(state, sequence)
        release_blocks(state, sequence)
        note_forget(state, sequence)


@inline
def publish_end(state, shared, slot, produced, reason, error_code):
    """Store a slot's last word; after it the scheduler does not touch the slot again."""
    row = slot * SLOT_WORDS
    shared.slots[row + ERROR_CODE] = error_code
    word = published_word(shared.slots[row + GENERATION], reason, produced)
    store_release(shared.slots, row + PUBLISHED, word)
    state.lane_news[lane_of_owner(shared.slots[row + OWNER])] = 1
    if reason == layout.FINISH_CANCELLED:
        shared.metrics[METRIC_ABORTED] += 1
    elif reason == layout.FINISH_ERROR:
        shared.metrics[METRIC_FAILED] += 1


@subroutine
def end_sequence(state, shared, sequence, reason, error_code):
    """End a live sequence before its time and publish why."""
    produced = state.sequences[sequence * SEQUENCE_WORDS + PRODUCED]
    detach(state, sequence)
    publish_end(state, shared, sequence, produced, reason, error_code)


@subroutine
def accept(state, shared, slot, produced):
    """Load a submitted slot as a waiting sequence whose first `produced` tokens are published already."""
    row = slot * SLOT_WORDS
    prompt = shared.slots[row + PROMPT_TOKENS]
    max_new = shared.slots[row + MAX_NEW_TOKENS]
    rank = shared.slots[row + PRIORITY] - PRIORITY_MIN
    if prompt < 1 or max_new < 1 or prompt + max_new > shared.header[MAX_REQUEST_TOKENS]:
        publish_end(state, shared, slot, produced, layout.FINISH_ERROR, layout.ERROR_INVALID)
        return
    sequence = slot * SEQUENCE_WORDS
    state.sequences[sequence + SEQ_GENERATION] = shared.slots[row + GENERATION]
    state.sequences[sequence + LANE] = lane_of_owner(shared.slots[row + OWNER])
    state.sequences[sequence + PRIORITY_CLASS] = min(max(rank, 0), PRIORITY_CLASSES - 1)
    state.sequences[sequence + PROMPT] = prompt
    state.sequences[sequence + MAX_NEW] = max_new
    state.sequences[sequence + PRODUCED] = produced
    state.sequences[sequence + COMPUTED] = 0
    state.sequences[sequence + PREEMPTIONS] = 0
    state.sequences[sequence + SEQ_FLAGS] = shared.slots[row + FLAGS]
    state.arrival_ns[slot] = shared.slots[row + ARRIVAL_NS]
    state.seeds[slot] = shared.slots[row + SEED]
    enqueue(state, slot)


@inline
def take_hint(state, shared, slot, generation):
    """Act on one lane entry: a new submission, a cancel, or news that is old already."""
    row = slot * SLOT_WORDS
    is_cancelled = load_acquire(shared.slots, row + CANCELLED) == generation
    status = state.sequences[slot * SEQUENCE_WORDS + STATUS]
    if status != STATUS_NONE and state.sequences[slot * SEQUENCE_WORDS + SEQ_GENERATION] == generation:
        if is_cancelled:
            end_sequence(state, shared, slot, layout.FINISH_CANCELLED, layout.ERROR_NONE)
        return
    if load_acquire(shared.slots, row + SUBMITTED) != generation or shared.slots[row + OWNER] == 0:
        return
    if published_generation(shared.slots[row + PUBLISHED]) == generation:
        return  # known before: it has finished and waits for its owner
    if is_cancelled:
        publish_end(state, shared, slot, 0, layout.FINISH_CANCELLED, layout.ERROR_NONE)
    else:
        accept(state, shared, slot, 0)


@subroutine
def reap_lane(state, shared, lane, generation):
    """The lane's holder has died: nobody will read its slots, claimed, live or finished. Free them all."""
    dead_owner = owner_word(lane, generation)
    for slot in range(shared.header[NUM_SLOTS]):
        row = slot * SLOT_WORDS
        if load_acquire(shared.slots, row + OWNER) != dead_owner:
            continue
        if load_acquire(shared.slots, row + SUBMITTED) == shared.slots[row + GENERATION]:
            shared.metrics[METRIC_LOST] += 1
        if state.sequences[slot * SEQUENCE_WORDS + STATUS] != STATUS_NONE:
            detach(state, slot)
            shared.metrics[METRIC_ABORTED] += 1
        store_release(shared.slots, row + OWNER, 0)
    store_release(shared.lanes, lane * LANE_WORDS + REAPED_GENERATION, generation)


@kernel("int64(intp, intp, int64)")
def drain(state_address, segment_address, now_ns):
    """Beat the heart and take in all that the lanes hold. Returns the number of waiting and running sequences."""
    state = open_state(state_address)
    shared = open_shared(segment_address)
    shared.header[HEARTBEAT_NS] = now_ns
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


@kernel("int64(intp, intp, int64)")
def rebuild(state_address, segment_address, resumable):
    """Fill an empty state from the segment: every live slot waits as if it had just been preempted.

    With `resumable` 0 a sequence that has published tokens ends with an error, since its backend cannot continue it.
    Returns the number of sequences that wait.
    """
    state = open_state(state_address)
    shared = open_shared(segment_address)
    shared.header[IN_DEVICE_CALL] = 0
    shared.metrics[METRIC_STARTS] += 1
    for slot in range(shared.header[NUM_SLOTS]):
        row = slot * SLOT_WORDS
        owner = load_acquire(shared.slots, row + OWNER)
        if owner == 0:
            continue
        lane = lane_of_owner(owner) * LANE_WORDS
        lane_generation = owner >> layout.OWNER_LANE_BITS
        is_dead = load_acquire(shared.lanes, lane + DEAD_GENERATION) == lane_generation
        if is_dead or shared.lanes[lane + LANE_GENERATION] != lane_generation:
            if load_acquire(shared.slots, row + SUBMITTED) == shared.slots[row + GENERATION]:
                shared.metrics[METRIC_LOST] += 1
            store_release(shared.slots, row + OWNER, 0)
            continue
        generation = load_acquire(shared.slots, row + SUBMITTED)
        if generation != shared.slots[row + GENERATION]:
            continue  # claimed, not submitted yet
        published = shared.slots[row + PUBLISHED]
        produced = 0
        if published_generation(published) == generation:
            if published_reason(published) != layout.FINISH_NONE:
                continue
            produced = published_produced(published)
        if load_acquire(shared.slots, row + CANCELLED) == generation:
            publish_end(state, shared, slot, produced, layout.FINISH_CANCELLED, layout.ERROR_NONE)
        elif produced > 0 and resumable == 0:
            publish_end(state, shared, slot, produced, layout.FINISH_ERROR, layout.ERROR_LOST)
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
    """The backend has lost all its state: preempt whoever runs. As in `rebuild`, who has begun may have to end.

    Returns how many ran.
    """
    state = open_state(state_address)
    shared = open_shared(segment_address)
    shared.header[IN_DEVICE_CALL] = 0
    state.header[ROW_COUNT] = 0
    count = 0
    while state.header[RUNNING_COUNT] > 0:
        preempt_newest(state, shared)
        count += 1
    for sequence in range(shared.header[NUM_SLOTS] if resumable == 0 else 0):
        row = sequence * SEQUENCE_WORDS
        if state.sequences[row + STATUS] == STATUS_WAITING and state.sequences[row + PRODUCED] > 0:
            end_sequence(state, shared, sequence, layout.FINISH_ERROR, layout.ERROR_LOST)
    return count

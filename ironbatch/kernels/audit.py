"""The invariants of the scheduler's state, re-derived from scratch. A simulation runs this after every step."""

from __future__ import annotations

from ironbatch.kernels.jit import kernel, subroutine
from ironbatch.kernels.queues import END, is_senior
from ironbatch.kernels.state import (
    BLOCK_SHIFT,
    BLOCKS,
    BLOCKS_PER_SEQUENCE,
    COMPUTED,
    FREE_COUNT,
    MAX_NEW,
    NEXT,
    NUM_BLOCKS,
    NUM_SLOTS,
    PREVIOUS,
    PRIORITY_CLASS,
    PRODUCED,
    PROMPT,
    RUNNING_COUNT,
    RUNNING_LIMIT,
    SEQUENCE_WORDS,
    STATUS,
    STATUS_RUNNING,
    STATUS_WAITING,
    WAITING_COUNT,
    open_state,
)
from ironbatch.limits import PRIORITY_CLASSES

SOUND = 0
VIOLATIONS = {
    1: "the free list holds a block id outside the pool, or more ids than there are",
    2: "the free list holds a block twice",
    3: "a free block has references",
    4: "a block table holds a block id outside the pool",
    5: "a reference count differs from the number of block tables that hold the block",
    6: "a block is neither free nor held",
    7: "a running sequence's context is not backed by its blocks",
    8: "the running set is not sorted by seniority, or over its limit",
    9: "a member of the running set is not marked as running, or the other way round",
    10: "the waiting queue is not sorted by seniority",
    11: "the waiting queue's links or its count are wrong",
    12: "a waiting sequence holds blocks or computed tokens",
    13: "a sequence's counts are out of range",
}


@subroutine
def audit_blocks(state, seen):
    """Free list, reference counts and block tables, from each other. `seen`: int32[num_blocks], scratch."""
    num_blocks = state.header[NUM_BLOCKS]
    seen[:] = 0
    if not 0 <= state.header[FREE_COUNT] <= num_blocks:
        return 1
    for k in range(state.header[FREE_COUNT]):
        block = state.free_blocks[k]
        if block < 0 or block >= num_blocks:
            return 1
        if seen[block] != 0:
            return 2
        if state.refcounts[block] != 0:
            return 3
        seen[block] = -1
    for sequence in range(state.header[NUM_SLOTS]):
        table = sequence * state.header[BLOCKS_PER_SEQUENCE]
        for k in range(state.sequences[sequence * SEQUENCE_WORDS + BLOCKS]):
            block = state.block_tables[table + k]
            if block < 0 or block >= num_blocks:
                return 4
            if seen[block] < 0:
                return 5
            seen[block] += 1
    for block in range(num_blocks):
        if seen[block] == 0:
            return 6
        if seen[block] > 0 and state.refcounts[block] != seen[block]:
            return 5
    return SOUND


@subroutine
def audit_running(state):
    """The running set: sorted, within its limit, every context backed."""
    count = state.header[RUNNING_COUNT]
    if count > state.header[RUNNING_LIMIT]:
        return 8
    for k in range(count):
        sequence = state.running[k]
        row = sequence * SEQUENCE_WORDS
        if state.sequences[row + STATUS] != STATUS_RUNNING:
            return 9
        if k > 0 and not is_senior(state, state.running[k - 1], sequence):
            return 8
        context = state.sequences[row + PROMPT] + state.sequences[row + PRODUCED]
        if state.sequences[row + BLOCKS] << state.header[BLOCK_SHIFT] < context:
            return 7
        if not 0 <= state.sequences[row + COMPUTED] < context:
            return 13
        if not 0 <= state.sequences[row + PRODUCED] < state.sequences[row + MAX_NEW]:
            return 13
    return SOUND


@subroutine
def audit_waiting(state):
    """The waiting queue: linked both ways, sorted, and without blocks. Returns minus a violation, or the count."""
    count = 0
    for rank in range(PRIORITY_CLASSES):
        before = END
        sequence = state.queue_heads[rank]
        while sequence != END:
            row = sequence * SEQUENCE_WORDS
            if state.sequences[row + PREVIOUS] != before or state.sequences[row + STATUS] != STATUS_WAITING:
                return -11
            if state.sequences[row + PRIORITY_CLASS] != rank:
                return -11
            if before != END and not is_senior(state, before, sequence):
                return -10
            if state.sequences[row + BLOCKS] != 0 or state.sequences[row + COMPUTED] != 0:
                return -12
            count += 1
            if count > state.header[NUM_SLOTS]:
                return -11
            before = sequence
            sequence = state.sequences[row + NEXT]
        if state.queue_tails[rank] != before:
            return -11
    return count


@kernel("int64(intp, int32[::1])")
def audit(state_address, scratch):
    """Check every invariant between steps. `scratch`: int32[num_blocks]. Returns SOUND or a key of VIOLATIONS."""
    state = open_state(state_address)
    violation = audit_blocks(state, scratch)
    if violation != SOUND:
        return violation
    violation = audit_running(state)
    if violation != SOUND:
        return violation
    waiting = audit_waiting(state)
    if waiting < 0:
        return -waiting
    if waiting != state.header[WAITING_COUNT]:
        return 11
    live = 0
    for sequence in range(state.header[NUM_SLOTS]):
        status = state.sequences[sequence * SEQUENCE_WORDS + STATUS]
        if status == STATUS_RUNNING:
            live += 1
        elif status != STATUS_WAITING and state.sequences[sequence * SEQUENCE_WORDS + BLOCKS] != 0:
            return 9
    return SOUND if live == state.header[RUNNING_COUNT] else 9

"""Groups: the choices of one request, which share the KV of their prompt.

Choice 0 is the parent and prefills the prompt; the others fork from it when that is done. Until then a fork is linked
to its parent: it waits beside it in the queue, is admitted with it, and then holds no blocks but a promise of some
(`reserved_count`). After the fork it is a sequence like any other, but for one block that it may owe a copy of.
"""

from __future__ import annotations

from ironbatch.kernels.blocks import blocks_for, grow_blocks, release_block
from ironbatch.kernels.jit import inline, subroutine
from ironbatch.kernels.queues import enqueue, note_preemption, remove_running
from ironbatch.kernels.records import (
    BLOCKS,
    CACHED_BLOCKS,
    COMPUTED,
    COPY_WORDS,
    FIRST_FORK,
    FORK_COUNT,
    FORK_PARENT,
    FORK_WORDS,
    IN_GROUP,
    MAX_NEW,
    NEXT_FORK,
    NOBODY,
    PROMPT,
    RESERVED_BLOCKS,
    ROW_FIRST,
    ROW_SEQUENCE,
    ROW_WORDS,
    SEQ_FLAGS,
    SEQUENCE_WORDS,
    SOURCE_BLOCK,
    STATUS,
    STATUS_RUNNING,
)
from ironbatch.kernels.state import (
    BLOCK_SHIFT,
    BLOCK_SIZE,
    BLOCKS_PER_SEQUENCE,
    HELPS,
    LOOKAHEAD,
    OWED_COPIES,
    PENDING_FORKS,
    RESERVED_COUNT,
    ROW_COUNT,
)

NOT_FORKED = -1
"""The computed tokens of a running fork that waits for its parent: it is never one position away from a decode."""


@inline
def is_in_group(state, sequence):
    """Whether the sequence is linked to others, or owes a copy."""
    return state.sequences[sequence * SEQUENCE_WORDS + SEQ_FLAGS] & IN_GROUP != 0


@inline
def waits_for_parent(state, sequence):
    """Whether the sequence is a fork whose parent's prefill is not done."""
    return is_in_group(state, sequence) and state.forks[sequence * FORK_WORDS + FORK_PARENT] != NOBODY


@inline
def shared_blocks(state, sequence):
    """How many of its parent's blocks a fork shares: those before the block in which it computes first."""
    return (state.sequences[sequence * SEQUENCE_WORDS + PROMPT] - 1) >> state.header[BLOCK_SHIFT]


@inline
def own_blocks(state, sequence):
    """How many blocks a fork needs of its own, to compute the prompt's last position and for what it emits then."""
    prompt = state.sequences[sequence * SEQUENCE_WORDS + PROMPT]
    longest = prompt + state.sequences[sequence * SEQUENCE_WORDS + MAX_NEW]
    reach = min(prompt + state.header[LOOKAHEAD], longest)
    return blocks_for(state, reach) - shared_blocks(state, sequence)


@inline
def group_size(state, sequence):
    """How many sequences are admitted with this one, itself included."""
    return 1 + state.forks[sequence * FORK_WORDS + FORK_COUNT]


@inline
def link_fork(state, parent, fork):
    """Make `fork` the first of the parent's forks; the caller adds them in falling order of seniority."""
    own, parents = fork * FORK_WORDS, parent * FORK_WORDS
    state.forks[own + FORK_PARENT] = parent
    state.forks[own + NEXT_FORK] = state.forks[parents + FIRST_FORK]
    state.forks[parents + FIRST_FORK] = fork
    state.forks[parents + FORK_COUNT] += 1
    state.sequences[fork * SEQUENCE_WORDS + SEQ_FLAGS] |= IN_GROUP
    state.sequences[parent * SEQUENCE_WORDS + SEQ_FLAGS] |= IN_GROUP


@inline
def unlink_fork(state, fork):
    """Take a fork out of its parent's list; a promise of blocks lapses."""
    own = fork * FORK_WORDS
    parents = state.forks[own + FORK_PARENT] * FORK_WORDS
    if state.forks[parents + FIRST_FORK] == fork:
        state.forks[parents + FIRST_FORK] = state.forks[own + NEXT_FORK]
    else:
        before = state.forks[parents + FIRST_FORK]
        while state.forks[before * FORK_WORDS + NEXT_FORK] != fork:
            before = state.forks[before * FORK_WORDS + NEXT_FORK]
        state.forks[before * FORK_WORDS + NEXT_FORK] = state.forks[own + NEXT_FORK]
    state.forks[parents + FORK_COUNT] -= 1
    state.forks[own + FORK_PARENT] = NOBODY
    state.forks[own + NEXT_FORK] = NOBODY
    if state.sequences[fork * SEQUENCE_WORDS + STATUS] == STATUS_RUNNING:
        state.header[RESERVED_COUNT] -= state.forks[own + RESERVED_BLOCKS]
        state.header[HELPS] += 1
        state.header[PENDING_FORKS] -= 1
        state.forks[own + RESERVED_BLOCKS] = 0
        state.sequences[fork * SEQUENCE_WORDS + COMPUTED] = 0


@inline
def reserve_fork(state, fork):
    """A fork is admitted with its parent: promise it its own blocks."""
    reserved = own_blocks(state, fork)
    state.forks[fork * FORK_WORDS + RESERVED_BLOCKS] = reserved
    state.header[RESERVED_COUNT] += reserved
    state.header[PENDING_FORKS] += 1
    state.sequences[fork * SEQUENCE_WORDS + COMPUTED] = NOT_FORKED


@inline
def fork_from(state, parent, fork):
    """Share the parent's KV of the prompt with `fork`, which then computes the prompt's last position itself."""
    fields = fork * SEQUENCE_WORDS
    last = state.sequences[fields + PROMPT] - 1
    shared = shared_blocks(state, fork)
    wanted = shared + state.forks[fork * FORK_WORDS + RESERVED_BLOCKS]
    source = parent * state.header[BLOCKS_PER_SEQUENCE]
    target = fork * state.header[BLOCKS_PER_SEQUENCE]
    unlink_fork(state, fork)
    for k in range(shared):
        block = state.block_tables[source + k]
        state.refcounts[block] += 1
        state.block_tables[target + k] = block
    state.sequences[fields + BLOCKS] = shared
    state.sequences[fields + CACHED_BLOCKS] = min(shared, state.sequences[parent * SEQUENCE_WORDS + CACHED_BLOCKS])
    state.sequences[fields + COMPUTED] = last
    grow_blocks(state, fork, wanted)
    if last & (state.header[BLOCK_SIZE] - 1) == 0:
        state.sequences[fields + SEQ_FLAGS] &= ~IN_GROUP
        return
    block = state.block_tables[source + shared]
    state.refcounts[block] += 1
    state.forks[fork * FORK_WORDS + SOURCE_BLOCK] = block
    state.header[OWED_COPIES] += 1


@subroutine
def fork_all(state, parent):
    """The parent's prompt is computed, and its blocks are held: fork."""
    while state.forks[parent * FORK_WORDS + FIRST_FORK] != NOBODY:
        fork_from(state, parent, state.forks[parent * FORK_WORDS + FIRST_FORK])
    state.sequences[parent * SEQUENCE_WORDS + SEQ_FLAGS] &= ~IN_GROUP


@inline
def drop_source(state, sequence):
    """The copy has been made, or will not be needed."""
    row = sequence * FORK_WORDS
    if state.forks[row + SOURCE_BLOCK] != NOBODY:
        release_block(state, state.forks[row + SOURCE_BLOCK])
        state.forks[row + SOURCE_BLOCK] = NOBODY
        state.header[OWED_COPIES] -= 1
        state.sequences[sequence * SEQUENCE_WORDS + SEQ_FLAGS] &= ~IN_GROUP


@subroutine
def leave_group(state, shared, sequence):
    """Whoever ends or is preempted leaves its group; if that is a parent, its forks are sequences of their own.

    Forks that run already are preempted: they have nothing to fork from.
    """
    row = sequence * FORK_WORDS
    if state.forks[row + FORK_PARENT] != NOBODY:
        parent = state.forks[row + FORK_PARENT]
        unlink_fork(state, sequence)
        if state.forks[parent * FORK_WORDS + FIRST_FORK] == NOBODY:
            state.sequences[parent * SEQUENCE_WORDS + SEQ_FLAGS] &= ~IN_GROUP
        state.header[HELPS] += 1  # the group needs less
    drop_source(state, sequence)
    while state.forks[row + FIRST_FORK] != NOBODY:
        fork = state.forks[row + FIRST_FORK]
        unlink_fork(state, fork)
        state.sequences[fork * SEQUENCE_WORDS + SEQ_FLAGS] &= ~IN_GROUP
        if state.sequences[fork * SEQUENCE_WORDS + STATUS] == STATUS_RUNNING:
            remove_running(state, fork)
            note_preemption(state, shared, fork)
            enqueue(state, fork)
    state.sequences[sequence * SEQUENCE_WORDS + SEQ_FLAGS] &= ~IN_GROUP


@subroutine
def plan_copies(state, rows):
    """List the copies that the plan's first `rows` rows owe. Returns how many."""
    count = 0
    for k in range(rows):
        sequence = state.rows[k * ROW_WORDS + ROW_SEQUENCE]
        source = state.forks[sequence * FORK_WORDS + SOURCE_BLOCK]
        if is_in_group(state, sequence) and source != NOBODY:
            place = state.rows[k * ROW_WORDS + ROW_FIRST] >> state.header[BLOCK_SHIFT]
            target = state.block_tables[sequence * state.header[BLOCKS_PER_SEQUENCE] + place]
            state.copies[count * COPY_WORDS] = source
            state.copies[count * COPY_WORDS + 1] = target
            count += 1
    return count


@subroutine
def drop_sources(state):
    """The plan was computed, and so its copies are made."""
    for k in range(state.header[ROW_COUNT]):
        sequence = state.rows[k * ROW_WORDS + ROW_SEQUENCE]
        if is_in_group(state, sequence):
            drop_source(state, sequence)

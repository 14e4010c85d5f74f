"""Part of the audit: free list and reference counts, from block tables and owed copies."""

from __future__ import annotations

from ironbatch.kernels.jit import inline, subroutine
from ironbatch.kernels.records import (
    BLOCKS,
    COMPUTED,
    COUNT_MASK,
    FORK_WORDS,
    IN_CACHE,
    NOBODY,
    SEQUENCE_WORDS,
    SOURCE_BLOCK,
)
from ironbatch.kernels.state import (
    BLOCK_SHIFT,
    BLOCKS_PER_SEQUENCE,
    EVICTABLE_COUNT,
    FREE_COUNT,
    NUM_BLOCKS,
    NUM_SLOTS,
    OWED_COPIES,
    RUNNING_COUNT,
)
from ironbatch.kernels.violations import SOUND

UNSEEN = 0
FREE = -1


@subroutine
def audit_free(state, seen):
    """The free list. Marks its blocks as FREE in `seen`, int32[num_blocks]."""
    num_blocks = state.header[NUM_BLOCKS]
    seen[:] = UNSEEN
    if not 0 <= state.header[FREE_COUNT] <= num_blocks:
        return 1
    for k in range(state.header[FREE_COUNT]):
        block = state.free_blocks[k]
        if block < 0 or block >= num_blocks:
            return 1
        if seen[block] != UNSEEN:
            return 2
        if state.refcounts[block] != 0:
            return 3
        seen[block] = FREE
    return SOUND


@subroutine
def count_references(state, seen):
    """Add up in `seen` what block tables and owed copies hold."""
    num_blocks = state.header[NUM_BLOCKS]
    for sequence in range(state.header[NUM_SLOTS]):
        held = state.sequences[sequence * SEQUENCE_WORDS + BLOCKS]
        if not 0 <= held <= state.header[BLOCKS_PER_SEQUENCE]:
            return 4
        table = sequence * state.header[BLOCKS_PER_SEQUENCE]
        source = state.forks[sequence * FORK_WORDS + SOURCE_BLOCK]
        for k in range(held + (1 if source != NOBODY else 0)):
            block = state.block_tables[table + k] if k < held else source
            if block < 0 or block >= num_blocks:
                return 4
            if seen[block] == FREE:
                return 5
            seen[block] += 1
    return SOUND


@subroutine
def audit_references(state, seen):
    """Every block is free, held as often as its count says, or evictable."""
    evictable = 0
    for block in range(state.header[NUM_BLOCKS]):
        references = state.refcounts[block] & COUNT_MASK
        is_cached = state.refcounts[block] & IN_CACHE != 0
        if seen[block] == UNSEEN and not is_cached:
            return 6
        if seen[block] >= 0 and references != seen[block]:
            return 5
        if is_cached and references == 0:
            evictable += 1
    return SOUND if evictable == state.header[EVICTABLE_COUNT] else 15


@subroutine
def audit_writable(state):
    """What a running sequence will write is its own: one table alone holds it, and the cache does not."""
    for k in range(state.header[RUNNING_COUNT]):
        sequence = state.running[k]
        row = sequence * SEQUENCE_WORDS
        table = sequence * state.header[BLOCKS_PER_SEQUENCE]
        first = max(state.sequences[row + COMPUTED], 0) >> state.header[BLOCK_SHIFT]
        for place in range(first, state.sequences[row + BLOCKS]):
            block = state.block_tables[table + place]
            references = state.refcounts[block]
            if references != 1 and references - owed_copies_of(state, block) != 1:
                return 14
    return SOUND


@inline
def owed_copies_of(state, block):
    """How many forks are still to copy `block`: these references are to what stands before the parent's next write."""
    count = 0
    if state.header[OWED_COPIES] > 0:
        for k in range(state.header[RUNNING_COUNT]):
            if state.forks[state.running[k] * FORK_WORDS + SOURCE_BLOCK] == block:
                count += 1
    return count

"""Part of the audit: eviction list, index and contents of the prefix cache, from each other."""

from __future__ import annotations

from ironbatch.kernels.jit import subroutine
from ironbatch.kernels.prefix_index import ROOT_SIGN, block_hash, root_hash
from ironbatch.kernels.records import (
    BLOCKS,
    BUCKET_NEXT,
    CACHED_BLOCKS,
    CACHED_WORDS,
    HASH,
    IN_CACHE,
    NEWER,
    NOBODY,
    OLDER,
    PARENT_A,
    PARENT_B,
    PARENT_BLOCK,
    SEQUENCE_WORDS,
    UID,
)
from ironbatch.kernels.state import (
    BLOCK_SHIFT,
    BLOCKS_PER_SEQUENCE,
    EVICTABLE_COUNT,
    INDEX_MASK,
    NEWEST,
    NUM_BLOCKS,
    OLDEST,
    RUNNING_COUNT,
)
from ironbatch.kernels.violations import SOUND


@subroutine
def audit_eviction_list(state, order):
    """The list's links and its members. Writes each block's place, from 1, into `order`, int32[num_blocks]."""
    order[:] = 0
    block = state.header[OLDEST]
    before = NOBODY
    for place in range(1, state.header[EVICTABLE_COUNT] + 1):
        if block < 0 or block >= state.header[NUM_BLOCKS] or order[block] != 0:
            return 15
        if state.refcounts[block] != IN_CACHE or state.cached_blocks[block * CACHED_WORDS + OLDER] != before:
            return 15
        order[block] = place
        before = block
        block = state.cached_blocks[block * CACHED_WORDS + NEWER]
    return SOUND if block == NOBODY and state.header[NEWEST] == before else 15


@subroutine
def audit_index(state):
    """Every cached block stands once in the bucket of its hash, and nothing else does."""
    num_blocks = state.header[NUM_BLOCKS]
    found = 0
    for bucket in range(state.header[INDEX_MASK] + 1):
        block = state.index[bucket]
        while block != NOBODY:
            if block < 0 or block >= num_blocks or found >= num_blocks:
                return 16
            row = block * CACHED_WORDS
            is_here = state.cached_blocks[row + HASH] & state.header[INDEX_MASK] == bucket
            if not is_here or state.refcounts[block] & IN_CACHE == 0 or state.cached_blocks[row + UID] <= 0:
                return 16
            found += 1
            block = state.cached_blocks[row + BUCKET_NEXT]
    cached = 0
    for block in range(num_blocks):
        cached += 1 if state.refcounts[block] & IN_CACHE != 0 else 0
    return SOUND if cached == found else 16


@subroutine
def audit_contents(state, order):
    """Each cached block's hash, and that its parent will be there as long as it is."""
    for block in range(state.header[NUM_BLOCKS]):
        if state.refcounts[block] & IN_CACHE == 0:
            continue
        row = block * CACHED_WORDS
        parent_a = state.cached_blocks[row + PARENT_A]
        parent_b = state.cached_blocks[row + PARENT_B]
        chained = root_hash(state, parent_a, parent_b)
        if parent_a > 0:
            parent = state.cached_blocks[row + PARENT_BLOCK]
            if not 0 <= parent < state.header[NUM_BLOCKS] or state.refcounts[parent] & IN_CACHE == 0:
                return 18
            if state.cached_blocks[parent * CACHED_WORDS + UID] != parent_a:
                return 18
            # Place 0 is that of a block that is held.
            if order[parent] != 0 and (order[block] == 0 or order[block] > order[parent]):
                return 18
            chained = state.cached_blocks[parent * CACHED_WORDS + HASH]
        elif parent_a & ROOT_SIGN == 0:
            return 18
        start = block << state.header[BLOCK_SHIFT]
        if block_hash(state, chained, state.block_tokens, start) != state.cached_blocks[row + HASH]:
            return 17
    return SOUND


@subroutine
def audit_chains(state):
    """The blocks that a sequence counts as cached are a chain from a root."""
    for k in range(state.header[RUNNING_COUNT]):
        sequence = state.running[k]
        table = sequence * state.header[BLOCKS_PER_SEQUENCE]
        cached = state.sequences[sequence * SEQUENCE_WORDS + CACHED_BLOCKS]
        if not 0 <= cached <= state.sequences[sequence * SEQUENCE_WORDS + BLOCKS]:
            return 19
        parent_a = 0
        for place in range(cached):
            block = state.block_tables[table + place]
            own = state.cached_blocks[block * CACHED_WORDS + PARENT_A]
            is_chained = own < 0 if place == 0 else own == parent_a
            if state.refcounts[block] & IN_CACHE == 0 or not is_chained:
                return 19
            parent_a = state.cached_blocks[block * CACHED_WORDS + UID]
    return SOUND

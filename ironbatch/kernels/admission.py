"""Admission: what a waiting sequence would take, whether that is there, and its first chunk."""

from __future__ import annotations

import numpy as np

from ironbatch import layout
from ironbatch.kernels.blocks import available_blocks, blocks_for, grow_blocks
from ironbatch.kernels.forks import group_size, own_blocks, reserve_fork
from ironbatch.kernels.jit import inline, subroutine
from ironbatch.kernels.prefix import adopt_prefix, count_evictable, match_prefix
from ironbatch.kernels.queues import dequeue, insert_running
from ironbatch.kernels.records import (
    FIRST_FORK,
    FORK_WORDS,
    MAX_NEW,
    NEXT_FORK,
    NOBODY,
    PRODUCED,
    PROMPT,
    SEQ_FLAGS,
    SEQUENCE_WORDS,
    USES_CACHE,
)
from ironbatch.kernels.shared import CACHED_TOKENS, CHOICE_INDEX, SLOT_WORDS
from ironbatch.kernels.state import (
    ADMITTED_COUNT,
    BLOCK_SHIFT,
    BLOCKED_HELPS,
    BLOCKED_SEQUENCE,
    BUCKET_COUNT,
    CONTEXT_CAP,
    HELPS,
    LOOKAHEAD,
    RUNNING_COUNT,
    RUNNING_IS_DEVICE,
    RUNNING_LIMIT,
)
from ironbatch.kernels.waits import end_wait

METRIC_QUERY = layout.word(layout.METRICS, "prefix_query_tokens")
METRIC_HIT = layout.word(layout.METRICS, "prefix_hit_tokens")


@inline
def admission_blocks(state, sequence):
    """Blocks that a sequence must hold to be admitted: for its whole context, and what it may emit next."""
    fields = sequence * SEQUENCE_WORDS
    context = state.sequences[fields + PROMPT] + state.sequences[fields + PRODUCED]
    longest = state.sequences[fields + PROMPT] + state.sequences[fields + MAX_NEW]
    return blocks_for(state, min(context + state.header[LOOKAHEAD], longest))


@inline
def admission_cost(state, shared, sequence):
    """How many blocks the prefix cache has for it, and how many its admission takes out of what is available.

    A matched block that nobody holds is not available any more once it is shared, so it costs as much as a new one.
    Every fork costs its own blocks. Nothing is changed, but for the ids of the matched blocks (see `match_prefix`).
    """
    matched = match_prefix(state, shared, sequence)
    cost = admission_blocks(state, sequence) - matched + count_evictable(state, sequence, matched)
    forks = group_size(state, sequence) - 1
    if forks > 0:
        cost += forks * own_blocks(state, sequence)
    return matched, cost


@inline
def has_failed_before(state, sequence):
    """Whether the sequence was found to lack blocks, and nothing has changed since that could help it."""
    return state.header[BLOCKED_SEQUENCE] == sequence and state.header[BLOCKED_HELPS] == state.header[HELPS]


@inline
def note_failure(state, sequence):
    """See `has_failed_before`: a head that waits for blocks is not matched anew in each step."""
    state.header[BLOCKED_SEQUENCE] = sequence
    state.header[BLOCKED_HELPS] = state.header[HELPS]


@inline
def padded_rows(state, rows):
    """To how many rows the device pads a plan of `rows`: the smallest of its shapes that holds them."""
    for k in range(state.header[BUCKET_COUNT]):
        if state.sequence_buckets[k] >= rows:
            return np.int64(state.sequence_buckets[k])
    return rows


@subroutine
def exceeds_cap(state, sequence, running):
    """Whether the sequence's group and the `running` most senior could not all decode in one step, at their longest."""
    if state.header[CONTEXT_CAP] == 0:
        return False
    fields = sequence * SEQUENCE_WORDS
    longest = state.sequences[fields + PROMPT] + state.sequences[fields + MAX_NEW]
    for k in range(running):
        other = state.running[k] * SEQUENCE_WORDS
        longest = max(longest, state.sequences[other + PROMPT] + state.sequences[other + MAX_NEW])
    rows = padded_rows(state, running + group_size(state, sequence))
    return rows * longest > state.header[CONTEXT_CAP]


@inline
def missing_place(state, sequence):
    """Why there is no place for the sequence's group among the running: a wait reason, or WAIT_STEP if there is one."""
    if state.header[RUNNING_COUNT] + group_size(state, sequence) > state.header[RUNNING_LIMIT]:
        return layout.WAIT_DEVICE if state.header[RUNNING_IS_DEVICE] else layout.WAIT_SLOTS
    if state.header[CONTEXT_CAP] > 0 and exceeds_cap(state, sequence, state.header[RUNNING_COUNT]):
        return layout.WAIT_DEVICE
    return layout.WAIT_STEP


@subroutine
def try_blocks(state, shared, sequence):
    """Whether the blocks for an admission are available: (WAIT_STEP or WAIT_BLOCKS, blocks matched in the cache)."""
    if has_failed_before(state, sequence):
        return layout.WAIT_BLOCKS, 0
    matched, cost = admission_cost(state, shared, sequence)
    if cost > available_blocks(state):
        note_failure(state, sequence)
        return layout.WAIT_BLOCKS, 0
    return layout.WAIT_STEP, matched


@subroutine
def admit(state, shared, sequence, matched):
    """Move a sequence, for which all is there, to the running set, with its blocks and its forks."""
    enter_running(state, shared, sequence, matched)
    adopt_prefix(state, sequence, matched)
    grow_blocks(state, sequence, admission_blocks(state, sequence))
    state.header[ADMITTED_COUNT] += 1
    fork = state.forks[sequence * FORK_WORDS + FIRST_FORK]
    while fork != NOBODY:
        enter_running(state, shared, fork, matched)
        reserve_fork(state, fork)
        state.header[ADMITTED_COUNT] += 1
        fork = state.forks[fork * FORK_WORDS + NEXT_FORK]


@subroutine
def enter_running(state, shared, sequence, matched):
    """Out of the queue and into the running set; its wait is charged, and what it found in the cache is counted."""
    dequeue(state, sequence)
    insert_running(state, sequence)
    is_first_time = end_wait(state, shared, sequence)
    fields = sequence * SEQUENCE_WORDS
    if is_first_time and state.sequences[fields + SEQ_FLAGS] & USES_CACHE:
        prompt = state.sequences[fields + PROMPT]
        found = min(matched << state.header[BLOCK_SHIFT], prompt)
        shared.slots[sequence * SLOT_WORDS + CACHED_TOKENS] = found
        if shared.slots[sequence * SLOT_WORDS + CHOICE_INDEX] == 0:  # once a request
            shared.metrics[METRIC_QUERY] += prompt
            shared.metrics[METRIC_HIT] += found

"""Who has to make room, for whom, and how much. The policy in words: docs/scheduling.md."""

from __future__ import annotations

from ironbatch import layout
from ironbatch.kernels.admission import (
    admission_blocks,
    admission_cost,
    admit,
    exceeds_cap,
)
from ironbatch.kernels.blocks import available_blocks
from ironbatch.kernels.ending import KV_GOOD, end_sequence, preempt
from ironbatch.kernels.forks import group_size, waits_for_parent
from ironbatch.kernels.jit import inline, subroutine
from ironbatch.kernels.queues import END, age_running, first_waiting, remaining_tokens
from ironbatch.kernels.records import (
    BLOCKS,
    COUNT_MASK,
    FORK_WORDS,
    NOBODY,
    PRIORITY_CLASS,
    RESERVED_BLOCKS,
    SEQUENCE_WORDS,
    SOURCE_BLOCK,
)
from ironbatch.kernels.state import (
    AGING_NS,
    BATCH_TOKENS,
    BLOCKS_PER_SEQUENCE,
    DENIED_HELPS,
    DENIED_SEQUENCE,
    DISPLACED_COUNT,
    HELPS,
    OUTGROWN_COUNT,
    PREEMPTED_COUNT,
    PREFILL_ROW_LIMIT,
    RESERVES,
    RUNNING_COUNT,
    RUNNING_LIMIT,
)


@subroutine
def make_room(state, shared, sequence, wanted):
    """Preempt from the junior end until `sequence` can hold `wanted` blocks. Returns 0 if it runs no more itself."""
    missing = wanted - state.sequences[sequence * SEQUENCE_WORDS + BLOCKS]
    while available_blocks(state) < missing:
        count = state.header[RUNNING_COUNT]
        if count == 1:
            state.header[OUTGROWN_COUNT] += 1
            end_sequence(state, shared, sequence, layout.FINISH_ERROR, layout.ERROR_NO_BLOCKS)
            return 0
        victim = state.running[count - 1]
        if blocks_gained(state, victim, sequence, 0) == 0:
            victim = sequence  # the search ends: to preempt that one would cost work and gain nothing
        preempt(state, shared, victim, KV_GOOD)
        state.header[PREEMPTED_COUNT] += 1
        if victim == sequence:
            return 0
    return 1


@subroutine
def blocks_gained(state, victim, newcomer, matched):
    """How many blocks more would be available to `newcomer` if `victim` were preempted.

    Those that `newcomer` would find cached are no gain: it has them already. They are the first `matched` of its table,
    and stand at the same places in the victim's.
    """
    table = victim * state.header[BLOCKS_PER_SEQUENCE]
    wanted = newcomer * state.header[BLOCKS_PER_SEQUENCE]
    gained = state.forks[victim * FORK_WORDS + RESERVED_BLOCKS]
    source = state.forks[victim * FORK_WORDS + SOURCE_BLOCK]
    if source != NOBODY and state.refcounts[source] & COUNT_MASK == 1:
        gained += 1
    for k in range(state.sequences[victim * SEQUENCE_WORDS + BLOCKS]):
        block = state.block_tables[table + k]
        is_wanted = k < matched and state.block_tables[wanted + k] == block
        if state.refcounts[block] & COUNT_MASK == 1 and not is_wanted:
            gained += 1
    return gained


@inline
def growth(state, sequence):
    """How many blocks a running sequence will take in this plan, in which it decodes."""
    if remaining_tokens(state, sequence) != 1:
        return 0
    return max(admission_blocks(state, sequence) - state.sequences[sequence * SEQUENCE_WORDS + BLOCKS], 0)


@subroutine
def total_growth(state):
    """What all decodes of this plan will take: whoever is admitted before them must not have it."""
    total = 0
    for k in range(state.header[RUNNING_COUNT]):
        total += growth(state, state.running[k])
    return total


@subroutine
def count_victims(state, sequence, places, blocks, matched):
    """How many of the least senior running sequences must go, so that `sequence` has `places` and `blocks` more.

    And so that the device could decode what stays. Only strictly lower classes are asked. Returns 0 if they are not
    enough, or if one would free nothing.
    """
    rank = state.sequences[sequence * SEQUENCE_WORDS + PRIORITY_CLASS]
    count = 0
    k = state.header[RUNNING_COUNT] - 1
    while places > 0 or blocks > 0 or exceeds_cap(state, sequence, k + 1):
        if k < 0 or state.sequences[state.running[k] * SEQUENCE_WORDS + PRIORITY_CLASS] <= rank:
            return 0
        if blocks > 0:
            gained = blocks_gained(state, state.running[k], sequence, matched)
            if gained == 0:
                return 0
            blocks -= gained + growth(state, state.running[k])
        places -= 1
        count += 1
        k -= 1
    return count


@inline
def outranks_running(state, sequence):
    """Whether `sequence` is of a strictly higher class than the least senior running one."""
    if sequence == END or state.header[RUNNING_COUNT] == 0:
        return False
    last = state.running[state.header[RUNNING_COUNT] - 1]
    lowest = state.sequences[last * SEQUENCE_WORDS + PRIORITY_CLASS]
    return state.sequences[sequence * SEQUENCE_WORDS + PRIORITY_CLASS] < lowest


@subroutine
def room_for_chunks(state, rank):
    """Tokens and rows that the next plans have for chunks of waiting requests of class `rank`.

    Before them come the decodes, and the running prefills of their class or a higher one.
    """
    tokens = state.header[BATCH_TOKENS] - state.header[RUNNING_COUNT]
    rows = state.header[PREFILL_ROW_LIMIT] if state.header[PREFILL_ROW_LIMIT] > 0 else state.header[RUNNING_LIMIT]
    for k in range(state.header[RUNNING_COUNT]):
        sequence = state.running[k]
        fields = sequence * SEQUENCE_WORDS
        more = remaining_tokens(state, sequence) - 1
        if more > 0 and state.sequences[fields + PRIORITY_CLASS] <= rank and not waits_for_parent(state, sequence):
            tokens -= more
            rows -= 1
    return tokens, rows


@inline
def make_way(state, shared, now_ns):
    """Admit whoever outranks a running sequence before anything else is planned, if need be in the place of such."""
    if state.header[RESERVES] != 0:
        return
    head = first_waiting(state, 0)
    if not outranks_running(state, head):
        return
    if state.header[AGING_NS] > 0:
        age_running(state, now_ns)
    if state.header[DENIED_SEQUENCE] != head or state.header[DENIED_HELPS] != state.header[HELPS]:
        admit_by_rank(state, shared, head)


@subroutine
def admit_by_rank(state, shared, sequence):
    """Admit from the head on. Their chunks are planned with those of all running prefills, in which they are senior."""
    tokens, rows = room_for_chunks(state, state.sequences[sequence * SEQUENCE_WORDS + PRIORITY_CLASS])
    while tokens > 0 and rows > 0 and outranks_running(state, sequence):
        matched, cost = admission_cost(state, shared, sequence)
        places = state.header[RUNNING_COUNT] + group_size(state, sequence) - state.header[RUNNING_LIMIT]
        blocks = cost + total_growth(state) - available_blocks(state)
        if places > 0 or blocks > 0 or exceeds_cap(state, sequence, state.header[RUNNING_COUNT]):
            victims = count_victims(state, sequence, places, blocks, matched)
            if victims == 0:
                # Until something is released or registered it stays so: what others take does not help, and classes
                # of running sequences only rise.
                state.header[DENIED_SEQUENCE] = sequence
                state.header[DENIED_HELPS] = state.header[HELPS]
                return
            for _ in range(victims):
                preempt(state, shared, state.running[state.header[RUNNING_COUNT] - 1], KV_GOOD)
            state.header[DISPLACED_COUNT] += victims
        matched, cost = admission_cost(state, shared, sequence)  # the victims' blocks can be found now
        admit(state, shared, sequence, matched)
        tokens -= remaining_tokens(state, sequence)
        rows -= 1
        sequence = first_waiting(state, 0)

"""The batching policy: who computes what in the next step.

Continuous batching as in Orca (Yu et al., OSDI 2022), chunked prefill as in Sarathi-Serve (Agrawal et al., OSDI 2024).

Decodes come first, then chunks of prefills that run already, then admission by seniority. Before a token is computed
its position, and that of the token it emits, is backed by a block; a sequence is admitted with blocks for its whole
context, so only decodes ever grow, and only their growth preempts.
"""

from __future__ import annotations

from ironbatch import layout
from ironbatch.kernels.blocks import blocks_for, grow_blocks
from ironbatch.kernels.jit import inline, kernel, subroutine
from ironbatch.kernels.queues import END, dequeue, first_waiting, insert_running, preempt_newest
from ironbatch.kernels.shared import (
    IN_DEVICE_CALL,
    STEP_STARTED_NS,
    TOKEN_ROW_TOKENS,
    open_shared,
)
from ironbatch.kernels.state import (
    ADMITTED_COUNT,
    BATCH_TOKENS,
    BLOCK_SHIFT,
    BLOCK_SIZE,
    BLOCKS,
    BLOCKS_PER_SEQUENCE,
    COMPUTED,
    FREE_COUNT,
    MAX_NEW,
    PLAN_DECODES,
    PLAN_TOKENS,
    PREEMPTED_COUNT,
    PRIORITY_CLASS,
    PRODUCED,
    PROMPT,
    ROW_CONTEXT,
    ROW_COUNT,
    ROW_EMITS,
    ROW_FIRST,
    ROW_NEW,
    ROW_OFFSET,
    ROW_PRODUCED,
    ROW_PROMPT,
    ROW_SEQUENCE,
    ROW_WORDS,
    RUNNING_COUNT,
    RUNNING_LIMIT,
    SEQ_FLAGS,
    SEQUENCE_WORDS,
    TOKENS_PER_STEP,
    open_plan_tokens,
    open_state,
)


@inline
def remaining_tokens(state, sequence):
    """Positions of the sequence's context whose KV is not computed; 1 means that it decodes."""
    row = sequence * SEQUENCE_WORDS
    return state.sequences[row + PROMPT] + state.sequences[row + PRODUCED] - state.sequences[row + COMPUTED]


@inline
def add_row(state, count, sequence, new_tokens, emits, offset):
    """Write row `count` of the plan."""
    row = count * ROW_WORDS
    fields = sequence * SEQUENCE_WORDS
    first = state.sequences[fields + COMPUTED]
    state.rows[row + ROW_SEQUENCE] = sequence
    state.rows[row + ROW_FIRST] = first
    state.rows[row + ROW_NEW] = new_tokens
    state.rows[row + ROW_CONTEXT] = first + new_tokens
    state.rows[row + ROW_EMITS] = emits
    state.rows[row + ROW_OFFSET] = offset
    state.rows[row + ROW_PROMPT] = state.sequences[fields + PROMPT]
    state.rows[row + ROW_PRODUCED] = state.sequences[fields + PRODUCED]
    state.output_counts[count] = emits
    return count + 1


@subroutine
def make_room(state, shared, sequence, wanted):
    """Preempt from the junior end until `sequence` can hold `wanted` blocks. Returns 0 if it was preempted itself."""
    missing = wanted - state.sequences[sequence * SEQUENCE_WORDS + BLOCKS]
    while state.header[FREE_COUNT] < missing:
        victim = preempt_newest(state, shared)
        state.header[PREEMPTED_COUNT] += 1
        if victim == sequence:
            return 0
    return 1


@kernel("int64(intp, intp, int64)")
def plan(state_address, segment_address, now_ns):
    """Plan one step. Returns its number of rows; 0 if there is nothing to compute."""
    state = open_state(state_address)
    shared = open_shared(segment_address)
    header = state.header
    header[PREEMPTED_COUNT] = 0
    header[ADMITTED_COUNT] = 0
    lookahead = header[TOKENS_PER_STEP]
    block_shift = header[BLOCK_SHIFT]
    budget = header[BATCH_TOKENS]
    count = 0
    prefilling = 0
    offset = 0

    # Decodes, senior first. A victim is junior to the sequence that needs its block, hence not planned yet.
    k = 0
    while k < header[RUNNING_COUNT]:
        sequence = state.running[k]
        k += 1
        row = sequence * SEQUENCE_WORDS
        context = state.sequences[row + PROMPT] + state.sequences[row + PRODUCED]
        if context - state.sequences[row + COMPUTED] > 1:
            prefilling += 1
            continue
        held = state.sequences[row + BLOCKS]
        reach = min(context + lookahead, state.sequences[row + PROMPT] + state.sequences[row + MAX_NEW])
        if reach > held << block_shift:
            wanted = blocks_for(state, reach)
            if header[FREE_COUNT] < wanted - held and make_room(state, shared, sequence, wanted) == 0:
                break
            grow_blocks(state, sequence, wanted)
        count = add_row(state, count, sequence, 1, 1, offset)
        offset += 1
    budget -= offset
    header[PLAN_DECODES] = offset

    # Prefills that run already; their blocks are theirs since admission.
    k = 0
    while prefilling > 0 and budget > 0 and k < header[RUNNING_COUNT]:
        sequence = state.running[k]
        k += 1
        remaining = remaining_tokens(state, sequence)
        if remaining > 1:
            chunk = min(remaining, budget)
            count = add_row(state, count, sequence, chunk, 1 if chunk == remaining else 0, offset)
            offset += chunk
            budget -= chunk

    # Admission. Who does not fit stays at the head; nothing is admitted into a pool that has just run out.
    rank = 0
    while budget > 0 and header[PREEMPTED_COUNT] == 0 and header[RUNNING_COUNT] < header[RUNNING_LIMIT]:
        sequence = first_waiting(state, rank)
        if sequence == END:
            break
        remaining = remaining_tokens(state, sequence)
        row = sequence * SEQUENCE_WORDS
        rank = state.sequences[row + PRIORITY_CLASS]  # nothing is enqueued here, so higher classes stay empty
        longest = state.sequences[row + PROMPT] + state.sequences[row + MAX_NEW]
        wanted = blocks_for(state, min(remaining + lookahead, longest))
        if wanted > header[FREE_COUNT]:
            break
        dequeue(state, sequence)
        grow_blocks(state, sequence, wanted)
        insert_running(state, sequence)
        header[ADMITTED_COUNT] += 1
        chunk = min(remaining, budget)
        count = add_row(state, count, sequence, chunk, 1 if chunk == remaining else 0, offset)
        offset += chunk
        budget -= chunk

    header[ROW_COUNT] = count
    header[PLAN_TOKENS] = offset
    shared.header[STEP_STARTED_NS] = now_ns
    shared.header[IN_DEVICE_CALL] = 1 if count > 0 else 0
    return count


@kernel("int64(intp, intp)")
def fill_plan_tokens(state_address, segment_address):
    """Write token_ids, positions and kv_slot_mapping of the present plan, for backends that compute attention.

    A prompt that came without token ids counts as zeros. Returns the number of tokens.
    """
    state = open_state(state_address)
    shared = open_shared(segment_address)
    out = open_plan_tokens(state_address)
    block_size = state.header[BLOCK_SIZE]
    for k in range(state.header[ROW_COUNT]):
        row = k * ROW_WORDS
        sequence = state.rows[row + ROW_SEQUENCE]
        has_ids = (state.sequences[sequence * SEQUENCE_WORDS + SEQ_FLAGS] & layout.FLAG_TOKEN_IDS) != 0
        known_from = 0 if has_ids else state.rows[row + ROW_PROMPT]
        tokens = sequence * shared.header[TOKEN_ROW_TOKENS]
        table = sequence * state.header[BLOCKS_PER_SEQUENCE]
        offset = state.rows[row + ROW_OFFSET]
        for position in range(state.rows[row + ROW_FIRST], state.rows[row + ROW_CONTEXT]):
            block = state.block_tables[table + (position >> state.header[BLOCK_SHIFT])]
            out.token_ids[offset] = shared.tokens[tokens + position] if position >= known_from else 0
            out.positions[offset] = position
            out.kv_slot_mapping[offset] = block * block_size + (position & (block_size - 1))
            offset += 1
    return state.header[PLAN_TOKENS]

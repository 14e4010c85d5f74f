"""The batching policy: who computes what in the next step. In words: docs/scheduling.md.

Continuous batching as in Orca (Yu et al., OSDI 2022), chunked prefill as in Sarathi-Serve (Agrawal et al., OSDI 2024).
"""

from __future__ import annotations

from ironbatch import layout
from ironbatch.kernels.admission import admit, missing_place, try_blocks
from ironbatch.kernels.atomics import store_release
from ironbatch.kernels.blocks import available_blocks, blocks_for, grow_blocks
from ironbatch.kernels.forks import plan_copies, waits_for_parent
from ironbatch.kernels.jit import inline, kernel, subroutine
from ironbatch.kernels.preemption import make_room, make_way
from ironbatch.kernels.queues import age_waiting, first_waiting, remaining_tokens
from ironbatch.kernels.records import (
    BLOCKS,
    COMPUTED,
    MAX_NEW,
    PRIORITY_CLASS,
    PRODUCED,
    PROMPT,
    ROW_CONTEXT,
    ROW_EMITS,
    ROW_FIRST,
    ROW_NEW,
    ROW_OFFSET,
    ROW_PRODUCED,
    ROW_PROMPT,
    ROW_SEQUENCE,
    ROW_WORDS,
    SEQ_FLAGS,
    SEQUENCE_WORDS,
)
from ironbatch.kernels.shared import (
    EPOCH,
    IN_DEVICE_CALL,
    LISTED_COUNT,
    LISTED_EPOCH,
    STEP_STARTED_NS,
    TOKEN_ROW_TOKENS,
    open_shared,
)
from ironbatch.kernels.state import (
    ADMITTED_COUNT,
    BATCH_IS_DEVICE,
    BATCH_TOKENS,
    BLOCK_SHIFT,
    BLOCK_SIZE,
    BLOCKS_PER_SEQUENCE,
    CHUNKS_NEXT,
    COPY_COUNT,
    DISPLACED_COUNT,
    LOOKAHEAD,
    MIXES,
    NEXT_AGING_NS,
    OWED_COPIES,
    PLAN_DECODES,
    PLAN_TOKENS,
    PREEMPTED_COUNT,
    PREFILL_ROW_LIMIT,
    ROW_COUNT,
    RUNNING_CHANGED,
    RUNNING_COUNT,
    WAIT_REASON,
    WAITING_COUNT,
    open_plan_tokens,
    open_state,
)


@inline
def write_row(state, count, sequence, new_tokens, emits, offset):
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


@inline
def plan_decodes(state, shared):
    """A row for every running sequence that decodes, senior first. Returns how many running ones still prefill.

    A victim of growth is junior to the sequence that needs its block, hence not planned yet.
    """
    header = state.header
    lookahead = header[LOOKAHEAD]
    block_shift = header[BLOCK_SHIFT]
    count = 0
    prefilling = 0
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
            if available_blocks(state) < wanted - held and make_room(state, shared, sequence, wanted) == 0:
                k -= 1  # its place is another's now
                continue
            grow_blocks(state, sequence, wanted)
        write_row(state, count, sequence, 1, 1, count)
        count += 1
    header[ROW_COUNT] = count
    header[PLAN_TOKENS] = count
    header[PLAN_DECODES] = count
    if header[OWED_COPIES] > 0:
        header[COPY_COUNT] = plan_copies(state, count)
    return prefilling


@inline
def add_chunk(state, sequence):
    """A row for the next chunk of a sequence's prefill, as long as the step's budget allows."""
    remaining = remaining_tokens(state, sequence)
    offset = state.header[PLAN_TOKENS]
    chunk = min(remaining, state.header[BATCH_TOKENS] - offset)
    write_row(state, state.header[ROW_COUNT], sequence, chunk, 1 if chunk == remaining else 0, offset)
    state.header[ROW_COUNT] += 1
    state.header[PLAN_TOKENS] = offset + chunk


@inline
def missing_chunk(state):
    """Why the plan takes no further chunk: a wait reason, or WAIT_STEP if it takes one."""
    if state.header[PLAN_TOKENS] >= state.header[BATCH_TOKENS]:
        return layout.WAIT_DEVICE if state.header[BATCH_IS_DEVICE] else layout.WAIT_TOKENS
    limit = state.header[PREFILL_ROW_LIMIT]
    if limit > 0 and state.header[ROW_COUNT] - state.header[PLAN_DECODES] >= limit:
        return layout.WAIT_DEVICE
    return layout.WAIT_STEP


@inline
def plan_prefills(state):
    """A row for the next chunk of the prefills that run already, senior first; their blocks are theirs."""
    k = 0
    while k < state.header[RUNNING_COUNT] and missing_chunk(state) == layout.WAIT_STEP:
        sequence = state.running[k]
        k += 1
        if remaining_tokens(state, sequence) > 1 and not waits_for_parent(state, sequence):
            add_chunk(state, sequence)


@inline
def missing(state, shared, sequence):
    """What the head of the queue lacks first, as a wait reason; and how much of it is cached. WAIT_STEP: nothing."""
    if state.header[PREEMPTED_COUNT] > 0 and state.header[ROW_COUNT] > 0:
        return layout.WAIT_BLOCKS, 0  # nobody is admitted into a pool that has just run out
    reason = missing_place(state, sequence)
    if reason == layout.WAIT_STEP:
        reason = missing_chunk(state)
    if reason != layout.WAIT_STEP:
        return reason, 0
    return try_blocks(state, shared, sequence)


@inline
def plan_admissions(state, shared, takes_chunks):
    """Admit from the head of the queue while everything fits. Returns why the next has to wait; WAIT_STEP: nobody does.

    Nothing is enqueued here, so classes above the last admitted one's stay empty.
    """
    rank = 0
    while state.header[WAITING_COUNT] > 0:
        sequence = first_waiting(state, rank)
        rank = state.sequences[sequence * SEQUENCE_WORDS + PRIORITY_CLASS]
        reason, matched = missing(state, shared, sequence)
        if reason != layout.WAIT_STEP:
            return reason
        if not takes_chunks:
            return layout.WAIT_DEVICE  # it is the decodes' turn
        admit(state, shared, sequence, matched)
        add_chunk(state, sequence)
    return layout.WAIT_STEP


@subroutine
def begin_plan(state, now_ns):
    """Empty the last plan, and let the waiting age."""
    header = state.header
    header[ROW_COUNT] = 0
    header[COPY_COUNT] = 0
    header[PLAN_TOKENS] = 0
    header[PLAN_DECODES] = 0
    header[PREEMPTED_COUNT] = 0
    header[DISPLACED_COUNT] = 0
    header[ADMITTED_COUNT] = 0
    if header[WAITING_COUNT] > 0 and now_ns >= header[NEXT_AGING_NS]:
        age_waiting(state, now_ns)


@subroutine
def list_running(state, shared):
    """Write down in the segment who runs, for the case that their computing kills this scheduler."""
    count = state.header[RUNNING_COUNT]
    for k in range(count):
        shared.running[k] = state.running[k]
    shared.header[LISTED_COUNT] = count
    shared.header[LISTED_EPOCH] = shared.header[EPOCH]
    state.header[RUNNING_CHANGED] = 0


TURNS = 3
"""A device that does not mix: if there is nothing for one kind, the other; and the first again, since decodes that have
all given way have made room for it."""


@kernel("int64(intp, intp, int64)")
def plan(state_address, segment_address, now_ns):
    """Plan one step. Returns its number of rows; 0 if there is nothing to compute."""
    state = open_state(state_address)
    shared = open_shared(segment_address)
    header = state.header
    begin_plan(state, now_ns)
    if header[WAITING_COUNT] > 0:
        make_way(state, shared, now_ns)
    takes_chunks = header[MIXES] | header[CHUNKS_NEXT]
    takes_decodes = header[MIXES] | (1 - takes_chunks)
    for _ in range(TURNS):
        prefilling = header[RUNNING_COUNT]
        if takes_decodes:
            prefilling = plan_decodes(state, shared)
        if takes_chunks and prefilling > 0:
            plan_prefills(state)
        header[WAIT_REASON] = plan_admissions(state, shared, takes_chunks)
        if header[MIXES] or header[ROW_COUNT] > 0:
            header[CHUNKS_NEXT] = takes_decodes
            break
        takes_chunks, takes_decodes = takes_decodes, takes_chunks
    count = header[ROW_COUNT]
    if header[RUNNING_CHANGED] != 0:
        list_running(state, shared)
    shared.header[STEP_STARTED_NS] = now_ns
    store_release(shared.header, IN_DEVICE_CALL, layout.CALL_STEP if count > 0 else layout.CALL_NONE)
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

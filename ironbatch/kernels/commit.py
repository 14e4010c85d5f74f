"""The end of a step: append what the backend emitted, finish, free, publish, count, and see who is to be woken."""

from __future__ import annotations

from ironbatch import layout
from ironbatch.kernels.atomics import exchange, full_fence, load_acquire, store_release
from ironbatch.kernels.blocks import release_blocks
from ironbatch.kernels.forks import drop_sources, fork_all, is_in_group, leave_group
from ironbatch.kernels.jit import inline, kernel, subroutine
from ironbatch.kernels.prefix import register_prefix
from ironbatch.kernels.queues import note_forget
from ironbatch.kernels.records import (
    COMPUTED,
    LANE,
    MAX_NEW,
    PRODUCED,
    PROMPT,
    ROW_CONTEXT,
    ROW_EMITS,
    ROW_PRODUCED,
    ROW_PROMPT,
    ROW_SEQUENCE,
    ROW_WORDS,
    SEQ_FLAGS,
    SEQ_GENERATION,
    SEQUENCE_WORDS,
    STATUS,
    STATUS_NONE,
    STATUS_RUNNING,
)
from ironbatch.kernels.shared import (
    ERROR_CODE,
    IN_DEVICE_CALL,
    LANE_WORDS,
    PUBLISHED,
    SLOT_WORDS,
    TOKEN_ROW_TOKENS,
    WORKER_SLEEPING,
    open_shared,
    published_word,
)
from ironbatch.kernels.state import (
    COPY_COUNT,
    EOS_TOKEN_ID,
    EVICTABLE_COUNT,
    EVICTED_COUNT,
    FREE_COUNT,
    NUM_LANES,
    PENDING_FORKS,
    PLAN_DECODES,
    PLAN_TOKENS,
    PREFIX_CACHE,
    ROW_COUNT,
    RUNNING_CHANGED,
    RUNNING_COUNT,
    TOKENS_PER_STEP,
    WAITING_COUNT,
    WAKE_COUNT,
    open_state,
)
from ironbatch.kernels.tables import prefetch_for_write

INVALID_OUTPUT = -1
MOST_ERROR = max(layout.ERROR_MESSAGES)

METRIC_TOKENS = layout.word(layout.METRICS, "tokens_generated")
METRIC_STEPS = layout.word(layout.METRICS, "steps")
METRIC_PREFILL = layout.word(layout.METRICS, "prefill_tokens")
METRIC_DECODE = layout.word(layout.METRICS, "decode_tokens")
METRIC_WITHOUT_ID = layout.word(layout.METRICS, "pieces_without_id")
METRIC_FAILED = layout.word(layout.METRICS, "sequences_failed")
METRIC_RUNNING = layout.word(layout.METRICS, "running")
METRIC_WAITING = layout.word(layout.METRICS, "waiting")
METRIC_FREE = layout.word(layout.METRICS, "kv_blocks_free")
METRIC_CACHED = layout.word(layout.METRICS, "kv_blocks_cached")
METRIC_EVICTED = layout.word(layout.METRICS, "prefix_evicted_blocks")
METRIC_COPIED = layout.word(layout.METRICS, "copied_blocks")


@inline
def append_tokens(state, shared, sequence, cursor, count, reason):
    """Append `count` emitted tokens from place `cursor` on, up to the sequence's end. Returns (produced, reason)."""
    fields = sequence * SEQUENCE_WORDS
    produced = state.sequences[fields + PRODUCED]
    limit = state.sequences[fields + MAX_NEW]
    out = sequence * shared.header[TOKEN_ROW_TOKENS] + state.sequences[fields + PROMPT]
    for token_index in range(cursor, cursor + count):
        token = state.output_tokens[token_index]
        shared.tokens[out + produced] = token
        produced += 1
        if token == layout.NO_TOKEN_ID:
            shared.metrics[METRIC_WITHOUT_ID] += 1
        if token == state.header[EOS_TOKEN_ID] and state.sequences[fields + SEQ_FLAGS] & layout.FLAG_IGNORE_EOS == 0:
            return produced, layout.FINISH_STOP
        if produced == limit:
            return produced, layout.FINISH_LENGTH
    return produced, reason


AHEAD = 8
"""How many rows before its turn a row's cache lines are called for."""


@inline
def prefetch_row(state, shared, k):
    """Call for the lines of the segment that row `k` is to write. Token rows are long: each is in a page of its own."""
    row = k * ROW_WORDS
    sequence = state.rows[row + ROW_SEQUENCE]
    context = state.rows[row + ROW_PROMPT] + state.rows[row + ROW_PRODUCED]
    prefetch_for_write(shared.tokens, sequence * shared.header[TOKEN_ROW_TOKENS] + context)
    prefetch_for_write(shared.slots, sequence * SLOT_WORDS + PUBLISHED)


@inline
def shares_from(state):
    """The first row after which something may be shared: a chunk's full blocks, or the prompt of a group."""
    if state.header[PENDING_FORKS] > 0:
        return 0
    return state.header[PLAN_DECODES] if state.header[PREFIX_CACHE] else state.header[ROW_COUNT]


@subroutine
def share_computed(state, shared, k):
    """Register what row `k` has computed of a prompt, and fork from it if that was the last of it."""
    sequence = state.rows[k * ROW_WORDS + ROW_SEQUENCE]
    if k >= state.header[PLAN_DECODES]:
        register_prefix(state, shared, sequence)
    if state.rows[k * ROW_WORDS + ROW_EMITS] != 0 and is_in_group(state, sequence):
        fork_all(state, sequence)


@subroutine
def finish(state, shared, sequence, reason, error):
    """Free a finished sequence's blocks; the caller publishes it and compacts the running set."""
    if is_in_group(state, sequence):
        leave_group(state, shared, sequence)
    if reason != layout.FINISH_ERROR:
        register_prefix(state, shared, sequence)
    release_blocks(state, sequence)
    note_forget(state, sequence)
    state.sequences[sequence * SEQUENCE_WORDS + STATUS] = STATUS_NONE
    shared.slots[sequence * SLOT_WORDS + ERROR_CODE] = error
    if reason == layout.FINISH_ERROR:
        shared.metrics[METRIC_FAILED] += 1


@inline
def compact_running(state):
    """Drop from the running set whoever has finished, in one pass that keeps the order."""
    kept = 0
    for k in range(state.header[RUNNING_COUNT]):
        sequence = state.running[k]
        if state.sequences[sequence * SEQUENCE_WORDS + STATUS] == STATUS_RUNNING:
            state.running[kept] = sequence
            kept += 1
    state.header[RUNNING_COUNT] = kept
    state.header[RUNNING_CHANGED] = 1


@inline
def gather_wakes(state, shared):
    """List the lanes that have news and whose worker sleeps; each such worker is rung by this caller alone."""
    full_fence()
    count = 0
    for lane in range(state.header[NUM_LANES]):
        if state.lane_news[lane] == 0:
            continue
        state.lane_news[lane] = 0
        word = lane * LANE_WORDS + WORKER_SLEEPING
        if load_acquire(shared.lanes, word) != 0 and exchange(shared.lanes, word, 0) == 1:
            state.wakes[count] = lane
            count += 1
    state.header[WAKE_COUNT] = count
    return count


@inline
def set_gauges(state, shared):
    """What /metrics shows of the scheduler's private state."""
    shared.metrics[METRIC_RUNNING] = state.header[RUNNING_COUNT]
    shared.metrics[METRIC_WAITING] = state.header[WAITING_COUNT]
    shared.metrics[METRIC_FREE] = state.header[FREE_COUNT] + state.header[EVICTABLE_COUNT]
    shared.metrics[METRIC_CACHED] = state.header[EVICTABLE_COUNT]
    shared.metrics[METRIC_EVICTED] += state.header[EVICTED_COUNT]
    state.header[EVICTED_COUNT] = 0


@inline
def is_sound(reason):
    """Whether a row computed what it was to compute, by the reason for which it ends, if it does."""
    return reason in (layout.FINISH_NONE, layout.FINISH_LENGTH, layout.FINISH_STOP)


@inline
def error_of(reason):
    """The error code in what a backend has set as a finish reason; ERROR_REQUEST if it has named none that there is."""
    error = reason >> layout.OUTPUT_CODE_SHIFT
    return error if layout.ERROR_NONE < error <= MOST_ERROR else layout.ERROR_REQUEST


@inline
def counts_are_valid(state, rows):
    """Whether no row has emitted more than the backend may. Without a branch, so that it is a few vector operations."""
    most = state.header[TOKENS_PER_STEP]
    lowest = highest = 0
    for k in range(rows):
        lowest = min(lowest, state.output_counts[k])
        highest = max(highest, state.output_counts[k])
    return lowest >= 0 and highest <= most


@kernel("int64(intp, intp)")
def commit(state_address, segment_address):
    """Commit the executed plan. Returns the number of workers to wake (their lanes stand in `wakes`).

    Returns INVALID_OUTPUT, with nothing changed, if a row emitted more than the backend may: no row could be trusted.

    Reads output_counts[row] tokens a row from output_tokens, in row order, and output_finish[row], a finish reason
    that the backend itself decided on. A row that emits nothing keeps its place: its last position is computed again.
    """
    state = open_state(state_address)
    shared = open_shared(segment_address)
    rows = state.header[ROW_COUNT]
    if not counts_are_valid(state, rows):
        return INVALID_OUTPUT
    if state.header[COPY_COUNT] > 0:
        shared.metrics[METRIC_COPIED] += state.header[COPY_COUNT]
        drop_sources(state)
    shared_from = shares_from(state)
    cursor = 0
    generated = 0
    finished = 0
    silent = 0
    for k in range(rows):
        if k + AHEAD < rows:
            prefetch_row(state, shared, k + AHEAD)
        row = k * ROW_WORDS
        sequence = state.rows[row + ROW_SEQUENCE]
        fields = sequence * SEQUENCE_WORDS
        count = state.output_counts[k]
        before = state.sequences[fields + PRODUCED]
        produced, reason = append_tokens(state, shared, sequence, cursor, count, state.output_finish[k])
        cursor += count
        generated += produced - before
        state.sequences[fields + PRODUCED] = produced
        # The last token of a context is computed by the step that emits the next.
        reached = state.rows[row + ROW_CONTEXT] + produced - before - state.rows[row + ROW_EMITS]
        state.sequences[fields + COMPUTED] = reached
        if k >= shared_from and is_sound(reason):
            share_computed(state, shared, k)
        if reason != layout.FINISH_NONE:
            error = layout.ERROR_NONE
            if not is_sound(reason):
                error = error_of(reason)
                reason = layout.FINISH_ERROR  # or a plug-in's slip
            state.output_finish[k] = layout.FINISH_NONE
            if produced == before and reason != layout.FINISH_ERROR:
                reason |= layout.FINISH_WITHOUT_TOKEN
            finish(state, shared, sequence, reason, error)
            finished += 1
        elif produced == before:
            silent += k < state.header[PLAN_DECODES]
            continue
        word = published_word(state.sequences[fields + SEQ_GENERATION], reason, produced)
        store_release(shared.slots, sequence * SLOT_WORDS + PUBLISHED, word)
        state.lane_news[state.sequences[fields + LANE]] = 1
    if finished > 0:
        compact_running(state)
    state.header[ROW_COUNT] = 0
    shared.metrics[METRIC_STEPS] += 1
    shared.metrics[METRIC_TOKENS] += generated
    shared.metrics[METRIC_DECODE] += state.header[PLAN_DECODES] - silent  # a stream without news computed nothing
    shared.metrics[METRIC_PREFILL] += state.header[PLAN_TOKENS] - state.header[PLAN_DECODES]
    set_gauges(state, shared)
    count = gather_wakes(state, shared)
    # Until here a death is one of those that the plan's sequences may have caused (kernels/suspects.py).
    store_release(shared.header, IN_DEVICE_CALL, 0)
    return count


@kernel("int64(intp, intp)")
def announce(state_address, segment_address):
    """For a step that computed nothing: the gauges, and who is to be woken for what `drain` ended."""
    state = open_state(state_address)
    shared = open_shared(segment_address)
    set_gauges(state, shared)
    return gather_wakes(state, shared)

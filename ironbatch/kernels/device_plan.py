"""A batch plan as the records of a device's ring, and the device's answer as the plan's output.

What the records are stands in `device_records.py`. The plan's tables are copied once, into memory that the device
reads; nothing is allocated.
"""

from __future__ import annotations

from ironbatch import layout
from ironbatch.kernels.device_records import (
    FLAGS_SHIFT,
    INT_BLOCKS,
    INT_BYTES,
    INT_CONTEXT,
    INT_COUNT,
    INT_NEW,
    INT_OP_FLAGS,
    INT_STEP_RESERVED,
    INTS_HEADER,
    INTS_STEP,
    INTS_TOKENS,
    OP_COPY_BLOCKS,
    OP_STEP,
    OP_TOKENS,
    STEP_EMITS,
    WORD_SEED,
    WORD_SEQUENCE,
    WORD_STEP_RESERVED,
    WORD_TEMPERATURE,
    WORD_TOKENS_SEQUENCE,
    WORD_TOP_K,
    WORD_TOP_P,
    WORD_USER,
)
from ironbatch.kernels.jit import inline, kernel
from ironbatch.kernels.records import (
    COPY_WORDS,
    ROW_CONTEXT,
    ROW_EMITS,
    ROW_NEW,
    ROW_OFFSET,
    ROW_SEQUENCE,
    ROW_WORDS,
)
from ironbatch.kernels.shared import SLOT_WORDS, open_shared
from ironbatch.kernels.state import (
    BLOCK_SHIFT,
    BLOCK_SIZE,
    BLOCKS_PER_SEQUENCE,
    COPY_COUNT,
    ROW_COUNT,
    open_plan_tokens,
    open_state,
)
from ironbatch.kernels.tables import int32_table, word_table

SLOT_TEMPERATURE = layout.word(layout.SLOT, "temperature")
SLOT_TOP_P = layout.word(layout.SLOT, "top_p")
SLOT_TOP_K = layout.word(layout.SLOT, "top_k")

INT_BYTES_EACH = 4


@inline
def padded_ints(count):
    """So many int32, up to the next multiple of 8 bytes."""
    return (count + 1) & ~1


@inline
def context_blocks(state, row):
    """Entries of its block table that a row reads."""
    return (state.rows[row + ROW_CONTEXT] + state.header[BLOCK_SIZE] - 1) >> state.header[BLOCK_SHIFT]


@inline
def step_ints(state, row):
    """Size of a row's STEP, its padding aside, in int32."""
    return INTS_STEP + context_blocks(state, row) + state.rows[row + ROW_NEW]


@inline
def copies_ints(state):
    """Likewise of the plan's COPY_BLOCKS; 0: it has none."""
    copies = state.header[COPY_COUNT]
    return INTS_HEADER + 2 * copies if copies > 0 else 0


@inline
def plan_bytes(state):
    """Size of all records of the plan."""
    ints = padded_ints(copies_ints(state))
    for k in range(state.header[ROW_COUNT]):
        ints += padded_ints(step_ints(state, k * ROW_WORDS))
    return ints * INT_BYTES_EACH


@inline
def begin_record(address, size, op, flags, user):
    """Write the header of a record of `size` int32, and its padding. Returns the record's int32 and its words."""
    ints = int32_table(address, padded_ints(size))
    words = word_table(address, padded_ints(size) >> 1)
    ints[padded_ints(size) - 1] = 0
    ints[INT_OP_FLAGS] = op | flags << FLAGS_SHIFT
    ints[INT_BYTES] = size * INT_BYTES_EACH
    words[WORD_USER] = user
    return ints, words


@inline
def write_copies(state, address, first_block):
    """Write the plan's copies. Returns the bytes written."""
    size = copies_ints(state)
    if size == 0:
        return 0
    ints, _ = begin_record(address, size, OP_COPY_BLOCKS, 0, 0)
    for k in range(state.header[COPY_COUNT] * COPY_WORDS):
        ints[INTS_HEADER + k] = first_block + state.copies[k]
    return padded_ints(size) * INT_BYTES_EACH


@inline
def write_step(state, slots, token_ids, address, k, first_block):
    """Write row `k`. Returns the bytes written."""
    row = k * ROW_WORDS
    sequence = state.rows[row + ROW_SEQUENCE]
    size = step_ints(state, row)
    ints, words = begin_record(address, size, OP_STEP, STEP_EMITS if state.rows[row + ROW_EMITS] != 0 else 0, k)
    new_tokens = state.rows[row + ROW_NEW]
    blocks = context_blocks(state, row)
    slot = sequence * SLOT_WORDS
    words[WORD_SEQUENCE] = sequence
    words[WORD_SEED] = state.seeds[sequence]
    ints[INT_CONTEXT] = state.rows[row + ROW_CONTEXT]
    ints[INT_NEW] = new_tokens
    ints[INT_BLOCKS] = blocks
    ints[INT_STEP_RESERVED] = 0
    words[WORD_TEMPERATURE] = slots[slot + SLOT_TEMPERATURE]  # float64, whose bits are copied
    words[WORD_TOP_P] = slots[slot + SLOT_TOP_P]
    words[WORD_TOP_K] = slots[slot + SLOT_TOP_K]
    words[WORD_STEP_RESERVED] = 0
    table = sequence * state.header[BLOCKS_PER_SEQUENCE]
    for b in range(blocks):
        ints[INTS_STEP + b] = first_block + state.block_tables[table + b]
    offset = state.rows[row + ROW_OFFSET]
    for t in range(new_tokens):
        ints[INTS_STEP + blocks + t] = token_ids[offset + t]
    return padded_ints(size) * INT_BYTES_EACH


@kernel("int64(intp, intp, intp, int64, int64)")
def encode_plan(state_address, segment_address, ring_address, ring_bytes, first_block):
    """Write the present plan as records: its copies, if it has any, then a STEP for each row; its index is its `user`.

    The plan's token tables are filled. Returns the bytes written; or, if there is room for `ring_bytes` only, minus the
    bytes that it takes, and nothing is written.
    """
    state = open_state(state_address)
    needed = plan_bytes(state)
    if needed > ring_bytes:
        return -needed
    slots = open_shared(segment_address).slots
    token_ids = open_plan_tokens(state_address).token_ids
    address = ring_address + write_copies(state, ring_address, first_block)
    for k in range(state.header[ROW_COUNT]):
        address += write_step(state, slots, token_ids, address, k, first_block)
    return needed


@kernel("int64(intp, intp, int64)")
def decode_tokens(state_address, results_address, rows):
    """Fill the plan's output from a TOKENS record for each row. Returns how many tokens there are.

    -1 - row: the device's answer to this row is not one. Each record is wiped as it is read: one that a device has not
    written must not be taken for that of an earlier batch.
    """
    state = open_state(state_address)
    address = results_address
    total = 0
    for k in range(rows):
        row = k * ROW_WORDS
        emits = state.rows[row + ROW_EMITS]
        size = INTS_TOKENS + emits
        ints = int32_table(address, padded_ints(size))
        words = word_table(address, padded_ints(size) >> 1)
        is_answer = (
            ints[INT_OP_FLAGS] == OP_TOKENS
            and ints[INT_BYTES] == size * INT_BYTES_EACH
            and words[WORD_USER] == k
            and words[WORD_TOKENS_SEQUENCE] == state.rows[row + ROW_SEQUENCE]
            and ints[INT_COUNT] == emits
        )
        if not is_answer:
            return -1 - k
        ints[INT_OP_FLAGS] = 0
        state.output_counts[k] = emits
        if emits != 0:
            token_id = ints[INTS_TOKENS]
            if token_id < 0:
                return -1 - k
            state.output_tokens[total] = token_id
            total += 1
        address += padded_ints(size) * INT_BYTES_EACH
    return total

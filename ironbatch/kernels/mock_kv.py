"""The mock's KV: token ids in paged host memory, and tokens that depend on what is read back from it.

A token's "KV" is its id. It is written where `kv_slot_mapping` says and read back through the block table, and the
emitted token is drawn from a hash of all that was read. So a wrong table entry, a missed copy, a block that was handed
on too early or a position that was never computed gives another token than the request alone does, as it would on a
device; and what the request alone gives is known (`mock_kv_tokens`).

The memory is one table of int32: `block_size` ids a block, then one flag a block, which says that all of it is POISON.
"""

from __future__ import annotations

import numpy as np

from ironbatch.kernels.emission import mix, prefill_tokens_of, step_ns, token_of
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
from ironbatch.kernels.state import (
    BLOCK_SHIFT,
    BLOCK_SIZE,
    BLOCKS_PER_SEQUENCE,
    COPY_COUNT,
    EOS_TOKEN_ID,
    NUM_BLOCKS,
    ROW_COUNT,
    open_plan_tokens,
    open_state,
)
from ironbatch.kernels.tables import int32_table

POISON = -0x5EAD
"""What stands where nothing was written; no token is negative."""

HASH_SEED = np.uint64(0x243F6A8885A308D3)
"""Of an empty context: digits of pi."""

_HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)


@inline
def extend_hash(hashed, token_id):
    """The hash of a context one token longer: multiply and xorshift, so that the order counts."""
    hashed = (hashed ^ np.uint64(token_id)) * _HASH_FACTOR
    return hashed ^ (hashed >> np.uint64(32))


@inline
def token_after(seed, context_tokens, hashed, eos_token_id, eos_threshold):
    """The token after a context of that length and hash."""
    return token_of(mix(np.uint64(seed) ^ hashed, context_tokens), eos_token_id, eos_threshold)


@kernel("int64(int64, int32[::1], int64, int64, int64, int64)")
def mock_kv_tokens(seed, context, prompt_tokens, count, eos_token_id, eos_threshold):
    """Write the `count` tokens that follow a prompt behind it, as the request alone determines them. Returns `count`.

    `context` holds the prompt's ids, zeros for a prompt of which only the length is known, and then room.
    """
    hashed = HASH_SEED
    for position in range(prompt_tokens):
        hashed = extend_hash(hashed, context[position])
    for position in range(prompt_tokens, prompt_tokens + count):
        context[position] = token_after(seed, position, hashed, eos_token_id, eos_threshold)
        hashed = extend_hash(hashed, context[position])
    return count


@inline
def poison(kv, start, end):
    """Overwrite places start <= p < end."""
    for place in range(start, end):
        kv[place] = POISON


@inline
def poison_free_blocks(header, refcounts, kv, flags):
    """What nobody holds and the cache does not keep is anybody's: nothing may still be read from it."""
    size = header[BLOCK_SIZE]
    for block in range(header[NUM_BLOCKS]):
        if refcounts[block] == 0 and kv[flags + block] == 0:
            poison(kv, block * size, (block + 1) * size)
            kv[flags + block] = 1


@inline
def copy_blocks(header, copies, kv, flags):
    """The plan's copies, in order."""
    size = header[BLOCK_SIZE]
    for k in range(header[COPY_COUNT]):
        source = copies[k * COPY_WORDS]
        target = copies[k * COPY_WORDS + 1]
        for offset in range(size):
            kv[target * size + offset] = kv[source * size + offset]
        kv[flags + target] = kv[flags + source]


@inline
def write_tokens(header, tokens, first, end, kv, flags):
    """Write the plan's new tokens first <= i < end where the mapping says."""
    shift = header[BLOCK_SHIFT]
    size = header[BLOCK_SIZE]
    for i in range(first, end):
        place = tokens.kv_slot_mapping[i]
        block = place >> shift
        if place == block << shift and kv[flags + block] == 0:
            # Whoever had the block until this step has left something behind in it.
            poison(kv, place + 1, place + size)
        kv[flags + block] = 0
        kv[place] = tokens.token_ids[i]


@inline
def hash_context(header, block_tables, sequence, context_tokens, kv):
    """The hash of positions 0 <= p < context_tokens, as the block table finds them."""
    size = header[BLOCK_SIZE]
    entry = sequence * header[BLOCKS_PER_SEQUENCE]
    hashed = HASH_SEED
    left = context_tokens
    while left > 0:
        start = np.int64(block_tables[entry]) * size
        for place in range(start, start + min(left, size)):
            hashed = extend_hash(hashed, kv[place])
        entry += 1
        left -= size
    return hashed


@kernel("int64(intp, intp, int64, int64, int64, int64, int64)")
def mock_kv_execute(state_address, kv_address, eos_threshold, base_ns, prefill_token_ns, sequence_ns, kv_token_ns):
    """Compute the plan in the memory at `kv_address`; its token tables are filled. Returns what `mock_execute` does.

    As on a device: copies, then everything is written, then the contexts are read.
    """
    state = open_state(state_address)
    header = state.header
    tokens = open_plan_tokens(state_address)
    flags = header[NUM_BLOCKS] * header[BLOCK_SIZE]  # where they begin
    kv = int32_table(kv_address, flags + header[NUM_BLOCKS])
    poison_free_blocks(header, state.refcounts, kv, flags)
    copy_blocks(header, state.copies, kv, flags)
    rows = header[ROW_COUNT]
    for k in range(rows):
        offset = state.rows[k * ROW_WORDS + ROW_OFFSET]
        write_tokens(header, tokens, offset, offset + state.rows[k * ROW_WORDS + ROW_NEW], kv, flags)
    emitted = 0
    prefill_tokens = 0
    kv_tokens = 0
    for k in range(rows):
        row = k * ROW_WORDS
        context = state.rows[row + ROW_CONTEXT]
        prefill_tokens += prefill_tokens_of(state.rows[row + ROW_NEW])
        kv_tokens += context
        if state.rows[row + ROW_EMITS] != 0:
            sequence = state.rows[row + ROW_SEQUENCE]
            hashed = hash_context(header, state.block_tables, sequence, context, kv)
            token = token_after(state.seeds[sequence], context, hashed, header[EOS_TOKEN_ID], eos_threshold)
            state.output_tokens[emitted] = token
            emitted += 1
    return step_ns(rows, prefill_tokens, kv_tokens, base_ns, prefill_token_ns, sequence_ns, kv_token_ns)

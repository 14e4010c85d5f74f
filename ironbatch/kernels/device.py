"""What the reference device computes: whether a batch's records are sound, and the batch.

The records are a private copy, since the client may write its ring at any time. `check_batch` believes nothing in them;
`run_batch` believes all of it, for it has been checked.

A position's KV is its token id, an int32; `block_tokens` of them make a block. The next token comes from a hash of the
whole context, read back through the block ids, as in `kernels/mock_kv.py`.
"""

from __future__ import annotations

import numpy as np

from ironbatch.kernels.atomics import store_release
from ironbatch.kernels.device_records import (
    FLAGS_SHIFT,
    HEADER,
    INT_BLOCKS,
    INT_BYTES,
    INT_CONTEXT,
    INT_COUNT,
    INT_NEW,
    INT_OP_FLAGS,
    INT_RESET_COUNT,
    INT_STEP_RESERVED,
    INT_TOKENS_RESERVED,
    INTS_HEADER,
    INTS_STEP,
    INTS_TOKENS,
    OP_COPY_BLOCKS,
    OP_MASK,
    OP_STEP,
    OP_TOKENS,
    OP_ZERO_BLOCKS,
    RECORD_ALIGN,
    STATUS,
    STEP,
    STEP_EMITS,
    TOKENS,
    WORD_FAILED,
    WORD_SEED,
    WORD_SEQUENCE,
    WORD_SIGNALED,
    WORD_STEP_RESERVED,
    WORD_TOKENS_SEQUENCE,
    WORD_USER,
)
from ironbatch.kernels.jit import inline, kernel, subroutine
from ironbatch.kernels.mock_kv import HASH_SEED, POISON, extend_hash, token_after
from ironbatch.kernels.tables import int32_table, word_table

INT_BYTES_EACH = 4
HEADER_BYTES = HEADER.itemsize
STEP_BYTES = STEP.itemsize
TOKENS_BYTES = TOKENS.itemsize
STATUS_WORDS = STATUS.itemsize // 8
U32 = 0xFFFFFFFF

# What is wrong with a record; 0: nothing.
BAD_SIZE = 1  # value: its bytes; limit: what they should be, or the bytes that are left
BAD_OP = 2
BAD_FLAGS = 3
BAD_RESERVED = 4
BAD_CONTEXT = 5  # no tokens
BAD_NEW = 6  # none, or more than the context
BAD_BLOCK_COUNT = 7  # limit: what it should be
BAD_BLOCK = 8  # not of this context; item: its index among the record's ids
BAD_TOKEN = 9  # negative; item: its index among the record's ids, which begin with those of blocks

# What `check_batch` writes: the first fault, and what the batch holds. Words.
(
    PROBLEM,
    RECORD,  # its index in the batch
    ITEM,  # -1: none
    VALUE,
    LIMIT,
    STEPS,
    NEW_TOKENS,
    PREFILLS,  # steps of several tokens, or that emit none
    LONGEST_CONTEXT,
    COPIES,  # records of copies
    ZEROS,  # records of zeros
    VERDICT_WORDS,
) = range(12)


@inline
def unsigned(word):
    """A uint32 that was read as an int32."""
    return word & U32


@inline
def padded(size):
    """A record's size, padded, where the next one begins."""
    return (size + RECORD_ALIGN - 1) // RECORD_ALIGN * RECORD_ALIGN


@inline
def blame(verdict, problem, item, value, limit):
    """Write down what is wrong. Returns `problem`."""
    verdict[PROBLEM] = problem
    verdict[ITEM] = item
    verdict[VALUE] = value
    verdict[LIMIT] = limit
    return problem


@subroutine
def check_blocks(ints, first, count, owners, num_blocks, owner, verdict):
    """Whether the `count` ids from `first` on are blocks of `owner`."""
    for k in range(count):
        block = unsigned(ints[first + k])
        if block >= num_blocks or owners[block] != owner:
            return blame(verdict, BAD_BLOCK, k, block, num_blocks)
    return 0


@subroutine
def check_step(ints, words, owners, num_blocks, owner, block_tokens, verdict):
    """Whether a STEP record is sound; `ints` and `words` are its own, and INT_BYTES of them exist."""
    size = unsigned(ints[INT_BYTES])
    if size < STEP_BYTES:
        return blame(verdict, BAD_SIZE, -1, size, STEP_BYTES)
    if ints[INT_STEP_RESERVED] != 0 or words[WORD_STEP_RESERVED] != 0:
        return blame(verdict, BAD_RESERVED, -1, 0, 0)
    context = unsigned(ints[INT_CONTEXT])
    new = unsigned(ints[INT_NEW])
    blocks = unsigned(ints[INT_BLOCKS])
    if context == 0:
        return blame(verdict, BAD_CONTEXT, -1, 0, 0)
    if new == 0 or new > context:
        return blame(verdict, BAD_NEW, -1, new, context)
    needed = (context + block_tokens - 1) // block_tokens
    if blocks != needed:
        return blame(verdict, BAD_BLOCK_COUNT, -1, blocks, needed)
    expected = STEP_BYTES + (blocks + new) * INT_BYTES_EACH  # both below 2**32: no overflow
    if size != expected:
        return blame(verdict, BAD_SIZE, -1, size, expected)
    problem = check_blocks(ints, INTS_STEP, blocks, owners, num_blocks, owner, verdict)
    if problem != 0:
        return problem
    for k in range(new):
        token = ints[INTS_STEP + blocks + k]
        if token < 0:
            return blame(verdict, BAD_TOKEN, blocks + k, token, 0)
    verdict[STEPS] += 1
    verdict[NEW_TOKENS] += new
    verdict[LONGEST_CONTEXT] = max(verdict[LONGEST_CONTEXT], context)
    if new > 1 or unsigned(ints[INT_OP_FLAGS]) >> FLAGS_SHIFT & STEP_EMITS == 0:
        verdict[PREFILLS] += 1
    return 0


@subroutine
def check_block_list(ints, ids_each, owners, num_blocks, owner, verdict):
    """Whether a COPY_BLOCKS or ZERO_BLOCKS record is sound."""
    size = unsigned(ints[INT_BYTES])
    body = size - HEADER_BYTES
    if body % (ids_each * INT_BYTES_EACH) != 0:
        whole = body // (ids_each * INT_BYTES_EACH) * (ids_each * INT_BYTES_EACH)
        return blame(verdict, BAD_SIZE, -1, size, HEADER_BYTES + whole)
    return check_blocks(ints, INTS_HEADER, body // INT_BYTES_EACH, owners, num_blocks, owner, verdict)


@kernel("int64(intp, int64, intp, int64, int64, int64, intp)")
def check_batch(records_address, size_bytes, owners_address, num_blocks, owner, block_tokens, verdict_address):
    """Look at a batch's records, and write the verdict. Returns the problem of the first bad one, 0 if there is none.

    Args:
        records_address: of the private copy, at a multiple of 8, and as long as `size_bytes` padded to one.
        size_bytes: of the records.
        owners_address: int32[num_blocks], whose each block is.
        num_blocks: of the device.
        owner: who submits.
        block_tokens: positions of a block.
        verdict_address: int64[VERDICT_WORDS].
    """
    verdict = word_table(verdict_address, VERDICT_WORDS)
    owners = int32_table(owners_address, num_blocks)
    for k in range(VERDICT_WORDS):
        verdict[k] = 0
    start = 0
    while start < size_bytes:
        left = size_bytes - start
        if left < HEADER_BYTES:
            return blame(verdict, BAD_SIZE, -1, left, HEADER_BYTES)
        # Padding is looked at by nobody, so the tables are as long as what is left.
        ints = int32_table(records_address + start, left // INT_BYTES_EACH)
        words = word_table(records_address + start, left // RECORD_ALIGN)
        size = unsigned(ints[INT_BYTES])
        if size < HEADER_BYTES or size > left:
            return blame(verdict, BAD_SIZE, -1, size, left)
        op = ints[INT_OP_FLAGS] & OP_MASK
        flags = unsigned(ints[INT_OP_FLAGS]) >> FLAGS_SHIFT
        if flags != 0 and (op != OP_STEP or flags != STEP_EMITS):
            return blame(verdict, BAD_FLAGS, -1, flags, 0)
        if op == OP_STEP:
            problem = check_step(ints, words, owners, num_blocks, owner, block_tokens, verdict)
        elif op == OP_COPY_BLOCKS:
            problem = check_block_list(ints, 2, owners, num_blocks, owner, verdict)
            verdict[COPIES] += 1
        elif op == OP_ZERO_BLOCKS:
            problem = check_block_list(ints, 1, owners, num_blocks, owner, verdict)
            verdict[ZEROS] += 1
        else:
            problem = blame(verdict, BAD_OP, -1, op, 0)
        if problem != 0:
            return problem
        verdict[RECORD] += 1
        start += padded(size)
    return 0


@inline
def copy_record(ints, kv, block_ints):
    """The pairs of a COPY_BLOCKS record, in order."""
    for pair in range((unsigned(ints[INT_BYTES]) - HEADER_BYTES) // (2 * INT_BYTES_EACH)):
        source = unsigned(ints[INTS_HEADER + 2 * pair]) * block_ints
        target = unsigned(ints[INTS_HEADER + 2 * pair + 1]) * block_ints
        for offset in range(block_ints):
            kv[target + offset] = kv[source + offset]


@inline
def zero_record(ints, kv, block_ints):
    """The blocks of a ZERO_BLOCKS record."""
    for k in range((unsigned(ints[INT_BYTES]) - HEADER_BYTES) // INT_BYTES_EACH):
        place = unsigned(ints[INTS_HEADER + k]) * block_ints
        for offset in range(block_ints):
            kv[place + offset] = 0


@inline
def write_record(ints, kv, block_ints):
    """The new tokens of a STEP record, each at its position."""
    context = unsigned(ints[INT_CONTEXT])
    new = unsigned(ints[INT_NEW])
    tokens = INTS_STEP + unsigned(ints[INT_BLOCKS])
    for k in range(new):
        position = context - new + k
        block = unsigned(ints[INTS_STEP + position // block_ints])
        kv[block * block_ints + position % block_ints] = ints[tokens + k]


@inline
def hash_record(ints, kv, block_ints):
    """The hash of a STEP record's whole context, as its block ids find it."""
    hashed = HASH_SEED
    left = unsigned(ints[INT_CONTEXT])
    entry = INTS_STEP
    while left > 0:
        start = unsigned(ints[entry]) * block_ints
        for place in range(start, start + min(left, block_ints)):
            hashed = extend_hash(hashed, kv[place])
        entry += 1
        left -= block_ints
    return hashed


@inline
def write_result(result_address, ints, words, kv, block_ints):
    """The TOKENS record of a STEP record. Returns its size, padded."""
    emits = ints[INT_OP_FLAGS] >> FLAGS_SHIFT & STEP_EMITS
    size = TOKENS_BYTES + emits * INT_BYTES_EACH
    result = int32_table(result_address, padded(size) // INT_BYTES_EACH)
    result_words = word_table(result_address, padded(size) // RECORD_ALIGN)
    result[INT_OP_FLAGS] = OP_TOKENS
    result[INT_BYTES] = size
    result_words[WORD_USER] = words[WORD_USER]
    result_words[WORD_TOKENS_SEQUENCE] = words[WORD_SEQUENCE]
    result[INT_COUNT] = emits
    result[INT_TOKENS_RESERVED] = 0
    if emits != 0:
        hashed = hash_record(ints, kv, block_ints)
        result[INTS_TOKENS] = token_after(words[WORD_SEED], unsigned(ints[INT_CONTEXT]), hashed, -1, 0)
        result[INTS_TOKENS + 1] = 0
    return padded(size)


@kernel("int64(intp, int64, intp, int64, int64, intp)")
def run_batch(records_address, size_bytes, kv_address, num_blocks, block_tokens, results_address):
    """Run records that `check_batch` has passed: all copies, zeros and writes in order, then a result for each STEP.

    Args:
        records_address: as for `check_batch`.
        size_bytes: likewise.
        kv_address: of the device's block 0.
        num_blocks: of the device.
        block_tokens: positions of a block.
        results_address: where the TOKENS go, at a multiple of 8.

    Returns:
        The bytes of the results.
    """
    kv = int32_table(kv_address, num_blocks * block_tokens)
    start = 0
    while start < size_bytes:
        ints = int32_table(records_address + start, (size_bytes - start) // INT_BYTES_EACH)
        op = ints[INT_OP_FLAGS] & OP_MASK
        if op == OP_COPY_BLOCKS:
            copy_record(ints, kv, block_tokens)
        elif op == OP_ZERO_BLOCKS:
            zero_record(ints, kv, block_tokens)
        else:
            write_record(ints, kv, block_tokens)
        start += padded(unsigned(ints[INT_BYTES]))
    start = 0
    written = 0
    while start < size_bytes:
        ints = int32_table(records_address + start, (size_bytes - start) // INT_BYTES_EACH)
        words = word_table(records_address + start, (size_bytes - start) // RECORD_ALIGN)
        if ints[INT_OP_FLAGS] & OP_MASK == OP_STEP:
            written += write_result(results_address + written, ints, words, kv, block_tokens)
        start += padded(unsigned(ints[INT_BYTES]))
    return written


@inline
def poison_block(kv, block, block_ints):
    """Write POISON all over a block."""
    for place in range(block * block_ints, (block + 1) * block_ints):
        kv[place] = POISON


@inline
def spoil_record(ints, kv, block_ints):
    """POISON wherever a record writes."""
    op = ints[INT_OP_FLAGS] & OP_MASK
    ids = (unsigned(ints[INT_BYTES]) - HEADER_BYTES) // INT_BYTES_EACH
    if op == OP_COPY_BLOCKS:
        for pair in range(ids // 2):
            poison_block(kv, unsigned(ints[INTS_HEADER + 2 * pair + 1]), block_ints)
    elif op == OP_ZERO_BLOCKS:
        for k in range(ids):
            poison_block(kv, unsigned(ints[INTS_HEADER + k]), block_ints)
    else:
        context = unsigned(ints[INT_CONTEXT])
        for position in range(context - unsigned(ints[INT_NEW]), context):
            block = unsigned(ints[INTS_STEP + position // block_ints])
            kv[block * block_ints + position % block_ints] = POISON


@kernel("int64(intp, int64, intp, int64, int64)")
def spoil_batch(records_address, size_bytes, kv_address, num_blocks, block_tokens):
    """What a batch that fails may do at its worst: wherever it would have written is POISON. Arguments as `run_batch`.

    Returns 0.
    """
    kv = int32_table(kv_address, num_blocks * block_tokens)
    start = 0
    while start < size_bytes:
        ints = int32_table(records_address + start, (size_bytes - start) // INT_BYTES_EACH)
        spoil_record(ints, kv, block_tokens)
        start += padded(unsigned(ints[INT_BYTES]))
    return 0


@kernel("int64(intp, int64, int64, int64)")
def write_status(status_address, signaled, failed, reset_count):
    """Write a status page, `signaled` last: whoever sees it sees all that was written before. Returns `signaled`."""
    page = word_table(status_address, STATUS_WORDS)
    ints = int32_table(status_address, STATUS_WORDS * 2)
    page[WORD_FAILED] = failed
    ints[INT_RESET_COUNT] = reset_count
    store_release(page, WORD_SIGNALED, signaled)
    return signaled


assert np.dtype(np.int32).itemsize == INT_BYTES_EACH

"""What stands in a device's mapped memory: the status page, and the records of a ring (docs/driver.md).

A batch is a run of records in the ring, each a header and a body, and each at a multiple of 8 bytes from the batch's
beginning. All integers are little-endian; nothing is padded implicitly. The C header `driver/ironbatch_ioctl.h`
declares the same structs, and `tests/driver/test_header.py` compares the two.

| op | body |
|---|---|
| STEP | STEP, then `block_count` block ids (uint32), then `new_tokens` token ids (int32) |
| COPY_BLOCKS | (source, target) pairs of block ids (uint32), in order |
| ZERO_BLOCKS | block ids (uint32) |
| TOKENS | TOKENS, then `count` token ids (int32); a result, one for each STEP, in their order |

Block ids are the device's own: the first of a claim, plus the engine's id.
"""

from __future__ import annotations

import numpy as np

OP_STEP = 1
OP_COPY_BLOCKS = 2
OP_ZERO_BLOCKS = 3
OP_TOKENS = 4

STEP_EMITS = 1
"""Flag of a STEP's header: the row reaches the end of its sequence, and is owed the next token."""

RECORD_ALIGN = 8

HEADER = np.dtype(
    [
        ("op", "<u2"),
        ("flags", "<u2"),
        ("bytes", "<u4"),  # of header and body; the next record begins at the next multiple of 8
        ("user", "<u8"),  # comes back in the STEP's TOKENS
    ]
)

STEP = np.dtype(
    [
        *((name, HEADER[name].str) for name in HEADER.names or ()),
        ("sequence", "<u8"),
        ("seed", "<u8"),
        ("context_tokens", "<u4"),  # positions after this step
        ("new_tokens", "<u4"),  # of these, the last so many are computed now; their ids follow the block ids
        ("block_count", "<u4"),  # the block table's first ceil(context_tokens / block_tokens) entries follow
        ("reserved0", "<u4"),
        ("temperature", "<f8"),
        ("top_p", "<f8"),
        ("top_k", "<i8"),  # 0: off
        ("reserved1", "<u8"),
    ]
)

TOKENS = np.dtype(
    [
        *((name, HEADER[name].str) for name in HEADER.names or ()),
        ("sequence", "<u8"),
        ("count", "<u4"),  # 0: the row does not emit
        ("reserved0", "<u4"),
    ]
)

STATUS = np.dtype(
    [
        ("signaled", "<u8"),  # the newest fence of this context whose batch is over; stored last, with release
        ("failed", "<u8"),  # the newest fence whose batch has failed; 0: none
        ("reset_count", "<u4"),
        ("reserved0", "<u4", (11,)),
    ]
)

assert HEADER.itemsize == 16
assert STEP.itemsize == 80
assert TOKENS.itemsize == 32
assert STATUS.itemsize == 64


def _word(dtype: np.dtype[np.void], name: str, size: int) -> int:
    fields = dtype.fields
    assert fields is not None
    assert fields[name][1] % size == 0
    return int(fields[name][1]) // size


# As kernels find them: INT... in a table of int32, WORD... in one of int64, both from the record's beginning.
INT_OP_FLAGS = _word(HEADER, "op", 4)  # op in its low half
INT_BYTES = _word(HEADER, "bytes", 4)
WORD_USER = _word(HEADER, "user", 8)
INTS_HEADER = HEADER.itemsize // 4

WORD_SEQUENCE = _word(STEP, "sequence", 8)
WORD_SEED = _word(STEP, "seed", 8)
INT_CONTEXT = _word(STEP, "context_tokens", 4)
INT_NEW = _word(STEP, "new_tokens", 4)
INT_BLOCKS = _word(STEP, "block_count", 4)
INT_STEP_RESERVED = _word(STEP, "reserved0", 4)
WORD_TEMPERATURE = _word(STEP, "temperature", 8)
WORD_TOP_P = _word(STEP, "top_p", 8)
WORD_TOP_K = _word(STEP, "top_k", 8)
WORD_STEP_RESERVED = _word(STEP, "reserved1", 8)
INTS_STEP = STEP.itemsize // 4

WORD_TOKENS_SEQUENCE = _word(TOKENS, "sequence", 8)
INT_COUNT = _word(TOKENS, "count", 4)
INT_TOKENS_RESERVED = _word(TOKENS, "reserved0", 4)
INTS_TOKENS = TOKENS.itemsize // 4

WORD_SIGNALED = _word(STATUS, "signaled", 8)
WORD_FAILED = _word(STATUS, "failed", 8)
INT_RESET_COUNT = _word(STATUS, "reset_count", 4)

FLAGS_SHIFT = 16
OP_MASK = 0xFFFF


def padded_bytes(size: int) -> int:
    """A record's size, padded."""
    return -(-size // RECORD_ALIGN) * RECORD_ALIGN


def step_bytes(blocks: int, new_tokens: int) -> int:
    """Size of a STEP record."""
    return padded_bytes(STEP.itemsize + 4 * (blocks + new_tokens))


def blocks_bytes(blocks: int) -> int:
    """Size of a COPY_BLOCKS or ZERO_BLOCKS record that names so many blocks."""
    return padded_bytes(HEADER.itemsize + 4 * blocks)


def tokens_bytes(count: int) -> int:
    """Size of a TOKENS record."""
    return padded_bytes(TOKENS.itemsize + 4 * count)

"""The driver's UAPI, version 1: ioctl numbers, their structs, flags. docs/driver.md says what each call does.

The same stands in C in `ironbatch_ioctl.h`; sizes, offsets and numbers are asserted here at import, and compared with
the header by tests. Variable data goes through the ring in the mapped memory (`kernels/device_records.py`), because an
ioctl copies no more than the size that its number states. (Linux's Documentation/driver-api/ioctl.rst)

An out-of-range value is an error, never wrapped: structs are packed by `struct`, not by ctypes.
"""

from __future__ import annotations

import struct
from collections import namedtuple
from typing import Any, Final, SupportsIndex

ABI_MAJOR: Final = 1
ABI_MINOR: Final = 0
SIGNATURE: Final = int.from_bytes(b"IBT1", "little")

MAGIC: Final = 0xBE
"""Free in Linux's Documentation/userspace-api/ioctl/ioctl-number.rst (looked at in December 2026: 0xBA is the next
below that is taken, 0xC0 the next above)."""

_WRITE, _READ = 1, 2  # as the caller sees it; include/uapi/asm-generic/ioctl.h
_SIZE_LIMIT = 1 << 14  # _IOC_SIZEBITS

_KINDS = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q", "s32": "i", "s64": "q"}


class FieldOutOfRange(ValueError):
    """A value does not fit its field; the message names struct, field, value and range."""


class Message:
    """The struct of one ioctl, and the ioctl's number.

    Args:
        name: such as "submit_batch"; the C struct is `ironbatch_submit_batch`, the request IRONBATCH_SUBMIT_BATCH.
        number: the request's `nr`.
        direction: _READ, _WRITE or both.
        size: in bytes, as the header says it.
        fields: lines of `kind name`; a kind is u8, u16, u32, u64, s32 or s64, with `[count]` for an array. An array of
            u8 is `bytes`, which zeros fill up, another one a tuple. `unpack` leaves out what is named reserved...
    """

    def __init__(self, name: str, number: int, direction: int, size: int, fields: str) -> None:
        self.name = name
        self.kinds: dict[str, tuple[str, int]] = {}
        self.offsets: dict[str, int] = {}
        offset = 0
        for line in fields.strip().splitlines():
            kind, field = line.split()
            base, _, count = kind.rstrip("]").partition("[")
            self.kinds[field] = base, int(count or 0)
            assert offset % struct.calcsize("<" + _KINDS[base]) == 0, f"{name}.{field} is padded implicitly"
            self.offsets[field] = offset
            offset += self.field_bytes(field)
        assert offset == size < _SIZE_LIMIT, f"{name} has {offset} bytes, not {size}"
        assert size % 8 == 0, f"{name} would be padded at its end"
        self.size = size
        self.request = direction << 30 | size << 16 | MAGIC << 8 | number
        self._format = struct.Struct("<" + "".join(self._code(field) for field in self.kinds))
        assert self._format.size == size
        self._arrays = frozenset(field for field, (_, count) in self.kinds.items() if count)
        self._zeros = list(self._format.unpack(bytes(size)))
        self._places = self._find_places()
        named = [field for field in self.kinds if not _is_reserved(field)]
        self._tuple = namedtuple(name, named)  # type: ignore[misc]  # noqa: PYI024
        self._returned = [self._places[field] for field in named]
        self._reserved = [
            (slice(self.offsets[field], self.offsets[field] + self.field_bytes(field)), bytes(self.field_bytes(field)))
            for field in self.kinds.keys() - set(named)
        ]

    def field_bytes(self, field: str) -> int:
        """The size of a field."""
        return struct.calcsize("<" + self._code(field))

    def __repr__(self) -> str:
        return f"<ioctl {self.name}>"

    def pack(self, **values: Any) -> bytearray:
        """A buffer of exactly `size` bytes; what is not named is zero.

        Raises:
            FieldOutOfRange: naming the field, its value and its range.
        """
        buffer = bytearray(self.size)
        self.pack_into(buffer, **values)
        return buffer

    def pack_into(self, buffer: bytearray, **values: Any) -> None:
        """`pack` into a buffer that is used again."""
        if self._arrays:
            for field in self._arrays.intersection(values):  # struct cuts long bytes off; a short tuple shifts the rest
                self._check(field, values[field])
        flat = self._zeros.copy()
        for field, value in values.items():
            flat[self._places[field]] = value
        try:
            self._format.pack_into(buffer, 0, *flat)
        except struct.error:
            for field, value in values.items():
                self._check(field, value)
            raise  # the buffer is too small

    def unpack(self, buffer: bytes | bytearray | memoryview) -> Any:
        """A namedtuple of the fields that are not reserved."""
        flat = self._format.unpack(buffer)
        return self._tuple(*[flat[place] for place in self._returned])

    def has_reserved_bits(self, buffer: bytes | bytearray | memoryview) -> bool:
        """Whether a reserved field is not zero, which a device refuses: a later version may mean something by it."""
        return any(buffer[place] != zeros for place, zeros in self._reserved)

    def _code(self, field: str) -> str:
        """As `struct` calls it."""
        base, count = self.kinds[field]
        if not count:
            return _KINDS[base]
        return f"{count}s" if base == "u8" else f"{count}{_KINDS[base]}"

    def _find_places(self) -> dict[str, int | slice]:
        """Where each field stands among the values that `struct` packs."""
        places: dict[str, int | slice] = {}
        position = 0
        for field, (base, count) in self.kinds.items():
            if count and base != "u8":
                places[field] = slice(position, position + count)
                position += count
            else:
                places[field] = position
                position += 1
        return places

    def _check(self, field: str, value: Any) -> None:
        """Raise FieldOutOfRange, unless the field can hold the value."""
        base, count = self.kinds[field]
        if count and base == "u8":
            if not isinstance(value, bytes | bytearray) or len(value) > count:
                raise FieldOutOfRange(f"{self.name}.{field}: {value!r} is not bytes, at most {count} of them")
            return
        if count and (not isinstance(value, tuple | list) or len(value) != count):
            raise FieldOutOfRange(f"{self.name}.{field}: {value!r} is not a tuple of {count} values")
        bits = int(base[1:])
        low, high = (0, 2**bits - 1) if base[0] == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        for item in value if count else (value,):
            if not isinstance(item, SupportsIndex) or not low <= item.__index__() <= high:
                raise FieldOutOfRange(f"{self.name}.{field}: {item!r} is not a whole number {low}..{high}")


def _is_reserved(field: str) -> bool:
    return field.startswith("reserved")


# ------------------------------------------------------------------------------------------------------------- messages

GET_INFO: Final = Message(
    "get_info",
    0x00,
    _WRITE | _READ,
    128,
    """
    u32 signature
    u16 abi_major
    u16 abi_minor
    u64 caps
    u32 num_blocks
    u32 block_bytes
    u32 block_tokens
    u32 reset_count
    u64 status_off
    u64 ring_off
    u64 ring_bytes
    u64 kv_off
    u64 kv_bytes
    u64 map_bytes
    u8[16] boot_id
    u32 longest_step_us
    s32 eos_token_id
    u64[3] reserved0
    """,
)

SUBMIT_BATCH: Final = Message(
    "submit_batch",
    0x01,
    _WRITE | _READ,
    64,
    """
    u64 batch_id
    u32 num_seqs
    u32 flags
    u32 ring_offset
    u32 ring_bytes
    u32 results_offset
    u32 results_bytes
    s64 deadline_ns
    u32 epoch
    u32 reserved0
    u64 fence
    u64 reserved1
    """,
)

WAIT_FENCE: Final = Message(
    "wait_fence",
    0x02,
    _WRITE | _READ,
    40,
    """
    u64 fence
    s64 deadline_ns
    u32 flags
    s32 status
    u64 signaled
    u64 reserved0
    """,
)

QUERY_FREE_BLOCKS: Final = Message(
    "query_free_blocks",
    0x03,
    _READ,
    16,
    """
    u32 free
    u32 total
    u32 used_by_fd
    u32 reserved0
    """,
)

CLAIM_BLOCKS: Final = Message(
    "claim_blocks",
    0x04,
    _WRITE | _READ,
    16,
    """
    u32 want
    u32 first
    u32 granted
    u32 flags
    """,
)

GET_MEM_PATH: Final = Message(
    "get_mem_path",
    0x05,
    _READ,
    128,
    """
    u64 st_dev
    u64 st_ino
    u64 size
    u8[104] path
    """,
)

RESET: Final = Message(
    "reset",
    0x06,
    _WRITE | _READ,
    16,
    """
    u32 flags
    u32 reset_count
    u64 reserved0
    """,
)

GET_ERROR: Final = Message(
    "get_error",
    0x07,
    _READ,
    128,
    """
    u64 fence
    s32 code
    u32 record
    u32 item
    u32 reset_count
    s64 value
    u8[96] message
    """,
)

GET_LIMITS: Final = Message(
    "get_limits",
    0x08,
    _READ,
    128,
    """
    u32 max_seqs
    u32 max_tokens
    u32 max_prefill_seqs
    u32 max_in_flight
    u64 max_batch_context
    u32 flags
    u32 reserved0
    u32[12] seq_buckets
    u32[12] token_buckets
    """,
)

MESSAGES: Final = (
    GET_INFO,
    SUBMIT_BATCH,
    WAIT_FENCE,
    QUERY_FREE_BLOCKS,
    CLAIM_BLOCKS,
    GET_MEM_PATH,
    RESET,
    GET_ERROR,
    GET_LIMITS,
)
BY_REQUEST: Final = {message.request: message for message in MESSAGES}
assert len(BY_REQUEST) == len(MESSAGES)

# ---------------------------------------------------------------------------------------------------------------- flags

CAP_MMAP: Final = 1 << 0
"""The node itself can be mapped; without it, the memory is the file that GET_MEM_PATH names."""
CAP_COPY: Final = 1 << 1
CAP_ZERO: Final = 1 << 2
CAP_RESET: Final = 1 << 3
CAPS: Final = {"mmap": CAP_MMAP, "copy": CAP_COPY, "zero": CAP_ZERO, "reset": CAP_RESET}

CLAIM_EXACT: Final = 1 << 0
"""All that is wanted, or nothing."""

LIMITS_NO_MIX: Final = 1 << 0
"""A batch holds decodes only or prefill chunks only."""

NO_DEADLINE: Final = 2**63 - 1

NO_INDEX: Final = 2**32 - 1
"""As GET_ERROR's record and item: none."""

assert GET_INFO.request == 0xC080BE00
assert SUBMIT_BATCH.request == 0xC040BE01
assert WAIT_FENCE.request == 0xC028BE02
assert QUERY_FREE_BLOCKS.request == 0x8010BE03
assert CLAIM_BLOCKS.request == 0xC010BE04
assert GET_MEM_PATH.request == 0x8080BE05
assert RESET.request == 0xC010BE06
assert GET_ERROR.request == 0x8080BE07
assert GET_LIMITS.request == 0x8080BE08

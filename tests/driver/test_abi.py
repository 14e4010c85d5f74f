"""The UAPI in Python: what fits goes through unchanged, what does not is an error, and docs/driver.md has it right."""

from __future__ import annotations

import errno
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ironbatch.driver import abi, faults, options
from ironbatch.driver.abi import FieldOutOfRange, Message
from ironbatch.driver.handle import GONE
from ironbatch.kernels import device_records as records

PAGE = Path(__file__).parents[2] / "docs" / "driver.md"
BITS = {"u8": 8, "u16": 16, "u32": 32, "u64": 64, "s32": 32, "s64": 64}
DIRECTIONS = {"R": 2, "W": 1, "WR": 3}
REFUSED = (1.5, "1", None, b"1", (1,), 1 + 0j)


def is_reserved(field: str) -> bool:
    return field.startswith("reserved")


ALL = [(message, field) for message in abi.MESSAGES for field in message.kinds]
SINGLE = [(message, field) for message, field in ALL if message.kinds[field][1] == 0]
BYTES = [(message, field) for message, field in ALL if message.kinds[field][0] == "u8"]
TUPLES = [(message, field) for message, field in ALL if message.kinds[field][1] and message.kinds[field][0] != "u8"]


def names(cases: list[tuple[Message, str]]) -> list[str]:
    return [f"{message.name}.{field}" for message, field in cases]


def edges(message: Message, field: str) -> tuple[int, int]:
    """The least and the greatest value."""
    kind = message.kinds[field][0]
    bits = BITS[kind]
    return (0, 2**bits - 1) if kind[0] == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def field_of(message: Message, field: str, buffer: bytearray) -> bytes:
    offset = message.offsets[field]
    return bytes(buffer[offset : offset + message.field_bytes(field)])


def in_bytes(value: int, size: int) -> bytes:
    return value.to_bytes(size, "little", signed=value < 0)


# -------------------------------------------------------------------------------------------------------------- fields


@pytest.mark.parametrize(("message", "field"), SINGLE, ids=names(SINGLE))
def test_a_field_takes_its_edges_and_touches_nothing_else(message: Message, field: str) -> None:
    for value in edges(message, field):
        buffer = message.pack(**{field: value})
        size = message.field_bytes(field)
        assert field_of(message, field, buffer) == in_bytes(value, size)
        buffer[message.offsets[field] : message.offsets[field] + size] = bytes(size)
        assert not any(buffer)


@pytest.mark.parametrize(("message", "field"), SINGLE, ids=names(SINGLE))
def test_a_value_beyond_an_edge_is_an_error_that_names_it(message: Message, field: str) -> None:
    low, high = edges(message, field)
    for value in (low - 1, high + 1, 2**64 + 5, np.float64(1.0), *REFUSED):
        with pytest.raises(FieldOutOfRange) as caught:
            message.pack(**{field: value})
        assert str(caught.value) == f"{message.name}.{field}: {value!r} is not a whole number {low}..{high}"


@pytest.mark.parametrize(("message", "field"), TUPLES, ids=names(TUPLES))
def test_an_array_takes_exactly_its_length_and_each_of_its_edges(message: Message, field: str) -> None:
    low, high = edges(message, field)
    count = message.kinds[field][1]
    size = BITS[message.kinds[field][0]] // 8
    for index in range(count):
        values = [low] * count
        values[index] = high
        buffer = message.pack(**{field: tuple(values)})
        assert field_of(message, field, buffer) == b"".join(in_bytes(value, size) for value in values)
        for beyond in (low - 1, high + 1, 1.5, None):
            with pytest.raises(FieldOutOfRange, match=re.escape(f"{message.name}.{field}: {beyond!r} is not")):
                message.pack(**{field: (*values[:index], beyond, *values[index + 1 :])})
    for length in (0, count - 1, count + 1):
        with pytest.raises(FieldOutOfRange, match=rf"{message.name}\.{field}: .* is not a tuple of {count} values"):
            message.pack(**{field: (low,) * length})
    for value in (0, None, "1" * count, b"1" * count):
        with pytest.raises(FieldOutOfRange, match=rf"{message.name}\.{field}: .* is not a tuple of {count} values"):
            message.pack(**{field: value})


@pytest.mark.parametrize(("message", "field"), BYTES, ids=names(BYTES))
def test_bytes_are_filled_up_and_never_cut_off(message: Message, field: str) -> None:
    count = message.kinds[field][1]
    for length in (0, 1, count):
        buffer = message.pack(**{field: b"\xff" * length})
        assert field_of(message, field, buffer) == b"\xff" * length + bytes(count - length)
    for value in (b"x" * (count + 1), "x", None, 1, (1,) * count):
        with pytest.raises(
            FieldOutOfRange, match=rf"{message.name}\.{field}: .* is not bytes, at most {count} of them"
        ):
            message.pack(**{field: value})


def test_numpy_s_whole_numbers_are_whole_numbers() -> None:
    buffer = abi.WAIT_FENCE.pack(fence=np.uint64(7), deadline_ns=np.int64(-1), status=np.int32(-5))
    assert abi.WAIT_FENCE.unpack(buffer)[:4] == (7, -1, 0, -5)
    limits = abi.GET_LIMITS.unpack(abi.GET_LIMITS.pack(seq_buckets=tuple(np.arange(12, dtype=np.uint32))))
    assert limits.seq_buckets == tuple(range(12))
    with pytest.raises(FieldOutOfRange):
        abi.CLAIM_BLOCKS.pack(want=np.int64(-1))


def test_a_field_that_is_not_there_is_a_bug() -> None:
    with pytest.raises(KeyError):
        abi.RESET.pack(flag=1)


@pytest.mark.parametrize("message", abi.MESSAGES, ids=lambda message: message.name)
def test_a_buffer_of_another_size_is_a_bug(message: Message) -> None:
    with pytest.raises(struct.error):
        message.pack_into(bytearray(message.size - 1))
    for size in (message.size - 1, message.size + 1):
        with pytest.raises(struct.error):
            message.unpack(bytes(size))


def values_of(message: Message) -> st.SearchStrategy[dict[str, Any]]:
    """Values of all fields that are not reserved."""
    fields: dict[str, st.SearchStrategy[Any]] = {}
    for field, (kind, count) in message.kinds.items():
        if is_reserved(field):
            continue
        low, high = edges(message, field)
        if count and kind == "u8":
            fields[field] = st.binary(min_size=count, max_size=count)
        elif count:
            fields[field] = st.tuples(*[st.integers(low, high)] * count)
        else:
            fields[field] = st.integers(low, high)
    return st.fixed_dictionaries(fields)


@settings(max_examples=100)
@given(data=st.data(), message=st.sampled_from(abi.MESSAGES))
def test_what_is_packed_is_what_is_unpacked(data: st.DataObject, message: Message) -> None:
    values = data.draw(values_of(message))
    buffer = message.pack(**values)
    assert len(buffer) == message.size
    assert message.unpack(buffer)._asdict() == values
    assert message.unpack(memoryview(bytes(buffer)))._asdict() == values
    assert not message.has_reserved_bits(buffer)


def test_a_buffer_that_is_used_again_keeps_nothing() -> None:
    buffer = bytearray(b"\xff" * abi.SUBMIT_BATCH.size)
    abi.SUBMIT_BATCH.pack_into(buffer, fence=1)
    assert buffer == abi.SUBMIT_BATCH.pack(fence=1)
    assert abi.SUBMIT_BATCH.pack() == bytes(abi.SUBMIT_BATCH.size)


@pytest.mark.parametrize("message", abi.MESSAGES, ids=lambda message: message.name)
def test_every_reserved_bit_is_seen_and_no_other(message: Message) -> None:
    reserved = {
        byte
        for field in message.kinds
        if is_reserved(field)
        for byte in range(message.offsets[field], message.offsets[field] + message.field_bytes(field))
    }
    for byte in range(message.size):
        for bit in (0, 7):
            buffer = bytearray(message.size)
            buffer[byte] = 1 << bit
            for seen in (buffer, bytes(buffer), memoryview(buffer)):
                assert message.has_reserved_bits(seen) == (byte in reserved)
    assert not any(is_reserved(field) for field in message.unpack(bytes(message.size))._fields)


# ------------------------------------------------------------------------------------------------------------- numbers


def test_requests_are_what_linux_makes_of_direction_size_magic_and_number() -> None:
    """include/uapi/asm-generic/ioctl.h; gcc says the same in test_header.py."""
    for number, message in enumerate(abi.MESSAGES):
        assert message.request & 0xFF == number
        assert message.request >> 8 & 0xFF == abi.MAGIC
        assert message.request >> 16 & 0x3FFF == message.size
        assert message.request >> 30 in DIRECTIONS.values()
    assert len(abi.BY_REQUEST) == len(abi.MESSAGES)


@pytest.mark.parametrize("message", abi.MESSAGES, ids=lambda message: message.name)
def test_a_struct_is_never_padded_and_fits_an_ioctl(message: Message) -> None:
    assert message.size < 1 << 14
    assert message.size % 8 == 0
    end = 0
    for field, offset in message.offsets.items():
        assert offset == end
        assert offset % (BITS[message.kinds[field][0]] // 8) == 0
        end += message.field_bytes(field)
    assert end == message.size


@pytest.mark.parametrize(
    ("size", "fields", "complaint"),
    [
        (12, "u32 a\nu64 b", "padded implicitly"),
        (16, "u32 a", "has 4 bytes, not 16"),
        (4, "u32 a", "padded at its end"),
        (1 << 14, "u64[2048] a", "has 16384 bytes"),
    ],
)
def test_a_struct_that_breaks_the_rules_is_not_made(size: int, fields: str, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        Message("bad", 0, 3, size, fields)


def test_the_signature_reads_as_text() -> None:
    buffer = abi.GET_INFO.pack(signature=abi.SIGNATURE)
    assert buffer[:4] == b"IBT1"


def test_flags_are_single_bits_that_differ() -> None:
    caps = list(abi.CAPS.values())
    assert len({*caps}) == len(caps)
    for flag in (*caps, abi.CLAIM_EXACT, abi.LIMITS_NO_MIX, records.STEP_EMITS):
        assert flag > 0
        assert flag & (flag - 1) == 0


def test_record_sizes_are_padded_to_eight_bytes() -> None:
    assert [records.padded_bytes(size) for size in (0, 1, 8, 9)] == [0, 8, 8, 16]
    assert records.step_bytes(blocks=1, new_tokens=1) == 88
    assert records.step_bytes(blocks=1, new_tokens=2) == 96
    assert records.blocks_bytes(0) == 16
    assert records.blocks_bytes(3) == 32
    assert records.tokens_bytes(0) == 32
    assert records.tokens_bytes(1) == 40
    for dtype in (records.HEADER, records.STEP, records.TOKENS, records.STATUS):
        assert dtype.itemsize % records.RECORD_ALIGN == 0
        end = 0
        for name in dtype.names or ():
            kind, offset = dtype.fields[name][:2]  # type: ignore[index]
            assert offset == end
            assert offset % kind.base.itemsize == 0
            end += kind.itemsize
        assert end == dtype.itemsize


# ------------------------------------------------------------------------------------------------------ docs/driver.md


def section(title: str) -> str:
    """What stands under a heading, up to the next heading of any rank."""
    match = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#+ |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert match is not None, title
    return match.group(1)


def table(text: str, head: str) -> list[list[str]]:
    """The rows of the table whose head begins so."""
    lines = text.splitlines()
    (start,) = [index for index, line in enumerate(lines) if line.startswith(head)]
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def kind_of(kind: str, count: int) -> str:
    return f"{kind}[{count}]" if count else kind


def test_the_page_has_every_call() -> None:
    names_by_bits = {bits: name for name, bits in DIRECTIONS.items()}
    assert table(section("The calls"), "| nr |") == [
        [
            f"0x{message.request & 0xFF:02X}",
            message.name.upper(),
            names_by_bits[message.request >> 30],
            str(message.size),
            f"0x{message.request:08X}",
        ]
        for message in abi.MESSAGES
    ]
    assert f"Magic {abi.MAGIC:#X}".replace("0X", "0x") in section("The calls")


@pytest.mark.parametrize("message", abi.MESSAGES, ids=lambda message: message.name)
def test_the_page_has_every_field_of_a_call(message: Message) -> None:
    rows = table(section(message.name.upper()), "| offset |")
    assert [row[:3] for row in rows] == [
        [str(message.offsets[field]), kind_of(*message.kinds[field]), field] for field in message.kinds
    ]
    assert [row[3] == "0" for row in rows] == [is_reserved(field) for field in message.kinds]


def test_the_page_has_every_field_of_the_mapped_memory() -> None:
    kinds = {"<u2": "u16", "<u4": "u32", "<u8": "u64", "<i8": "s64", "<f8": "f64"}
    texts = section("Records")
    steps, tokens = texts.index("**STEP** computes"), texts.index("**TOKENS** stand")
    found = [
        [row[:3] for row in table(part, "| offset |")]
        for part in (section("Status page"), texts[:steps], texts[steps:tokens], texts[tokens:])
    ]
    for rows, dtype in zip(found, (records.STATUS, records.HEADER, records.STEP, records.TOKENS), strict=True):
        expected = []
        for name in dtype.names or ():
            kind, offset = dtype.fields[name][:2]  # type: ignore[index]
            expected.append([str(offset), kind_of(kinds[kind.base.str], kind.shape[0] if kind.shape else 0), name])
        assert rows == expected


def test_the_page_has_every_flag_and_op() -> None:
    flags = ("CAP_", "CLAIM_EXACT", "LIMITS_")
    values = {name: value for name, value in vars(abi).items() if name.startswith(flags)}
    values["STEP_EMITS"] = records.STEP_EMITS
    rows = table(section("Capabilities and flags"), "| flag |")
    assert {name: 1 << int(bit) for name, bit, *_ in rows} == values
    ops = {name: value for name, value in vars(records).items() if name.startswith("OP_") and name != "OP_MASK"}
    told = [row[0].split() for row in table(section("Records"), "| op |")]
    assert {f"OP_{name}": int(number) for number, name in told} == ops


def test_the_page_has_every_flag_of_the_node_with_its_default() -> None:
    told: dict[str, str] = {}
    for names_cell, defaults, _ in table(section("The reference node"), "| flag |"):
        flags = re.findall(r"`(--[a-z-]+)`", names_cell)
        values = defaults.split(", ")
        told |= zip(flags, values if len(values) == len(flags) else [defaults] * len(flags), strict=True)
    words = {"": "none", "false": "none", None: ""}
    special = {"--group": "own group", "--allow-other": "no"}
    assert told == {flag.text: special.get(flag.text, words.get(flag.default, flag.default)) for flag in options.FLAGS}
    assert [row[0].strip("`") for row in table(section("Faults"), "| kind |")] == list(faults.KINDS)


def test_the_page_names_only_errnos_that_there_are() -> None:
    named = set(re.findall(r"`(E[A-Z]+)`", PAGE.read_text()))
    assert len(named) > 15
    assert [name for name in named if not hasattr(errno, name)] == []
    gone = {errno.errorcode[code] for code in GONE}
    rows = table(section("Errors"), "| errno |")
    assert set(re.findall(r"`(E[A-Z]+)`", rows[-1][0])) == gone

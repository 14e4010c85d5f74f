"""The C header and its Python twins say the same, down to each byte; gcc and g++ are the judges."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from ironbatch.driver import abi
from ironbatch.kernels import device_records as records

HEADER = Path(abi.__file__).parent / "ironbatch_ioctl.h"
WARNINGS = ("-pedantic", "-Wall", "-Wextra", "-Werror", "-Wpadded")
COMPILERS = {"c": "gcc", "c++": "g++"}
RECORDS = {
    "ironbatch_record": records.HEADER,
    "ironbatch_step": records.STEP,
    "ironbatch_tokens": records.TOKENS,
    "ironbatch_status": records.STATUS,
}
RECORD_CONSTANTS = ("OP_STEP", "OP_COPY_BLOCKS", "OP_ZERO_BLOCKS", "OP_TOKENS", "STEP_EMITS", "RECORD_ALIGN")
NOT_IN_C = {"MESSAGES", "BY_REQUEST", "CAPS"}
"""Tables of abi.py; what stands in them is compared."""


@dataclass(frozen=True)
class Field:
    """A member of a struct, as Python has it."""

    name: str
    offset: int
    size: int
    is_array: bool
    kind: str  # u, s or f


def structs() -> dict[str, list[Field]]:
    """All structs by their names in C."""
    found = {
        f"ironbatch_{message.name}": [
            Field(name, message.offsets[name], message.field_bytes(name), count > 0, kind[0])
            for name, (kind, count) in message.kinds.items()
        ]
        for message in abi.MESSAGES
    }
    for struct, dtype in RECORDS.items():
        assert dtype.fields is not None
        found[struct] = [
            Field(in_c(struct, name), offset, kind.itemsize, kind.shape != (), kind.base.kind.replace("i", "s"))
            for name, (kind, offset) in dtype.fields.items()
        ]
    return found


def in_c(struct: str, field: str) -> str:
    """A record's first members are those of `header`."""
    in_header = struct in {"ironbatch_step", "ironbatch_tokens"} and field in (records.HEADER.names or ())
    return f"header.{field}" if in_header else field


def sizes() -> dict[str, int]:
    messages = {f"ironbatch_{message.name}": message.size for message in abi.MESSAGES}
    return messages | {struct: dtype.itemsize for struct, dtype in RECORDS.items()}


def constants() -> dict[str, int]:
    """All macros by their names in C."""
    plain = {name: value for name, value in vars(abi).items() if name.isupper() and name[0] != "_"}
    requests = {message.name.upper(): message.request for message in abi.MESSAGES}
    values = {name: value for name, value in plain.items() if name not in NOT_IN_C} | requests
    values |= {name: getattr(records, name) for name in RECORD_CONSTANTS}
    return {f"IRONBATCH_{name}": value for name, value in values.items()}


def assertions(language: str) -> str:
    """Everything that the header must say, as a source."""
    lines = [f"#define ASSERT {'_Static_assert' if language == 'c' else 'static_assert'}"]
    lines += [f'ASSERT(sizeof(struct {name}) == {size}, "size of {name}");' for name, size in sizes().items()]
    for struct, fields in structs().items():
        for field in fields:
            member = f"((struct {struct} *)0)->{field.name}"
            where = f"{struct}.{field.name}"
            lines.append(f'ASSERT(offsetof(struct {struct}, {field.name}) == {field.offset}, "offset of {where}");')
            lines.append(f'ASSERT(sizeof({member}) == {field.size}, "size of {where}");')
            element = f"__typeof__({member}{'[0]' if field.is_array else ''})"
            if field.name in {"path", "message"}:
                lines.append(
                    f'ASSERT(sizeof({element}) == 1, "element of {where}");'
                )  # char: its sign is the machine's
            elif field.kind != "f":
                lines.append(f'ASSERT((({element})-1 < 1) == {int(field.kind == "s")}, "sign of {where}");')
            elif language == "c":
                lines.append(f'ASSERT(__builtin_types_compatible_p({element}, double), "type of {where}");')
    lines += [f'ASSERT({name} == {value}ULL, "{name}");' for name, value in constants().items()]
    return "\n".join(lines)


def compile_source(folder: Path, text: str, language: str, standard: str, *options: str) -> str:
    """What the compiler complains of in a source that includes `folder`'s header, or ours if that has none."""
    compiler = COMPILERS[language]
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler}")
    source = folder / "check.txt"
    source.write_text(f'#include <stddef.h>\n#include "ironbatch_ioctl.h"\n{text}\nextern int something;\n')
    command = [compiler, "-x", language, f"-std={standard}", *WARNINGS, *options, "-c", "-o", "/dev/null"]
    result = subprocess.run(
        [*command, "-I", str(folder), "-I", str(HEADER.parent), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode == 0) == (not result.stderr), result.stderr
    return result.stderr


@pytest.mark.parametrize(
    ("language", "standard"), [("c", "gnu89"), ("c", "c99"), ("c", "c17"), ("c++", "c++98"), ("c++", "c++20")]
)
def test_it_compiles_without_a_warning(tmp_path: Path, language: str, standard: str) -> None:
    assert compile_source(tmp_path, "", language, standard) == ""


@pytest.mark.parametrize("language", ["c", "c++"])
def test_it_says_what_python_says(tmp_path: Path, language: str) -> None:
    assert compile_source(tmp_path, assertions(language), language, "c11" if language == "c" else "c++11") == ""


def test_so_it_does_for_32_bits(tmp_path: Path) -> None:
    if compile_source(tmp_path, "", "c", "c11", "-m32"):
        pytest.skip("this compiler does not compile for 32 bits")
    assert compile_source(tmp_path, assertions("c"), "c", "c11", "-m32") == ""


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("__u32 ring_offset;", "__u32 ring_first;", "ring_offset"),
        (
            "__u64 fence;           /* out: 1,",
            "__s64 fence;           /* out: 1,",
            "sign of ironbatch_submit_batch.fence",
        ),
        ("__s32 status;  ", "__u32 status;  ", "sign of ironbatch_wait_fence.status"),
        ("__u8 boot_id[16];", "__u8 boot_id[24];", "size of ironbatch_get_info"),
        ("_IOWR(IRONBATCH_MAGIC, 0x06", "_IOR(IRONBATCH_MAGIC, 0x06", "IRONBATCH_RESET"),
        ("double temperature;", "__u64 temperature;", "type of ironbatch_step.temperature"),
        ("#define IRONBATCH_OP_TOKENS 4", "#define IRONBATCH_OP_TOKENS 5", "IRONBATCH_OP_TOKENS"),
        ("#define IRONBATCH_CAP_ZERO (1ULL << 2)", "#define IRONBATCH_CAP_ZERO (1ULL << 4)", "IRONBATCH_CAP_ZERO"),
    ],
)
def test_a_header_that_says_otherwise_is_found(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    """The control: the tests above can fail."""
    text = HEADER.read_text()
    assert text.count(old) == 1
    (tmp_path / HEADER.name).write_text(text.replace(old, new))
    assert complaint in compile_source(tmp_path, assertions("c"), "c", "c11")


def test_two_fields_that_have_changed_places_are_found(tmp_path: Path) -> None:
    text = HEADER.read_text()
    lines = re.findall(r"\t__u32 (?:want|first);.*\n", text)
    swapped = text.replace("".join(lines), "".join(reversed(lines)))
    assert swapped != text
    (tmp_path / HEADER.name).write_text(swapped)
    assert "offset of ironbatch_claim_blocks.first" in compile_source(tmp_path, assertions("c"), "c", "c11")


def test_nothing_stands_in_it_that_python_does_not_know() -> None:
    text = HEADER.read_text()
    assert set(re.findall(r"^struct (\w+) \{", text, re.MULTILINE)) == structs().keys()
    defined = set(re.findall(r"^#define (\w+)", text, re.MULTILINE))
    assert defined - {"IRONBATCH_IOCTL_H", "IRONBATCH_ASSERT_SIZE"} == constants().keys()
    for struct, fields in structs().items():
        match = re.search(rf"^struct {struct} \{{\n(.*?)^\}};", text, re.MULTILINE | re.DOTALL)
        assert match is not None
        members = re.findall(r"^\t[\w ]+ (\w+)(?:\[\d+\])?;", match.group(1), re.MULTILINE)
        assert members == list(dict.fromkeys(field.name.partition(".")[0] for field in fields))


def test_every_struct_states_its_size_itself() -> None:
    stated = dict(re.findall(r"^IRONBATCH_ASSERT_SIZE\((\w+), (\d+)\);", HEADER.read_text(), re.MULTILINE))
    assert {name: int(size) for name, size in stated.items()} == sizes()


def test_every_field_that_the_device_fills_says_so() -> None:
    """`out` in the header; docs/driver.md has it from there."""
    for name in ("query_free_blocks", "get_mem_path", "get_error", "get_limits"):
        match = re.search(rf"^struct ironbatch_{name} \{{\n(.*?)^\}};", HEADER.read_text(), re.MULTILINE | re.DOTALL)
        assert match is not None
        lines = [line for line in match.group(1).splitlines() if "reserved" not in line]
        assert [line for line in lines if "/* out" not in line] == []

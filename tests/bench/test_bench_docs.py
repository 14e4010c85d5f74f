"""docs/benchmarking.md: its commands are valid, and its tables are complete."""

import re
import shlex
from pathlib import Path

import pytest

import ironbatch
from ironbatch.bench.flags import FLAGS
from ironbatch.bench.lengths import FORMS
from ironbatch.bench.open_loop import OVER_CAP
from ironbatch.bench.ramp import LATE_CLIENT_MS
from ironbatch.bench.timeline import MAX_BUCKETS
from ironbatch.bench.trace_format import FORMATS
from tests.bench.options import read_options

PAGE = (Path(ironbatch.__file__).parents[1] / "docs" / "benchmarking.md").read_text()
COMMANDS = re.findall(r"^    ironbatch bench (.*)$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_valid(command: str) -> None:
    assert read_options(*shlex.split(command))


def test_every_format_flag_and_limit_stands_there() -> None:
    lower = PAGE.lower()
    for known in FORMATS:
        assert all(f"`{column}`" in lower for column in known.columns), known.name
    for flag in FLAGS:
        assert flag.text in PAGE or flag.name == "url"
    assert all(f"`{form}`" in PAGE for form in FORMS)
    assert OVER_CAP in PAGE
    assert f"at most {LATE_CLIENT_MS:g} ms late" in PAGE
    assert f"at most {MAX_BUCKETS} buckets" in PAGE

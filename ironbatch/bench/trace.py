"""A trace file of arrival times, prompt lengths and output lengths, read a line at a time."""

import csv
import itertools
import json
import math
import os
import re
import stat
from collections.abc import Iterator
from typing import Final, NamedTuple, TextIO

from ironbatch.bench.trace_format import TraceFormat, detect_format, known_columns, lower_keys
from ironbatch.errors import ConfigError
from ironbatch.limits import Bound, quoted

MAX_LINE_CHARS: Final = 1_048_576
"""A Mooncake line holds a number for each 512 tokens of its prompt: far less than this."""


class TraceRow(NamedTuple):
    """One request of a trace. `arrival_ns` counts from the trace's first row, in the trace's own time."""

    arrival_ns: int
    prompt_tokens: int
    max_new_tokens: int


class Trace:
    """The trace at `path`: CSV with a header, or JSON lines; see `trace_format.FORMATS`.

    Every walk reads the file anew and keeps no row. A prompt of 0 tokens, as some public traces have them, is read as
    one of `prompt_bound.low`, and counted in `raised_prompts`, over all walks.
    """

    def __init__(self, path: str, prompt_bound: Bound, output_bound: Bound) -> None:
        self.path = path
        self.raised_prompts = 0
        self._prompt_bound = prompt_bound
        self._output_bound = output_bound

    def rows(self) -> Iterator[TraceRow]:
        """Yield the rows. Raises ConfigError naming file, line, value, limit and remedy."""
        try:
            if not stat.S_ISREG(os.stat(self.path).st_mode):  # a pipe would end before it is read a second time
                raise ConfigError([f"--trace: {self.path!r} is not a regular file; give one, such as a copy of it"])
            with open(self.path, encoding="utf-8-sig", newline="") as file:
                yield from self._read(file)
        except OSError as error:
            raise ConfigError(
                [f"--trace: {self.path!r} can't be read: {error.strerror or error}; give a file that can"]
            ) from None
        except UnicodeDecodeError as error:
            raise ConfigError(
                [f"--trace: {self.path!r} is not UTF-8 text ({error.reason}); unpack it first if it is compressed"]
            ) from None

    def _read(self, file: TextIO) -> Iterator[TraceRow]:
        found: TraceFormat | None = None
        first_s: float | None = None
        last_s = -math.inf
        for line, cells in _cells(file, self.path):
            if found is None or not cells.keys() >= set(found.columns):
                found = self._detect(line, cells)
            arrival_s = self._arrival_s(line, cells, found)
            first_s = arrival_s if first_s is None else first_s
            if arrival_s < last_s:
                raise self._problem(
                    line,
                    f"{found.arrival} {quoted(cells[found.arrival])} is before the line above; sort the file by it",
                )
            last_s = arrival_s
            prompt_tokens = self._tokens(line, found.prompt_tokens, cells, Bound(0, self._prompt_bound.high))
            self.raised_prompts += prompt_tokens < self._prompt_bound.low
            yield TraceRow(
                round((arrival_s - first_s) * 1e9),
                max(prompt_tokens, self._prompt_bound.low),
                self._tokens(line, found.output_tokens, cells, self._output_bound),
            )
        if found is None:
            raise ConfigError([f"--trace: {self.path!r} holds no requests; give a file with one a line"])

    def _detect(self, line: int, cells: dict[str, str]) -> TraceFormat:
        found = detect_format(cells)
        if found is None:
            shown = quoted(", ".join(cells))
            raise self._problem(line, f"columns {shown} are of no known trace; use those of {known_columns()}")
        return found

    def _arrival_s(self, line: int, cells: dict[str, str], found: TraceFormat) -> float:
        try:
            return found.read_arrival_s(cells[found.arrival])
        except ValueError as error:
            raise self._problem(line, f"{found.arrival} {error}; correct it, or take the line out") from None

    def _tokens(self, line: int, column: str, cells: dict[str, str], bound: Bound) -> int:
        text = re.sub(r"\.0*$", "", cells[column])  # pandas writes whole numbers so
        try:
            return bound.read(text)
        except ValueError as error:
            raise self._problem(line, f"{column} {error}, or take the line out") from None

    def _problem(self, line: int, text: str) -> ConfigError:
        return ConfigError([f"--trace: {self.path!r}, line {line}: {text}"])


def _cells(file: TextIO, path: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield each row with its line's number, by lower-case column name."""
    lines = _bounded_lines(file, path)
    first = next(lines, "")
    lines = itertools.chain([first], lines)
    return _json_cells(lines, path) if first.lstrip().startswith("{") else _csv_cells(lines, path)


def _bounded_lines(file: TextIO, path: str) -> Iterator[str]:
    line = 0
    while text := file.readline(MAX_LINE_CHARS + 1):
        line += 1
        if len(text) > MAX_LINE_CHARS:
            problem = f"it is longer than {MAX_LINE_CHARS} characters; give a trace with one request a line"
            raise ConfigError([f"--trace: {path!r}, line {line}: {problem}"])
        yield text


def _json_cells(lines: Iterator[str], path: str) -> Iterator[tuple[int, dict[str, str]]]:
    for line, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            problem = f"{quoted(text.strip())} is not a JSON object; put one on each line"
            raise ConfigError([f"--trace: {path!r}, line {line}: {problem}"])
        yield line, lower_keys(row)


def _csv_cells(lines: Iterator[str], path: str) -> Iterator[tuple[int, dict[str, str]]]:
    reader = csv.DictReader(lines, restkey="", restval="", strict=True)
    try:
        for row in reader:
            yield reader.line_num, lower_keys(row)
    except csv.Error as error:
        problem = f"{error}; write it as CSV with a comma between columns"
        raise ConfigError([f"--trace: {path!r}, line {reader.reader.line_num}: {problem}"]) from None

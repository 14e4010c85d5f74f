"""The log: one event one line in both formats, whatever is in it and whatever becomes of its reader."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ironbatch import line_writer, logs
from ironbatch.line_writer import LineWriter
from ironbatch.logs import JsonFormatter, LineFormatter, LineHandler, MessageFormatter, TextFormatter

MARKER = "UNMISTAKABLE-4711"
STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z"
REPOSITORY = Path(__file__).parents[1]


def record(message: str = "hello", *args: Any, level: int = logging.INFO, **fields: Any) -> logging.LogRecord:
    made = logging.LogRecord("ironbatch.test", level, __file__, 1, message, args, None)
    vars(made).update(fields)
    return made


def failure(raised: BaseException, cause: BaseException | None = None, **fields: Any) -> logging.LogRecord:
    """A record of an exception that was raised, and has a traceback."""
    try:
        raise raised from cause  # noqa: TRY301
    except BaseException as problem:
        return record("it failed", exc_info=(type(problem), problem, problem.__traceback__), **fields)


@contextlib.contextmanager
def in_request(name: str) -> Iterator[None]:
    token = logs.request_id.set(name)
    try:
        yield
    finally:
        logs.request_id.reset(token)


# ---------------------------------------------------------------------------------------------------------- formats


def test_a_text_line_says_when_how_bad_who_and_what() -> None:
    line = TextFormatter().format(record("%d of %s", 3, "four", level=logging.WARNING))
    assert re.fullmatch(rf"{STAMP} WARNING ironbatch\.test\[{os.getpid()}\]: 3 of four", line)


def test_a_json_line_has_the_documented_fields() -> None:
    event = json.loads(JsonFormatter().format(record("%d of %s", 3, "four")))
    assert list(event) == ["ts", "level", "logger", "pid", "message"]
    assert re.fullmatch(STAMP, event.pop("ts"))
    assert event == {"level": "info", "logger": "ironbatch.test", "pid": os.getpid(), "message": "3 of four"}


def test_time_is_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Kathmandu")
    time.tzset()
    try:
        event = json.loads(JsonFormatter().format(record(created=0.25)))
    finally:
        monkeypatch.undo()
        time.tzset()
    assert event["ts"] == "1970-01-01T00:00:00.250000Z"


def test_fields_of_an_event_and_the_request_id() -> None:
    with in_request("abc-1"):
        text = TextFormatter().format(record(slot=7))
        event = json.loads(JsonFormatter().format(record(slot=7)))
    assert text.endswith(": hello request_id=abc-1 slot=7")
    assert (event["request_id"], event["slot"]) == ("abc-1", 7)
    assert "request_id" not in json.loads(JsonFormatter().format(record()))


def test_an_event_may_name_another_request_than_the_running_one() -> None:
    with in_request("abc-1"):
        assert json.loads(JsonFormatter().format(record(request_id="xyz-2")))["request_id"] == "xyz-2"


def test_a_field_cannot_take_the_place_of_a_documented_one() -> None:
    assert json.loads(JsonFormatter().format(record(logger="forged", ts="forged")))["logger"] == "ironbatch.test"


def test_a_traceback_is_one_field_of_json_and_indented_lines_of_text() -> None:
    event = json.loads(JsonFormatter().format(failure(ValueError("first\nsecond"))))
    assert event["message"] == "it failed"
    assert event["exception"].startswith("Traceback (most recent call last):\n")
    assert event["exception"].endswith("ValueError: first\nsecond")
    head, *rows = TextFormatter().format(failure(ValueError("first\nsecond"))).split("\n")
    assert head.endswith(": it failed")
    assert all(row.startswith("    ") for row in rows)
    assert [rows[-2], rows[-1]] == ["    ValueError: first", "    second"]


@pytest.mark.parametrize(
    "formatter", [TextFormatter(), JsonFormatter(), MessageFormatter()], ids=["text", "json", "message"]
)
@given(text=st.text() | st.text("\r\n\0\x1b\x7f\x85\u2028\u2029\ud800 "))
def test_no_text_makes_two_lines_or_moves_the_cursor(formatter: LineFormatter, text: str) -> None:
    for made in (record("%s", text), record(text.replace("%", ""))):
        line = formatter.format(made)
        assert line.isprintable()
        assert len(f"{line}\n".encode().splitlines()) == 1


@given(text=st.text("\r\n\0\x1b\x85\u2028"))
def test_nor_does_a_field_or_an_exception(text: str) -> None:
    assert JsonFormatter().format(failure(ValueError(text), field=text)).isprintable()
    for row in TextFormatter().format(failure(ValueError(text), field=text)).split("\n")[1:]:
        assert row.startswith("    ")
        assert row.isprintable()


# ------------------------------------------------------------------------------------------------- what is not said


@pytest.mark.parametrize("formatter_class", [TextFormatter, JsonFormatter])
def test_hidden_text_of_exceptions(formatter_class: type[LineFormatter]) -> None:
    def raised() -> logging.LogRecord:
        try:
            try:
                raise KeyError(MARKER)  # noqa: TRY301
            except KeyError as problem:
                raise ValueError(f"bad {MARKER}") from problem
        except ValueError as problem:
            return record("failed: %s", problem, exc_info=(type(problem), problem, problem.__traceback__))

    formatter = formatter_class()
    assert MARKER in formatter.format(raised()), "the control"
    formatter.hides_text = True
    line = formatter.format(raised())
    assert MARKER not in line
    assert line.index("KeyError") < line.rindex("ValueError")
    assert "test_logs.py" in line, "where it was raised is still said"


def test_a_message_that_is_an_exception_is_hidden_too() -> None:
    formatter = TextFormatter()
    formatter.hides_text = True
    assert MARKER not in formatter.format(record(ValueError(MARKER)))  # type: ignore[arg-type]


def test_the_systems_words_are_no_request_text() -> None:
    formatter = TextFormatter()
    formatter.hides_text = True
    line = formatter.format(failure(OSError(24, MARKER)))
    assert "OSError: Too many open files" in line
    assert MARKER not in line


# ---------------------------------------------------------------------------------------------------------- writing


class Pipe:
    """A pipe whose reader reads when the test says so."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()

    def fill(self) -> None:
        os.set_blocking(self.writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(self.writer, b"x" * 512)
        os.set_blocking(self.writer, True)  # as a process finds it: whoever writes there must not be held up

    def read(self) -> bytes:
        """All that is there."""
        found = b""
        while select.select([self.reader], [], [], 0)[0] and (data := os.read(self.reader, 1 << 16)):
            found += data
        return found

    def close(self) -> None:
        for descriptor in (self.reader, self.writer):
            with contextlib.suppress(OSError):
                os.close(descriptor)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.close()


def handler_to(descriptor: int) -> LineHandler:
    return LineHandler(LineWriter(descriptor), TextFormatter())


@pytest.mark.parametrize("whose", ["ours", "another user's"])
def test_a_full_pipe_costs_lines_and_not_time(pipe: Pipe, whose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if whose != "ours":  # then it can't be opened anew
        monkeypatch.setattr(line_writer, "_reopened", lambda descriptor: None)
    pipe.fill()
    handler = handler_to(pipe.writer)
    started_s = time.monotonic()
    for _ in range(1000):
        handler.handle(record("lost"))
    assert time.monotonic() - started_s < 10, "a wait of its own for each line would take 50 s"
    assert b"lost" not in pipe.read()
    handler.handle(record("found"))
    first, second = pipe.read().decode().splitlines()
    assert "1000 lines of the log could not be written" in first
    assert second.endswith(": found")
    handler.close()


def test_a_line_that_was_cut_does_not_swallow_the_next(pipe: Pipe) -> None:
    writer = LineWriter(pipe.writer)
    assert not writer.try_write("a" * 200_000), "more than a pipe holds"
    pipe.read()
    assert writer.try_write("whole")
    assert pipe.read() == b"\nwhole\n"
    writer.close()


def test_a_long_line_to_a_reader_that_reads_is_whole(pipe: Pipe, tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(["cat"], stdin=pipe.reader, stdout=log):
        os.close(pipe.reader)
        writer = LineWriter(pipe.writer)
        assert writer.try_write("a" * 300_000)
        writer.close()
        os.close(pipe.writer)
    assert (tmp_path / "log").read_bytes() == b"a" * 300_000 + b"\n"


@pytest.mark.parametrize("becomes", ["gone before", "gone after"])
def test_a_pipe_without_a_reader(pipe: Pipe, becomes: str) -> None:
    if becomes == "gone before":
        os.close(pipe.reader)
    handler = handler_to(pipe.writer)
    if becomes == "gone after":
        os.close(pipe.reader)
    handler.handle(record("into nothing"))
    handler.close()


def test_a_full_disk() -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    handler = handler_to(descriptor)
    handler.handle(record("no room"))
    handler.close()
    os.close(descriptor)


def test_a_closed_descriptor() -> None:
    descriptor = os.open(os.devnull, os.O_WRONLY)
    os.close(descriptor)
    handler = handler_to(descriptor)
    handler.handle(record("nowhere"))
    handler.close()


def test_a_file_is_appended_to_where_others_have_written(tmp_path: Path) -> None:
    """Two processes that were started with `2>log` share its position."""
    descriptor = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    handlers = [handler_to(descriptor) for _ in range(2)]
    os.write(descriptor, b"a child's own\n")
    for handler in (*handlers, *handlers):
        handler.handle(record("mine"))
    os.close(descriptor)
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines[0] == "a child's own"
    assert len(lines) == 5


def test_a_socket_as_systemd_gives_one() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        handler = handler_to(ours.fileno())
        handler.handle(record("to the journal"))
        assert theirs.recv(4096).endswith(b": to the journal\n")
        started_s = time.monotonic()
        for _ in range(2000):
            handler.handle(record("y" * 1000))
        assert time.monotonic() - started_s < 10
        assert os.get_blocking(ours.fileno()), "it is shared with others"
        handler.close()


def test_a_message_that_cannot_be_formatted_is_said_to_be_so(pipe: Pipe) -> None:
    handler = handler_to(pipe.writer)
    handler.handle(record("%d", "no number"))
    assert b"a message could not be formatted about='%d'" in pipe.read()
    handler.close()


# ----------------------------------------------------------------------------------------------------- a whole process


def run(code: str, *, log_format: str, level: str = "info") -> str:
    """What a process of its own, configured so, has said on stderr."""
    start = f"import logging, warnings\nfrom ironbatch import logs\nlogs.configure({level!r}, {log_format!r})\n"
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    words = [sys.executable, "-c", start + code]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60, check=False)
    return done.stderr


def test_levels_are_of_our_own_loggers() -> None:
    code = """
logging.getLogger("ironbatch.web").debug("ours")
logging.getLogger("numba.core").debug("a flood")
logging.getLogger("numba.core").warning("theirs")
"""
    at_debug = run(code, log_format="text", level="debug")
    assert "ours" in at_debug
    assert "a flood" not in at_debug
    assert "theirs" in at_debug
    at_error = run(code, log_format="text", level="error")
    assert at_error == ""


def test_what_python_itself_would_print_is_an_event() -> None:
    told = run("warnings.warn('careful')\n1 / 0\n", log_format="json")
    warned, ended = map(json.loads, told.splitlines())
    assert (warned["level"], warned["logger"]) == ("warning", "py.warnings")
    assert "careful" in warned["message"]
    assert (ended["level"], ended["message"]) == ("critical", "a bug ends this process")
    assert ended["exception"].endswith("ZeroDivisionError: division by zero")


def test_configured_again_it_writes_once() -> None:
    code = "logs.configure('info', 'json')\nlogging.getLogger('ironbatch').info('once')\n"
    assert json.loads(run(code, log_format="text"))["message"] == "once"


@pytest.mark.parametrize(("log_format", "line"), [("text", "ironbatch: error: no room"), ("json", None)])
def test_what_ends_a_start_is_told_in_the_format(log_format: str, line: str | None) -> None:
    told = run("logs.complain(['no room'])\n", log_format=log_format)
    if line is None:
        event = json.loads(told)
        assert (event["level"], event["message"]) == ("error", "no room")
    else:
        assert told == line + "\n"


def test_asyncio_prints_no_task_and_no_text() -> None:
    code = f"""
import asyncio
async def fail(): raise ValueError("-".join({MARKER.split("-")}))
async def main():
    asyncio.get_running_loop().set_exception_handler(logs.log_loop_problem)
    task = asyncio.ensure_future(fail())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    del task
logs.hide_request_text()
asyncio.run(main())
"""
    event = json.loads(run(code, log_format="json"))
    assert event["message"] == "the event loop: Task exception was never retrieved"
    assert "ValueError" in event["exception"]
    assert MARKER not in str(event)

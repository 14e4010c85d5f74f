"""What every process of an engine logs, and how: one event is one line, on stderr, as text or as JSON.

Three things a server's log must not do, and the standard library's does:

- wait: a pipe whose reader has stopped would hold up the process that writes, and with it every stream. A line that
  cannot be written at once, or nearly so (line_writer.py), is lost, and the next one that can be says how many were;
- let a client write lines of its own: what is not printable is escaped, and a traceback's lines are indented;
- quote requests: the text of an exception may hold a piece of one. Web workers leave it out, see `hide_request_text`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final, TypeVar

from ironbatch.line_writer import LineWriter

STDOUT: Final = 1
STDERR: Final = 2

request_id: Final[ContextVar[str]] = ContextVar("request_id", default="")
"""Of the request that the running task answers; every line that it logs carries it."""

_HIDDEN: Final = "its text is not logged, since it may quote a request"
_MOST_LINKS: Final = 10  # of a chain of exceptions
_STANDARD_FIELDS: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


# ------------------------------------------------------------------------------------------------------- the format


class LineFormatter(logging.Formatter):
    """What the formats have in common.

    `hides_text`: leave out the text of exceptions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hides_text = False

    def told(self, record: logging.LogRecord) -> str:
        """The record's message."""
        if not self.hides_text:
            return record.getMessage()
        shown = logging.makeLogRecord(vars(record))
        shown.msg = _without_text(record.msg)
        if isinstance(record.args, tuple):
            shown.args = tuple(_without_text(value) for value in record.args)
        return shown.getMessage()

    def details(self, record: logging.LogRecord) -> str:
        """The traceback of its exception, and the stack that was asked for; many lines, or empty."""
        parts = []
        if record.exc_info and record.exc_info[1] is not None:
            parts.append(exception_text(record.exc_info[1], hides_text=self.hides_text))
        if record.stack_info:
            parts.append(record.stack_info)
        return "\n".join(parts)


class TextFormatter(LineFormatter):
    """`time LEVEL logger[pid]: message name=value`, then the lines of a traceback, indented."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={escaped(str(value))}" for name, value in event_fields(record).items())
        line = f"{timestamp(record)} {record.levelname} {record.name}[{record.process}]: {escaped(self.told(record))}"
        details = "".join(f"\n    {escaped(row)}" for row in self.details(record).split("\n") if row)
        return line + fields + details


class JsonFormatter(LineFormatter):
    """One JSON object of ASCII: ts, level, logger, pid, message, the event's fields, exception."""

    def format(self, record: logging.LogRecord) -> str:
        event = {
            "ts": timestamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": self.told(record),
        }
        event |= {name: value for name, value in event_fields(record).items() if name not in event}
        details = self.details(record)
        if details:
            event["exception"] = details
        return json.dumps(event, default=str)


class MessageFormatter(LineFormatter):
    """The message alone: gunicorn's access log, which has a format of its own."""

    def format(self, record: logging.LogRecord) -> str:
        return escaped(self.told(record))


def timestamp(record: logging.LogRecord) -> str:
    """RFC 3339, in UTC, to the microsecond."""
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def event_fields(record: logging.LogRecord) -> dict[str, Any]:
    """What the event was given beside its message (logging's `extra`), and the id of the request that it is about."""
    fields = {name: value for name, value in vars(record).items() if name not in _STANDARD_FIELDS}
    current = request_id.get()
    return {"request_id": current, **fields} if current else fields


def escaped(text: str) -> str:
    """On one line: what is not printable as Python would write it in a string."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def exception_text(problem: BaseException, *, hides_text: bool) -> str:
    """The traceback of an exception and of those that it came from, in lines; the first cause first."""
    if not hides_text:
        return "".join(traceback.format_exception(problem)).rstrip("\n")
    parts: list[str] = []
    link: BaseException | None = problem
    while link is not None and len(parts) < _MOST_LINKS:
        frames = "".join(traceback.format_tb(link.__traceback__))
        parts.append(f"{frames}{_without_text(link)}")
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return "\nwhich led to:\n".join(reversed(parts))


T = TypeVar("T")


def _without_text(value: T) -> T | str:
    """An exception by its type, and by the system's words for its errno; anything else as it is."""
    if not isinstance(value, BaseException):
        return value
    name = type(value).__qualname__
    if isinstance(value, OSError) and value.errno is not None:
        return f"{name}: {os.strerror(value.errno)}"
    return f"{name} ({_HIDDEN})" if str(value) else name


# ------------------------------------------------------------------------------------------------------ the writing


class LineHandler(logging.Handler):
    """Formats records and writes them; never raises, whatever becomes of them.

    Args:
        writer: where to.
        formatter: makes a line of a record.
    """

    def __init__(self, writer: LineWriter, formatter: LineFormatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._writer = writer
        self._lost_count = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # a bug of whoever logs must not become the server's
            line = self.format(_event(logging.ERROR, "a message could not be formatted", about=repr(record.msg)[:200]))
        if self._lost_count:
            notice = _event(logging.WARNING, f"{self._lost_count} lines of the log could not be written here")
            if not self._writer.try_write(self.format(notice)):
                self._lost_count += 1
                return
            self._lost_count = 0
        if not self._writer.try_write(line):
            self._lost_count += 1

    def close(self) -> None:
        """Write nothing more."""
        self._writer.close()
        super().close()


def _event(level: int, message: str, **fields: object) -> logging.LogRecord:
    record = logging.LogRecord("ironbatch.logs", level, __file__, 0, message, None, None)
    vars(record).update(fields)
    return record


# --------------------------------------------------------------------------------------------------------- the rest


def formatter_of(log_format: str) -> LineFormatter:
    """For `--log-format`."""
    return JsonFormatter() if log_format == "json" else TextFormatter()


def configure(level: str, log_format: str) -> None:
    """Set up this process's log; once more replaces what was set up.

    Args:
        level: of Ironbatch's own loggers. A library's messages below WARNING are for its own developers.
        log_format: text or json, as `--log-format`.
    """
    unconfigure()
    root = logging.getLogger()
    root.addHandler(LineHandler(LineWriter(STDERR), formatter_of(log_format)))
    number = logging.getLevelNamesMapping()[level.upper()]
    root.setLevel(max(number, logging.WARNING))
    logging.getLogger("ironbatch").setLevel(number)
    logging.captureWarnings(True)  # noqa: FBT003  positional only
    sys.excepthook = _log_uncaught


def unconfigure() -> None:
    """Undo it: what is logged goes where it went before."""
    root = logging.getLogger()
    for handler in list(_line_handlers(root)):
        root.removeHandler(handler)
        handler.close()
    root.setLevel(logging.WARNING)
    logging.getLogger("ironbatch").setLevel(logging.NOTSET)
    logging.captureWarnings(False)  # noqa: FBT003  positional only
    sys.excepthook = sys.__excepthook__


def hide_request_text(*names: str) -> None:
    """From now on this process reads requests: the root's handlers and these loggers' leave out exceptions' text."""
    for logger in (logging.getLogger(), *map(logging.getLogger, names)):
        for handler in logger.handlers:
            if isinstance(handler.formatter, LineFormatter):
                handler.formatter.hides_text = True


def log_loop_problem(loop: object, context: Mapping[str, Any]) -> None:
    """Asyncio's exception handler: its own would print the exception, and tasks with what they hold."""
    problem = context.get("exception")
    logging.getLogger("ironbatch.web").error("the event loop: %s", context["message"], exc_info=problem)


def announce(message: str) -> None:
    """Say something on stdout; as JSON where the log is JSON. That nobody can read it is no reason to stop."""
    line = JsonFormatter().format(_event(logging.INFO, message)) if _is_json() else f"ironbatch: {message}"
    writer = LineWriter(STDOUT)
    writer.try_write(line)
    writer.close()


def complain(problems: Sequence[str], *, level: int = logging.ERROR) -> None:
    """Tell the operator at the terminal; as JSON where the log is configured to be JSON."""
    for problem in problems:
        if _is_json():
            logging.getLogger("ironbatch").log(level, "%s", problem)
            continue
        with contextlib.suppress(OSError):  # nobody can read it
            print(f"ironbatch: {logging.getLevelName(level).lower()}: {problem}", file=sys.stderr)


def _is_json() -> bool:
    return any(isinstance(handler.formatter, JsonFormatter) for handler in _line_handlers(logging.getLogger()))


def _line_handlers(logger: logging.Logger) -> Iterator[LineHandler]:
    return (handler for handler in logger.handlers if isinstance(handler, LineHandler))


def _log_uncaught(kind: type[BaseException], problem: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, problem, trace)
        return
    logging.getLogger("ironbatch").critical("a bug ends this process", exc_info=(kind, problem, trace))

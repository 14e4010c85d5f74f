"""gunicorn's own messages in the engine's format, and as little in the way of the server as its."""

from __future__ import annotations

import logging
from logging.handlers import SysLogHandler
from typing import Any

from gunicorn.glogging import Logger

from ironbatch import logs
from ironbatch.line_writer import LineWriter


class GunicornLogger(Logger):  # type: ignore[misc]  # gunicorn has no annotations
    """gunicorn's logger, whose handlers write as `ironbatch/logs.py` does.

    The messages go where gunicorn's settings say (`errorlog`, `accesslog`, `syslog`). `log_format` is set by whoever
    makes the class known to gunicorn, which makes the object.
    """

    log_format = "text"

    def setup(self, cfg: Any) -> None:
        """At the start, and again at each HUP: gunicorn's handlers, then ours in place of those on a stream."""
        super().setup(cfg)
        access_formatter = logs.JsonFormatter() if self.log_format == "json" else logs.MessageFormatter()
        tag = f"gunicorn.{cfg.syslog_prefix or cfg.proc_name.replace(':', '.')}"
        _take_over(self.error_log, logs.STDERR, logs.formatter_of(self.log_format), f"{tag}.error: ")
        _take_over(self.access_log, logs.STDOUT, access_formatter, f"{tag}.access: ")


def _take_over(logger: logging.Logger, descriptor: int, formatter: logs.LineFormatter, syslog_tag: str) -> None:
    for handler in list(logger.handlers):
        if not getattr(handler, "_gunicorn", False):  # somebody's own, of a logging configuration
            continue
        if isinstance(handler, SysLogHandler):
            handler.ident = syslog_tag  # which gunicorn has in its format
            handler.setFormatter(formatter)
        elif isinstance(handler, logging.FileHandler):
            handler.setFormatter(formatter)
        elif type(handler) is logging.StreamHandler:
            ours = logs.LineHandler(LineWriter(descriptor), formatter)
            ours._gunicorn = True  # type: ignore[attr-defined]  # noqa: SLF001  by which gunicorn finds it at the next HUP
            logger.removeHandler(handler)
            logger.addHandler(ours)

"""gunicorn's messages in the engine's format, where gunicorn's settings say."""

from __future__ import annotations

import json
import logging
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gunicorn.config import Config

from ironbatch.logs import LineHandler, hide_request_text
from ironbatch.web.gunicorn_log import GunicornLogger

STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z"


@pytest.fixture
def logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., GunicornLogger]]:
    """Makes one with gunicorn's settings; what it has put into the logging module is gone afterwards."""
    names = ("gunicorn.error", "gunicorn.access")

    def make(log_format: str, **settings: Any) -> GunicornLogger:
        config = Config()
        for name, value in settings.items():
            config.set(name, value)
        monkeypatch.setattr(GunicornLogger, "log_format", log_format)
        return GunicornLogger(config)

    yield make
    for name in names:
        for handler in list(logging.getLogger(name).handlers):
            logging.getLogger(name).removeHandler(handler)
            handler.close()


def test_messages_go_to_stderr_as_lines(
    logger: Callable[..., GunicornLogger], capfd: pytest.CaptureFixture[str]
) -> None:
    made = logger("text")
    made.info("Booting worker with pid: %s", 7)
    made.error("two\nlines")
    first, second = capfd.readouterr().err.splitlines()
    assert re.fullmatch(rf"{STAMP} INFO gunicorn\.error\[\d+\]: Booting worker with pid: 7", first)
    assert second.endswith(r"two\nlines")


def test_as_json(logger: Callable[..., GunicornLogger], capfd: pytest.CaptureFixture[str]) -> None:
    logger("json").warning("careful")
    event = json.loads(capfd.readouterr().err)
    assert (event["level"], event["logger"], event["message"]) == ("warning", "gunicorn.error", "careful")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_the_access_log_goes_to_stdout(
    logger: Callable[..., GunicornLogger], log_format: str, capfd: pytest.CaptureFixture[str]
) -> None:
    made = logger(log_format, accesslog="-")
    made.access_log.info('%(h)s "%(r)s"', {"h": "::1", "r": "GET /a\nb HTTP/1.1"})
    (line,) = capfd.readouterr().out.splitlines()
    if log_format == "text":
        assert line == r'::1 "GET /a\nb HTTP/1.1"'
    else:
        assert json.loads(line)["message"] == '::1 "GET /a\nb HTTP/1.1"'


def test_a_file_has_the_format_too(logger: Callable[..., GunicornLogger], tmp_path: Path) -> None:
    logger("json", errorlog=str(tmp_path / "log")).info("hello")
    assert json.loads((tmp_path / "log").read_text())["message"] == "hello"


def test_a_reload_leaves_one_handler(logger: Callable[..., GunicornLogger], capfd: pytest.CaptureFixture[str]) -> None:
    made = logger("text", accesslog="-")
    made.setup(made.cfg)
    made.setup(made.cfg)
    for log in (made.error_log, made.access_log):
        assert len([handler for handler in log.handlers if isinstance(handler, LineHandler)]) == 1
    made.info("once")
    assert capfd.readouterr().err.count("once") == 1


def test_without_an_access_log_the_server_does_not_believe_that_there_is_one(
    logger: Callable[..., GunicornLogger],
) -> None:
    """Or each stream would take the slow way, see `web/wire.py`."""
    assert not logger("json").access_log_enabled
    assert logger("json", accesslog="-").access_log_enabled


MARKER = "UNMISTAKABLE-4711"


def fail(made: GunicornLogger) -> None:
    try:
        raise ValueError(MARKER[:])  # noqa: TRY301  the source line is no secret
    except ValueError as problem:
        made.exception("Error handling connection: %s", problem)


def test_no_way_out_quotes_a_request(logger: Callable[..., GunicornLogger], tmp_path: Path) -> None:
    """A file and syslog, beside the streams that `tests/test_logs.py` looks at."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as syslog:
        syslog.bind(str(tmp_path / "syslog"))
        syslog.settimeout(20)
        settings = {"errorlog": str(tmp_path / "log"), "syslog": True, "syslog_addr": f"unix://{tmp_path}/syslog#dgram"}
        made = logger("json", **settings, proc_name="ironbatch")
        fail(made)
        assert MARKER in syslog.recv(65536).decode(), "the control"
        hide_request_text("gunicorn.error", "gunicorn.access")
        fail(made)
        told = syslog.recv(65536).decode()
    assert "gunicorn.ironbatch.error: {" in told
    assert "ValueError" in told
    assert MARKER not in told
    control, hidden = (tmp_path / "log").read_text().splitlines()
    assert MARKER in control
    assert MARKER not in hidden

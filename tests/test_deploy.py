"""What deploy/ promises: the unit, against systemd's own checks and the code's constants; and gunicorn's settings."""

from __future__ import annotations

import asyncio
import gc
import importlib
import itertools
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import uvloop
from gunicorn.config import KNOWN_SETTINGS

from ironbatch.config import Config
from ironbatch.draining import ERROR_LINE_S, STOP_BEYOND_DRAIN_S
from ironbatch.errors import EXIT_FAILED, EXIT_USAGE
from ironbatch.health import HEALTH_GRACE_NS
from ironbatch.processes import RELOAD_SIGNALS
from ironbatch.scheduler.keeper import STOP_S
from ironbatch.service_manager import MIN_WATCHDOG_S
from tests.unit_file import PROGRAM, SYSTEMD_ANALYZE, UNIT, directives, seconds, value, values

DEPLOY = UNIT.parent
ROOT = DEPLOY.parent
MOST_EXPOSURE = 15  # tenths
HOOKS = {"on_starting", "when_ready", "pre_fork", "post_fork", "post_worker_init", "child_exit", "on_exit"}

needs_systemd = pytest.mark.skipif(SYSTEMD_ANALYZE is None, reason="no systemd-analyze here")


@pytest.fixture(scope="module")
def conf() -> Iterator[ModuleType]:
    """The package's settings. Where they are loaded, reload signals are ignored from then on; not so here."""
    handlers = {number: signal.getsignal(number) for number in RELOAD_SIGNALS}
    try:
        yield importlib.import_module("ironbatch.web.gunicorn_conf")
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


# ------------------------------------------------------------------------------------------------------- the unit


def analyze(directory: Path, *words: str, drop_in: str = "") -> str:
    """What systemd-analyze says of the unit, with a program that exists and perhaps a drop-in. It must be content."""
    program = directory / "ironbatch"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = directory / UNIT.name
    unit.write_text(UNIT.read_text().replace(PROGRAM, str(program)))
    (directory / f"{UNIT.name}.d").mkdir()
    (directory / f"{UNIT.name}.d" / "override.conf").write_text(drop_in)
    command = [str(SYSTEMD_ANALYZE), *words, str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@needs_systemd
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    assert analyze(tmp_path, "verify") == "", "a warning"


@needs_systemd
def test_systemd_finds_little_exposed(tmp_path: Path) -> None:
    report = analyze(tmp_path, "security", "--offline=yes", "--no-pager", f"--threshold={MOST_EXPOSURE}")
    print(report.splitlines()[-1])


DROP_INS = re.findall(r"(?m)^ {4}\[Service\]\n(?: {4}.*\n)+", (DEPLOY / "README.md").read_text())


@needs_systemd
@pytest.mark.parametrize("drop_in", DROP_INS)
def test_systemd_accepts_the_drop_ins_of_the_readme(tmp_path: Path, drop_in: str) -> None:
    assert len(DROP_INS) >= 4
    assert analyze(tmp_path, "verify", drop_in=drop_in.replace("    ", "")) == "", "a warning"


@needs_systemd
def test_a_drop_in_that_means_nothing_is_noticed(tmp_path: Path) -> None:
    assert "NoSuchThing" in analyze(tmp_path, "verify", drop_in="[Service]\nNoSuchThing=yes\n")


def test_every_directive_has_its_reason() -> None:
    """Each block of lines begins with a comment; what needs none aside."""
    plain = {"Description", "WantedBy"}
    for block in UNIT.read_text().split("\n\n"):
        lines = [line for line in block.splitlines() if not line.startswith("[")]
        assert not lines or lines[0].startswith("#") or lines[0].partition("=")[0] in plain, block


def test_the_supervisor_alone_speaks_and_starts_and_stops() -> None:
    assert value("Type") == "notify"
    assert value("NotifyAccess") == "main"
    assert value("ExecStart") == f"{PROGRAM} serve"
    assert value("ExecReload").endswith("kill -HUP $MAINPID")
    assert value("KillMode") == "mixed"


def test_times_fit_the_codes(conf: ModuleType) -> None:
    drain_timeout_s = Config().drain_timeout_s
    assert drain_timeout_s + ERROR_LINE_S < conf.graceful_timeout < drain_timeout_s + STOP_BEYOND_DRAIN_S
    assert seconds(value("TimeoutStopSec")) > drain_timeout_s + STOP_BEYOND_DRAIN_S + STOP_S
    assert seconds(value("TimeoutStartSec")) >= 300
    assert seconds(value("WatchdogSec")) > max(MIN_WATCHDOG_S, HEALTH_GRACE_NS / 1e9)


def test_a_wrong_configuration_is_not_started_again_and_anything_else_is() -> None:
    assert value("Restart") == "on-failure"
    assert value("RestartPreventExitStatus").split() == [str(EXIT_USAGE)]
    assert EXIT_FAILED != EXIT_USAGE
    # As many starts as it takes to give up must fit into the interval, or it never does.
    burst, interval_s = int(value("StartLimitBurst")), seconds(value("StartLimitIntervalSec"))
    assert burst * (seconds(value("RestartSec")) + 10) < interval_s


def test_what_numba_and_the_segment_need_is_left_to_them() -> None:
    assert not values("MemoryDenyWriteExecute")
    assert not values("InaccessiblePaths")
    assert not values("ProcSubset")
    assert value("SystemCallErrorNumber") == "EPERM", "libuv and OpenBLAS ask, and do without"
    assert set(value("RestrictAddressFamilies").split()) == {"AF_INET", "AF_INET6", "AF_UNIX"}


def test_it_has_a_user_and_directories_of_its_own() -> None:
    assert value("DynamicUser") == "yes"
    assert value("CacheDirectory") == value("RuntimeDirectory") == "ironbatch"
    assert value("WorkingDirectory") == "%t/ironbatch"
    assert value("EnvironmentFile").startswith("-/etc/")


def test_no_directive_stands_twice_but_the_filter() -> None:
    names = [name for _, name, _ in directives()]
    assert {name for name in names if names.count(name) > 1} == {"SystemCallFilter"}


def test_the_install_uses_the_units_paths() -> None:
    text = (DEPLOY / "README.md").read_text()
    assert PROGRAM.removesuffix("/bin/ironbatch") in text
    assert value("EnvironmentFile").removeprefix("-") in text
    assert "`WatchdogSec`" in text
    assert f"{value('WatchdogSec')} s later" in text


# ----------------------------------------------------------------------------------------------- gunicorn's settings


def test_the_file_to_edit_names_every_setting_and_no_other(conf: ModuleType) -> None:
    text = (DEPLOY / "gunicorn.conf.py").read_text()
    to_uncomment = set(re.findall(r"^# (\w+) = ", text, re.MULTILINE))
    to_leave = set(itertools.chain(*(line.split(", ") for line in re.findall(r"^- ([\w, ]+):", text, re.MULTILINE))))
    known = {setting.name for setting in KNOWN_SETTINGS}
    assert to_uncomment <= known
    assert to_leave <= known
    assert not to_uncomment & to_leave
    assert to_leave >= HOOKS
    assert (known & set(vars(conf))) - {"proc_name"} <= to_uncomment | to_leave


def test_the_file_to_edit_shows_the_values_that_it_would_replace(conf: ModuleType) -> None:
    text = (DEPLOY / "gunicorn.conf.py").read_text()
    shown = dict(re.findall(r"^# (\w+) = (.*)$", text, re.MULTILINE))
    for name in ("keepalive", "timeout", "backlog", "worker_tmp_dir", "workers", "loglevel"):
        assert shown[name].strip('"') == str(getattr(conf, name)), name


@pytest.mark.parametrize(
    "path", [DEPLOY / "gunicorn.conf.py", ROOT / "ironbatch" / "web" / "gunicorn_conf.py"], ids=["deploy", "package"]
)
def test_every_setting_has_its_reason(path: Path) -> None:
    """A comment above it, or above the settings just before it."""
    lines = path.read_text().splitlines()
    names = "|".join({setting.name for setting in KNOWN_SETTINGS})
    for number, line in enumerate(lines):
        if re.match(rf"(# )?({names}) = ", line):
            above = itertools.takewhile(lambda text: text, reversed(lines[:number]))
            assert any(re.match(r"# (?!\w+ = )", text) for text in above), line


# ------------------------------------------------------------------------------------------------------- the hooks

TCPI_SACKED = 28  # of a listening socket: the backlog it asked for (tcp(7), struct tcp_info)


def test_a_worker_listens_with_the_backlog_that_is_set_and_collects_no_imports(conf: ModuleType) -> None:
    """Gunicorn's asgi worker listens by way of uvloop, whose own backlog of 100 would come last."""
    loop = uvloop.new_event_loop()
    worker = SimpleNamespace(loop=loop, cfg=SimpleNamespace(backlog=conf.backlog), state={})
    try:
        conf.post_worker_init(worker)
        assert gc.get_freeze_count() > 1_000
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(conf.backlog)
            server = loop.run_until_complete(worker.loop.create_server(asyncio.Protocol, sock=listener.dup()))
            info = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCPI_SACKED + 4)
            assert int.from_bytes(info[TCPI_SACKED:], sys.byteorder) == conf.backlog
            server.close()
            loop.run_until_complete(server.wait_closed())
    finally:
        gc.unfreeze()
        loop.close()

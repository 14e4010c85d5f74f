"""The process above the others: it makes the engine, starts and restarts the scheduler, and removes the engine.

Two roles. `serve` is the whole system: it binds the address, makes the segment, starts gunicorn and the scheduler.
`run_engine` is the same without the web role, for a gunicorn that was started by hand: the arbiter makes the segment
and starts this module as a program.

Single-threaded throughout, since schedulers are forked from it, warm.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time

from ironbatch.clock import MonotonicClock
from ironbatch.config import Config
from ironbatch.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, ConfigError, StartError
from ironbatch.processes import (
    CHILD_ENVIRONMENT,
    StartSignals,
    StopRequested,
    die_with_parent,
    read_signals,
    set_process_name,
    signal_pipe,
)
from ironbatch.scheduler.keeper import SchedulerKeeper
from ironbatch.shm.engine import Engine

_log = logging.getLogger("ironbatch.supervisor")

LISTEN_BACKLOG = 2048
GUNICORN_STOP_S = 40.0  # its graceful_timeout, and what it needs to notice
READY_POLL_S = 0.02
STDIN = 0

_BIND_REMEDIES = {
    errno.EADDRINUSE: "another process listens there: stop it, or choose another port with --addr",
    errno.EACCES: "ports below 1024 need privileges: choose another port with --addr",
    errno.EADDRNOTAVAIL: "no interface of this machine has that address: use one that has, or :PORT for all",
}
_STOPS = (signal.SIGTERM, signal.SIGINT)
_FORWARDED = (signal.SIGHUP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGUSR1)


def serve(config: Config) -> int:
    """Run the whole system until it is told to stop. Returns the exit code.

    Raises:
        StartError: port taken, address that can't be bound, no shared memory.
    """
    signals = StartSignals()
    _prepare(config)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(bind_listener(config))
        engine = stack.enter_context(contextlib.closing(Engine.create(config, MonotonicClock().now_ns())))
        try:
            web = start_gunicorn(config, engine, listener)
        except OSError as problem:
            raise StartError(f"cannot start gunicorn: {problem.strerror}; see `ulimit -a`") from None
        stack.callback(_kill_group, web)
        url = _url(config, listener)
        listener.close()  # gunicorn has it; a copy here would keep the port open after gunicorn's end
        return Supervisor(config, engine, web, url=url).run(signals)


def run_engine() -> int:
    """Run the engine of a gunicorn that has made its segment, until the lifeline ends. Returns the exit code."""
    die_with_parent(os.getppid())
    signals = StartSignals()
    try:
        config = Config.load({}, os.environ)
        _prepare(config)
        engine = Engine.from_environ(os.environ)
        return Supervisor(config, engine, web=None, lifeline=STDIN).run(signals)
    except ConfigError as problem:
        print(*(f"ironbatch: error: {line}" for line in problem.problems), sep="\n", file=sys.stderr)
        return EXIT_USAGE
    except StartError as problem:
        print(f"ironbatch: error: {problem}", file=sys.stderr)
        return EXIT_FAILED


class Supervisor:
    """Watches over a scheduler and, in the role of `serve`, over gunicorn.

    Args:
        config: the engine's configuration.
        engine: made already.
        web: the gunicorn arbiter, or None.
        url: where it will serve; printed once it does.
        lifeline: a descriptor whose end of file says that the parent is gone, or None.
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        web: subprocess.Popen[bytes] | None,
        *,
        url: str | None = None,
        lifeline: int | None = None,
    ) -> None:
        self._config = config
        self._header = engine.segment.header
        self._lanes = engine.segment.lanes
        self._keeper = SchedulerKeeper(config, engine)
        self._web = web
        self._unannounced_url = url
        self._lifeline = lifeline

    def run(self, start_signals: StartSignals) -> int:
        """Start the scheduler, and watch until somebody says stop or nothing is left to do. Returns the exit code."""
        try:
            with start_signals.interrupt():
                self._keeper.warm_up()
        except StopRequested:
            return EXIT_OK
        with signal_pipe(*_STOPS, signal.SIGCHLD, signal.SIGUSR2, *_FORWARDED) as signals:
            if start_signals.is_requested:  # between the one way to listen and the other
                return EXIT_OK
            self._keeper.start()
            while True:
                for number in self._wait(signals):
                    if number in _STOPS:
                        return self._stop(signals, is_quick=number == signal.SIGINT)
                    self._forward(number)
                self._keeper.look()
                if self._keeper.cannot_start or (self._web is not None and self._web.poll() is not None):
                    return self._give_up(signals)
                self._announce()

    def _wait(self, signals: int) -> list[int]:
        """Sleep until something is due. Returns the signals; where there is a lifeline, it alone says stop."""
        timeout_s = self._keeper.due_in_s()
        if self._unannounced_url is not None:
            timeout_s = READY_POLL_S if timeout_s is None else min(timeout_s, READY_POLL_S)
        watched = [signals] if self._lifeline is None else [signals, self._lifeline]
        readable, _, _ = select.select(watched, [], [], timeout_s)
        numbers = read_signals(signals)
        if self._lifeline is None:
            return numbers
        # A service manager's SIGTERM reaches everybody, but streams that still run need the scheduler.
        numbers = [number for number in numbers if number not in _STOPS]
        if self._lifeline in readable and not os.read(self._lifeline, 1):
            numbers.append(signal.SIGTERM)
        return numbers

    def _forward(self, number: int) -> None:
        if number in _FORWARDED and self._web is not None:
            self._web.send_signal(number)
        elif number == signal.SIGUSR2:
            _log.error("USR2 is refused, it would start a second engine: use HUP to reload, or restart the service")

    def _announce(self) -> None:
        if self._unannounced_url is None or not self._header["scheduler_ready"]:
            return
        serving = (self._lanes["serving_generation"] == self._lanes["generation"]) & (self._lanes["generation"] > 0)
        if int(serving.sum()) >= self._config.workers:
            try:
                print(f"ironbatch: serving on {self._unannounced_url}", flush=True)
            except OSError:  # nobody can read it, which is no reason to stop serving
                sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  for the rest of this process
            self._unannounced_url = None

    def _give_up(self, signals: int) -> int:
        if self._keeper.cannot_start:
            _log.error("the scheduler cannot start; stopping")
        else:
            assert self._web is not None
            _log.error("gunicorn has ended with status %s; stopping", self._web.returncode)
        self._stop(signals, is_quick=True)
        return EXIT_FAILED

    def _stop(self, signals: int, *, is_quick: bool) -> int:
        """Let running streams end, unless `is_quick`; then stop the scheduler. A second signal makes it quick."""
        self._header["draining"] = 1
        if self._web is not None:
            self._web.send_signal(signal.SIGQUIT if is_quick else signal.SIGTERM)
            deadline_s = time.monotonic() + GUNICORN_STOP_S
            while self._web.poll() is None and time.monotonic() < deadline_s:
                select.select([signals], [], [], READY_POLL_S)
                if any(number in _STOPS for number in read_signals(signals)):
                    self._web.send_signal(signal.SIGQUIT)
                self._keeper.look()  # streams that still run need their scheduler
            _kill_group(self._web)
        self._keeper.stop()
        return EXIT_OK


def bind_listener(config: Config) -> socket.socket:
    """The listening socket. Raises StartError in one line that says why not."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as problem:
        raise StartError(f"cannot listen on {config.addr}: {problem.strerror}; check the host in --addr") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(LISTEN_BACKLOG)
    except OSError as problem:
        listener.close()
        remedy = _BIND_REMEDIES.get(problem.errno or 0, "choose another with --addr")
        raise StartError(f"cannot listen on {config.addr}: {os.strerror(problem.errno or 0)}; {remedy}") from None
    return listener


def start_gunicorn(config: Config, engine: Engine, listener: socket.socket) -> subprocess.Popen[bytes]:
    """Start the web role. In a session of its own, so that Ctrl-C reaches the supervisor alone."""
    environ = {**os.environ, **config.to_environ(), **engine.to_environ(), **CHILD_ENVIRONMENT}
    environ.pop("GUNICORN_CMD_ARGS", None)
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "gunicorn",
            "--config=python:ironbatch.web.gunicorn_conf",
            f"--bind=fd://{listener.fileno()}",
            f"--workers={config.workers}",
            "ironbatch.web.app:app",
        ],
        env=environ,
        pass_fds=(listener.fileno(), *engine.descriptors),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def _kill_group(web: subprocess.Popen[bytes]) -> None:
    """Whatever is left of gunicorn, which leads a process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(web.pid, signal.SIGKILL)
    web.wait()


def _prepare(config: Config) -> None:
    set_process_name("supervisor")
    try:
        os.getcwd()
    except FileNotFoundError:  # deleted; gunicorn wants one
        os.chdir("/")
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )


def _url(config: Config, listener: socket.socket) -> str:
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"http://{host}:{listener.getsockname()[1]}"


if __name__ == "__main__":
    sys.exit(run_engine())

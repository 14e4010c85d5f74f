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
from collections.abc import Iterator

from ironbatch.clock import MonotonicClock
from ironbatch.config import Config
from ironbatch.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, ConfigError, StartError
from ironbatch.processes import (
    CHILD_ENVIRONMENT,
    die_with_parent,
    ignore_reload_signals,
    open_standard_streams,
    set_process_name,
)
from ironbatch.scheduler.keeper import SchedulerKeeper
from ironbatch.shm.engine import Engine

_log = logging.getLogger("ironbatch.supervisor")

LISTEN_BACKLOG = 2048
GUNICORN_STOP_S = 40.0  # its graceful_timeout, and what it needs to notice
READY_POLL_S = 0.02
RAISE_AGAIN_S = 0.1
STDIN = 0

_BIND_REMEDIES = {
    errno.EADDRINUSE: "another process listens there: stop it, or choose another port with --addr",
    errno.EACCES: "ports below 1024 need privileges: choose another port with --addr",
    errno.EADDRNOTAVAIL: "no interface of this machine has that address: use one that has, or :PORT for all",
}
_FORWARDED = (signal.SIGHUP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGUSR1)


class StopRequested(BaseException):
    """SIGTERM or SIGINT came while the kernels were compiled. No Exception, so that nothing on the way swallows it."""


class StartSignals:
    """SIGTERM and SIGINT while the system starts: noted, but where starting takes long they interrupt it at once."""

    def __init__(self) -> None:
        self.is_requested = False
        self._may_raise = False
        open_standard_streams()
        ignore_reload_signals()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)
        signal.signal(signal.SIGALRM, self._handle)

    @contextlib.contextmanager
    def interrupt(self) -> Iterator[None]:
        """Raise StopRequested if a signal has come or comes in this block."""
        self._may_raise = True
        try:
            if self.is_requested:
                raise StopRequested
            yield
        finally:
            self._may_raise = False
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _handle(self, number: int, frame: object) -> None:
        self.is_requested = True
        if self._may_raise:
            # Once more a little later: an exception that is raised in a callback of the compiler's goes no further.
            signal.setitimer(signal.ITIMER_REAL, RAISE_AGAIN_S)
            raise StopRequested


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
        with _signals() as signals:
            if start_signals.is_requested:  # between the one way to listen and the other
                return EXIT_OK
            self._keeper.start()
            while True:
                for number in self._wait(signals):
                    if number in (signal.SIGTERM, signal.SIGINT):
                        return self._stop(signals, is_quick=number == signal.SIGINT)
                    self._forward(number)
                self._keeper.look()
                if self._keeper.cannot_start or (self._web is not None and self._web.poll() is not None):
                    return self._give_up(signals)
                self._announce()

    def _wait(self, signals: int) -> list[int]:
        """Sleep until a signal comes or something is due. Returns the signals; the lifeline's end is a SIGTERM."""
        timeout_s = self._keeper.due_in_s()
        if self._unannounced_url is not None:
            timeout_s = READY_POLL_S if timeout_s is None else min(timeout_s, READY_POLL_S)
        watched = [signals] if self._lifeline is None else [signals, self._lifeline]
        readable, _, _ = select.select(watched, [], [], timeout_s)
        numbers = list(os.read(signals, 4096)) if signals in readable else []
        if self._lifeline in readable and not os.read(STDIN, 1):
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
                if any(number in (signal.SIGTERM, signal.SIGINT) for number in _drain(signals)):
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


@contextlib.contextmanager
def _signals() -> Iterator[int]:
    """From now on signals arrive as bytes on a pipe (signal.set_wakeup_fd). Gives its reading end."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGUSR2, *_FORWARDED):
        signal.signal(number, lambda number, frame: None)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(-1)
        os.close(reader)
        os.close(writer)


def _drain(signals: int) -> list[int]:
    with contextlib.suppress(BlockingIOError):
        return list(os.read(signals, 4096))
    return []


def _url(config: Config, listener: socket.socket) -> str:
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"http://{host}:{listener.getsockname()[1]}"


if __name__ == "__main__":
    sys.exit(run_engine())

"""The process above the others: it makes the engine, starts and restarts the scheduler, and removes the engine.

Two roles. `serve` is the whole system: it binds the address, makes the segment, starts gunicorn and the scheduler.
`run_engine` is the same without the web role, for a gunicorn that was started by hand: the arbiter makes the segment
and starts this module as a program.

Single-threaded throughout, since schedulers are forked from it, warm.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys

import numpy as np

from ironbatch import logs
from ironbatch.clock import MonotonicClock
from ironbatch.config import Config
from ironbatch.draining import ERROR_LINE_S, NS_PER_S, STOP_BEYOND_DRAIN_S, WEB_STOP_S, announce_drain, is_drained
from ironbatch.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, ConfigError, StartError
from ironbatch.health import health_problem, progress_problem
from ironbatch.listener import bind_listener, few_descriptors_problem, url_of
from ironbatch.named_files import file_problems
from ironbatch.processes import (
    CHILD_ENVIRONMENT,
    OUT_OF_MEMORY,
    StartSignals,
    StopRequested,
    die_with_parent,
    is_out_of_memory,
    read_signals,
    set_process_name,
    signal_pipe,
)
from ironbatch.scheduler.keeper import SchedulerKeeper
from ironbatch.service_manager import ServiceManager
from ironbatch.shm.engine import Engine

_log = logging.getLogger("ironbatch.supervisor")

READY_POLL_S = 0.02
COMPILE_LIMIT_S = 600.0  # on any machine; a service manager that would wait for less is asked for so much
START_BEYOND_WAIT_S = 30.0  # what a start takes beside the wait for a model server
STDIN = 0

_STOPS = (signal.SIGTERM, signal.SIGINT)
_FORWARDED = (signal.SIGHUP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGUSR1)


def serve(config: Config) -> int:
    """Run the whole system until it is told to stop. Returns the exit code.

    Raises:
        StartError: port taken, address that can't be bound, no shared memory.
        ConfigError: a file that the configuration names is no such file.
    """
    signals = StartSignals()
    _prepare(config)
    if problems := file_problems(config):
        raise ConfigError(problems)
    with contextlib.ExitStack() as stack:
        manager = stack.enter_context(contextlib.closing(ServiceManager.from_environ(os.environ, MonotonicClock())))
        listener = stack.enter_context(bind_listener(config))
        engine = stack.enter_context(contextlib.closing(Engine.create(config, MonotonicClock().now_ns())))
        if problem := few_descriptors_problem(config):
            _log.warning("%s", problem)
        try:
            web = start_gunicorn(config, engine, listener)
        except OSError as error:
            raise StartError(f"cannot start gunicorn: {error.strerror}; see `ulimit -a`") from None
        stack.callback(_kill_group, web)
        url = url_of(config, listener)
        listener.close()  # gunicorn has it; a copy here would keep the port open after gunicorn's end
        return Supervisor(config, engine, web, manager, url=url).run(signals)


def run_engine() -> int:
    """Run the engine of a gunicorn that has made its segment, until the lifeline ends. Returns the exit code."""
    die_with_parent(os.getppid())
    signals = StartSignals()
    try:
        config = Config.load({}, os.environ)
        _prepare(config)
        engine = Engine.from_environ(os.environ)
        # The service's main process, and who speaks for it, is the gunicorn.
        manager = ServiceManager.from_environ({}, MonotonicClock())
        return Supervisor(config, engine, None, manager, lifeline=STDIN).run(signals)
    except ConfigError as problem:
        logs.complain(problem.problems)
        return EXIT_USAGE
    except StartError as problem:
        logs.complain([str(problem)])
        return EXIT_FAILED
    except (MemoryError, ImportError, OSError) as problem:
        if not is_out_of_memory(problem):
            raise
        logs.complain([OUT_OF_MEMORY])
        return EXIT_FAILED


class Supervisor:
    """Watches over a scheduler and, in the role of `serve`, over gunicorn.

    Args:
        config: the engine's configuration.
        engine: made already.
        web: the gunicorn arbiter, or None.
        manager: is told what becomes of the service.
        url: where it will serve; printed once it does.
        lifeline: a descriptor whose end of file says that the parent is gone, or None.
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        web: subprocess.Popen[bytes] | None,
        manager: ServiceManager,
        *,
        url: str | None = None,
        lifeline: int | None = None,
    ) -> None:
        self._config = config
        self._header = engine.segment.header
        self._lanes = engine.segment.lanes
        self._keeper = SchedulerKeeper(config, engine)
        self._web = web
        self._manager = manager
        self._clock = MonotonicClock()
        self._url = url
        self._has_served = False
        # While workers are awaited: the generation of each lane that does not count, being from before. Else None.
        self._old_generations = None if url is None else np.zeros_like(self._lanes["generation"])
        self._lifeline = lifeline

    def run(self, start_signals: StartSignals) -> int:
        """Start the scheduler, and watch until somebody says stop or nothing is left to do. Returns the exit code."""
        try:
            with start_signals.interrupt():
                self._warm_up()
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
                self._beat()

    def _warm_up(self) -> None:
        if self._keeper.must_compile():
            self._manager.starting(
                "compiling the kernels, for the first time or after a change", limit_s=COMPILE_LIMIT_S
            )
        self._keeper.warm_up()
        # A model server may be waited for; without one there is no start, and this says so in time.
        limit_s = self._config.backend_wait_s + START_BEYOND_WAIT_S if self._config.has_text else None
        self._manager.starting("starting the scheduler and the web workers", limit_s=limit_s)

    def _wait(self, signals: int) -> list[int]:
        """Sleep until something is due. Returns the signals; where there is a lifeline, it alone says stop."""
        poll_s = None if self._old_generations is None else READY_POLL_S
        dues_s = [due_s for due_s in (poll_s, self._keeper.due_in_s(), self._manager.due_in_s()) if due_s is not None]
        watched = [signals] if self._lifeline is None else [signals, self._lifeline]
        readable, _, _ = select.select(watched, [], [], min(dues_s, default=None))
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
            if number == signal.SIGHUP and self._has_served:
                self._old_generations = self._lanes["generation"].copy()
                self._manager.reloading()
            self._web.send_signal(number)
        elif number == signal.SIGUSR2:
            _log.error("USR2 is refused, it would start a second engine: use HUP to reload, or restart the service")

    def _announce(self) -> None:
        """Say that it serves, as soon as /health would say so too; and again once a reload has replaced all workers."""
        if self._old_generations is None:
            return
        lanes = self._lanes
        are_serving = lanes["serving_generation"] == lanes["generation"]
        are_new = lanes["generation"] != self._old_generations
        if int((are_serving & are_new).sum()) < self._config.workers or self._health_problem() is not None:
            return
        self._old_generations = None
        if not self._has_served:
            self._has_served = True
            logs.announce(f"serving on {self._url}")
        self._manager.ready(self._status())

    def _beat(self) -> None:
        """Feed the service manager's watchdog, unless a scheduler that should be stepping does not.

        A step that is within its backend's longest is progress, and need not be shorter than the watchdog's time: this
        process feeds it, not the step. It is also fed while a scheduler waits for its restart or starts, and while a
        backend is reopened: somebody is at work on these, and to start everything anew would do the same work with the
        streams lost. /health tells of them. What is left is what only a new start can end: a scheduler or a device
        that hangs, and this process's own hanging, which needs no judgement.
        """
        if self._manager.due_in_s() != 0:
            return
        is_stepping = bool(self._header["scheduler_ready"]) and not self._keeper.is_starting
        stall = progress_problem(self._header, self._clock.now_ns()) if is_stepping else None
        self._manager.beat(self._status(), is_making_progress=stall is None)

    def _status(self) -> str:
        """One line for `systemctl status`."""
        problem, restarts = self._health_problem(), int(self._header["epoch"]) - 1
        if not self._has_served:
            return f"not serving yet: {problem or 'waiting for the web workers'}"
        told = f"; restarts of the scheduler: {restarts}" if restarts else ""
        return (f"serving on {self._url}" if problem is None else f"not serving: {problem}") + told

    def _health_problem(self) -> str | None:
        return health_problem(self._header, self._clock.now_ns())

    def _give_up(self, signals: int) -> int:
        if self._keeper.cannot_start:
            reason = "the scheduler cannot start"
        else:
            assert self._web is not None
            reason = f"gunicorn has ended with status {self._web.returncode}"
        _log.error("%s; stopping", reason)
        self._stop(signals, is_quick=True, reason=reason)
        return EXIT_FAILED

    def _stop(self, signals: int, *, is_quick: bool, reason: str = "told to stop") -> int:
        """Let running streams end, unless `is_quick`; then stop gunicorn and the scheduler.

        New requests are answered 503 from here on, by workers that still listen: a load balancer is to see it before
        connections are refused. A second signal makes it quick.
        """
        timeout_s = 0 if is_quick else self._config.drain_timeout_s
        announce_drain(self._header, self._clock.now_ns(), timeout_s)
        self._manager.stopping(
            reason if is_quick else f"{reason}; running streams may end", limit_s=timeout_s + 2 * STOP_BEYOND_DRAIN_S
        )
        if self._web is not None:
            while self._web.poll() is None and not is_drained(self._lanes) and self._streams_late_ns() < 0:
                is_quick |= self._is_hurried(signals)
            self._stop_web(self._web, signals, is_quick=is_quick)
        self._keeper.stop()
        return EXIT_OK

    def _stop_web(self, web: subprocess.Popen[bytes], signals: int, *, is_quick: bool) -> None:
        """Stop gunicorn. Its workers may have the ends of answers to send to slow readers, while the drain lasts."""
        web.send_signal(signal.SIGQUIT if is_quick else signal.SIGTERM)
        stop_ns = self._clock.now_ns()
        while web.poll() is None:
            waited_ns = min(self._streams_late_ns(), self._clock.now_ns() - stop_ns)
            if waited_ns > WEB_STOP_S * NS_PER_S:
                _log.error("gunicorn has not ended within %g s; killing it", WEB_STOP_S)
                break
            if self._is_hurried(signals):
                web.send_signal(signal.SIGQUIT)
        _kill_group(web)

    def _is_hurried(self, signals: int) -> bool:
        """Wait a little during a stop, with the scheduler watched, which running streams need. True at a signal."""
        select.select([signals], [], [], READY_POLL_S)
        is_told = any(number in _STOPS for number in read_signals(signals))
        if is_told:
            announce_drain(self._header, self._clock.now_ns(), 0)
        self._keeper.look()
        return is_told

    def _streams_late_ns(self) -> int:
        """How long ago every stream should have ended, its error line included; negative before."""
        return self._clock.now_ns() - int(self._header["streams_end_ns"]) - int(ERROR_LINE_S * NS_PER_S)


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
    logs.configure(config.log_level, config.log_format)


if __name__ == "__main__":
    sys.exit(run_engine())

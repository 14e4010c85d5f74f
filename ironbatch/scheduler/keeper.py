"""Keeps one scheduler process alive, from the supervisor's side."""

from __future__ import annotations

import logging
import os
import signal
import time

from ironbatch.clock import MonotonicClock
from ironbatch.config import Config
from ironbatch.shm.engine import Engine

_log = logging.getLogger("ironbatch.supervisor")

STEADY_S = 5.0
"""A scheduler that lived for less counts as a failed start; several in a row are restarted ever more slowly."""

BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 2.0
STORM_DELAY_S = 0.4
"""From this delay on new requests are refused instead of queued."""

STOP_S = 2.0
REAP_POLL_S = 0.005


def restart_delay_s(short_lives: int) -> float:
    """How long to wait after `short_lives` schedulers in a row have died young: not at all after the first."""
    if short_lives < 2:
        return 0.0
    return min(BACKOFF_FIRST_S * 2.0 ** min(short_lives - 2, 16), BACKOFF_MAX_S)


class SchedulerKeeper:
    """Never two schedulers: the next is forked only after the last was reaped.

    `cannot_start` turns true when the first one says that a restart would not help.
    """

    def __init__(self, config: Config, engine: Engine) -> None:
        self._config = config
        self._engine = engine
        self._pid = 0
        self._started_s = 0.0
        self._started_ns = 0
        self._short_lives = 0
        self._restart_at_s: float | None = None
        self._has_served = False
        self.cannot_start = False

    @property
    def is_starting(self) -> bool:
        """Whether a scheduler is still to run its first step: it waits for its turn, or starts its backend.

        `scheduler_ready` does not tell: it stays as the last one has left it, since no client need notice a restart.
        """
        return not self._pid or int(self._engine.segment.header["step_started_ns"]) < self._started_ns

    def must_compile(self) -> bool:
        """Whether `warm_up` will take long."""
        from ironbatch.kernels import jit  # noqa: PLC0415  numba's import; gunicorn starts meanwhile

        last_ones = ["ironbatch.kernels.intake"] + ["ironbatch.kernels.mock_kv"] * self._config.mock_kv
        return not all(map(jit.is_compiled, last_ones))

    def warm_up(self) -> None:
        """Import the scheduler, which compiles its kernels or loads them from the cache."""
        if self.must_compile():
            _log.info("compiling the kernels, for the first time or after a change; this takes a while")
        from ironbatch.backends.registry import prepare_backend  # noqa: PLC0415  likewise
        from ironbatch.scheduler import process  # noqa: F401, PLC0415  likewise

        prepare_backend(self._config)

    def start(self) -> None:
        """Fork a scheduler."""
        from ironbatch.scheduler.process import fork_scheduler  # noqa: PLC0415  see warm_up

        self._restart_at_s = None
        self._started_s = time.monotonic()
        self._engine.segment.header["epoch"] += 1
        clock = MonotonicClock()
        self._started_ns = clock.now_ns()
        self._pid = fork_scheduler(self._config, self._engine, clock)

    def due_in_s(self) -> float | None:
        """Seconds until `look` has something to do whatever happens; None: only a SIGCHLD gives it something."""
        return None if self._restart_at_s is None else max(self._restart_at_s - time.monotonic(), 0.0)

    def look(self) -> None:
        """Reap a dead scheduler, and start the next one if that is due."""
        if self._pid:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self._pid = 0
                self._note_death(os.waitstatus_to_exitcode(status))
        if self._restart_at_s is None or time.monotonic() < self._restart_at_s:
            return
        try:
            self.start()
        except OSError as problem:
            _log.error("a scheduler cannot be forked: %s", problem.strerror)
            self._restart_at_s = time.monotonic() + BACKOFF_MAX_S

    def stop(self) -> None:
        """Tell the scheduler to end, and kill it if it does not."""
        if not self._pid:
            return
        from ironbatch.scheduler.process import STOP_SIGNAL  # noqa: PLC0415  see warm_up

        os.kill(self._pid, STOP_SIGNAL)
        deadline_s = time.monotonic() + STOP_S
        while os.waitpid(self._pid, os.WNOHANG)[0] == 0:
            if time.monotonic() >= deadline_s:
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
                break
            time.sleep(REAP_POLL_S)
        self._pid = 0

    def _note_death(self, exit_code: int) -> None:
        from ironbatch.scheduler.process import EXIT_START_FAILED  # noqa: PLC0415  see warm_up

        header = self._engine.segment.header
        self._has_served |= bool(header["scheduler_ready"])
        if exit_code == EXIT_START_FAILED and not self._has_served:
            self.cannot_start = True
            return
        lived_s = time.monotonic() - self._started_s
        self._short_lives = 0 if lived_s >= STEADY_S else self._short_lives + 1
        delay_s = restart_delay_s(self._short_lives)
        if delay_s >= STORM_DELAY_S:  # no client notices a death or two; a storm /health must tell of
            header["scheduler_ready"] = 0
        _log.error("the scheduler ended with %s; the next starts in %.1f s", _described(exit_code), delay_s)
        self._restart_at_s = time.monotonic() + delay_s


def _described(exit_code: int) -> str:
    return f"signal {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit code {exit_code}"

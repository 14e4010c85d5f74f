"""Keeps one scheduler process alive, from the supervisor's side."""

from __future__ import annotations

import logging
import os
import signal
import time

from ironbatch.clock import MonotonicClock
from ironbatch.config import SOFTWARE_DEVICE, Config
from ironbatch.errors import DeviceError
from ironbatch.layout import CALL_OPENING, CALL_STEP
from ironbatch.scheduler.heart_watch import HeartWatch
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

HUNG_S = 0.5
"""Whoever is killed and does not end within this time is in a system call that cannot be interrupted."""

NS_PER_S = 1_000_000_000


def restart_delay_s(short_lives: int) -> float:
    """How long to wait after `short_lives` schedulers in a row have died young: not at all after the first."""
    if short_lives < 2:
        return 0.0
    return min(BACKOFF_FIRST_S * 2.0 ** min(short_lives - 2, 16), BACKOFF_MAX_S)


class SchedulerKeeper:
    """Never two schedulers: the next is forked only after the last was reaped.

    Nothing here waits for a scheduler to end, but `stop`, and that for a bounded time.

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
        self._killed_at_s: float | None = None  # as hung, and not reaped yet
        self._watch = HeartWatch(engine.segment.header, config.scheduler_timeout_s)
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

        last_ones = {
            "ironbatch.kernels.suspects": True,
            "ironbatch.kernels.mock_kv": self._config.mock_kv,
            "ironbatch.kernels.device_plan": self._config.backend == "device",
            "ironbatch.kernels.device": self._config.device == SOFTWARE_DEVICE,
        }
        return not all(jit.is_compiled(module) for module, is_needed in last_ones.items() if is_needed)

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
        self._watch.restart(self._started_s)

    def due_in_s(self) -> float | None:
        """Seconds until `look` has something to do whatever happens; None: only a SIGCHLD gives it something."""
        if self._restart_at_s is not None:
            return max(self._restart_at_s - time.monotonic(), 0.0)
        if not self._pid or not self._config.scheduler_timeout_s:
            return None
        return self._watch.look_every_s if self._killed_at_s is None else HUNG_S

    def look(self) -> None:
        """Reap a dead scheduler, kill one that hangs, and start the next one if that is due."""
        if self._pid:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self._pid = 0
                self._note_death(os.waitstatus_to_exitcode(status))
            elif self._config.scheduler_timeout_s:
                self._look_for_progress()
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

        os.kill(self._pid, STOP_SIGNAL if self._killed_at_s is None else signal.SIGKILL)
        if not self._ends_within(STOP_S):
            os.kill(self._pid, signal.SIGKILL)
            if not self._ends_within(STOP_S) and not (self._abort_device() and self._ends_within(HUNG_S)):
                _log.error("the scheduler (process %d) was killed and does not end: its device hangs", self._pid)
        self._pid = 0

    def _ends_within(self, seconds: float) -> bool:
        """Whether it could be reaped in that time."""
        deadline_s = time.monotonic() + seconds
        while os.waitpid(self._pid, os.WNOHANG)[0] == 0:
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(REAP_POLL_S)
        return True

    def _look_for_progress(self) -> None:
        """Kill a scheduler that has made none for too long. It is reaped, like any other, before the next starts."""
        header, now_s = self._engine.segment.header, time.monotonic()
        if self._killed_at_s is not None:
            if now_s - self._killed_at_s >= HUNG_S and not header["device_hung"]:
                header["device_hung"] = 1
                _log.error("the scheduler (process %d) was killed and does not end: its device hangs", self._pid)
                self._abort_device()
        elif not self._should_beat():
            self._watch.restart(now_s)
        else:
            silent_s = self._watch.look(now_s)
            longest_s = int(header["longest_step_ns"]) / NS_PER_S
            if silent_s > longest_s + self._config.scheduler_timeout_s:
                where = "in a call to its backend" if header["in_device_call"] else "outside its backend"
                _log.error("the scheduler has made no progress for %.1f s, %s; it is killed", silent_s, where)
                self._killed_at_s = now_s
                os.kill(self._pid, signal.SIGKILL)

    def _abort_device(self) -> bool:
        """Let all calls to the device's node fail, so that whoever is stuck in one can end. Returns whether it could.

        Another user of the node loses it too, but it hangs for that one as well.
        """
        path = self._config.device_path
        if not path:
            return False
        from ironbatch.driver.mount import abort_connection  # noqa: PLC0415  for the worst case only

        try:
            is_aborted = abort_connection(path)
        except (DeviceError, OSError) as problem:
            _log.error("%s", problem)
            return False
        if is_aborted:
            _log.error("the connection of the device %s was aborted, so that the scheduler ends; start it again", path)
        else:
            _log.error("the device %s is no FUSE node whose connection could be aborted: reset it, or its host", path)
        return is_aborted

    def _should_beat(self) -> bool:
        """Whether the scheduler's heart should beat.

        Not while it starts, or opens its backend anew, for that may take any time; unless it was stopped meanwhile.
        """
        header = self._engine.segment.header
        if header["scheduler_ready"] and not self.is_starting and header["in_device_call"] != CALL_OPENING:
            return True
        # One that has ended meanwhile is still to be reaped, and without WEXITED it would be no child at all.
        state = os.waitid(os.P_PID, self._pid, os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return state is not None and state.si_code == os.CLD_STOPPED

    def _note_death(self, exit_code: int) -> None:
        from ironbatch.scheduler.process import EXIT_START_FAILED  # noqa: PLC0415  see warm_up

        header = self._engine.segment.header
        header["device_hung"] = 0
        self._killed_at_s = None
        self._has_served |= bool(header["scheduler_ready"])
        if exit_code == EXIT_START_FAILED and not self._has_served:
            self.cannot_start = True
            return
        if header["in_quarantine"] and header["in_device_call"] == CALL_STEP:
            # It has told who killed it. Two such deaths end that sequence, and explain as many of those before.
            self._short_lives = max(self._short_lives - 1, 0)
            delay_s = 0.0
        else:
            lived_s = time.monotonic() - self._started_s
            self._short_lives = 0 if lived_s >= STEADY_S else self._short_lives + 1
            delay_s = restart_delay_s(self._short_lives)
        # No client notices a death or two; /health must tell of a storm, and of a backend that cannot be had.
        if delay_s >= STORM_DELAY_S or exit_code == EXIT_START_FAILED:
            header["scheduler_ready"] = 0
        _log.error("the scheduler ended with %s; the next starts in %.1f s", _described(exit_code), delay_s)
        self._restart_at_s = time.monotonic() + delay_s


def _described(exit_code: int) -> str:
    return f"signal {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit code {exit_code}"

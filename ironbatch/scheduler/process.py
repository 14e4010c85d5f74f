"""The life of a scheduler process: forked from the warm supervisor, it rebuilds, steps, sleeps, and is told to stop."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Callable

from ironbatch.backends.registry import create_backend
from ironbatch.clock import Clock
from ironbatch.config import Config
from ironbatch.errors import StartError
from ironbatch.kernels.lanes import arm_scheduler, disarm_scheduler
from ironbatch.processes import StopRequested, die_with_parent, set_process_name
from ironbatch.scheduler.step import AuditFailed, Scheduler
from ironbatch.shm.engine import Engine
from ironbatch.shm.wakeup import Alarm

_log = logging.getLogger("ironbatch.scheduler")

IDLE_WAIT_MS = 500
"""An idle scheduler wakes this often to beat its heart; a doorbell wakes it at once."""

EXIT_START_FAILED = 10
"""The backend cannot start: a restart would not help. (3 and 4 mean something else to gunicorn.)"""

EXIT_AUDIT_FAILED = 11
"""The scheduler's state contradicts itself."""

STOP_SIGNAL = signal.SIGUSR1
GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
"""Ctrl-C and a service manager's SIGTERM reach the whole group, but streams that still run need their scheduler: the
supervisor alone decides when it stops."""


def fork_scheduler(config: Config, engine: Engine, clock: Clock) -> int:
    """Fork a scheduler from this single-threaded process, whose kernels are compiled. Returns its pid.

    A fork has no imports to do, so that a restart costs milliseconds.
    """
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    # Held back until the child can take it: the handler that it inherits is the parent's.
    signal.pthread_sigmask(signal.SIG_BLOCK, {STOP_SIGNAL})
    pid = parent
    try:
        pid = os.fork()
    finally:
        if pid != 0:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {STOP_SIGNAL})
    if pid != 0:
        return pid
    status = 1
    try:
        die_with_parent(parent)
        status = _main(config, engine, clock)
    except BaseException:
        _log.exception("the scheduler has failed")
    finally:
        os._exit(status)


def _main(config: Config, engine: Engine, clock: Clock) -> int:
    set_process_name("scheduler")
    signal.set_wakeup_fd(-1)
    for number in GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    stopping = _stop_on_signal(engine)
    engine.segment.populate()
    engine.segment.header["scheduler_pid"] = os.getpid()
    gc.freeze()
    try:
        backend = create_backend(config)
        backend.is_stopping = stopping
        scheduler = Scheduler(config, engine.segment, engine.lane_bells, backend, clock)
        waiting = scheduler.open()
    except StartError as problem:
        _log.error("%s", problem)
        return EXIT_START_FAILED
    except StopRequested:
        return 0
    except AuditFailed as problem:
        return _audit_failed(problem)
    except Exception:  # whatever a plug-in's start may raise
        _log.exception("backend %s cannot start", config.backend)
        return EXIT_START_FAILED
    if scheduler.narrowing:
        _log.info("backend %s narrows the configuration to: %s", config.backend, scheduler.narrowing)
    if waiting:
        _log.info("took over %d sequences", waiting)
    try:
        _serve(scheduler, engine, stopping)
    except AuditFailed as problem:
        return _audit_failed(problem)
    scheduler.close()
    return 0


def _audit_failed(problem: AuditFailed) -> int:
    """The state is not to be touched again, nor the backend that it may have misled."""
    _log.critical("audit failed: %s; a fresh scheduler takes over from the slots", problem)
    return EXIT_AUDIT_FAILED


def _serve(scheduler: Scheduler, engine: Engine, stopping: Callable[[], bool]) -> None:
    alarm = Alarm([engine.scheduler_bell] if scheduler.news is None else [engine.scheduler_bell, scheduler.news])
    while not stopping():
        has_nothing_to_do = scheduler.step() == 0 or scheduler.is_waiting
        if has_nothing_to_do and arm_scheduler(engine.segment.address):
            alarm.wait(IDLE_WAIT_MS)
            disarm_scheduler(engine.segment.address)


def _stop_on_signal(engine: Engine) -> Callable[[], bool]:
    stops: list[int] = []

    def stop(number: int, frame: object) -> None:
        stops.append(number)
        engine.scheduler_bell.ring()

    signal.signal(STOP_SIGNAL, stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {STOP_SIGNAL})
    return lambda: bool(stops)

"""The process around a run: open files, event loop, signals, garbage collector."""

import asyncio
import gc
import resource
import signal
from collections.abc import Coroutine
from typing import Any, Final

import uvloop

from ironbatch.errors import ConfigError

SPARE_FILE_DESCRIPTORS: Final = 64


def reserve_file_descriptors(connections: int) -> None:
    """Raise this process's soft limit of open files to what the connections need. Raises ConfigError."""
    needed = connections + SPARE_FILE_DESCRIPTORS
    most = most_connections(connections)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < connections:
        problem = (
            f"--concurrency: {connections} connections need {needed} open files, over this process's hard"
            f" limit of {hard}; use {most} or less, or raise `ulimit -n`"
        )
        raise ConfigError([problem])
    if soft != resource.RLIM_INFINITY and soft < needed:
        # One connection is let through however low the limit is: it may do.
        raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))


def most_connections(wanted: int) -> int:
    """How many of the wanted connections this process's hard limit of open files allows; 1 at least."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY in {soft, hard}:
        return wanted
    return max(min(wanted, max(soft, hard) - SPARE_FILE_DESCRIPTORS), 1)


def run_until_signal(work: Coroutine[Any, Any, None]) -> int | None:
    """Run `work` in an event loop, and cancel it at SIGINT or SIGTERM.

    Returns the signal that interrupted it, or None. Raises what `work` raises.
    """
    gc.collect()
    gc.freeze()  # else a collection walks through every imported module, and its pause looks like latency
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_until_signal(work))
    finally:
        gc.unfreeze()


async def _until_signal(work: Coroutine[Any, Any, None]) -> int | None:
    interrupted_by: int | None = None
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()

    def interrupt(signal_number: int) -> None:
        nonlocal interrupted_by
        interrupted_by = signal_number
        loop.remove_signal_handler(signal_number)  # a second one ends the process at once
        task.cancel()

    for signal_number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signal_number, interrupt, signal_number)
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()
    return interrupted_by

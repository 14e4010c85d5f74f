"""One run: event loop, signals, progress bar; then the report."""

import asyncio
import contextlib
import gc
import resource
import signal
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

import uvloop

from ironbatch.bench.client import GenerateClient
from ironbatch.bench.load import closed_loop
from ironbatch.bench.measure import Measurements
from ironbatch.bench.options import BenchOptions
from ironbatch.bench.report import RunTimes
from ironbatch.clock import Clock
from ironbatch.errors import ConfigError

SPARE_FILE_DESCRIPTORS: Final = 64
PROGRESS_INTERVAL_S: Final = 0.25
"""Drawing takes milliseconds in which no token is stamped: often enough to watch, too seldom to show."""


def reserve_file_descriptors(connections: int) -> None:
    """Raise this process's soft limit of open files to what the connections need. Raises ConfigError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + SPARE_FILE_DESCRIPTORS
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        problem = (
            f"--concurrency: {connections} connections need {needed} open files, over this process's hard"
            f" limit of {hard}; use {max(hard - SPARE_FILE_DESCRIPTORS, 1)} or less, or raise `ulimit -n`"
        )
        raise ConfigError([problem])
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def run_load(options: BenchOptions, clock: Clock, measurements: Measurements) -> tuple[RunTimes, int | None]:
    """Send the load. Returns its times, and the signal that interrupted it or None. Raises Unreachable."""
    gc.collect()
    gc.freeze()  # else a collection walks through every imported module, and its pause looks like latency
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_run_until_signal(options, clock, measurements))
    finally:
        gc.unfreeze()


async def _run_until_signal(
    options: BenchOptions, clock: Clock, measurements: Measurements
) -> tuple[RunTimes, int | None]:
    interrupted_by: int | None = None
    started_at, cpu_ns, started_ns = datetime.now(UTC), time.process_time_ns(), clock.now_ns()
    load = asyncio.ensure_future(_send_all(options, clock, measurements))
    loop = asyncio.get_running_loop()

    def interrupt(signal_number: int) -> None:
        nonlocal interrupted_by
        interrupted_by = signal_number
        loop.remove_signal_handler(signal_number)  # a second one ends the process at once
        load.cancel()

    for signal_number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signal_number, interrupt, signal_number)
    with progress_bar(measurements, options.total_requests):
        await asyncio.wait([load])
    duration_s = (clock.now_ns() - started_ns) / 1e9
    cpu_s = (time.process_time_ns() - cpu_ns) / 1e9
    if not load.cancelled():
        load.result()
    return RunTimes(started_at, duration_s, cpu_s), interrupted_by


async def _send_all(options: BenchOptions, clock: Clock, measurements: Measurements) -> None:
    async with GenerateClient(
        options.url,
        clock,
        measurements,
        prompt_tokens=options.prompt_tokens,
        max_new_tokens=options.max_new_tokens,
        timeout_s=options.timeout_s,
    ) as client:
        await closed_loop(client, concurrency=options.concurrency, total_requests=options.total_requests)


@contextlib.contextmanager
def progress_bar(measurements: Measurements, total_requests: int) -> Iterator[None]:
    """Show the run's progress on stderr, if that is a terminal. Needs a running event loop."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console  # noqa: PLC0415 - 100 ms that a run without a terminal doesn't pay
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    counts = TextColumn("{task.fields[tokens]} tokens, {task.fields[failed]} failed")
    columns = (BarColumn(), MofNCompleteColumn(), counts, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as progress:
        task_id = progress.add_task("requests", total=total_requests, tokens=0, failed=0)

        def draw() -> None:
            progress.update(
                task_id,
                completed=measurements.requests,
                tokens=measurements.tokens,
                failed=measurements.failed,
                refresh=True,
            )

        async def redraw() -> None:
            while True:
                draw()
                await asyncio.sleep(PROGRESS_INTERVAL_S)

        redrawing = asyncio.ensure_future(redraw())
        try:
            yield
        finally:
            redrawing.cancel()
            draw()

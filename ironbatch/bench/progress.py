"""The progress bar of a run, on a terminal."""

import asyncio
import contextlib
import math
import sys
from collections.abc import Iterator
from typing import Final

from ironbatch.bench.options import BenchOptions
from ironbatch.bench.run import Run

PROGRESS_INTERVAL_S: Final = 0.25
"""Drawing takes milliseconds in which no token is stamped: often enough to watch, too seldom to show."""


@contextlib.contextmanager
def progress_bar(run: Run, options: BenchOptions) -> Iterator[None]:
    """Show the run's progress on stderr, if that is a terminal. Needs a running event loop.

    The bar counts requests if their number ends the run, and seconds otherwise.
    """
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console  # noqa: PLC0415 - 100 ms that a run without a terminal doesn't pay
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    measured = run.measured
    total: float | None = options.total_requests
    if options.duration_s is not None:
        total = math.ceil(options.warm_up_s + options.duration_s)
    counts = TextColumn("{task.fields[requests]} requests, {task.fields[tokens]} tokens, {task.fields[failed]} failed")
    columns = (BarColumn(), MofNCompleteColumn(), counts, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as progress:
        task_id = progress.add_task("", total=total, requests=0, tokens=0, failed=0)

        def draw() -> None:
            progress.update(
                task_id,
                completed=measured.requests if options.duration_s is None else min(int(run.elapsed_s), total or 0),
                requests=measured.requests,
                tokens=measured.tokens,
                failed=measured.failed,
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

"""`ironbatch bench`: the command. What takes long to import is imported when it runs, not for `--help`."""

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING, Final

from ironbatch.bench.options import FLAGS, BenchOptions
from ironbatch.clock import MonotonicClock
from ironbatch.errors import ConfigError

if TYPE_CHECKING:
    from ironbatch.bench.json_file import JsonFile

EXIT_OK: Final = 0
EXIT_FAILURES: Final = 1
EXIT_USAGE: Final = 2
EXIT_SIGNAL_BASE: Final = 128  # plus the signal's number, as a shell has it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags. They are read as text: `run` checks them, so that all its messages look alike."""
    for flag in FLAGS:
        default = "" if flag.default is None else f" (default: {flag.default})"
        parser.add_argument(
            flag.text, default=flag.default, metavar=flag.metavar, help=flag.help + default, dest=flag.name
        )


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark and print its report.

    Returns the exit code: 0 all went well, 1 a request failed or the server can't be reached, 2 a bad value,
    130 (SIGINT) or 143 (SIGTERM) interrupted, with what was measured until then.
    """
    try:
        options = BenchOptions.read(arguments)

        from ironbatch.bench.runner import reserve_file_descriptors  # noqa: PLC0415 - aiohttp and uvloop

        reserve_file_descriptors(min(options.concurrency, options.total_requests))
    except ConfigError as error:
        for problem in error.problems:
            _complain(problem)
        return EXIT_USAGE
    with contextlib.ExitStack() as stack:
        json_file = None
        if options.json is not None:
            from ironbatch.bench.json_file import JsonFile  # noqa: PLC0415

            try:
                json_file = stack.enter_context(JsonFile(options.json))
            except OSError as error:
                _complain(f"--json: {options.json!r} can't be written: {error.strerror or error}")
                return EXIT_USAGE
        return _run_and_report(options, json_file)


def _run_and_report(options: BenchOptions, json_file: "JsonFile | None") -> int:
    from ironbatch.bench.load import Unreachable  # noqa: PLC0415
    from ironbatch.bench.measure import Measurements  # noqa: PLC0415
    from ironbatch.bench.report import figures, report_lines  # noqa: PLC0415
    from ironbatch.bench.runner import run_load  # noqa: PLC0415

    measurements = Measurements()
    try:
        times, interrupted_by = run_load(options, MonotonicClock(), measurements)
    except Unreachable as error:
        _complain(f"can't reach {options.url}: {error}; is the server up, and --url right?")
        return EXIT_FAILURES
    run_figures = figures(measurements, options, times, interrupted=interrupted_by is not None)
    print("\n".join(report_lines(run_figures)), flush=True)
    if json_file is not None:
        try:
            json_file.write(run_figures)
        except OSError as error:
            _complain(f"--json: {options.json!r} can't be written: {error.strerror or error}")
            return EXIT_FAILURES
    if interrupted_by is not None:
        return EXIT_SIGNAL_BASE + interrupted_by
    return EXIT_FAILURES if measurements.failed else EXIT_OK


def _complain(problem: str) -> None:
    print(f"ironbatch bench: {problem}", file=sys.stderr)

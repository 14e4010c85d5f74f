"""`ironbatch bench`: the command. What takes long to import is imported when it runs, not for `--help`."""

import argparse
import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from ironbatch.bench.options import FLAGS, BenchOptions
from ironbatch.clock import MonotonicClock
from ironbatch.errors import EXIT_FAILED, EXIT_OK, EXIT_SIGNAL_BASE, ConfigError, IronbatchError

if TYPE_CHECKING:
    from ironbatch.bench.json_file import JsonFile

EPILOG: Final = (
    "Every stream is checked: token_index counts from 0, only the last line says done. TTFT runs from the send,"
    " connecting included, to the first token's arrival; inter-token latency from token to token: k tokens that"
    " arrive together count as k gaps of a k-th of the time since those before, or of 0 if they come with the"
    " first. Exit code: 0 all went well, 1 a request failed or the server can't be reached, 2 a bad value, 130"
    " interrupted."
)


class UnwritableFile(IronbatchError):
    """The run is over, but its figures can't be written to `--json`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags. They are read as text: `run` checks them, so that all its messages look alike."""
    for flag in FLAGS:
        default = "" if flag.default is None else f" (default: {flag.default})"
        parser.add_argument(
            flag.text, default=flag.default, metavar=flag.metavar, help=flag.help + default, dest=flag.name
        )


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark and print its report.

    Returns the exit code: 0 all went well, 1 a request failed, 130 (SIGINT) or 143 (SIGTERM) interrupted, with
    what was measured until then. Raises ConfigError for a bad value, Unreachable, UnwritableFile.
    """
    options = BenchOptions.read(arguments)
    from ironbatch.bench.json_file import JsonFile  # noqa: PLC0415
    from ironbatch.bench.runner import reserve_file_descriptors  # noqa: PLC0415 - uvloop

    reserve_file_descriptors(min(options.concurrency, options.total_requests))
    with contextlib.ExitStack() as stack:
        json_file = None
        if options.json is not None:
            try:
                json_file = stack.enter_context(JsonFile(options.json))
            except OSError as error:
                raise ConfigError([f"--json: {_unwritable(options.json, error)}"]) from None
        return _run_and_report(options, json_file)


def _run_and_report(options: BenchOptions, json_file: "JsonFile | None") -> int:
    from ironbatch.bench.measure import Measurements  # noqa: PLC0415
    from ironbatch.bench.report import figures, report_lines  # noqa: PLC0415
    from ironbatch.bench.runner import run_load  # noqa: PLC0415

    measurements = Measurements()
    times, interrupted_by = run_load(options, MonotonicClock(), measurements)
    run_figures = figures(measurements, options, times, interrupted=interrupted_by is not None)
    try:
        if json_file is not None:
            _write(json_file, run_figures)
    finally:
        print("\n".join(report_lines(run_figures)), flush=True)
    if interrupted_by is not None:
        return EXIT_SIGNAL_BASE + interrupted_by
    return EXIT_FAILED if measurements.failed else EXIT_OK


def _write(json_file: "JsonFile", run_figures: Mapping[str, Any]) -> None:
    try:
        json_file.write(run_figures)
    except OSError as error:
        raise UnwritableFile(f"--json: {_unwritable(json_file.path, error)}") from None


def _unwritable(path: str, error: OSError) -> str:
    return f"{path!r} can't be written: {error.strerror or error}; give a file in a folder that exists and is writable"

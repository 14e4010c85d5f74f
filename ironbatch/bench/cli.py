"""`ironbatch bench`: the command. What takes long to import is imported when it runs, not for `--help`."""

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from ironbatch.bench.options import FLAGS, BenchOptions
from ironbatch.clock import MonotonicClock
from ironbatch.errors import EXIT_FAILED, EXIT_OK, EXIT_SIGNAL_BASE, ConfigError, IronbatchError

if TYPE_CHECKING:
    from ironbatch.bench.whole_file import WholeFile
    from ironbatch.bench.workload import Workload

EPILOG: Final = (
    "Closed loop (without --rate, --trace and --ramp): --concurrency requests are always in flight. Open loop:"
    " requests are sent at their own times, drawn or from a trace. Every stream is checked: token_index counts from"
    " 0, only the last line says done. Latencies run from the send, connecting included; in the open loop from the"
    " time a request was meant to be sent. TTFT runs to the first token's arrival; inter-token latency from token to"
    " token: k tokens that arrive together count as k gaps of a k-th of the time since those before, or of 0 if they"
    " come with the first. Goodput counts requests that succeed with their TTFT and their mean inter-token latency"
    " within the bounds. Exit code: 0 all went well, 1 a request failed (--ramp: no rate is within the bounds) or"
    " the server can't be reached, 2 a bad value, 130 interrupted. docs/benchmarking.md says more."
)


class UnwritableFile(IronbatchError):
    """The run is over, but its figures can't be written to `--json`, or its plot to `--plot`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags. They are read as text: `run` checks them, so that all its messages look alike."""
    for flag in FLAGS:
        default = "" if flag.default is None else f" (default: {flag.default})"
        parser.add_argument(
            flag.text, default=flag.default, metavar=flag.metavar, help=flag.help + default, dest=flag.name
        )


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark and print its report.

    Returns the exit code: 0 all went well, 1 a request failed or no rate of a ramp is within its bounds, 130
    (SIGINT) or 143 (SIGTERM) interrupted, with what was measured until then. Raises ConfigError for a bad value,
    Unreachable, UnwritableFile.
    """
    options = BenchOptions.read(arguments)
    from ironbatch.bench.workload import Workload  # noqa: PLC0415

    if options.plot is not None:
        from ironbatch.bench.plot import require_matplotlib  # noqa: PLC0415

        require_matplotlib()
    options = _with_open_files(options)
    with contextlib.ExitStack() as stack:
        files = {}
        for flag, path in (("--json", options.json), ("--plot", options.plot)):
            if path is not None:
                files[flag] = stack.enter_context(_open(flag, path))
        workload = Workload(options)
        workload.check()
        if options.ramp is not None:
            return _run_ramp(options, workload, files)
        return _run_once(options, workload, files)


def _with_open_files(options: BenchOptions) -> BenchOptions:
    """Make room for the connections. A cap that nobody asked for is lowered to what there is room for."""
    from ironbatch.bench.runner import most_connections, reserve_file_descriptors  # noqa: PLC0415 - uvloop

    connections = options.concurrency
    if options.total_requests is not None and not options.warm_up_s:
        connections = min(connections, options.total_requests)
    if not options.has_concurrency_flag and options.is_open_loop:
        connections = most_connections(connections)
        options = dataclasses.replace(options, concurrency=most_connections(options.concurrency))
    reserve_file_descriptors(connections)
    return options


def _run_once(options: BenchOptions, workload: "Workload", files: "dict[str, WholeFile]") -> int:
    from ironbatch.bench.figures import figures  # noqa: PLC0415
    from ironbatch.bench.plot import draw_run  # noqa: PLC0415
    from ironbatch.bench.progress import progress_bar  # noqa: PLC0415
    from ironbatch.bench.report import report_lines  # noqa: PLC0415
    from ironbatch.bench.run import Run  # noqa: PLC0415
    from ironbatch.bench.runner import run_until_signal  # noqa: PLC0415

    one_run = Run(options, workload, MonotonicClock(), options.rate)

    async def work() -> None:
        with progress_bar(one_run, options):
            await one_run.send_all()

    interrupted_by = run_until_signal(work())
    result = one_run.result()
    run_figures = figures(
        result, options, interrupted=interrupted_by is not None, raised_prompts=workload.raised_prompts
    )
    try:
        _write_files(files, run_figures, lambda: draw_run(run_figures, result.measured, options))
    finally:
        print("\n".join(report_lines(run_figures)), flush=True)
    if interrupted_by is not None:
        return EXIT_SIGNAL_BASE + interrupted_by
    return EXIT_FAILED if result.measured.failed else EXIT_OK


def _run_ramp(options: BenchOptions, workload: "Workload", files: "dict[str, WholeFile]") -> int:
    from ironbatch.bench.figures import ramp_figures  # noqa: PLC0415
    from ironbatch.bench.plot import draw_ramp  # noqa: PLC0415
    from ironbatch.bench.ramp import Ramp  # noqa: PLC0415
    from ironbatch.bench.ramp_report import probe_line, result_lines  # noqa: PLC0415
    from ironbatch.bench.runner import run_until_signal  # noqa: PLC0415

    ramp = Ramp(options, workload, MonotonicClock(), lambda probe: print(probe_line(probe), flush=True))
    interrupted_by = run_until_signal(ramp.run())
    all_figures = ramp_figures(ramp, options, interrupted=interrupted_by is not None)
    try:
        if all_figures is not None:
            _write_files(files, all_figures, lambda: draw_ramp(all_figures, options))
    finally:
        print("\n".join(result_lines(ramp, interrupted=interrupted_by is not None)), flush=True)
    if interrupted_by is not None:
        return EXIT_SIGNAL_BASE + interrupted_by
    return EXIT_OK if ramp.search.highest_passed is not None and ramp.ended_by is None else EXIT_FAILED


def _open(flag: str, path: str) -> "WholeFile":
    from ironbatch.bench.whole_file import WholeFile  # noqa: PLC0415

    try:
        return WholeFile(path)
    except OSError as error:
        raise ConfigError([f"{flag}: {_unwritable(path, error)}"]) from None


def _write_files(files: "Mapping[str, WholeFile]", document: Mapping[str, Any], draw: Callable[[], bytes]) -> None:
    """Write the files that were asked for, by flag. Raises UnwritableFile."""
    for flag, file in files.items():
        content = json.dumps(document, indent=2).encode() + b"\n" if flag == "--json" else draw()
        try:
            file.write(content)
        except OSError as error:
            raise UnwritableFile(f"{flag}: {_unwritable(file.path, error)}") from None


def _unwritable(path: str, error: OSError) -> str:
    return f"{path!r} can't be written: {error.strerror or error}; give a file in a folder that exists and is writable"

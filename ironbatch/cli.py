"""The command line: `ironbatch serve`, `check-config`, `bench`, `device`.

What takes long to import (numba, numpy, the web side) is imported by the command that needs it: `--help` and a
message about a bad value come at once.
"""

import argparse
import difflib
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

import ironbatch
from ironbatch import logs
from ironbatch.bench import cli as bench_cli
from ironbatch.bench.options import FLAGS as BENCH_FLAGS
from ironbatch.config import Config, Option, environment_warnings, options
from ironbatch.driver import cli as device_cli
from ironbatch.driver.options import FLAGS as DEVICE_FLAGS
from ironbatch.errors import EXIT_FAILED, EXIT_OK, EXIT_SIGNAL_BASE, EXIT_USAGE, ConfigError, IronbatchError
from ironbatch.kinds import as_text
from ironbatch.limits import quoted
from ironbatch.processes import CHILD_ENVIRONMENT, missing_resource, open_standard_streams

_PRECEDENCE: Final = (
    "Each option is also an environment variable, named with it; a flag outranks its variable, and an empty"
    " variable counts as unset. `ironbatch check-config` shows what would run, and where each value comes from."
    " One variable is no option: IRONBATCH_CACHE_DIR says where compiled kernels are kept (default:"
    " ~/.cache/ironbatch)."
)
_NOT_OPTIONS: Final = frozenset({"command", "json"})


class UsageError(ConfigError):
    """The command line can't be read."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code.

    0: all went well. 1: it failed, in one line on stderr. 2: bad usage or values, each problem on its own line.
    130: interrupted. 141: nobody reads the output any more.
    """
    try:
        code = _run(sys.argv[1:] if argv is None else list(argv))
        if sys.stdout is not None:  # it was closed
            sys.stdout.flush()  # here, where a reader that has gone is handled
    except ConfigError as error:
        return _complain(error.problems, EXIT_USAGE)
    except IronbatchError as error:
        return _complain([str(error)], EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_SIGNAL_BASE + signal.SIGINT
    except BrokenPipeError:
        _discard_output()
        return EXIT_SIGNAL_BASE + signal.SIGPIPE
    except (MemoryError, ImportError, OSError) as error:
        missing = missing_resource(error)
        if missing is None:
            raise
        return _complain([missing], EXIT_FAILED)
    return code


def _run(argv: list[str]) -> int:
    _check_command(argv)
    parser = _parser()
    try:
        arguments, unknown = parser.parse_known_args(argv)
    except SystemExit as end:  # --help and --version have printed
        return int(end.code or EXIT_OK)
    if unknown:
        raise UsageError(_unknown_problems(arguments.command, unknown))
    return _COMMANDS[arguments.command](arguments)


def _serve(arguments: argparse.Namespace) -> int:
    config = Config.load(_option_values(arguments), os.environ)
    open_standard_streams()
    logs.configure(config.log_level, config.log_format)
    _warn(environment_warnings(os.environ))
    _allow_one_thread_for_blas()
    from ironbatch.supervisor import serve  # noqa: PLC0415

    return serve(config)


def _check_config(arguments: argparse.Namespace) -> int:
    _allow_one_thread_for_blas()
    from ironbatch import check_config  # noqa: PLC0415

    _warn(environment_warnings(os.environ))
    return check_config.run(_option_values(arguments), os.environ, as_json=arguments.json)


def _allow_one_thread_for_blas() -> None:
    """Before numpy is imported: `serve` forks, so it must have no threads, and they cost `check-config` 50 ms."""
    os.environ.update(CHILD_ENVIRONMENT)


_COMMANDS: Final[Mapping[str, Callable[[argparse.Namespace], int]]] = {
    "serve": _serve,
    "check-config": _check_config,
    "bench": bench_cli.run,
    "device": device_cli.run,
}
_OWN_FLAGS: Final[Mapping[str, Sequence[str]]] = {
    "bench": [flag.text for flag in BENCH_FLAGS],
    "device": [flag.text for flag in DEVICE_FLAGS],
}
"""Of the commands that run no engine; the others have its options."""


class _Parser(argparse.ArgumentParser):
    """argparse, but its errors are ours: one line, no usage, the same exit code and shape as any other problem."""

    def print_help(self, file: Any = None) -> None:
        """Its own would ignore a reader that has gone, as soon as the help is longer than the stream's buffer."""
        (file or sys.stdout).write(self.format_help())

    def error(self, message: str) -> NoReturn:
        raise UsageError([f"{message}; `{self.prog} --help` says more"])


def _parser() -> _Parser:
    parser = _Parser(prog="ironbatch", description="An LLM serving engine.", epilog=_PRECEDENCE, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"ironbatch {ironbatch.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def add(name: str, summary: str, epilog: str | None) -> _Parser:
        return commands.add_parser(
            name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", epilog=epilog, allow_abbrev=False
        )

    serve = add("serve", "run the engine until SIGTERM or SIGINT", _PRECEDENCE)
    check = add("check-config", "say what `serve` would run with these flags and this environment", _PRECEDENCE)
    bench = add("bench", "measure a running server", bench_cli.EPILOG)
    device = add("device", "serve a reference device as a node in the file system", device_cli.EPILOG)
    for command in (serve, check):
        for option in options():
            _add_option(command, option)
    check.add_argument("--json", action="store_true", help="print it as JSON")
    bench_cli.add_arguments(bench)
    device_cli.add_arguments(device)
    return parser


def _add_option(parser: argparse.ArgumentParser, option: Option) -> None:
    # Read as text, and left out if not given: Config.load checks it together with the environment.
    default = "none" if option.default == "" else as_text(option.default)
    text = f"{option.help} (default: {default}; {option.kind.bounds}; {option.env})"
    value: dict[str, Any] = {"nargs": "?", "const": "true"} if option.is_switch else {}
    parser.add_argument(
        option.flag,
        dest=option.name,
        metavar=option.metavar,
        default=argparse.SUPPRESS,
        help=text.replace("%", "%%"),
        **value,
    )


def _option_values(arguments: argparse.Namespace) -> dict[str, str]:
    return {name: value for name, value in vars(arguments).items() if name not in _NOT_OPTIONS}


def _check_command(argv: Sequence[str]) -> None:
    """Raise UsageError unless a command, or a flag that needs none, comes first."""
    names = f"{', '.join(list(_COMMANDS)[:-1])} or {list(_COMMANDS)[-1]}"
    if not argv:
        raise UsageError([f"no command; use {names}, or --help"])
    first = argv[0]
    if first in _COMMANDS or first in {"-h", "--help", "--version"}:
        return
    if first.startswith("-"):
        problem = f"{quoted(first)} is no flag of ironbatch itself; begin with a command: {names}"
    else:
        problem = f"{quoted(first)} is no command; {_meant(first, _COMMANDS) or f'use {names}'}"
    raise UsageError([problem])


def _unknown_problems(command: str, unknown: Sequence[str]) -> list[str]:
    """One line for each argument that `command` does not know; values of unknown flags are not told of twice."""
    flags = list(_OWN_FLAGS.get(command) or [option.flag for option in options()])
    flags += ["--json", "--help"] if command == "check-config" else ["--help"]
    unknown_flags = [word for word in unknown if word.startswith("-")]
    problems = []
    for word in unknown_flags or unknown:
        name = word.partition("=")[0]
        hint = _meant(name, flags) or f"`ironbatch {command} --help` lists those there are"
        problems.append(f"{quoted(name)} is no {'flag' if unknown_flags else 'argument'} of {command}; {hint}")
    return problems


def _meant(word: str, candidates: Sequence[str] | Mapping[str, object]) -> str:
    close = difflib.get_close_matches(word, list(candidates), n=1)
    return f"did you mean {close[0]}?" if close else ""


def _warn(warnings: Sequence[str]) -> None:
    logs.complain(warnings, level=logging.WARNING)


def _complain(problems: Sequence[str], code: int) -> int:
    logs.complain(problems)
    return code


def _discard_output() -> None:
    """What is still buffered would raise once more when the interpreter flushes it at its end."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())

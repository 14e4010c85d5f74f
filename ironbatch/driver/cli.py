"""`ironbatch device`: the command. What takes long to import is imported when it runs, not for `--help`."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any, Final

from ironbatch.driver.options import FLAGS, NodeOptions
from ironbatch.processes import CHILD_ENVIRONMENT

EPILOG: Final = (
    "A reference device for `ironbatch serve --backend device --device PATH`, and for any program that speaks the"
    " ioctls of ironbatch_ioctl.h: it computes what the mock backend does, in memory that it shares with its clients."
    " Needs /dev/fuse; runs as root, or as another user with fusermount3 (package fuse3). Serves until SIGTERM or"
    " SIGINT, or until the node is unmounted. Exit code: 0 ended so, 1 it can't serve, or its connection was aborted, 2"
    " a bad value. docs/driver.md says more."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags. They are read as text: `run` checks them, so that all its messages look alike."""
    for flag in FLAGS:
        default = "" if flag.default is None else f" (default: {flag.default or 'none'})"
        value: dict[str, Any] = {"nargs": "?", "const": "true"} if flag.is_switch else {}
        parser.add_argument(
            flag.text, default=flag.default, metavar=flag.metavar, help=flag.help + default, dest=flag.name, **value
        )


def run(arguments: argparse.Namespace) -> int:
    """Serve a node until somebody ends it. Returns the exit code.

    Raises:
        ConfigError: bad values.
        StartError: it can't serve.
    """
    options = NodeOptions.read(arguments)
    if options.spec.caution:
        sys.stderr.write(f"ironbatch device: warning: {options.spec.caution}\n")
    os.environ.update(CHILD_ENVIRONMENT)  # before numpy is imported: one thread is all that a node needs
    from ironbatch.driver.serving import serve  # noqa: PLC0415 - numpy and the kernels

    return serve(options, _say)


def _say(line: str) -> None:
    sys.stdout.write(f"ironbatch device: {line}\n")
    sys.stdout.flush()

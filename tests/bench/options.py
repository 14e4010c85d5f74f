"""Options as the command line would give them."""

import argparse

from ironbatch.bench.cli import add_arguments
from ironbatch.bench.options import BenchOptions


def read_options(*argv: str) -> BenchOptions:
    """What these flags say. Raises ConfigError."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return BenchOptions.read(parser.parse_args(argv))

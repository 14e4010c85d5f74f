"""What every script here measures beside its own: the yardsticks that make a figure a ratio within one run."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import pyperf

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # a checkout that is not installed, and the tests' oracle

import ironbatch  # noqa: E402
from tests import scheduler_oracle  # noqa: E402

EMPTY_CALL = "empty_call"
ORACLE_STEP = "oracle_step"
ORACLE_SEQUENCES = 64

INHERITED = ("IRONBATCH_CACHE_DIR", "XDG_CACHE_HOME")
"""Where compiled kernels are: pyperf's workers would compile them anew."""

PACKAGES = ("falcon", "gunicorn", "numba", "numpy", "uvloop")


def runner(description: str) -> pyperf.Runner:
    """A pyperf runner that has the yardsticks already.

    A worker process takes a second to load the kernels, so there are fewer of them than by pyperf's default of 20, and
    each takes more values.
    """
    made = pyperf.Runner(values=6, processes=6, metadata=metadata())
    made.argparser.description = description
    arguments = made.parse_args()
    arguments.inherit_environ = [*(arguments.inherit_environ or ()), *INHERITED]
    made.bench_func(EMPTY_CALL, empty)
    made.bench_func(ORACLE_STEP, OracleStep().run)
    return made


def metadata() -> dict[str, str]:
    """What a reader of the figures wants to know beside pyperf's own metadata."""
    return {"ironbatch_version": ironbatch.__version__} | {f"{name}_version": version(name) for name in PACKAGES}


def empty() -> None:
    """An empty Python function."""


class OracleStep:
    """The tests' scheduler, in plain Python and slow on purpose: a decode step of 64 sequences, none of which ends."""

    def __init__(self) -> None:
        self._scheduler = scheduler_oracle.Scheduler(
            num_blocks=1 << 40, block_size=16, batch_tokens=ORACLE_SEQUENCES * 16, running_limit=ORACLE_SEQUENCES
        )
        for slot in range(ORACLE_SEQUENCES):
            self._scheduler.submit(scheduler_oracle.Sequence(slot, prompt=16, max_new=1 << 40))
        self.run()

    def run(self) -> None:
        """Plan and commit."""
        rows = self._scheduler.plan(now_ns=0)
        self._scheduler.commit([[1]] * len(rows))

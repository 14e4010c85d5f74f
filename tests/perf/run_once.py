"""Run each benchmark of a pyperf script once, all in this process: `run_once.py SCRIPT`. Prints their names.

pyperf starts a process for each, which loads all kernels; that is most of the time of a run that measures nothing.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyperf


class Once(pyperf.Runner):  # type: ignore[misc]
    """A runner that measures nothing."""

    def bench_func(self, name: str, func: Callable[..., Any], *args: Any, **_: Any) -> None:
        """Call it once."""
        func(*args)
        print(name)

    def bench_time_func(self, name: str, time_func: Callable[..., float], *args: Any, **_: Any) -> None:
        """Have it time one loop."""
        assert time_func(1, *args) >= 0
        print(name)


if __name__ == "__main__":
    script = sys.argv.pop(1)
    sys.path.insert(0, str(Path(script).parent))
    pyperf.Runner = Once
    runpy.run_path(script, run_name="__main__")

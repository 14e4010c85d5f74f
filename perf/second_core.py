"""A second process on a core of its own."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def child(run: Callable[[], object]) -> Iterator[None]:
    """A forked process that calls `run` without end. It and this process get a core each, where there are two.

    Left to the kernel, the two sometimes share one, where a wake costs a quarter and a spin everything.
    """
    cores = sorted(os.sched_getaffinity(0))
    pid = os.fork()
    os.sched_setaffinity(0, cores[1:2] or cores if pid == 0 else cores[:1])
    if pid == 0:
        with contextlib.suppress(BaseException):
            while True:
                run()
        os._exit(1)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.sched_setaffinity(0, cores)

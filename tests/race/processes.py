"""Real processes on one real segment, all started at once and all reaped, and scratch memory for test kernels."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ironbatch import layout
from ironbatch.processes import die_with_parent
from ironbatch.shm.segment import SHM_DIRECTORY, Segment
from tests.support import small_config

Job = Callable[[Segment], Any]
"""What one process does with the segment that it has attached; its result is pickled."""

DEADLINE_S = 90.0
"""Nothing here takes longer unless it hangs, however busy the machine is."""

LINE_WORDS = layout.CACHE_LINE_BYTES // layout.WORD_BYTES


@contextlib.contextmanager
def shared_segment(**options: Any) -> Iterator[Segment]:
    """A small engine's segment; it is gone from /dev/shm afterwards."""
    segment = Segment.create(small_config(**options), 0)
    path = Path(SHM_DIRECTORY, segment.name)
    try:
        yield segment
        assert path.exists(), "one of those who only attached it has removed it"
    finally:
        segment.close()
        assert not path.exists()


def scratch_of(segment: Segment) -> int:
    """Address of memory that a test may use as it likes: the token table, zeroed and aligned to a cache line."""
    return segment.address + int(segment.header["tokens_offset"])


def race(segment: Segment, jobs: Sequence[Job], deadline_s: float = DEADLINE_S) -> list[Any]:
    """Run each job in a process of its own, from the same moment on. Returns their results, in their order.

    The first that fails fails the test, with its traceback. All are dead and reaped when this returns or raises.
    """
    deadline = time.monotonic() + deadline_s
    gate, opener = os.pipe()
    crew: dict[int, tuple[int, bytearray]] = {}  # descriptor of the result -> pid, what has come
    results: dict[int, Any] = {}
    pids: list[int] = []
    try:
        cpus = itertools.cycle(sorted(os.sched_getaffinity(0)))
        for job, cpu in zip(jobs, cpus, strict=False):
            reader, writer = os.pipe()
            pid = _fork(partial(_run, job, segment.name, gate, cpu), opener, writer)
            os.close(writer)
            pids.append(pid)
            crew[reader] = (pid, bytearray())
        os.close(opener)
        opener = -1
        while crew:
            remaining_s = deadline - time.monotonic()
            ready = select.select(list(crew), [], [], max(remaining_s, 0.0))[0]
            assert ready, f"{len(crew)} of {len(jobs)} processes have not ended within {deadline_s:.0f} s"
            for reader in ready:
                _read_some(reader, crew, results)
        return [results[pid] for pid in pids]
    finally:
        for descriptor in (gate, opener, *crew):
            if descriptor >= 0:
                os.close(descriptor)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)  # those that have ended are zombies still
            os.waitpid(pid, 0)


def _read_some(reader: int, crew: dict[int, tuple[int, bytearray]], results: dict[int, Any]) -> None:
    pid, received = crew[reader]
    some = os.read(reader, 1 << 16)
    received += some
    if some:
        return
    os.close(reader)
    del crew[reader]
    assert received, "a process has died without a word"
    error, results[pid] = pickle.loads(received)
    assert error is None, error


def _fork(run: Callable[[], Any], opener: int, writer: int) -> int:
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Python 3.12 and later warn of any thread, such as those that numpy's BLAS keeps and the children never call.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid != 0:
        return pid
    status = 1
    try:
        die_with_parent(parent)
        os.close(opener)
        answer: tuple[str | None, Any] = (None, run())
        status = 0
    except BaseException:
        answer = (traceback.format_exc(), None)
    finally:
        with contextlib.suppress(BaseException), os.fdopen(writer, "wb") as stream:
            pickle.dump(answer, stream)
        os._exit(status)


def _run(job: Job, name: str, gate: int, cpu: int) -> Any:
    os.sched_setaffinity(0, {cpu})  # short races are otherwise run on one processor, one after the other
    segment = Segment.attach(name)  # a mapping of its own, at another address
    segment.populate()
    os.read(gate, 1)  # the end of file is the start
    return job(segment)


class Patience:
    """Bounds a loop that waits for another process: each turn hands the processor on, until the deadline."""

    def __init__(self, what: str, deadline_s: float = DEADLINE_S) -> None:
        self._what = what
        self._deadline = time.monotonic() + deadline_s

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._deadline

    def wait(self) -> None:
        """Let others run. Fails once the deadline is over."""
        assert not self.is_over, f"waited in vain: {self._what}"
        os.sched_yield()

"""What the processes of an engine do to themselves: their names, signals, standard streams, and end."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import sys
from collections.abc import Iterator, Mapping

import setproctitle

PR_SET_PDEATHSIG = 1  # prctl(2)
CHILD_ENVIRONMENT: Mapping[str, str] = {"OPENBLAS_NUM_THREADS": "1"}
"""numpy's BLAS would start a thread a core, and a process with threads must not fork. Set before numpy is imported."""


RAISE_AGAIN_S = 0.1
RELOAD_SIGNALS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTTIN, signal.SIGTTOU)


def open_standard_streams() -> None:
    """Open /dev/null for each of stdin, stdout and stderr that is closed.

    Otherwise a socket or a segment would get its number, and the start of a child would put something else there.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest that is free, hence this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, "r" if descriptor == 0 else "w", closefd=False))


def ignore_reload_signals() -> None:
    """Until somebody handles them, they must not kill: not this process, nor the helpers that it starts meanwhile.

    One of these is the resource tracker: a SIGHUP to the whole group would end it, and the segment would stay.
    """
    for number in RELOAD_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


OUT_OF_MEMORY = (
    "there is not enough memory to start; raise the limit (ulimit -v, MemoryMax=, docker run --memory), or lower"
    " --max-queued-requests, --max-running-seqs, --max-model-len or --total-kv-blocks"
)

OUT_OF_DESCRIPTORS = "there are not enough file descriptors; raise the limit (ulimit -n)"


def is_out_of_memory(problem: BaseException) -> bool:
    """Whether an exception, or what it came from, says that memory was refused; a library may be too large to load."""
    link: BaseException | None = problem
    while link is not None:
        if isinstance(link, MemoryError) or getattr(link, "errno", None) == errno.ENOMEM:
            return True
        if "failed to map segment" in str(link) or "Cannot allocate memory" in str(link):  # dlopen(3)'s words
            return True
        link = link.__cause__ or link.__context__
    return False


def missing_resource(problem: BaseException) -> str | None:
    """Of which limit an exception speaks, in words for the operator; None: of none."""
    if getattr(problem, "errno", None) in {errno.EMFILE, errno.ENFILE}:
        return OUT_OF_DESCRIPTORS
    return OUT_OF_MEMORY if is_out_of_memory(problem) else None


def set_process_name(role: str) -> None:
    """Name this process for `ps`: `ironbatch: <role>`."""
    setproctitle.setproctitle(f"ironbatch: {role}")


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel SIGKILL this process when its parent dies, whatever the parent dies of (prctl(2)).

    Args:
        parent_pid: who the parent was before the call; if it is dead already, this process exits at once.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


class StopRequested(BaseException):
    """SIGTERM or SIGINT came while the kernels were compiled. No Exception, so that nothing on the way swallows it."""


class StartSignals:
    """SIGTERM and SIGINT while the system starts: noted, but where starting takes long they interrupt it at once."""

    def __init__(self) -> None:
        self.is_requested = False
        self._may_raise = False
        open_standard_streams()
        ignore_reload_signals()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)
        signal.signal(signal.SIGALRM, self._handle)

    @contextlib.contextmanager
    def interrupt(self) -> Iterator[None]:
        """Raise StopRequested if a signal has come or comes in this block."""
        self._may_raise = True
        try:
            if self.is_requested:
                raise StopRequested
            yield
        finally:
            self._may_raise = False
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _handle(self, number: int, frame: object) -> None:
        self.is_requested = True
        if self._may_raise:
            # Once more a little later: an exception that is raised in a callback of the compiler's goes no further.
            signal.setitimer(signal.ITIMER_REAL, RAISE_AGAIN_S)
            raise StopRequested


@contextlib.contextmanager
def signal_pipe(*numbers: int) -> Iterator[int]:
    """From now on these signals arrive as bytes on a pipe (signal.set_wakeup_fd). Gives its reading end."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda number, frame: None)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(-1)
        os.close(reader)
        os.close(writer)


def read_signals(signals: int) -> list[int]:
    """Those that have come on a `signal_pipe`; empty if none has."""
    with contextlib.suppress(BlockingIOError):
        return list(os.read(signals, 4096))
    return []

"""What every process of an engine does to itself: its name, its end when its parent dies, its threads."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping

import setproctitle

PR_SET_PDEATHSIG = 1  # prctl(2)
CHILD_ENVIRONMENT: Mapping[str, str] = {"OPENBLAS_NUM_THREADS": "1"}
"""numpy's BLAS would start a thread a core, and a process with threads must not fork. Set before numpy is imported."""


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

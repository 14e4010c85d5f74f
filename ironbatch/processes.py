"""What every process of an engine does to itself: its name, its end when its parent dies, its threads."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Mapping

import setproctitle

PR_SET_PDEATHSIG = 1  # prctl(2)
CHILD_ENVIRONMENT: Mapping[str, str] = {"OPENBLAS_NUM_THREADS": "1"}
"""numpy's BLAS would start a thread a core, and a process with threads must not fork. Set before numpy is imported."""


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

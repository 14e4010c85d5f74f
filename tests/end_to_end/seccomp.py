"""Run a command with a filter of system calls, as systemd does: `seccomp.py NAMES COMMAND...`; others answer EPERM.

By libseccomp, which systemd itself uses. `NAMES` is a file with one name a line; other processors' are left out.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from pathlib import Path

LIBRARY = "libseccomp.so.2"
SCMP_ACT_ALLOW = 0x7FFF0000
SCMP_ACT_ERRNO = 0x00050000


def restrict(names: list[str]) -> None:
    """From now on this process and its children may use these alone."""
    library = ctypes.CDLL(LIBRARY)
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(SCMP_ACT_ERRNO | errno.EPERM)))
    for name in names:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number >= 0:
            assert library.seccomp_rule_add(context, ctypes.c_uint32(SCMP_ACT_ALLOW), number, 0) == 0, name
    assert library.seccomp_load(context) == 0


if __name__ == "__main__":
    restrict(Path(sys.argv[1]).read_text().split())
    os.execv(sys.argv[2], sys.argv[2:])

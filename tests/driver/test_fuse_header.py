"""The structs of the FUSE protocol are the kernel's: gcc compares them with <linux/fuse.h>."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from ironbatch.driver import fuse
from ironbatch.driver.fuse import Opcode

SIZES = {
    "fuse_in_header": fuse.IN_HEADER.size,
    "fuse_out_header": fuse.OUT_HEADER.size,
    "fuse_init_out": fuse.INIT_OUT.size,
    "fuse_attr": fuse.ATTR.size,
    "fuse_attr_out": fuse.ATTR_OUT_HEAD.size + fuse.ATTR.size,
    "fuse_setattr_in": fuse.SETATTR_IN.size,
    "fuse_open_in": fuse.OPEN_IN.size,
    "fuse_open_out": fuse.OPEN_OUT.size,
    "fuse_release_in": fuse.RELEASE_IN.size,
    "fuse_statfs_out": fuse.STATFS_OUT.size,
    "fuse_interrupt_in": fuse.INTERRUPT_IN.size,
    "fuse_ioctl_in": fuse.IOCTL_IN.size,
    "fuse_ioctl_out": fuse.IOCTL_OUT.size,
    "fuse_poll_in": fuse.POLL_IN.size,
    "fuse_poll_out": fuse.POLL_OUT.size,
    "fuse_notify_poll_wakeup_out": fuse.NOTIFY_POLL_OUT.size,
}
OFFSETS = {
    ("fuse_setattr_in", "size"): 16,
    ("fuse_setattr_in", "mode"): 68,
    ("fuse_setattr_in", "uid"): 76,
    ("fuse_attr", "mode"): 60,
    ("fuse_init_out", "max_write"): 20,
    ("fuse_init_out", "flags2"): 32,
    ("fuse_ioctl_in", "cmd"): 12,
    ("fuse_ioctl_in", "in_size"): 24,
    ("fuse_poll_in", "flags"): 16,
}
CONSTANTS = {
    "FOPEN_DIRECT_IO": fuse.OPEN_DIRECT_IO,
    "FOPEN_NOFLUSH": fuse.OPEN_NO_FLUSH,
    "FATTR_MODE": fuse.SET_MODE,
    "FATTR_UID": fuse.SET_UID,
    "FATTR_GID": fuse.SET_GID,
    "FATTR_SIZE": fuse.SET_SIZE,
    "FUSE_POLL_SCHEDULE_NOTIFY": fuse.POLL_SCHEDULE_NOTIFY,
    "FUSE_NOTIFY_POLL": 1,
    "FUSE_ABORT_ERROR": 1 << 21,
    "FUSE_INIT_EXT": 1 << 30,
    "FUSE_ROOT_ID": fuse.ROOT_ID,
    "FUSE_KERNEL_VERSION": fuse.MAJOR,
} | {f"FUSE_{opcode.name}": int(opcode) for opcode in Opcode}
NEWEST_NEEDED = "FUSE_INIT_EXT"
HEADER = Path("/usr/include/linux/fuse.h")


@pytest.mark.skipif(
    shutil.which("gcc") is None or not HEADER.exists() or NEWEST_NEEDED not in HEADER.read_text(),
    reason="gcc and a <linux/fuse.h> of Linux 5.17 or newer are needed",
)
def test_gcc_agrees(tmp_path: Path) -> None:
    lines = ["#include <stddef.h>", "#include <linux/fuse.h>"]
    lines += [f'_Static_assert(sizeof(struct {name}) == {size}, "{name}");' for name, size in SIZES.items()]
    lines += [
        f'_Static_assert(offsetof(struct {name}, {field}) == {offset}, "{name}.{field}");'
        for (name, field), offset in OFFSETS.items()
    ]
    lines += [f'_Static_assert({name} == {value}, "{name}");' for name, value in CONSTANTS.items()]
    (tmp_path / "check.c").write_text("\n".join(lines) + "\n")
    command = ["gcc", "-std=c11", "-Wall", "-Werror", "-c", "-o", os.devnull, str(tmp_path / "check.c")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode == 0, ran.stderr

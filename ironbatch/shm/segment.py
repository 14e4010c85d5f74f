"""Creating, attaching and leaving the segment.

Only its creator unlinks it, or, if that is killed, its multiprocessing resource tracker. `multiprocessing` before
Python 3.13 gives that right to whoever attaches as well: the segment then vanishes when the first worker exits. So all
attaching goes through `Segment.attach`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import sys
from collections.abc import Iterator
from multiprocessing import resource_tracker, shared_memory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ironbatch import layout
from ironbatch.config import Config
from ironbatch.errors import StartError
from ironbatch.shm.stale import hold, remove_stale

SHM_DIRECTORY = "/dev/shm"  # noqa: S108  where glibc's shm_open puts it
NAME_PREFIX = "ironbatch-"
MADV_POPULATE_WRITE = 23  # Linux 5.14, include/uapi/asm-generic/mman-common.h; not in the mmap module


class _Memory(shared_memory.SharedMemory):
    """SharedMemory without two of its habits.

    Its `__del__` complains of views that live as long as the process does. And it unlinks a segment that it cannot map,
    also one of others: a worker that is short of memory would take it from all who come after.
    """

    def __init__(self, name: str, *, create: bool = False, size: int = 0, **options: Any) -> None:
        self._is_ours = create
        super().__init__(name, create=create, size=size, **options)

    def unlink(self) -> None:
        if self._is_ours:
            super().unlink()

    def __del__(self) -> None:
        with contextlib.suppress(BufferError, OSError):
            self.close()


class Segment:
    """One attached segment: its address for kernels, and structured numpy views of its tables for Python.

    Views: `header` (one HEADER record), `lanes` LANE[num_lanes], `slots` SLOT[num_slots],
    `tokens` int32[num_slots, token_row_tokens], `texts` uint8[num_slots, text_row_bytes], `running` int32[num_slots],
    `metrics` METRICS[1 + num_lanes].

    Args:
        memory: the shared memory.
        is_owner: whether this process has made it.
        lock: the descriptor by which a creator holds the lock on it, else -1.
    """

    def __init__(self, memory: shared_memory.SharedMemory, *, is_owner: bool, lock: int = -1) -> None:
        self._memory = memory
        self._is_owner = is_owner
        self._lock = lock
        self._creator_pid = os.getpid() if is_owner else 0
        self.name = memory.name
        self.header: Any = self._view(0, layout.HEADER, 1)[0]
        self.address = int(self._view(0, np.dtype(np.uint8), 1).ctypes.data)

    @classmethod
    def create(cls, config: Config, now_ns: int) -> Segment:
        """Make and populate the segment of a new engine; first remove those that dead ones have left behind.

        Raises:
            StartError: /dev/shm is missing or too small for it.
        """
        sizes = {
            "num_slots": config.num_slots,
            "num_lanes": config.num_lanes,
            "max_model_len": config.max_model_len,
        }
        offsets = layout.offsets(**sizes, has_text=config.has_text)
        remove_stale(SHM_DIRECTORY, NAME_PREFIX)
        memory, lock = _create_memory(offsets.total)
        segment = cls(memory, is_owner=True, lock=lock)
        header = segment.header
        for name, value in sizes.items():
            header[name] = value
        header["magic"] = layout.MAGIC
        header["layout_version"] = layout.LAYOUT_VERSION
        header["segment_bytes"] = offsets.total
        header["lane_entries"] = layout.lane_entries(config.num_slots)
        header["token_row_tokens"] = layout.token_row_tokens(config.max_model_len)
        header["lanes_offset"] = offsets.lanes
        header["entries_offset"] = offsets.entries
        header["slots_offset"] = offsets.slots
        header["tokens_offset"] = offsets.tokens
        header["running_offset"] = offsets.running
        header["texts_offset"] = offsets.texts
        header["text_row_bytes"] = layout.text_row_bytes(config.max_model_len) if config.has_text else 0
        header["metrics_offset"] = offsets.metrics
        header["max_request_tokens"] = config.max_request_tokens
        header["created_ns"] = now_ns
        segment._open_tables()
        segment.metrics[0]["kv_blocks_total"] = config.total_kv_blocks
        segment.metrics[0]["kv_blocks_free"] = config.total_kv_blocks
        return segment

    @classmethod
    def attach(cls, name: str) -> Segment:
        """Open a living engine's segment.

        Raises:
            StartError: there is none of that name, or it has another layout.
        """
        try:
            if sys.version_info >= (3, 13):
                memory = _Memory(name, track=False)
            else:
                with _untracked():
                    memory = _Memory(name)
        except FileNotFoundError:
            raise StartError(f"shared memory segment {name} does not exist: its engine has ended") from None
        segment = cls(memory, is_owner=False)
        found = (int(segment.header["magic"]), int(segment.header["layout_version"]))
        if found != (layout.MAGIC, layout.LAYOUT_VERSION):
            raise StartError(
                f"shared memory segment {name} has layout {found[1]}, this version of Ironbatch reads"
                f" {layout.LAYOUT_VERSION}: restart the whole engine after an upgrade"
            )
        segment._open_tables()
        return segment

    def _open_tables(self) -> None:
        header = self.header
        lanes, slots = int(header["num_lanes"]), int(header["num_slots"])
        row = int(header["token_row_tokens"])
        self.lanes = self._view(int(header["lanes_offset"]), layout.LANE, lanes)
        self.slots = self._view(int(header["slots_offset"]), layout.SLOT, slots)
        self.metrics = self._view(int(header["metrics_offset"]), layout.METRICS, 1 + lanes)
        flat = self._view(int(header["tokens_offset"]), np.dtype("<i4"), slots * row)
        self.tokens: NDArray[np.int32] = flat.reshape(slots, row)
        text = int(header["text_row_bytes"])
        texts = self._view(int(header["texts_offset"]), np.dtype(np.uint8), slots * text)
        self.texts: NDArray[np.uint8] = texts.reshape(slots, text)
        self.running: NDArray[np.int32] = self._view(int(header["running_offset"]), np.dtype("<i4"), slots)

    def _view(self, offset: int, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
        assert self._memory.buf is not None, "the segment was left"
        return np.frombuffer(self._memory.buf, dtype, count, offset)

    def populate(self) -> None:
        """Map all pages into this process now: a first touch inside a step costs it 0.5-1 ms."""
        with contextlib.suppress(OSError, ValueError):  # kernels before 5.14 fault them in one by one
            self._memory._mmap.madvise(MADV_POPULATE_WRITE)  # type: ignore[attr-defined]

    def close(self) -> None:
        """Leave the segment; its creator removes it as well. No view of it may be used afterwards."""
        for name in ("header", "lanes", "slots", "metrics", "tokens", "texts", "running"):
            self.__dict__.pop(name, None)
        with contextlib.suppress(BufferError):  # a view lives on elsewhere: the mapping goes with the process
            self._memory.close()
        if self._is_owner and self._creator_pid == os.getpid():
            self._is_owner = False
            with contextlib.suppress(FileNotFoundError):
                self._memory.unlink()
        if self._lock >= 0:  # last, or another start would remove what is about to be removed
            os.close(self._lock)
            self._lock = -1


def _create_memory(size: int) -> tuple[shared_memory.SharedMemory, int]:
    """The memory, and the descriptor that holds its lock."""
    name = f"{NAME_PREFIX}{secrets.token_hex(6)}"
    try:
        memory = _Memory(name, create=True, size=size)
    except OSError as problem:
        with contextlib.suppress(OSError):  # it may have been made: its resource tracker is started after it
            os.unlink(f"{SHM_DIRECTORY}/{name}")
        raise StartError(_no_room(size, problem)) from None
    try:
        # ftruncate alone succeeds on a full /dev/shm, and the first write to a page that isn't there is a SIGBUS.
        lock = hold(f"{SHM_DIRECTORY}/{memory.name}")
        try:
            os.posix_fallocate(lock, 0, size)
        except OSError:
            os.close(lock)
            raise
    except OSError as problem:
        memory.close()
        memory.unlink()
        raise StartError(_no_room(size, problem)) from None
    return memory, lock


def _no_room(size: int, problem: OSError) -> str:
    wanted = f"cannot reserve {size / 2**20:.1f} MiB of shared memory"
    if problem.errno != errno.ENOSPC:
        return f"{wanted} in {SHM_DIRECTORY}: {problem.strerror}"
    stat = os.statvfs(SHM_DIRECTORY)
    return (
        f"{wanted}: {SHM_DIRECTORY} has {stat.f_bavail * stat.f_frsize / 2**20:.1f} MiB free;"
        " lower --max-queued-requests, --max-running-seqs or --max-model-len, or give it more"
        " (docker run --shm-size)"
    )


@contextlib.contextmanager
def _untracked() -> Iterator[None]:
    """Attach without telling the resource tracker, which would unlink the segment when this process exits."""
    register = resource_tracker.register
    resource_tracker.register = lambda name, rtype: None
    try:
        yield
    finally:
        resource_tracker.register = register

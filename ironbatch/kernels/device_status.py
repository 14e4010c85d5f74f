"""Reading a context's status page."""

from __future__ import annotations

from ironbatch.kernels.atomics import load_acquire
from ironbatch.kernels.device_records import STATUS, WORD_FAILED, WORD_SIGNALED
from ironbatch.kernels.jit import kernel
from ironbatch.kernels.tables import word_table

STATUS_WORDS = STATUS.itemsize // 8


@kernel("int64(intp, int64)")
def is_well_signaled(status_address, fence):
    """Whether the page says that a fence is signalled, and no batch up to it has failed. 0: ask the device.

    What the batch has written may be read after a 1.
    """
    page = word_table(status_address, STATUS_WORDS)
    if load_acquire(page, WORD_SIGNALED) < fence:
        return 0
    return 0 if page[WORD_FAILED] >= fence else 1

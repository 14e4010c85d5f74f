"""A shared mapping of an open file that does not keep the file open."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


class _Mapping:
    """Unmapped when the last array on it is gone: nobody then has its address."""

    def __init__(self, address: int, size: int, *, is_writable: bool) -> None:
        self._address = address
        self._size = size
        self._munmap = _libc.munmap  # the module may be gone before the last array
        self.__array_interface__: dict[str, Any] = {
            "data": (address, not is_writable),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }

    def __del__(self) -> None:
        self._munmap(self._address, self._size)


def map_file(fd: int, size: int, *, is_writable: bool) -> NDArray[np.uint8]:
    """The first `size` bytes of an open file, shared with all who map it.

    Python's own mmap holds a duplicate of `fd` for as long as it lives, so that a device would learn of our close()
    only when the last view is gone. (Before Python 3.13, which has `trackfd`.)

    Raises:
        OSError: as mmap(2).
    """
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
    address = _libc.mmap(None, size, protection, mmap.MAP_SHARED, fd, 0)
    if address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return np.asarray(_Mapping(address, size, is_writable=is_writable))

"""Tables: memory at an address as a kernel sees it, indexed by words of 8 or 4 bytes.

A table is a bare pointer. As an array (`numba.carray`) it would be seven words, which each call of a subroutine would
copy, and every index would be looked at for being negative (docs/performance.md). With NUMBA_BOUNDSCHECK=1 it is an
array all the same, so that an index past the end raises.
"""

from __future__ import annotations

import numba
from numba import carray

from ironbatch.kernels.atomics import address_to_int32, address_to_words
from ironbatch.kernels.jit import inline

if numba.config.BOUNDSCHECK:

    @inline
    def word_table(address, count):
        """`count` int64 from `address` on."""
        return carray(address_to_words(address), count)

    @inline
    def int32_table(address, count):
        """`count` int32 from `address` on."""
        return carray(address_to_int32(address), count)

else:

    @inline
    def word_table(address, count):
        """`count` int64 from `address` on."""
        return address_to_words(address)

    @inline
    def int32_table(address, count):
        """`count` int32 from `address` on."""
        return address_to_int32(address)

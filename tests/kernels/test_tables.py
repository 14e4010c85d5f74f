"""Tables at an address: what a kernel reads and writes, and in which type."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit
from numba.core.errors import TypingError

from ironbatch.kernels.jit import kernel
from ironbatch.kernels.tables import int32_table, prefetch_for_write, word_table

INT32 = st.integers(-(2**31), 2**31 - 1)


@kernel("int64(intp, int64, int64)")
def exchange_int32(address, index, value):
    table = int32_table(address, 4)
    before = table[index]
    table[index] = value
    return before


@kernel("int64(intp, int64, int64)")
def exchange_word(address, index, value):
    table = word_table(address, 4)
    before = table[index]
    table[index] = value
    return before


@kernel("int64(intp)")
def sum_of_products(address):
    """It overflows 32 bits, if elements are not widened before they are used."""
    table = int32_table(address, 2)
    return table[0] * np.int64(table[1]) + table[0]


@kernel("int64(intp, int64)")
def prefetch_both(address, index):
    prefetch_for_write(int32_table(address, 4), index)
    prefetch_for_write(word_table(address, 4), index)
    return index


@given(values=st.lists(INT32, min_size=4, max_size=4), index=st.integers(0, 3), value=INT32)
def test_int32_elements_are_read_and_written_alone(values: list[int], index: int, value: int) -> None:
    memory = np.array(values, np.int32)
    assert exchange_int32(memory.ctypes.data, index, value) == values[index]
    values[index] = value
    assert memory.tolist() == values


def test_words_are_read_and_written_alone() -> None:
    memory = np.array([1, -(2**63), 3, 2**63 - 1], np.int64)
    assert exchange_word(memory.ctypes.data, 1, 7) == -(2**63)
    assert memory.tolist() == [1, 7, 3, 2**63 - 1]


@pytest.mark.parametrize("index", [0, 3, 4, -1, 2**60])
def test_prefetch_changes_nothing_and_may_miss(index: int) -> None:
    memory = np.array([1, 2, 3, 4], np.int64)
    assert prefetch_both(memory.ctypes.data, index) == index
    assert memory.tolist() == [1, 2, 3, 4]


def test_elements_are_wide_to_a_kernel() -> None:
    memory = np.array([2**31 - 1, -(2**31)], np.int32)
    assert sum_of_products(memory.ctypes.data) == -(2**31) * (2**31 - 1) + 2**31 - 1


@pytest.mark.parametrize("index", [1.5, "x"])
def test_index_of_another_type_is_refused(index: object) -> None:
    @njit
    def read(address: int, index: object) -> object:
        return int32_table(address, 4)[index]

    with pytest.raises(TypingError):
        read(np.zeros(4, np.int32).ctypes.data, index)


@pytest.mark.parametrize(("table", "index"), [(np.zeros(4), 1.5), (np.zeros((2, 2)), 0), (3, 0), ((1, 2), 0)])
def test_prefetch_of_what_is_no_table_is_refused(table: object, index: object) -> None:
    @njit
    def prefetch(table: object, index: object) -> None:
        prefetch_for_write(table, index)

    with pytest.raises(TypingError):
        prefetch(table, index)

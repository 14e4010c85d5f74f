"""Atomics: what they return, what they refuse, and that they are atomic."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numba import TypingError, carray, njit

from ironbatch.kernels.atomics import (
    address_to_int32,
    address_to_words,
    compare_and_swap,
    exchange,
    fetch_add,
    full_fence,
    load_acquire,
    store_release,
)

MOST = 2**63 - 1


@njit
def load(words, index):
    return load_acquire(words, index)


@njit
def store(words, index, value):
    store_release(words, index, value)


@njit
def add(words, index, value):
    return fetch_add(words, index, value)


@njit
def swap(words, index, value):
    return exchange(words, index, value)


@njit
def swap_if(words, index, expected, value):
    return compare_and_swap(words, index, expected, value)


@njit(nogil=True)
def add_many(words, times):
    for _ in range(times):
        fetch_add(words, 0, 1)


@njit(nogil=True)
def lock_many(words, times):
    """A spin lock of compare-and-swap and store-release around a plain increment."""
    for _ in range(times):
        while compare_and_swap(words, 0, 0, 1) != 0:
            pass
        words[1] += 1
        store_release(words, 0, 0)


@njit
def int32_at(address, index):
    full_fence()
    return carray(address_to_int32(address), 4)[index]


@njit
def word_at(address, index):
    full_fence()
    return carray(address_to_words(address), 4)[index]


def test_each_touches_its_word_alone_and_returns_the_old_value() -> None:
    words = np.arange(10, 15, dtype=np.int64)
    assert load(words, 2) == 12
    assert add(words, 2, -5) == 12
    assert swap(words, 3, MOST) == 13
    assert swap_if(words, 4, 14, -(2**63)) == 14
    assert swap_if(words, 1, 99, 7) == 11  # another value was found, and nothing stored
    store(words, 0, -1)
    assert words.tolist() == [-1, 11, 7, MOST, -(2**63)]
    assert add(words, 3, 1) == MOST  # it wraps
    assert words[3] == -(2**63)


def test_addresses_become_arrays() -> None:
    words = np.array([1, 2**32 + 2, 3, 4], np.int64)
    assert [word_at(words.ctypes.data, k) for k in range(4)] == words.tolist()
    assert [int32_at(words.ctypes.data, k) for k in range(4)] == [1, 0, 2, 1]


WORDS = np.zeros(4, np.int64)
READ_ONLY = np.zeros(4, np.int64)
READ_ONLY.flags.writeable = False

WRONG_ARRAYS = {
    "int32": np.zeros(4, np.int32),
    "uint64": np.zeros(4, np.uint64),
    "float64": np.zeros(4, np.float64),
    "two dimensions": np.zeros((4, 4), np.int64),
    "strided": np.zeros(8, np.int64)[::2],
    "read-only": READ_ONLY,
    "a list": (0, 0),
}
OPERATIONS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "load_acquire": (load, (0,)),
    "store_release": (store, (0, 0)),
    "fetch_add": (add, (0, 0)),
    "exchange": (swap, (0, 0)),
    "compare_and_swap": (swap_if, (0, 0, 0)),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("array", WRONG_ARRAYS)
def test_wrong_array_is_a_typing_error_and_not_a_wrong_address(operation: str, array: str) -> None:
    function, integers = OPERATIONS[operation]
    with pytest.raises(TypingError):
        function(WRONG_ARRAYS[array], *integers)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_numbers_that_are_no_integers_are_typing_errors(operation: str) -> None:
    function, integers = OPERATIONS[operation]
    for k in range(len(integers)):
        with pytest.raises(TypingError):
            function(WORDS, *(0.0 if k == position else number for position, number in enumerate(integers)))


@pytest.mark.parametrize("function", [int32_at, word_at])
def test_float_is_no_address(function: Callable[..., Any]) -> None:
    with pytest.raises(TypingError):
        function(1.5, 0)


def _in_two_threads(function: Callable[[Any, int], None], words: Any, times: int) -> None:
    function(words, 0)  # compiled before they start
    threads = [threading.Thread(target=function, args=(words, times)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_no_addition_is_lost() -> None:
    words = np.zeros(1, np.int64)
    _in_two_threads(add_many, words, 500_000)
    assert words[0] == 1_000_000


def test_compare_and_swap_lets_one_in_at_a_time() -> None:
    words = np.zeros(2, np.int64)
    _in_two_threads(lock_many, words, 100_000)
    assert words.tolist() == [0, 200_000]

"""The control of the bounds-checked test leg: if it does not raise, that leg has checked nothing.

The leg is `NUMBA_BOUNDSCHECK=1 pytest tests/kernels`; kernels compiled with checks have a cache of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest
from numba import carray

from ironbatch.kernels.atomics import address_to_words
from ironbatch.kernels.jit import kernel

WORDS = 4


@kernel("int64(intp, int64)")
def read_word(address, index):
    """As kernels see the segment: an array over an address."""
    return carray(address_to_words(address), WORDS)[index]


@kernel("int64(int64[::1], int64)")
def read_array(words, index):
    return words[index]


@pytest.mark.skipif(not numba.config.BOUNDSCHECK, reason="this is not the leg with NUMBA_BOUNDSCHECK=1")
@pytest.mark.parametrize("index", [WORDS, WORDS + 1_000, -WORDS - 1])
def test_reading_past_the_end_raises(index: int) -> None:
    words = np.arange(WORDS)
    with pytest.raises(IndexError):
        read_word(words.ctypes.data, index)
    with pytest.raises(IndexError):
        read_array(words, index)


def test_reading_within_bounds_does_not_raise() -> None:
    words = np.arange(WORDS)
    assert [read_word(words.ctypes.data, k) for k in range(WORDS)] == [0, 1, 2, 3]
    assert [read_array(words, k) for k in range(WORDS)] == [0, 1, 2, 3]


CONTROL = """
import numpy as np
from tests.kernels.test_boundscheck import read_word, WORDS
words = np.arange(WORDS)
try:
    read_word(words.ctypes.data, WORDS)
except IndexError:
    print("raises")
else:
    print("reads")
"""


def test_leg_raises_beside_unchecked_code_in_the_same_cache(tmp_path: Path) -> None:
    """Whatever leg this is: without checks first, so that the leg with them finds a cache that is filled already."""
    found = []
    for setting in ("0", "1"):
        environ = {**os.environ, "NUMBA_BOUNDSCHECK": setting, "IRONBATCH_CACHE_DIR": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", CONTROL], env=environ, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.strip())
    assert found == ["reads", "raises"]

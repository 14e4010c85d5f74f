"""Atomic operations on 8-byte words; the only place that orders shared memory.

All of them take a table of words (a pointer to int64, or a flat, C-contiguous int64 array) and an index. numba has no
atomics for the CPU, so each is an `@intrinsic` that emits the LLVM instruction of the same name (LLVM language
reference, "Atomic Memory Ordering Constraints"). A wrong argument type is a numba TypingError, not a wrong address.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

ALIGNMENT_BYTES = 8


def _is_word_table(candidate: Any) -> bool:
    if isinstance(candidate, types.CPointer):
        return bool(candidate.dtype == types.int64)
    return (
        isinstance(candidate, types.Array)
        and candidate.ndim == 1
        and candidate.layout == "C"
        and candidate.dtype == types.int64
        and candidate.mutable
    )


def _are_words(*candidates: Any) -> bool:
    return all(isinstance(candidate, types.Integer) for candidate in candidates)


def _address(context: Any, builder: Any, table_type: Any, table: Any, index: Any) -> Any:
    is_pointer = isinstance(table_type, types.CPointer)
    data = table if is_pointer else context.make_array(table_type)(context, builder, table).data
    return builder.gep(data, [index], inbounds=True)


@intrinsic
def load_acquire(typing_context: Any, words: Any, index: Any) -> Any:
    """words[index]; nothing that follows is moved before it."""
    if not (_is_word_table(words) and _are_words(index)):
        return None
    signature = types.int64(words, types.intp)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address = _address(context, builder, signature.args[0], *arguments)
        return builder.load_atomic(address, "acquire", ALIGNMENT_BYTES)

    return signature, generate


@intrinsic
def store_release(typing_context: Any, words: Any, index: Any, value: Any) -> Any:
    """words[index] = value; nothing that precedes is moved behind it."""
    if not (_is_word_table(words) and _are_words(index, value)):
        return None
    signature = types.void(words, types.intp, types.int64)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        table, index, value = arguments
        address = _address(context, builder, signature.args[0], table, index)
        builder.store_atomic(value, address, "release", ALIGNMENT_BYTES)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def fetch_add(typing_context: Any, words: Any, index: Any, value: Any) -> Any:
    """words[index] += value in one step; returns the old value. Sequentially consistent."""
    if not (_is_word_table(words) and _are_words(index, value)):
        return None
    signature = types.int64(words, types.intp, types.int64)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        table, index, value = arguments
        address = _address(context, builder, signature.args[0], table, index)
        return builder.atomic_rmw("add", address, value, "seq_cst")

    return signature, generate


@intrinsic
def exchange(typing_context: Any, words: Any, index: Any, value: Any) -> Any:
    """Swap words[index] for value; returns the old value. Sequentially consistent, hence also a full fence."""
    if not (_is_word_table(words) and _are_words(index, value)):
        return None
    signature = types.int64(words, types.intp, types.int64)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        table, index, value = arguments
        address = _address(context, builder, signature.args[0], table, index)
        return builder.atomic_rmw("xchg", address, value, "seq_cst")

    return signature, generate


@intrinsic
def compare_and_swap(typing_context: Any, words: Any, index: Any, expected: Any, value: Any) -> Any:
    """Store value if words[index] == expected; returns what was found (success iff that equals expected)."""
    if not (_is_word_table(words) and _are_words(index, expected, value)):
        return None
    signature = types.int64(words, types.intp, types.int64, types.int64)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        table, index, expected, value = arguments
        address = _address(context, builder, signature.args[0], table, index)
        pair = builder.cmpxchg(address, expected, value, "seq_cst", "acquire")
        return builder.extract_value(pair, 0)

    return signature, generate


@intrinsic
def full_fence(typing_context: Any) -> Any:
    """Every load and store before it is visible before any after it (the store-load order that x86 gives up)."""
    signature = types.void()

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def address_to_words(typing_context: Any, address: Any) -> Any:
    """An address as a pointer to int64."""
    return _address_to_pointer(address, types.int64)


@intrinsic
def address_to_int32(typing_context: Any, address: Any) -> Any:
    """An address as a pointer to int32."""
    return _address_to_pointer(address, types.int32)


def _address_to_pointer(address: Any, pointee: Any) -> Any:
    if not isinstance(address, types.Integer):
        return None
    signature = types.CPointer(pointee)(types.intp)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return signature, generate


__all__ = [
    "address_to_int32",
    "address_to_words",
    "compare_and_swap",
    "exchange",
    "fetch_add",
    "full_fence",
    "load_acquire",
    "store_release",
]

"""Tables: memory at an address as a kernel sees it, indexed by words of 8 or 4 bytes.

A table is a bare pointer. As an array (`numba.carray`) it would be seven words, which each call of a subroutine would
copy, and every index would be looked at for being negative (docs/performance.md). With NUMBA_BOUNDSCHECK=1 it is an
array all the same, so that an index past the end raises.

Whatever a table's words are in memory, a kernel reads and writes int64. If a table of int32 gave int32, every helper
that is called with an element would be compiled twice, for what comes from a table and for what was computed.
"""

from __future__ import annotations

import operator
from typing import Any

import numba
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, models, register_model

from ironbatch.kernels.atomics import address_to_int32, address_to_words
from ironbatch.kernels.jit import inline


class Int32Table(types.Type):  # type: ignore[misc]
    """A pointer to int32, whose elements are int64 to whoever indexes it."""

    def __init__(self) -> None:
        super().__init__(name="Int32Table")


INT32_TABLE = Int32Table()


@register_model(Int32Table)
class _Int32TableModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, table_type: Any) -> None:
        super().__init__(manager, table_type, manager.lookup(types.int32).get_value_type().as_pointer())


@intrinsic
def _as_int32_table(typing_context: Any, address: Any) -> Any:
    """The memory at `address`, which may be any integer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(INT32_TABLE))

    return INT32_TABLE(types.intp), generate


@infer_global(operator.getitem)
class _TypeOfElement(AbstractTemplate):  # type: ignore[misc]
    def generic(self, args: Any, kws: Any) -> Any:
        if args[0] is INT32_TABLE and isinstance(args[1], types.Integer):
            return signature(types.int64, INT32_TABLE, types.intp)
        return None


@infer_global(operator.setitem)
class _TypeOfStore(AbstractTemplate):  # type: ignore[misc]
    def generic(self, args: Any, kws: Any) -> Any:
        table, index, value = args
        if table is INT32_TABLE and isinstance(index, types.Integer) and isinstance(value, types.Integer):
            return signature(types.none, INT32_TABLE, types.intp, types.int64)
        return None


@lower_builtin(operator.getitem, Int32Table, types.intp)
def _load(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    table, index = arguments
    element = builder.load(builder.gep(table, [index], inbounds=True))
    return builder.sext(element, context.get_value_type(types.int64))


@lower_builtin(operator.setitem, Int32Table, types.intp, types.int64)
def _store(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    table, index, value = arguments
    element = builder.trunc(value, context.get_value_type(types.int32))
    builder.store(element, builder.gep(table, [index], inbounds=True))
    return context.get_dummy_value()


_FOR_WRITING, _INTO_ALL_CACHES, _DATA = 1, 3, 1


@intrinsic
def prefetch_for_write(typing_context: Any, table: Any, index: Any) -> Any:
    """Call for the cache line of table[index], which is to be written soon. Nothing happens but that.

    A processor carries out stores in order, so each waits for its line; that takes longest where every line is in a
    page of its own. `table` is a pointer, or a flat, C-contiguous array; an index outside it does no harm. (LLVM
    language reference, "llvm.prefetch")
    """
    is_array = isinstance(table, types.Array) and table.ndim == 1 and table.layout == "C"
    is_table = is_array or table is INT32_TABLE or isinstance(table, types.CPointer)
    if not (is_table and isinstance(index, types.Integer)):
        return None
    signature = types.void(table, types.intp)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data, index = arguments
        if isinstance(signature.args[0], types.Array):
            data = context.make_array(signature.args[0])(context, builder, data).data
        address = builder.bitcast(builder.gep(data, [index]), cgutils.voidptr_t)
        words = [cgutils.int32_t(word) for word in (_FOR_WRITING, _INTO_ALL_CACHES, _DATA)]
        hint_type = ir.FunctionType(ir.VoidType(), [address.type, *(word.type for word in words)])
        hint = cgutils.get_or_insert_function(builder.module, hint_type, "llvm.prefetch.p0")
        builder.call(hint, [address, *words])
        return context.get_dummy_value()

    return signature, generate


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
        return _as_int32_table(address)

"""What a plan tells a backend beside its rows: copies, decodes, and the shapes that it is padded to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ironbatch.backends import base
from ironbatch.backends.base import BatchLimits, BatchPlan
from tests.support import SmallEngine, small_engine


def planned(engine: SmallEngine, **limits: Any) -> BatchPlan:
    """The plan as it stands in the scheduler's state, for a backend with these limits."""
    plan = BatchPlan(engine.scheduler.arena, engine.segment, BatchLimits(**limits))
    plan.count = int(engine.scheduler.arena.header["row_count"])
    return plan


def test_copies_are_rows_of_source_and_target() -> None:
    with small_engine() as engine:
        arena = engine.scheduler.arena
        arena.views["copies"][:3] = [(5, 1), (6, 2), (9, 9)]
        arena.header["copy_count"] = 2
        plan = planned(engine)
        assert plan.copies.tolist() == [[5, 1], [6, 2]]
        arena.header["copy_count"] = 0
        assert plan.copies.shape == (0, 2)
        assert list(plan.copies) == []


def test_decodes_come_first() -> None:
    with small_engine() as engine:
        arena = engine.scheduler.arena
        arena.header["row_count"], arena.header["plan_decodes"] = 3, 2
        assert (len(planned(engine)), planned(engine).decode_count) == (3, 2)


@pytest.mark.parametrize(
    ("rows", "tokens", "padded"),
    [(1, 1, (1, 16)), (2, 16, (4, 16)), (4, 17, (4, 64)), (5, 64, (8, 64)), (8, 40, (8, 64))],
)
def test_plan_is_padded_to_the_next_shape(rows: int, tokens: int, padded: tuple[int, int]) -> None:
    with small_engine() as engine:
        header = engine.scheduler.arena.header
        header["row_count"], header["plan_tokens"] = rows, tokens
        shaped = planned(engine, sequence_buckets=(1, 4, 8), token_buckets=np.array([16, 64]))
        assert (shaped.padded_sequences, shaped.padded_tokens) == padded
        assert (planned(engine).padded_sequences, planned(engine).padded_tokens) == (rows, tokens)


def test_tables_are_filled_once_a_plan_and_only_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[tuple[int, ...]] = []
    monkeypatch.setattr(base, "fill_plan_tokens", lambda *addresses: filled.append(addresses))
    with small_engine() as engine:
        plan = planned(engine)
        assert filled == []
        for _ in range(2):
            plan.count, plan.has_tokens = 0, False
            plan.fill_tokens()
            assert (len(plan.token_ids), len(plan.positions), len(plan.kv_slot_mapping)) == (0, 0, 0)
        assert filled == [(engine.scheduler.arena.address, engine.segment.address)] * 2

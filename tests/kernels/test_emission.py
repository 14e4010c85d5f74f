"""The mock's tokens against splitmix64 in Python, and its latency model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ironbatch.kernels.emission import EOS_SCALE, VOCABULARY, mock_execute, mock_token
from ironbatch.kernels.intake import drain
from ironbatch.kernels.plan import plan
from ironbatch.limits import MAX_MODEL_LEN, SEED
from tests import oracle
from tests.support import small_engine

SEEDS = st.integers(SEED.low, SEED.high)
POSITIONS = st.integers(0, MAX_MODEL_LEN.high)


def test_oracle_is_splitmix64() -> None:
    """The first outputs for seed 1234567, as the reference implementation gives them."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [oracle.splitmix64(1234567, k) for k in range(4)] == published


@given(seed=SEEDS, position=POSITIONS, threshold=st.integers(0, EOS_SCALE))
def test_token_is_the_oracles(seed: int, position: int, threshold: int) -> None:
    expected = oracle.mock_token(seed, position, 0, threshold, VOCABULARY)
    assert mock_token(seed, position, 0, threshold) == expected


@given(seed=SEEDS, position=POSITIONS)
def test_token_without_end_is_a_token(seed: int, position: int) -> None:
    assert 0 < mock_token(seed, position, -1, 0) < VOCABULARY


@given(seed=SEEDS, position=POSITIONS)
def test_end_is_certain_at_probability_one_and_impossible_at_zero(seed: int, position: int) -> None:
    assert mock_token(seed, position, 7, EOS_SCALE) == 7
    assert mock_token(seed, position, -1, 0) != -1


def test_ends_are_as_frequent_as_asked_for() -> None:
    draws = 100_000
    ends = sum(mock_token(3, position, 0, round(0.02 * EOS_SCALE)) == 0 for position in range(draws))
    assert ends == pytest.approx(0.02 * draws, rel=0.1)


def test_tokens_depend_on_seed_and_position() -> None:
    tokens = {(seed, position): mock_token(seed, position, -1, 0) for seed in range(50) for position in range(50)}
    assert len(set(tokens.values())) > 2_300  # 2,500 draws of 31,999 collide about a hundred times


def test_execution_emits_for_the_rows_that_end_and_adds_up_their_time() -> None:
    with small_engine(max_batch_tokens=16, total_kv_blocks=32) as engine:
        worker = engine.worker()
        worker.submit(5, 9, seed=11, arrival_ns=1)
        engine.step()
        worker.submit(3, 4, seed=12, arrival_ns=2)
        worker.submit(20, 4, seed=13, arrival_ns=3)  # 12 of its tokens find room: it does not emit
        addresses = (engine.scheduler.arena.address, engine.segment.address)
        drain(*addresses, 1)
        assert plan(*addresses, 1) == 3
        duration = mock_execute(engine.scheduler.arena.address, 0, 1_000_000_000, 1_000_000, 1_000, 1)
        assert duration == 1_000_000_000 + (3 + 12) * 1_000_000 + 3 * 1_000 + (6 + 3 + 12)
        views = engine.scheduler.arena.views
        assert views["output_counts"][:3].tolist() == [1, 1, 0]
        assert views["output_tokens"][:2].tolist() == [mock_token(11, 6, -1, 0), mock_token(12, 3, -1, 0)]

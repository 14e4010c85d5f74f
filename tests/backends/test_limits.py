"""What a backend declares of its device: what is refused, and what it leaves of the configuration's limits."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ironbatch.backends.base import BatchLimits
from ironbatch.backends.limits import NO_LIMITS, check_limits, effective_limits, longest_context, narrowing, padded
from ironbatch.config import Config
from ironbatch.errors import StartError
from ironbatch.limits import DEVICE_BUCKETS_MAX, DEVICE_CONTEXT, DEVICE_COUNT, MAX_TOKENS_PER_STEP, MIN_REQUEST_TOKENS
from tests.support import ScriptedBackend, small_config

BUCKETS = st.sets(st.integers(1, 100), max_size=6).map(lambda values: tuple(sorted(values)))
COUNTS = st.none() | st.integers(1, 100)


def effective(config: Config | None = None, *, paged_kv: bool = True, **declared: Any) -> Any:
    config = config or small_config()
    backend = ScriptedBackend(config)
    backend.batch_limits = BatchLimits(**declared)
    backend.paged_kv = paged_kv
    return effective_limits(config, backend)


def refusal(declared: Any) -> str:
    with pytest.raises(StartError) as caught:
        check_limits(declared, "plug")
    message = str(caught.value)
    assert message.startswith("backend plug: batch_limits")
    assert "\n" not in message
    assert len(message) < 300
    return message.removeprefix("backend plug: batch_limits")


# -------------------------------------------------------------------------------------------------------------- padded


@given(buckets=BUCKETS, value=st.integers(0, 100))
def test_padded_is_the_smallest_bucket_that_holds_it(buckets: tuple[int, ...], value: int) -> None:
    if buckets and value > buckets[-1]:
        return  # no plan has as many
    assert padded(value, buckets) == min([bucket for bucket in buckets if bucket >= value], default=value)


# ------------------------------------------------------------------------------------------------------------ effective


def test_without_limits_it_is_the_configuration() -> None:
    config = small_config()
    assert effective(config)._asdict() == {
        "running_limit": config.running_limit,
        "batch_tokens": config.max_batch_tokens,
        "tokens_per_step": 1,
        "reserves": False,
        "mixes": True,
        "prefill_row_limit": 0,
        "context_cap": 0,
        "sequence_buckets": (),
        "longest_request_tokens": config.max_request_tokens,
        "running_is_device": False,
        "batch_tokens_is_device": False,
        "shares_kv": True,
        "prefix_cache": True,
    }


@given(
    running=st.integers(1, 50),
    batch=st.integers(1, 50),
    max_sequences=COUNTS,
    max_tokens=COUNTS,
    sequence_buckets=BUCKETS,
    token_buckets=BUCKETS,
)
def test_the_tightest_limit_counts(
    running: int,
    batch: int,
    max_sequences: int | None,
    max_tokens: int | None,
    sequence_buckets: tuple[int, ...],
    token_buckets: tuple[int, ...],
) -> None:
    found = effective(
        small_config(max_running_seqs=running, max_batch_tokens=batch),
        max_sequences=max_sequences,
        max_tokens=max_tokens,
        sequence_buckets=sequence_buckets,
        token_buckets=token_buckets,
    )
    device_tokens = [limit for limit in (max_tokens, *token_buckets[-1:]) if limit]
    device_rows = [limit for limit in (max_sequences, *sequence_buckets[-1:]) if limit]
    assert found.batch_tokens == min([batch, *device_tokens])
    assert found.running_limit == min([running, batch, *device_tokens, *device_rows])
    assert found.batch_tokens_is_device == any(limit < batch for limit in device_tokens)
    assert found.running_is_device == any(limit < min(running, batch) for limit in device_tokens + device_rows)
    # Whatever is planned fits a shape.
    assert padded(found.running_limit, sequence_buckets) >= found.running_limit
    assert padded(found.batch_tokens, token_buckets) >= found.batch_tokens


@given(cap=st.none() | st.integers(2, 400), buckets=BUCKETS, model_len=st.integers(2, 64))
def test_longest_request_runs_alone(cap: int | None, buckets: tuple[int, ...], model_len: int) -> None:
    if cap is not None and cap < MIN_REQUEST_TOKENS * padded(1, buckets):
        assert f"leaves a lone sequence, padded to {buckets[0]} rows, a context of" in refusal(
            BatchLimits(max_batch_context=cap, sequence_buckets=buckets)
        )
        return
    config = small_config(max_model_len=model_len)
    found = effective(config, max_batch_context=cap, sequence_buckets=buckets)
    longest = found.longest_request_tokens
    assert MIN_REQUEST_TOKENS <= longest <= config.max_request_tokens
    assert found.context_cap == (cap or 0)
    rows = padded(1, buckets)
    assert cap is None or rows * longest <= cap
    assert longest == config.max_request_tokens or (cap is not None and rows * (longest + 1) > cap)


def test_the_rest_is_handed_on() -> None:
    found = effective(
        mixes_prefill_and_decode=False, max_prefill_sequences=1, max_tokens_per_step=4, sequence_buckets=[1, 8]
    )
    assert (found.mixes, found.prefill_row_limit, found.tokens_per_step, found.sequence_buckets) == (
        False,
        1,
        4,
        (1, 8),
    )


@pytest.mark.parametrize(
    ("paged_kv", "no_prefix_cache", "shares_kv", "prefix_cache"),
    [(True, False, True, True), (True, True, True, False), (False, False, False, False), (False, True, False, False)],
)
def test_prefix_cache_needs_kv_in_blocks(
    *, paged_kv: bool, no_prefix_cache: bool, shares_kv: bool, prefix_cache: bool
) -> None:
    found = effective(small_config(no_prefix_cache=no_prefix_cache), paged_kv=paged_kv)
    assert (found.shares_kv, found.prefix_cache) == (shares_kv, prefix_cache)


def test_bad_limits_name_the_backend() -> None:
    with pytest.raises(StartError, match=r"^backend mock: batch_limits.max_tokens: 0 is not between 1 and "):
        effective(max_tokens=0)


# --------------------------------------------------------------------------------------------------------------- checks

GOOD: dict[str, Any] = {
    "max_sequences": (DEVICE_COUNT.low, DEVICE_COUNT.high, None),
    "max_tokens": (DEVICE_COUNT.low, DEVICE_COUNT.high, None),
    "max_tokens_per_step": (MAX_TOKENS_PER_STEP.low, MAX_TOKENS_PER_STEP.high),
    "mixes_prefill_and_decode": (True, False),
    "max_prefill_sequences": (DEVICE_COUNT.low, DEVICE_COUNT.high, None),
    "sequence_buckets": ((), (1,), (1, 2, DEVICE_COUNT.high)),
    "token_buckets": ((), (16,), (16, 2048)),
    "max_batch_context": (DEVICE_CONTEXT.low, DEVICE_CONTEXT.high, None),
}


def test_every_limit_is_checked() -> None:
    assert GOOD.keys() == {field.name for field in dataclasses.fields(BatchLimits)}
    assert check_limits(NO_LIMITS, "plug") == NO_LIMITS == BatchLimits()


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in GOOD.items() for value in values])
def test_good_values_stay_what_they_are(name: str, value: Any) -> None:
    assert check_limits(BatchLimits(**{name: value}), "plug") == BatchLimits(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "plain"),
    [
        ("max_sequences", np.int64(8), 8),
        ("max_tokens", np.uint16(8), 8),
        ("mixes_prefill_and_decode", np.bool_(0), False),
        ("sequence_buckets", [1, np.int32(4)], (1, 4)),
        ("token_buckets", np.array([16, 32]), (16, 32)),
        ("token_buckets", range(8, 25, 8), (8, 16, 24)),
        ("max_batch_context", np.int64(2**40), 2**40),
    ],
)
def test_whole_numbers_of_any_kind_become_plain(name: str, value: Any, plain: Any) -> None:
    found = getattr(check_limits(BatchLimits(**{name: value}), "plug"), name)
    assert found == plain
    assert type(found) is type(plain)
    assert not isinstance(plain, tuple) or {type(bucket) for bucket in found} == {int}


COUNT_NAMES = ["max_sequences", "max_tokens", "max_prefill_sequences"]
NO_NUMBER = [True, np.bool_(1), 1.0, "8", b"8", (8,), np.float64(8), np.array(8), object]


@pytest.mark.parametrize("name", [*COUNT_NAMES, "max_tokens_per_step", "max_batch_context"])
@pytest.mark.parametrize("value", NO_NUMBER, ids=repr)
def test_what_is_no_whole_number(name: str, value: Any) -> None:
    told = refusal(BatchLimits(**{name: value}))
    assert told.startswith(f".{name}: ")
    assert re.search(r" is not a whole number; give one between \d+ and \d+", told)


@pytest.mark.parametrize(
    ("declared", "told"),
    [
        ({"max_sequences": 0}, "0 is not between 1 and 2147483647; use 1 or more, or None for no limit"),
        ({"max_tokens": -3}, "-3 is not between 1 and 2147483647; use 1 or more, or None for no limit"),
        (
            {"max_prefill_sequences": 2**31},
            "2147483648 is not between 1 and 2147483647; use 2147483647 or less, or None for no limit",
        ),
        ({"max_tokens_per_step": 0}, "0 is not between 1 and 1024; use 1 or more"),
        ({"max_tokens_per_step": 1025}, "1025 is not between 1 and 1024; use 1024 or less"),
        ({"max_tokens_per_step": None}, "None is not a whole number; give one between 1 and 1024"),
        (
            {"max_batch_context": 1},
            "1 is not between 2 and 9007199254740992; use 2 or more, or None for no limit",
        ),
        ({"mixes_prefill_and_decode": 1}, "1 is neither True nor False; use one of these"),
        ({"mixes_prefill_and_decode": None}, "None is neither True nor False; use one of these"),
        ({"sequence_buckets": 8}, "8 is no sequence of whole numbers; use one such as (1, 8, 64)"),
        ({"sequence_buckets": None}, "None is no sequence of whole numbers; use one such as (1, 8, 64)"),
        ({"token_buckets": "16"}, "'16' is no sequence of whole numbers; use one such as (1, 8, 64)"),
        ({"token_buckets": {8, 16}}, "{8, 16} is no sequence of whole numbers; use one such as (1, 8, 64)"),
        ({"token_buckets": np.array(8)}, "array(8) is no sequence of whole numbers; use one such as (1, 8, 64)"),
        ({"token_buckets": np.zeros((2, 2), int)}, "array([[0, 0], [0, 0]]) is no sequence of whole numbers; use one"),
        (
            {"token_buckets": range(1, DEVICE_BUCKETS_MAX + 2)},
            f"{DEVICE_BUCKETS_MAX + 1} buckets are too many; use at most {DEVICE_BUCKETS_MAX}",
        ),
    ],
)
def test_what_is_refused_and_how(declared: dict[str, Any], told: str) -> None:
    (name,) = declared
    assert refusal(BatchLimits(**declared)).startswith(f".{name}: {told}")


@pytest.mark.parametrize("name", ["sequence_buckets", "token_buckets"])
@pytest.mark.parametrize(
    ("buckets", "told"),
    [
        ((0, 8), "[0]: 0 is not between 1 and 2147483647; use 1 or more"),
        ((1, -8), "[1]: -8 is not between 1 and 2147483647; use 1 or more"),
        ((1, 2.0), "[1]: 2.0 is not a whole number; give one between 1 and 2147483647"),
        ((True, 8), "[0]: True is not a whole number; give one between 1 and 2147483647"),
        ((1, 8, 4), "[2]: 4 follows 8; put them in ascending order, each of them once"),
        ((1, 8, 8), "[2]: 8 follows 8; put them in ascending order, each of them once"),
    ],
)
def test_buckets_ascend(name: str, buckets: tuple[Any, ...], told: str) -> None:
    assert refusal(BatchLimits(**{name: buckets})) == f".{name}{told}"


def test_context_in_which_no_request_fits() -> None:
    assert refusal(BatchLimits(max_batch_context=15, sequence_buckets=(8, 64))) == (
        ".max_batch_context: 15 leaves a lone sequence, padded to 8 rows, a context of 1, and the shortest request has"
        " 2 tokens; use 16 or more, or a smaller first of sequence_buckets"
    )
    assert longest_context(check_limits(BatchLimits(max_batch_context=16, sequence_buckets=(8,)), "plug")) == 2


@pytest.mark.parametrize("declared", [None, {"max_tokens": 8}, BatchLimits, "max_tokens=8"], ids=repr)
def test_what_is_no_batch_limits(declared: Any) -> None:
    assert refusal(declared).endswith("; use an ironbatch.backends.base.BatchLimits")


def test_value_is_shown_on_one_line_and_not_too_long() -> None:
    class Odd:
        def __repr__(self) -> str:
            return "odd\n" * 1000

    assert "odd odd odd" in refusal(BatchLimits(max_tokens=Odd()))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------- other declarations


class Unprintable:
    def __repr__(self) -> str:
        raise ZeroDivisionError


@pytest.mark.parametrize("name", ["resumable", "paged_kv", "eos_token_id", "longest_step_ns"])
@pytest.mark.parametrize(
    "value",
    [None, "x", 1.5, -2, 2**70, np.array([1, 2]), Unprintable(), [True]],
    ids=lambda value: type(value).__name__,
)
def test_declaration_of_another_kind_is_refused_in_one_line(name: str, value: Any) -> None:
    config = small_config()
    backend = ScriptedBackend(config)
    setattr(backend, name, value)
    with pytest.raises(StartError) as caught:
        effective_limits(config, backend)
    message = str(caught.value)
    assert message.startswith(f"backend mock: {name}: ")
    assert "\n" not in message
    assert len(message) < 300


def test_limit_that_cannot_be_shown_is_refused_all_the_same() -> None:
    assert "a Unprintable" in refusal(BatchLimits(max_tokens=Unprintable()))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("declared", "told"),
    [
        ({}, ""),
        ({"max_sequences": 3}, "3 running sequences"),
        ({"token_buckets": (3,)}, "3 running sequences, 3 tokens a step"),
        (
            {"max_batch_context": 20, "mixes_prefill_and_decode": False},
            "20 tokens a request, prefill and decode in turns",
        ),
    ],
)
def test_what_a_device_takes_off_is_told(declared: dict[str, Any], told: str) -> None:
    config = small_config()
    assert narrowing(config, effective(config, **declared)) == told


def test_lack_of_kv_in_blocks_is_told() -> None:
    config = small_config()
    assert narrowing(config, effective(config, paged_kv=False)) == "no prefix cache and no forks"

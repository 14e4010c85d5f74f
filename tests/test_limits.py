"""Bounds, the reading of whole numbers, and the relations between bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ironbatch import layout, limits
from ironbatch.limits import Bound, quoted

SMALL = st.integers(-300, 300)
WHOLE = st.integers(-(2**70), 2**70)


@given(SMALL, SMALL, SMALL)
def test_bound_holds_both_its_ends(low: int, high: int, value: int) -> None:
    if low > high:
        with pytest.raises(AssertionError):
            Bound(low, high)
        return
    assert (value in Bound(low, high)) == (value in range(low, high + 1))


@given(WHOLE, WHOLE, WHOLE, st.integers(0, 30))
def test_whole_number_is_read_or_refused_with_value_bound_and_remedy(a: int, b: int, value: int, zeros: int) -> None:
    bound = Bound(min(a, b), max(a, b))
    text = f"{'-' if value < 0 else ''}{'0' * zeros}{abs(value)}"
    if value in bound and abs(value) < 10**limits.MAX_DIGITS:
        assert bound.read(text) == value
    elif abs(value) < 10**limits.MAX_DIGITS:
        with pytest.raises(ValueError, match=f"^{value} is not between {bound.low} and {bound.high}; use ") as caught:
            bound.read(text)
        end = f"{bound.low} or more" if value < bound.low else f"{bound.high} or less"
        assert str(caught.value).endswith(end)


@pytest.mark.parametrize("text", ["1", "0001", "-0", "0" * 10_000 + "7"])
def test_leading_zeros_change_nothing(text: str) -> None:
    assert Bound(0, 7).read(text) == int(text[-1])


@pytest.mark.parametrize("text", ["9" * 10_000, "-" + "9" * 10_000])
def test_number_of_any_length_is_refused_in_few_words(text: str) -> None:
    with pytest.raises(ValueError, match="is not between -5 and 5; use ") as caught:
        Bound(-5, 5).read(text)
    assert len(str(caught.value)) < 100


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "-",
        "x",
        "1.5",
        "1.0",
        "1e3",
        "+1",
        " 1",
        "1 ",
        "1\n",
        "1_0",
        "0x1",
        "\N{ARABIC-INDIC DIGIT ONE}",
        "\N{FULLWIDTH DIGIT ONE}",
        "--1",
        "true",
    ],
)
def test_what_is_not_a_whole_number(text: str) -> None:
    with pytest.raises(ValueError, match=r" is not a whole number; give one between 0 and 100$") as caught:
        Bound(0, 100).read(text)
    assert repr(text) in str(caught.value)


@given(st.text(max_size=200))
def test_quoted_is_one_short_printable_line(text: str) -> None:
    shown = quoted(text)
    assert shown.isprintable()
    assert (shown == repr(text)) == (len(text) <= limits.MAX_QUOTED_CHARS)


@given(st.integers(1, 5000))
def test_powers_of_two(value: int) -> None:
    powers = [1 << shift for shift in range(14)]
    assert limits.is_power_of_two(value) == (value in powers)
    if value not in powers:
        below = max(power for power in powers if power < value)
        assert limits.nearest_powers_of_two(value, Bound(1, 10_000)) == (below, 2 * below)
        assert limits.nearest_powers_of_two(value, Bound(below, below)) == (below,)


def test_what_is_not_a_power_of_two() -> None:
    assert not limits.is_power_of_two(0)
    assert not limits.is_power_of_two(-4)


def test_derived_limits() -> None:
    assert limits.num_slots(256, 512) == 768
    assert limits.num_lanes(2) == 6
    assert limits.running_limit(256, 8192) == 256
    assert limits.running_limit(256, 100) == 100
    assert limits.max_request_tokens(8192, 65_536) == 8192
    assert limits.max_request_tokens(8192, 1024) == 1024


def test_slots_relation() -> None:
    assert limits.slots_problem(256, limits.MAX_SLOTS - 256) is None
    problem = limits.slots_problem(256, limits.MAX_SLOTS - 255)
    assert problem == "256 + 1048321 = 1048577 slots are over the limit of 1048576; lower them by 1 together"
    assert limits.slots_problem(limits.MAX_RUNNING_SEQS.low, limits.MAX_QUEUED_REQUESTS.high) is None


def test_segment_relation() -> None:
    assert limits.segment_problem(1, 63, limits.MAX_MODEL_LEN.high) is None
    problem = limits.segment_problem(1, 20_000, limits.MAX_MODEL_LEN.high)
    assert problem is not None
    assert "20001 slots (1 + 20000) of 1048576 tokens need 78.1 GiB of shared memory, over the limit of 64" in problem


@pytest.mark.parametrize(("slots", "model_len"), [(1, 1), (768, 8192), (20_000, 100)])
def test_approximate_segment_is_the_real_one_but_for_its_small_tables(slots: int, model_len: int) -> None:
    assert layout.SLOT.itemsize == limits.SLOT_OVERHEAD_BYTES
    assert layout.TOKEN_BYTES == limits.TOKEN_BYTES
    real = layout.offsets(num_slots=slots, num_lanes=4, max_model_len=model_len)
    slots_and_tokens = real.metrics - real.slots
    approximate = limits.approximate_segment_bytes(slots, model_len)
    assert approximate <= slots_and_tokens < approximate + 2 * slots * layout.CACHE_LINE_BYTES


def test_mock_step_relation() -> None:
    # base 1 us, 2 ns a prefill token, 3 ns a sequence, 4 ns a KV token; 100 batch tokens, 10 sequences
    terms = (1, 2, 3, 4, 100, 10)
    assert limits.mock_longest_step_ns(*terms, 50, 1000, 16) == 1000 + 2 * 100 + 3 * 10 + 4 * 10 * 50
    assert limits.mock_longest_step_ns(*terms, 50, 1, 16) == 1000 + 2 * 100 + 3 * 10 + 4 * 10 * 16
    hour_us = limits.MAX_MOCK_STEP_NS // 1000
    assert limits.mock_step_problem(hour_us, 0, 0, 0, 1, 1, 1, 1, 1) is None
    problem = limits.mock_step_problem(hour_us + 1, 0, 0, 0, 1, 1, 1, 1, 1)
    assert problem is not None
    assert problem.startswith("a full step of the mock could take 3601 s, over the limit of 3600 s; lower ")


def test_mock_kv_relation() -> None:
    assert limits.mock_kv_bytes(4096, 16) == 4096 * 16 * 4 + 4096 * 4, "an id a position and a flag a block"
    largest = limits.MAX_MOCK_KV_BYTES // (4 * 257)
    assert limits.mock_kv_problem(mock_kv=True, total_kv_blocks=largest, kv_block_size=256) is None
    problem = limits.mock_kv_problem(mock_kv=True, total_kv_blocks=10**7, kv_block_size=256)
    assert problem is not None
    assert problem.startswith("10000000 blocks of 256 tokens need 9.6 GiB of host memory for the mock's KV, over the")
    assert limits.mock_kv_problem(mock_kv=True, total_kv_blocks=largest + 1, kv_block_size=256) is not None
    assert limits.mock_kv_problem(mock_kv=False, total_kv_blocks=10**9, kv_block_size=256) is None


def test_what_a_device_may_declare_stays_within_an_int64() -> None:
    assert limits.DEVICE_COUNT.high < 2**31
    assert limits.DEVICE_COUNT.high * limits.MAX_MODEL_LEN.high < 2**63, "padded rows x longest context"
    assert limits.DEVICE_CONTEXT.high < 2**63

"""The mock with KV: through a whole engine, each stream gets what its request alone gives."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ironbatch import layout
from ironbatch.backends import mock_kv
from ironbatch.backends.base import BatchPlan, StepOutput
from ironbatch.backends.mock import EOS_TOKEN_ID, MockBackend
from ironbatch.backends.mock_kv import HOST_TOKEN_NS, MockKVBackend
from ironbatch.kernels.emission import EOS_SCALE
from ironbatch.kernels.mock_kv import POISON, mock_kv_tokens
from ironbatch.limits import TOKEN_ID
from tests.support import FakeWorker, SmallEngine, Stream, small_config, small_engine


def expected(stream: Stream, prompt: list[int], eos_threshold: int = 0) -> list[int]:
    """A stream's tokens from its request alone, to the end that it was to have."""
    eos = EOS_TOKEN_ID if eos_threshold else -1
    context = np.array(prompt + [0] * stream.max_new_tokens, np.int32)
    mock_kv_tokens(stream.seed, context, len(prompt), stream.max_new_tokens, eos, eos_threshold)
    tokens: list[int] = context[len(prompt) :].tolist()
    ends = [] if stream.ignores_eos else [k + 1 for k, token in enumerate(tokens) if token == eos]
    return tokens[: min([stream.max_new_tokens, *ends])]


def submit(worker: FakeWorker, prompt: list[int], max_new: int, **fields: Any) -> tuple[Stream, list[int]]:
    """A request with token ids, or with a length alone if all of them are 0."""
    ids = prompt if any(prompt) else None
    return worker.submit(len(prompt), max_new, prompt_token_ids=ids, **fields), prompt


prompts = st.lists(st.integers(TOKEN_ID.low, TOKEN_ID.high), min_size=1, max_size=20) | st.integers(1, 20).map(
    lambda length: [0] * length
)


@given(
    requests=st.lists(st.tuples(prompts, st.integers(1, 12), st.integers(0, 2**63 - 1)), min_size=1, max_size=8),
    options=st.fixed_dictionaries(
        {
            "total_kv_blocks": st.integers(8, 20),
            "max_batch_tokens": st.integers(1, 40),
            "mock_eos_prob": st.sampled_from([0.0, 0.2]),
        }
    ),
)
@settings(max_examples=60)
def test_streams_get_what_their_requests_give(
    requests: list[tuple[list[int], int, int]], options: dict[str, Any]
) -> None:
    """Under chunked prefill and preemption; blocks go from hand to hand all the time."""
    with small_engine(MockKVBackend, mock_kv=True, **options) as engine:
        worker = engine.worker()
        flags = (0, layout.FLAG_IGNORE_EOS)
        streams = [
            submit(worker, prompt, max_new, seed=seed, flags=flags[k % 2], arrival_ns=k)
            for k, (prompt, max_new, seed) in enumerate(requests)
        ]
        engine.run(worker)
        threshold = round(options["mock_eos_prob"] * EOS_SCALE)
        for stream, prompt in streams:
            assert stream.token_ids == expected(stream, prompt, threshold)


def test_streams_survive_preemption_and_the_death_of_their_scheduler() -> None:
    rng = random.Random(3)
    with small_engine(MockKVBackend, mock_kv=True, total_kv_blocks=8, max_model_len=32) as engine:
        worker = engine.worker()
        streams = [submit(worker, [rng.randrange(1000) for _ in range(9)], 20, seed=k) for k in range(8)]
        for _ in range(12):
            engine.step()
            worker.collect()
        engine.start_scheduler()  # its KV is gone with the last one
        engine.run(worker)
        assert engine.segment.metrics[0]["preemptions"] > 0
        assert [stream.token_ids for stream, _ in streams] == [expected(*stream) for stream in streams]


@pytest.mark.parametrize("fault", ["table", "mapping"])
def test_fault_of_the_engine_shows_in_a_stream(fault: str) -> None:
    class Faulty(MockKVBackend):
        def execute(self, plan: BatchPlan) -> StepOutput:
            if plan.rows["context_tokens"][0] != 10:
                return super().execute(plan)
            plan.fill_tokens()
            right = plan.block_tables.copy()
            if fault == "table":
                plan.block_tables[:, :2] = right[:, 1::-1]
            else:
                plan.kv_slot_mapping[0] -= 1
            output = super().execute(plan)
            plan.block_tables[:] = right  # the audit would see it too
            return output

    with small_engine(Faulty, mock_kv=True) as engine:
        worker = engine.worker()
        stream, prompt = submit(worker, [1, 2, 3, 4, 5, 6, 7, 8], 6)
        engine.run(worker)
        right = expected(stream, prompt)
        assert stream.token_ids[:2] == right[:2]
        assert stream.token_ids[2] != right[2]


def test_memory_is_poisoned_at_each_start() -> None:
    with small_engine(MockKVBackend, mock_kv=True) as engine:
        worker = engine.worker()
        submit(worker, [1, 2, 3, 4, 5, 6, 7, 8], 6)
        engine.run(worker)
        memory = kv_of(engine)
        assert (memory != POISON).any(), "nothing was written"
        engine.backend.close()
        engine.backend.start(engine.scheduler._kv, engine.scheduler._limits)
        assert (kv_of(engine) == POISON).all()
        assert engine.backend._kv.nbytes == small_config(mock_kv=True).mock_kv_bytes  # type: ignore[attr-defined]


def kv_of(engine: SmallEngine) -> Any:
    backend = engine.backend
    assert isinstance(backend, MockKVBackend)
    return backend._kv[: engine.config.kv_capacity_tokens]


def test_step_takes_what_the_latency_model_says(monkeypatch: pytest.MonkeyPatch) -> None:
    deadlines: list[int] = []
    monkeypatch.setattr(mock_kv.time, "monotonic_ns", lambda: 10**9)
    monkeypatch.setattr(mock_kv, "sleep_until", deadlines.append)
    terms = {"mock_token_latency_us": 3, "mock_prefill_token_latency_ns": 50, "mock_sequence_latency_ns": 7}
    with small_engine(MockKVBackend, mock_kv=True, mock_kv_token_latency_ns=1, **terms) as engine:
        worker = engine.worker()
        submit(worker, [1, 2, 3, 4, 5], 2)
        engine.run(worker)
    assert deadlines == [10**9 + 3_000 + 5 * 50 + 7 + 5, 10**9 + 3_000 + 7 + 6]


def test_what_it_says_of_itself() -> None:
    config = small_config(mock_kv=True, mock_eos_prob=0.5)
    with_kv, without = MockKVBackend(config), MockBackend(config)
    assert (with_kv.resumable, with_kv.paged_kv) == (True, True)
    assert with_kv.eos_token_id == without.eos_token_id
    reads = config.running_limit * config.max_request_tokens + config.kv_capacity_tokens
    assert with_kv.longest_step_ns == without.longest_step_ns + reads * HOST_TOKEN_NS

"""The whole policy behind HTTP: shared prefixes, choices and priorities over a small pool change no stream's tokens."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ironbatch import layout
from ironbatch.kernels.slots import choice_seed
from tests.end_to_end.server import RawStream, Server, generate_all, post, running, wait_until

pytestmark = pytest.mark.end_to_end

BLOCK = 16
REQUESTS = 200

SMALL = {
    "total_kv_blocks": 96,
    "kv_block_size": BLOCK,
    "max_batch_tokens": 128,
    "max_running_seqs": 24,
    "max_queued_requests": 600,
    "audit_every": 1,
    "priority_aging_s": 1,
}


def random_bodies(count: int) -> list[dict[str, Any]]:
    """Prompts that share prefixes, a few salts, one to three choices, all classes."""
    rng = np.random.default_rng(11)
    prefixes = [rng.integers(0, 2**31, 96).tolist() for _ in range(6)]
    bodies = []
    for k in range(count):
        prefix = prefixes[int(rng.integers(6))][: int(rng.integers(1, 97))]
        body: dict[str, Any] = {
            "prompt_token_ids": [*prefix, *rng.integers(0, 2**31, int(rng.integers(0, 20))).tolist()],
            "max_new_tokens": int(rng.integers(1, 60)),
            "seed": int(rng.integers(2**62)),
            "priority": int(rng.integers(-8, 8)),
            "details": True,
        }
        if k % 3 == 0:
            body["n"] = int(rng.integers(1, 4))
        if k % 7 == 0:
            body["cache_salt"] = f"tenant {k % 2}"
        if k % 11 == 0:
            body["prompt_tokens"] = len(body.pop("prompt_token_ids"))
        bodies.append(body)
    return bodies


BODIES = random_bodies(REQUESTS)
WAITS = {f"{reason}" for reason in layout.WAIT_REASONS}


def lines_of(answer: bytes) -> dict[int, list[dict[str, Any]]]:
    """The lines of each choice, each in order and with one end."""
    found: dict[int, list[dict[str, Any]]] = {}
    for line in map(json.loads, answer.splitlines()):
        lines = found.setdefault(line.get("choice", 0), [])
        assert not (lines and lines[-1]["done"])
        assert line["token_index"] == len(lines)
        lines.append(line)
    assert all(lines[-1]["done"] for lines in found.values())
    return found


def tokens(answer: bytes) -> dict[int, list[int]]:
    """The token ids of each choice."""
    found = lines_of(answer)
    assert {lines[-1]["finish_reason"] for lines in found.values()} == {"length"}
    return {choice: [line["token_id"] for line in lines] for choice, lines in sorted(found.items())}


def ask(server: Server, body: dict[str, Any]) -> bytes:
    """One request, alone."""
    (answer,) = generate_all(server.port, [body])
    return answer


def ttft_count(server: Server) -> int:
    """First tokens that were timed, in all workers' rows, read from shared memory."""
    data = np.memmap(f"/dev/shm/{server.segment}", np.uint8, "r")
    header = server.header()
    rows = 1 + int(header["num_lanes"])
    table = np.frombuffer(data, layout.METRICS, rows, int(header["metrics_offset"]))
    return int(table["ttft_us"][1:].sum())


@pytest.fixture(scope="module")
def alone() -> list[dict[int, list[int]]]:
    """What each request gets when it is the only one, of an engine that shares nothing."""
    with running("serve", mock_kv=True, no_prefix_cache=True, mock_token_latency_us=0, workers=1) as server:
        answers = [tokens(ask(server, body)) for body in BODIES]
        # A choice is the request with a seed of its own.
        for body, answer in [pair for pair in zip(BODIES, answers, strict=True) if pair[0].get("n", 1) > 1][:10]:
            for choice, token_ids in answer.items():
                single = body | {"n": 1, "seed": choice_seed(body["seed"], choice)}
                assert tokens(ask(server, single)) == {0: token_ids}
    return answers


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server whose pool is too small for its load."""
    with running("serve", mock_kv=True, mock_token_latency_us=500, **SMALL) as server:
        yield server
        assert server.stop() == 0
        server.assert_nothing_left()
        assert "Traceback" not in "".join(server.output)


def test_all_at_once_get_what_each_gets_alone(server: Server, alone: list[dict[int, list[int]]]) -> None:
    before = server.wait_idle()
    timed = ttft_count(server)
    answers = generate_all(server.port, BODIES)
    assert [tokens(answer) for answer in answers] == alone
    after = server.wait_idle()
    for name in ("preemptions", "prefix_hit_tokens", "prefix_evicted_blocks", "copied_blocks", "waited_slots_us"):
        assert after[name] > before[name], name
    assert after["audit_failures"] == after["requests_failed"] == after["sequences_failed"] == 0
    assert after["requests_completed"] - before["requests_completed"] == REQUESTS
    asked = sum(len(body.get("prompt_token_ids", ())) for body in BODIES)
    assert after["prefix_query_tokens"] - before["prefix_query_tokens"] >= asked
    assert ttft_count(server) - timed == REQUESTS  # once a request, however many choices it has
    produced = sum(len(token_ids) for answer in alone for token_ids in answer.values())
    assert after["tokens_generated"] - before["tokens_generated"] == produced


def test_last_line_tells_how_each_choice_fared(server: Server) -> None:
    before = server.wait_idle()
    answers = generate_all(server.port, BODIES)
    after = server.wait_idle()
    totals = dict.fromkeys(WAITS, 0)
    preemptions = 0
    for body, answer in zip(BODIES, answers, strict=True):
        choices = lines_of(answer)
        assert sorted(choices) == list(range(body.get("n", 1)))
        for lines in choices.values():
            *others, last = lines
            assert not any(line.keys() & {"cached_tokens", "queue_us", "waited_us"} for line in others)
            assert 0 <= last["cached_tokens"] < len(body.get("prompt_token_ids", range(1)))
            assert last["cached_tokens"] % BLOCK == 0
            assert last["waited_us"].keys() == WAITS
            assert min(last["waited_us"].values()) >= 0
            assert last["queue_us"] == sum(last["waited_us"].values())
            preemptions += last["preemptions"]
            for reason, waited_us in last["waited_us"].items():
                totals[reason] += waited_us
    assert preemptions == after["preemptions"] - before["preemptions"]
    count = sum(body.get("n", 1) for body in BODIES)
    for reason, total_us in totals.items():  # each choice's are rounded down by less than 1 us
        assert abs(after[f"waited_{reason}_us"] - before[f"waited_{reason}_us"] - total_us) <= count


def test_streams_survive_the_schedulers_death(alone: list[dict[int, list[int]]]) -> None:
    """Their lines are the same, but for what the last one says of the way there."""
    with running("serve", mock_kv=True, mock_token_latency_us=3_000, **SMALL) as server:
        answers: list[bytes] = []
        client = threading.Thread(target=lambda: answers.extend(generate_all(server.port, BODIES)))
        client.start()
        try:
            for _ in range(3):
                doomed, before = server.scheduler(), server.scheduler_tokens()
                wait_until(lambda before=before: server.scheduler_tokens() >= before + 300, "the moment to kill")
                doomed.kill()
                wait_until(
                    lambda doomed=doomed: server.processes("scheduler") and server.scheduler().pid != doomed.pid,
                    "the next scheduler",
                )
            assert client.is_alive(), "all streams had ended before the scheduler died"
        finally:
            client.join()
        assert [tokens(answer) for answer in answers] == alone
        metrics = server.wait_idle()
        assert metrics["scheduler_starts"] == 4
        assert metrics["requests_failed"] == metrics["audit_failures"] == 0


def test_hung_up_groups_leave_nothing(server: Server) -> None:
    """Their clients go at once, during the prefill, and while they stream."""
    server.wait_idle()
    for k in range(24):
        body = {"prompt_token_ids": list(range(k, k + 90)), "n": 1 + k % 4, "max_new_tokens": 400}
        stream = RawStream(server.port, body)
        if k % 3:
            stream.read_chunk()
        if k % 3 == 2:
            stream.read_chunk()
        stream.close()
    server.wait_idle()
    assert server.metrics()["audit_failures"] == 0


@pytest.mark.parametrize("length", [1, BLOCK, 2 * BLOCK, 2 * BLOCK + 1, 90])
def test_cached_tokens_are_full_blocks_and_never_the_whole_prompt(server: Server, length: int) -> None:
    rng = np.random.default_rng(100 + length)
    body = {"prompt_token_ids": rng.integers(0, 2**31, length).tolist(), "max_new_tokens": 3, "details": True}
    first, second, salted, again = (
        lines_of(ask(server, body | salt))[0][-1]["cached_tokens"]
        for salt in ({}, {}, {"cache_salt": "mine"}, {"cache_salt": "mine"})
    )
    found = (length - 1) // BLOCK * BLOCK
    assert (first, second, salted, again) == (0, found, 0, found)


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("details", [False, True])
def test_lines_name_their_choice_where_there_are_several(server: Server, n: int, *, details: bool) -> None:
    body = {"prompt_tokens": 20, "max_new_tokens": 7, "n": n, "details": details}
    answer = ask(server, body)
    assert all(("choice" in json.loads(line)) == (n > 1) for line in answer.splitlines())
    choices = lines_of(answer)
    assert sorted(choices) == list(range(n))
    assert {len(lines) for lines in choices.values()} == {7}
    assert all(("token_id" in line) == details for lines in choices.values() for line in lines)


def test_choices_differ_and_the_first_is_the_request_itself(server: Server) -> None:
    body = {"prompt_token_ids": list(range(40)), "max_new_tokens": 12, "seed": 3, "details": True}
    choices = tokens(ask(server, body | {"n": 4}))
    assert choices[0] == tokens(ask(server, body))[0]
    assert len({tuple(token_ids) for token_ids in choices.values()}) == 4


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 25}, "n"),  # more than may run
        ({"n": 24, "prompt_tokens": 79, "max_new_tokens": 60}, None),  # fits: 4 + 23 blocks and more
        ({"n": 1.5}, "n"),
        ({"n": True}, "n"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"cache_salt": 7}, "cache_salt"),
        ({"cache_salt": "x" * 256}, None),
        ({"priority": 8}, "priority"),
        ({"priority": -9}, "priority"),
    ],
)
def test_fields_are_checked_at_the_edge(server: Server, fields: dict[str, Any], param: str | None) -> None:
    status, answer = post(server, {"prompt_tokens": 3, "max_new_tokens": 2} | fields)
    assert status == (200 if param is None else 400)
    if param is not None:
        assert json.loads(answer)["error"]["param"] == param


def test_group_that_can_never_fit_is_refused_at_once() -> None:
    """8 blocks: a prompt of 6 blocks and one for each of two forks fit; seven forks do not."""
    options = {"total_kv_blocks": 8, "kv_block_size": BLOCK, "max_model_len": 128, "workers": 1}
    with running("serve", **options) as server:
        for n, status in ((3, 200), (8, 400)):
            assert post(server, {"prompt_tokens": 6 * BLOCK - 3, "max_new_tokens": 2, "n": n})[0] == status
        server.wait_idle()


def test_higher_priority_overtakes_a_queue() -> None:
    """One place: of those that wait the highest class goes first, though it came last."""
    with running("serve", max_running_seqs=1, mock_token_latency_us=5_000, workers=1, priority_aging_s=0) as server:
        holder = RawStream(server.port, {"prompt_tokens": 1, "max_new_tokens": 200, "priority": -8})
        holder.read_chunk()
        ended: list[int] = []

        def follow(priority: int, stream: RawStream) -> None:
            stream.read_all()
            ended.append(priority)
            stream.close()

        clients = []
        for count, priority in enumerate((7, 3, 0, -3), 1):
            stream = RawStream(server.port, {"prompt_tokens": 1, "max_new_tokens": 40, "priority": priority})
            wait_until(lambda count=count: server.metrics()["waiting"] == count, "the request to wait")
            clients.append(threading.Thread(target=follow, args=(priority, stream)))
            clients[-1].start()
        holder.read_all()
        holder.close()
        for client in clients:
            client.join()
        assert ended == [-3, 0, 3, 7]


def test_decodes_go_on_beside_a_long_prefill() -> None:
    """The longest gap between tokens is a step with one chunk in it, not the whole prompt's time."""
    options = {
        "max_batch_tokens": 256,
        "mock_token_latency_us": 1_000,
        "mock_prefill_token_latency_ns": 100_000,  # a chunk takes 26 ms, the prompt 820 ms
        "workers": 1,
    }
    with running("serve", **options) as server:
        decodes = RawStream(server.port, {"prompt_tokens": 1, "max_new_tokens": 4_000})
        decodes.read_chunk()
        long = RawStream(server.port, {"prompt_tokens": 8_000, "max_new_tokens": 1})
        assert long.read_head() == 200
        metrics = server.metrics()
        assert metrics["prefill_tokens"] >= 8_000
        assert metrics["steps"] >= 8_000 // 256
        assert metrics["inter_token_p99_us"] < 400_000  # of 3 s in all; a machine that is busy may stretch a chunk
        long.close()
        decodes.close()
        server.wait_idle()

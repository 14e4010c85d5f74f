"""The soak's own parts: the same seed draws the same, and what is wrong is found."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.mock_answers import Mock
from tests.soak.accounts import (
    CANCELLED,
    FAILED,
    FINISHED,
    LOST,
    REJECTED,
    STALE,
    UNAVAILABLE,
    WRONG,
    Accounts,
    log_problems,
    metrics_problems,
)
from tests.soak.client import CUT, ENDED, HUNG, LEFT, Outcome
from tests.soak.faults import SCHEDULER_KILL, WEIGHTS, WORKER_KILL, Damage, draw
from tests.soak.memory import MIB, Series
from tests.soak.plans import KV_BLOCK_SIZE, KV_BLOCKS, MAX_MODEL_LEN, Plan, Planner, request_bytes
from tests.soak.run import memory_problems

REPORT = Path(__file__).parents[2] / "perf" / "results" / "soak.json"

BODY = {"prompt_tokens": 3, "max_new_tokens": 3}
WHOLE = b"".join(b'{"token_index":%d,"done":%b}\n' % (k, b"true" if k == 2 else b"false") for k in range(3))
STREAM = {"status": 200, "headers": b"http/1.1 200 ok\r\n\r\n"}


def plans(seed: int, user: int, count: int) -> list[Plan]:
    planner = Planner(seed, user)
    return [planner.draw() for _ in range(count)]


def test_same_seed_draws_the_same_and_another_does_not() -> None:
    assert plans(1, 2, 200) == plans(1, 2, 200)
    assert plans(1, 2, 200) != plans(1, 3, 200)
    assert plans(1, 2, 200) != plans(2, 2, 200)
    assert [draw(Random("x")) for _ in range(2)] == [draw(Random("x")) for _ in range(2)]


def test_draws_are_of_all_kinds_and_fit_the_engine() -> None:
    drawn = list(itertools.chain.from_iterable(plans(5, user, 200) for user in range(10)))
    for name in ("n", "details", "priority", "cache_salt", "ignore_eos", "timeout_s", "prompt_tokens"):
        assert any(plan.body is not None and name in plan.body for plan in drawn), name
    assert {plan.conduct for plan in drawn} == {"read", "leave", "stall"}
    assert {plan.way for plan in drawn} == {"close", "reset", "half-close"}
    for plan in drawn:
        if plan.body is None:
            continue
        prompt = plan.body.get("prompt_tokens") or len(plan.body["prompt_token_ids"])
        total = prompt + plan.body["max_new_tokens"]
        assert total <= MAX_MODEL_LEN
        assert plan.body.get("n", 1) * -(-total // KV_BLOCK_SIZE) <= KV_BLOCKS
        assert json.loads(plan.payload.split(b"\r\n\r\n", 1)[1]) == plan.body
    random = Random(3)
    assert {draw(random).kind for _ in range(500)} == set(WEIGHTS)


# ---------------------------------------------------------------------------------------------------------- accounts


def accounts(**damage: Any) -> Accounts:
    return Accounts(Mock(), Damage(**damage))


def outcome(*, plan: Plan = Plan(BODY, request_bytes(BODY)), **seen: Any) -> Outcome:  # noqa: B008  which is frozen
    return Outcome(plan, **({"ending": ENDED, "started_s": 10.0, "ended_s": 11.0, "port": 7} | seen))


def refusal(status: int, error_type: str = "slots_full", headers: bytes = b"") -> dict[str, Any]:
    body = json.dumps({"error": {"type": error_type, "message": "why", "param": None}}, separators=(",", ":"))
    return {"status": status, "headers": b"http/1.1 x\r\n" + headers + b"\r\n", "body": body.encode()}


ERROR_LINE = b'{"token_index":0,"done":true,"error":{"type":"%b","message":"why","param":null}}\n'
TIMED = Plan(BODY | {"timeout_s": 0.1}, b"")
DOOMED = {"doomed": {7: [10.5]}}
RETRY = b"retry-after: 1\r\n"


@pytest.mark.parametrize(
    ("seen", "damage", "kind"),
    [
        (STREAM | {"body": WHOLE}, {}, FINISHED),
        (STREAM | {"body": WHOLE[:-1]}, {}, WRONG),
        (STREAM | {"body": WHOLE[:40]}, {}, WRONG),
        (STREAM | {"body": WHOLE + WHOLE}, {}, WRONG),
        (STREAM | {"body": WHOLE[:40], "ending": LEFT}, {}, CANCELLED),
        (STREAM | {"body": WHOLE[1:], "ending": LEFT}, {}, WRONG),
        ({"ending": LEFT}, {}, CANCELLED),
        (STREAM | {"body": WHOLE[:40], "ending": CUT}, {}, WRONG),
        (STREAM | {"body": WHOLE[:40], "ending": CUT}, DOOMED, LOST),
        (STREAM | {"body": WHOLE[:40], "ending": CUT}, {"doomed": {8: [10.5]}}, WRONG),
        (STREAM | {"body": WHOLE[:40], "ending": CUT}, {"doomed": {7: [9.0, 12.0]}}, WRONG),
        ({"ending": CUT}, {}, WRONG),
        ({"ending": CUT}, DOOMED, LOST),
        ({"ending": CUT, "is_reused": True}, {}, WRONG),
        ({"ending": CUT, "is_reused": True}, {"retirements": [9.0]}, STALE),
        ({"ending": CUT, "is_reused": True, "opened_s": 8.0}, {"doomed": {7: [9.0]}}, STALE),
        ({"ending": CUT, "is_reused": True, "opened_s": 9.5}, {"doomed": {7: [9.0]}}, WRONG),
        (STREAM | {"ending": CUT, "is_reused": True, "opened_s": 8.0}, {"doomed": {7: [9.0]}}, WRONG),
        ({"ending": CUT}, {"retirements": [9.0]}, WRONG),
        ({"ending": HUNG}, DOOMED, WRONG),
        (refusal(503, headers=RETRY), {}, UNAVAILABLE),
        (refusal(503), {}, WRONG),
        (refusal(500, "internal_error"), {}, WRONG),
        (refusal(400, "invalid_request"), {}, WRONG),
        (refusal(504, "timeout"), {}, WRONG),
        (refusal(504, "timeout") | {"plan": TIMED}, {}, FAILED),
        (STREAM | {"body": ERROR_LINE % b"timeout", "plan": TIMED}, {}, FAILED),
        (STREAM | {"body": ERROR_LINE % b"timeout"}, {}, WRONG),
        (STREAM | {"body": ERROR_LINE % b"backend_error"}, {}, WRONG),
        ({"body": b"", "status": 500, "headers": b"\r\n\r\n"}, {}, WRONG),
        ({"plan": Plan(None, b"x"), "status": 400}, {}, REJECTED),
        ({"plan": Plan(None, b"x"), "ending": CUT}, {}, REJECTED),
        ({"plan": Plan(None, b"x"), "status": 200}, {}, WRONG),
        ({"plan": Plan(None, b"x"), "status": 500}, {}, WRONG),
    ],
)
def test_each_request_is_accounted_for(seen: dict[str, Any], damage: dict[str, Any], kind: str) -> None:
    found = accounts(**damage)
    found.add(outcome(**seen))
    assert found.counts == {kind: 1}
    assert bool(found.problems) == (kind == WRONG)


GOOD = {
    **dict.fromkeys((f"requests_{end}" for end in ("cancelled", "failed", "rejected", "unavailable", "lost")), 0),
    "requests_received": 3,
    "requests_completed": 3,
    "audit_failures": 0,
    "kv_blocks_free": 9,
    "kv_blocks_total": 9,
    "running": 0,
    "waiting": 0,
}


@pytest.mark.parametrize(
    "bad",
    [
        {"requests_received": 4},
        {"requests_received": 2},
        {"requests_completed": 2},
        {"requests_received": 4, "requests_lost": 1},
        {"audit_failures": 1},
        {"kv_blocks_free": 8},
        {"running": 1},
        {"waiting": 1},
    ],
)
def test_metrics_that_do_not_add_up_are_found(bad: dict[str, int]) -> None:
    found = accounts()
    found.counts = Counter({FINISHED: 3})
    assert metrics_problems(GOOD, found) == []
    assert metrics_problems(GOOD | bad, found) != []


@pytest.mark.parametrize(
    ("ending", "killed_s", "may_be"), [(LEFT, 11.5, 1), (LEFT, 13.0, 0), (LEFT, 10.9, 0), (ENDED, 11.5, 0)]
)
def test_client_that_left_just_before_its_worker_was_killed_may_be_lost(
    ending: str, killed_s: float, may_be: int
) -> None:
    found = accounts()
    found.add(outcome(**STREAM | {"body": WHOLE, "ending": ending}))
    found.damage.worker_kills.append(killed_s)  # as it happens: after the client's end
    lost = {"requests_received": 1, "requests_completed": int(ending == ENDED), "requests_lost": 1}
    assert found.unnoticed == may_be
    assert any("lost" in problem for problem in metrics_problems(GOOD | lost, found)) == (not may_be)


def test_log_may_tell_of_the_injected_faults_alone() -> None:
    damage = Damage(counts=Counter({SCHEDULER_KILL: 1, WORKER_KILL: 1}))
    dead = "2026-01-01 ERROR ironbatch.supervisor: the scheduler ended with signal SIGKILL; the next starts in 0.0 s\n"
    lost = "[2026-01-01] [7] [ERROR] Worker (pid:9) was sent SIGKILL! Perhaps out of memory?\n"
    assert log_problems(["[INFO] all is well\n", dead, lost], damage) == []
    for bad in (
        [dead, dead],
        [lost, lost],
        ["Traceback (most recent call last):\n"],
        ["x CRITICAL ironbatch.scheduler: audit failed\n"],
        ["Task exception was never retrieved\n"],
        ["[ERROR] no lane is free for another worker; it will answer 503\n"],
    ):
        assert log_problems(bad, damage) != [], bad


# ------------------------------------------------------------------------------------------------------------ memory


def series(rise_bytes_per_s: float, seconds: int = 200, role: str = "scheduler") -> Series:
    times = [float(t) for t in range(seconds)]
    noise = Random(1)
    rss = [int(80 * MIB + rise_bytes_per_s * t + noise.uniform(-MIB / 4, MIB / 4)) for t in times]
    return Series(role, 0.0, times, rss)


def test_flat_memory_is_told_from_growing() -> None:
    flat, growing = series(0).judged(100, 200), series(60_000).judged(100, 200)
    assert flat is not None
    assert growing is not None
    assert flat["is_flat"]
    assert not growing["is_flat"]
    assert growing["rise_mib"] == pytest.approx(60_000 * 99 / MIB, rel=0.1)
    assert memory_problems([flat], 20) == []
    assert len(memory_problems([flat, growing], 20)) == 1


def test_short_lives_are_not_judged_and_a_long_run_needs_long_ones() -> None:
    assert series(0, seconds=70).judged(0, 200) is None  # 15 s of them do not count
    flat = [series(0, role=role).judged(100, 200) for role in ("supervisor", "scheduler", "web worker")]
    assert memory_problems([entry for entry in flat if entry is not None], 600) == [
        "no arbiter lived for long enough to be judged"
    ]


def test_beginning_of_a_life_does_not_count() -> None:
    young = series(0)
    young.rss_bytes[:15] = [MIB] * 15
    judged = young.judged(0, 200)
    assert judged is not None
    assert judged["first_mib"] > 70


# ------------------------------------------------------------------------------------------------------------ report


def test_committed_report_is_of_a_whole_run_that_passed() -> None:
    text = REPORT.read_text()
    report = json.loads(text)
    assert report["passed"]
    assert report["problems"] == []
    assert report["duration_s"] >= 600
    assert report["requests"].get(WRONG, 0) == 0
    assert report["scheduler_gap_ms"]["count"] > 10
    assert all(entry["is_flat"] for entry in report["memory"]["processes"])
    assert "hostname" not in text
    assert '"/' not in text.replace('"/health', "").replace('"/metrics', "")

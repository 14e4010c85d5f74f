"""Every stream accounted for, and what must hold when all is over."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.mock_answers import Mock, judge
from tests.soak.client import CUT, ENDED, LEFT, Outcome
from tests.soak.faults import BOTH_KILL, SCHEDULER_KILL, SCHEDULER_TWICE, WORKER_KILL, Damage
from tests.soak.plans import REFUSED

FINISHED, CANCELLED, LOST, STALE = "finished", "cancelled by its client", "lost with its worker", "stale connection"
FAILED, UNAVAILABLE, REJECTED = "ended with an error that says why", "refused for the moment", "refused as invalid"
WRONG = "wrong"

TIME_OUT_TYPES = frozenset({"timeout"})
OUTSIDE_TYPES = frozenset({"scheduler_killed", "shutting_down", "queue_timeout"})
"""Errors that a valid request may end with though it is not to blame; each names its reason."""

STALE_S = 90.0
"""A worker that was told to end may close a kept-alive connection under its client's next request for so long."""

MOST_PROBLEMS = 20  # that are kept in words

ENDS = ("completed", "cancelled", "failed", "rejected", "unavailable", "lost")

EXPECTED_ERRORS = (
    # gunicorn's and the supervisor's words for the faults that are injected.
    r"Worker \(pid:\d+\) was sent SIGKILL!",
    r"the scheduler ended with signal SIGKILL; the next starts in",
)
ALARMS = re.compile(r"Traceback|CRITICAL|\[ERROR\]|\bERROR\b|Exception|Task was destroyed|never (?:retrieved|awaited)")


@dataclass
class Accounts:
    """What became of all requests."""

    mock: Mock
    damage: Damage
    counts: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)  # by type
    tokens: int = 0
    stalls: int = 0
    doomed: int = 0  # requests whose worker was killed under them, whatever became of them
    left: list[tuple[int, float, float]] = field(default_factory=list)  # port, start, end: their client went
    problems: list[str] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Judge one request."""
        kind, problem = self._judged(outcome)
        if problem is not None:
            kind = WRONG
            if len(self.problems) < MOST_PROBLEMS:
                self.problems.append(f"{problem}; {described(outcome)}; {self.damage.near(outcome.ended_s)}")
        self.counts[kind] += 1
        self.stalls += outcome.detail == "stalled"
        if outcome.ending == LEFT:
            self.left.append((outcome.port, outcome.started_s, outcome.ended_s))
        else:
            self.doomed += self._is_doomed(outcome)

    @property
    def uncounted(self) -> int:
        """At most so many requests did not live to be counted by their worker."""
        return self.doomed + self.unnoticed

    @property
    def unnoticed(self) -> int:
        """Requests whose worker may not have noticed that their client had left, being killed then or just after.

        Only the end can tell: when a client leaves, the kill that hides it is still to come.
        """
        damage = self.damage
        return sum(damage.has_doomed(*request) or damage.may_hide(request[-1]) for request in self.left)

    def _is_doomed(self, outcome: Outcome) -> bool:
        return self.damage.has_doomed(outcome.port, outcome.started_s, outcome.ended_s)

    def _judged(self, outcome: Outcome) -> tuple[str, str | None]:
        """What became of a request, and what is wrong with that."""
        if outcome.ending not in (ENDED, LEFT, CUT):
            return WRONG, "it hangs, or what came is not HTTP"
        if outcome.plan.body is None:
            return self._judged_nonsense(outcome)
        if outcome.status == 200:
            return self._judged_stream(outcome, outcome.plan.body)
        if outcome.status:
            return self._judged_refusal(outcome)
        if outcome.ending == LEFT:
            return CANCELLED, None
        return self._judged_cut(outcome)

    def _judged_cut(self, outcome: Outcome) -> tuple[str, str | None]:
        """The connection ended before the answer did, which only a killed worker explains."""
        if self._is_doomed(outcome):
            return LOST, None
        if outcome.is_reused and not outcome.status and self._may_be_stale(outcome):
            return STALE, None
        return WRONG, "its connection was cut, and its worker lives"

    def _may_be_stale(self, outcome: Outcome) -> bool:
        """Whether the worker behind a kept connection was killed or told to end since it was opened."""
        was_killed = self.damage.has_doomed(outcome.port, outcome.opened_s, outcome.ended_s)
        return was_killed or any(0 <= outcome.ended_s - told_s <= STALE_S for told_s in self.damage.retirements)

    def _judged_stream(self, outcome: Outcome, body: dict[str, Any]) -> tuple[str, str | None]:
        verdict = judge(body, outcome.body, self.mock)
        self.tokens += verdict.tokens
        if verdict.problem is not None:
            return WRONG, verdict.problem
        for error in verdict.errors:
            self.errors[error["type"]] += 1
            if not self._is_explained(error["type"], outcome):
                return WRONG, f"it ended with {error}"
        if outcome.ending == CUT:
            return self._judged_cut(outcome)
        if outcome.ending == LEFT:
            return CANCELLED, None
        if not verdict.is_whole or not outcome.body.endswith(b"\n"):
            return WRONG, "its answer ended too early"
        return (FAILED if verdict.errors else FINISHED), None

    def _is_explained(self, error_type: str, outcome: Outcome) -> bool:
        return error_type in OUTSIDE_TYPES or (error_type in TIME_OUT_TYPES and outcome.plan.may_time_out)

    def _judged_refusal(self, outcome: Outcome) -> tuple[str, str | None]:
        """A valid request may be refused for the moment, or have run into its own time-out before its first token."""
        error_type = error_type_of(outcome.body)
        if outcome.ending == CUT:
            return self._judged_cut(outcome)
        if outcome.ending == LEFT:
            return CANCELLED, None
        if error_type is None:
            return WRONG, f"status {outcome.status} without an error that says why"
        self.errors[error_type] += 1
        if outcome.status == 503 and b"\r\nretry-after: " in outcome.headers:
            return UNAVAILABLE, None
        if outcome.status == 504 and self._is_explained(error_type, outcome):
            return FAILED, None
        if outcome.status == 500 and error_type in OUTSIDE_TYPES:
            return FAILED, None
        return WRONG, f"status {outcome.status} for a valid request"

    def _judged_nonsense(self, outcome: Outcome) -> tuple[str, str | None]:
        if outcome.status in REFUSED or outcome.status in {503, 0}:
            return REJECTED, None
        return WRONG, f"status {outcome.status} for a request that means nothing"

    def close(self, metrics: dict[str, int], log: list[str]) -> list[str]:
        """Everything that is wrong, when the server is idle again. `metrics` are its last, `log` is what it wrote."""
        problems = [*self.problems, *self.damage.problems, *metrics_problems(metrics, self)]
        return problems + log_problems(log, self.damage)


def described(outcome: Outcome) -> str:
    """For a report: what was seen and what was asked."""
    plan = outcome.plan
    asked: Any = plan.payload[:200]
    if plan.body is not None:
        asked = plan.body | {"prompt_token_ids": f"{len(plan.body.get('prompt_token_ids', ()))} of them"}
    kept = "kept connection, " if outcome.is_reused else ""
    seen = f"{kept}{outcome.ending}, status {outcome.status}, {len(outcome.body)} bytes, {outcome.detail!r}"
    return f"{seen}: {plan.conduct} after {plan.after_bytes} bytes or {plan.after_s} s, {asked}"


def error_type_of(body: bytes) -> str | None:
    """The type of an error's body, if it says why."""
    match = re.match(rb'\{"error":\{"type":"(\w+)","message":"[^"]', body)
    return match[1].decode() if match else None


def metrics_problems(metrics: dict[str, int], accounts: Accounts) -> list[str]:
    """Whether the server's own counters agree with each other, and with what the clients have seen."""
    problems, most_uncounted = [], accounts.uncounted
    unaccounted = metrics["requests_received"] - sum(metrics[f"requests_{end}"] for end in ENDS)
    # A worker may be killed between a request's receipt and its end's count, and not with its slot in between.
    if not 0 <= unaccounted <= most_uncounted:
        problems.append(
            f"{unaccounted} requests have no end in the metrics; {most_uncounted} may have been on killed workers"
        )
    finished, completed = accounts.counts[FINISHED], metrics["requests_completed"]
    # A client that leaves may have had all of its answer; a killed worker may not have counted what it had sent.
    most = finished + accounts.counts[CANCELLED] + accounts.counts[LOST]
    if not finished - most_uncounted <= completed <= most:
        problems.append(f"the metrics say that {completed} requests were completed, clients saw {finished}")
    if metrics["requests_lost"] > most_uncounted:
        problems.append(
            f"{metrics['requests_lost']} requests are lost, {most_uncounted} may have been on killed workers"
        )
    problems += [f"{name} is {metrics[name]}" for name in ("audit_failures",) if metrics[name]]
    if metrics["kv_blocks_free"] != metrics["kv_blocks_total"] or metrics["running"] or metrics["waiting"]:
        problems.append("the idle server holds blocks or sequences")
    return problems


def log_problems(log: list[str], damage: Damage) -> list[str]:
    """Alarms in the log that no injected fault explains, and fewer or more of those that do."""
    alarms = [line.rstrip() for line in log if ALARMS.search(line)]
    problems = [line for line in alarms if not any(re.search(pattern, line) for pattern in EXPECTED_ERRORS)]
    kills = damage.counts
    deaths = sum("the scheduler ended with" in line for line in alarms)
    most = kills[SCHEDULER_KILL] + 2 * kills[SCHEDULER_TWICE] + kills[BOTH_KILL]
    if deaths > most:
        problems.append(f"the log tells of {deaths} deaths of schedulers, and {most} were killed")
    losses = sum("was sent SIGKILL" in line for line in alarms)
    if losses > kills[WORKER_KILL] + kills[BOTH_KILL]:
        problems.append(f"the log tells of {losses} killed workers, and fewer were")
    return problems[:MOST_PROBLEMS]

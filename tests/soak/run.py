"""One run: the server, its users, the faults, and the report."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import itertools
import json
import sys
import threading
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyperf

from ironbatch import __version__
from tests.end_to_end.observer import Observer, observed
from tests.end_to_end.server import FORMS, REPOSITORY, Server, running, stale_segments
from tests.mock_answers import Mock
from tests.soak.accounts import WRONG, Accounts, described
from tests.soak.client import ENDED, Connection, Outcome
from tests.soak.faults import Faults
from tests.soak.memory import ALLOWED_BYTES, ALLOWED_SHARE, MIB, SETTLING_S, Memory, summary
from tests.soak.plans import KV_BLOCK_SIZE, KV_BLOCKS, MAX_MODEL_LEN, READ, STALL, Plan, Planner

sys.path.insert(0, str(REPOSITORY / "perf"))

import results

WORKERS = 2
USERS = 40
MOCK = Mock(keeps_kv=True, eos_prob=0.002)

# Small pools, so that sequences preempt each other, evict each other's prefixes and fill the queue.
OPTIONS: dict[str, Any] = {
    "workers": WORKERS,
    "mock_kv": True,
    "mock_eos_prob": MOCK.eos_prob,
    "mock_token_latency_us": 2_000,
    "total_kv_blocks": KV_BLOCKS,
    "kv_block_size": KV_BLOCK_SIZE,
    "max_model_len": MAX_MODEL_LEN,
    "max_batch_tokens": 128,
    "max_running_seqs": 24,
    "max_queued_requests": 48,
    "priority_aging_s": 2,
    "audit_every": 64,
}

CALM_FROM, CALM_UNTIL = 0.5, 0.9
"""Shares of the run between which a worker and the scheduler are left alive, so that their memory can be judged."""

IDLE_LIMIT_S = 60.0
POLL_S = 0.05
PROGRESS_S = 10.0
WATCH_S = 0.5
OF_TIME = ("elapsed_secs", "tokens_per_sec")  # which the observer does not know
NEEDED = ("preemptions", "prefix_hit_tokens", "prefix_evicted_blocks", "copied_blocks")
"""What has to have happened, or the run has shown less than it says."""


LONG_S = 240.0
"""A run of at least so long must have seen everything, and judges the memory of every kind of process."""

ROLES = ("supervisor", "scheduler", "web worker", "arbiter")
FLAT_MEANS = (
    "least-squares line of the resident memory, from half of the run on and without a process's first"
    f" {SETTLING_S:g} s: rises by at most {ALLOWED_BYTES // MIB} MiB and {ALLOWED_SHARE:.0%} of the median"
)


class Soak:
    """One run.

    Args:
        duration_s: how long the load lasts; its last requests, the idle server and its stop come after that.
        seed: of all that is drawn.
        form: how the server is started, one of FORMS.
    """

    def __init__(self, duration_s: float, seed: int, form: str) -> None:
        self._duration_s, self._seed, self._form = duration_s, seed, form
        self._health: Counter[str] = Counter()
        self.log: list[str] = []

    def run(self) -> dict[str, Any]:
        """Run, and return the report; its `problems` are empty when all went well."""
        before = stale_segments()
        with running(self._form, **OPTIONS) as server, observed(server) as engine:
            self.log = server.output
            is_calm = threading.Event()
            faults, memory = Faults(server, engine, self._seed, WORKERS, is_calm), Memory(server)
            accounts = Accounts(MOCK, faults.damage)
            start_s = time.monotonic()
            faults.start()
            memory.start()
            asyncio.run(self._load(server, faults, is_calm, accounts))
            end_s = time.monotonic()
            ending = self._ending(server, engine, accounts)
            grown = summary(memory.finish(), start_s + self._duration_s * CALM_FROM, end_s)
            metrics = {name: value for name, value in engine.metrics().items() if name not in OF_TIME}
            ending += stopped_problems(server)
        if stale_segments() - before:
            ending.append("shared memory is left in /dev/shm")
        problems = [*accounts.close(metrics, self.log), *ending, *memory_problems(grown, self._duration_s)]
        if self._duration_s >= LONG_S:
            problems += [f"{name} is 0: the load was too light" for name in NEEDED if not metrics[name]]
        return self._report(accounts, metrics, grown, problems)

    # ---------------------------------------------------------------------------------------------------------- load

    async def _load(self, server: Server, faults: Faults, is_calm: threading.Event, accounts: Accounts) -> None:
        """All users at once until the time is over; then the faults end, and what is under way may end too."""
        start_s = time.monotonic()
        until_s = start_s + self._duration_s
        users = [asyncio.create_task(self._user(user, server.port, until_s, accounts)) for user in range(USERS)]
        watch = asyncio.create_task(self._watch(server.port, accounts))
        for share, change in ((CALM_FROM, is_calm.set), (CALM_UNTIL, is_calm.clear), (1.0, lambda: None)):
            end_s = start_s + share * self._duration_s
            while (left_s := end_s - time.monotonic()) > 0 and server.process.poll() is None:
                await asyncio.sleep(min(left_s, PROGRESS_S))
                self._say(time.monotonic() - start_s, accounts)
            change()
        watch.cancel()
        has_ended = server.process.poll() is not None
        if has_ended:
            accounts.problems.insert(0, f"the server ended after {time.monotonic() - start_s:.0f} s of the load")
            for user in users:
                user.cancel()
        await asyncio.to_thread(faults.finish)
        for trouble in await asyncio.gather(*users, watch, return_exceptions=True):
            if isinstance(trouble, Exception) and not has_ended:
                raise trouble

    async def _user(self, user: int, port: int, until_s: float, accounts: Accounts) -> None:
        """One request after the other."""
        planner = Planner(self._seed, user)
        kept: Connection | None = None
        while time.monotonic() < until_s:
            await asyncio.sleep(planner.pause_s())
            plan = planner.draw()
            if kept is not None and not plan.reuses:
                await kept.leave("close")
                kept = None
            kept = await perform(Outcome(plan, is_reused=kept is not None), kept, port, accounts)
        if kept is not None:
            await kept.leave("close")

    async def _watch(self, port: int, accounts: Accounts) -> None:
        """Ask for the health and the metrics all the time; each is answered, whatever goes on."""
        for number in itertools.count():
            path = ("/health", "/metrics")[number % 2]
            plan = Plan(None, f"GET {path} HTTP/1.1\r\nHost: soak\r\nConnection: close\r\n\r\n".encode())
            outcome = Outcome(plan, started_s=time.monotonic())
            connection = await Connection.open(port)
            await connection.follow(outcome)
            await connection.leave("close")
            self._health[f"{path} {outcome.status}"] += 1
            is_doomed = accounts.damage.has_doomed(outcome.port, outcome.started_s, outcome.ended_s)
            if outcome.status not in {200, 503} and not is_doomed:
                accounts.problems.append(f"{path}: {described(outcome)}; {accounts.damage.near(outcome.ended_s)}")
            await asyncio.sleep(WATCH_S)

    def _say(self, elapsed_s: float, accounts: Accounts) -> None:
        counts, faults = accounts.counts, accounts.damage.counts
        print(
            f"{elapsed_s:5.0f} s: {counts.total()} requests, {counts[WRONG]} wrong; {faults.total()} faults",
            file=sys.stderr,
            flush=True,
        )

    # ----------------------------------------------------------------------------------------------------------- end

    def _ending(self, server: Server, engine: Observer, accounts: Accounts) -> list[str]:
        """The load is over: nothing is held, and the server serves."""
        problems = []
        deadline_s = time.monotonic() + IDLE_LIMIT_S
        while server.process.poll() is None and not (
            engine.is_idle() and 0 <= engine.unaccounted() <= accounts.uncounted and server.is_healthy()
        ):
            if time.monotonic() > deadline_s:
                gauges = {name: int(engine.gauges[name]) for name in ("running", "waiting", "kv_blocks_free")}
                problems.append(f"not idle after {IDLE_LIMIT_S} s: {gauges}, {engine.owned()} slots are in use")
                break
            time.sleep(POLL_S)
        return problems

    def _report(
        self, accounts: Accounts, metrics: dict[str, int], grown: list[dict[str, Any]], problems: list[str]
    ) -> dict[str, Any]:
        damage = accounts.damage
        gaps_ms = np.array(damage.gaps_s) * 1e3
        return {
            "form": self._form,
            "seed": self._seed,
            "duration_s": self._duration_s,
            "passed": not problems,
            "problems": problems,
            "requests": {"sent": accounts.counts.total(), **dict(sorted(accounts.counts.items()))},
            "errors": dict(sorted(accounts.errors.items())),
            "tokens": accounts.tokens,
            "stalled_readers": accounts.stalls,
            "requests_on_killed_workers": accounts.uncounted,
            "faults": dict(sorted(damage.counts.items())),
            "faults_skipped": dict(sorted(damage.skipped.items())),
            "scheduler_gap_ms": {
                "means": "from a scheduler's SIGKILL to the next token published",
                "count": len(damage.gaps_s),
                "p50": round(float(np.median(gaps_ms)), 1) if damage.gaps_s else None,
                "max": round(float(gaps_ms.max()), 1) if damage.gaps_s else None,
            },
            "answers_to_a_prober": dict(sorted(self._health.items())),
            "memory": {"flat_means": FLAT_MEANS, "processes": grown},
            "metrics": metrics,
            "metadata": metadata(),
        }


async def perform(outcome: Outcome, kept: Connection | None, port: int, accounts: Accounts) -> Connection | None:
    """One request, on a connection that is kept or on a new one. Returns the connection if it may be used again."""
    plan = outcome.plan
    outcome.started_s = outcome.ended_s = time.monotonic()
    try:
        connection = kept or await Connection.open(port, stalls=plan.conduct == STALL)
    except OSError as problem:
        outcome.detail = f"cannot connect: {problem}"
        accounts.add(outcome)
        return None
    await connection.follow(outcome)
    accounts.add(outcome)
    is_reusable = outcome.ending == ENDED and plan.conduct == READ and b"connection: close" not in outcome.headers
    if is_reusable and plan.body is not None:
        return connection
    await connection.leave(plan.way)
    return None


def stopped_problems(server: Server) -> list[str]:
    """Stop the server; what is wrong with how it ends."""
    code = server.stop()
    problems = [] if code == 0 else [f"it ended with status {code}"]
    try:
        server.assert_nothing_left(IDLE_LIMIT_S)
    except AssertionError as problem:
        problems.append(str(problem))
    return problems


def memory_problems(grown: list[dict[str, Any]], duration_s: float) -> list[str]:
    """Processes that grew; and kinds of which none was there for long enough, if the run was long enough for that."""
    problems = [f"a {entry['role']} grew: {entry}" for entry in grown if not entry["is_flat"]]
    if duration_s >= LONG_S:
        missing = set(ROLES) - {entry["role"] for entry in grown}
        problems += [f"no {role} lived for long enough to be judged" for role in sorted(missing)]
    return problems


def metadata() -> dict[str, Any]:
    """What there is to say of the machine and the packages in public; see perf/results.py."""
    known = pyperf.Run([1.0]).get_metadata()
    known |= {f"{name}_version": version(name) for name in ("falcon", "gunicorn", "numba", "numpy", "uvloop")}
    known |= {"ironbatch_version": __version__, "commit": results.commit()}
    return {name: value for name, value in sorted(known.items()) if name in results.KEPT}


def main(words: list[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--duration-s", type=float, default=600.0, metavar="SECONDS", help="of the load (600)")
    parser.add_argument("--seed", type=int, help="draws the same again; without it the time of day is one")
    parser.add_argument("--form", choices=FORMS, default=FORMS[0], help=f"how to start the server ({FORMS[0]})")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report here")
    parser.add_argument("--log", type=Path, metavar="FILE", help="write here what the server has logged")
    arguments = parser.parse_args(words)
    seed = time.time_ns() % 10**9 if arguments.seed is None else arguments.seed
    print(f"soak: {arguments.form}, {arguments.duration_s:g} s, --seed {seed}", file=sys.stderr, flush=True)
    soak = Soak(arguments.duration_s, seed, arguments.form)
    with contextlib.redirect_stdout(io.StringIO()):  # the server's log, which is checked
        report = soak.run()
    if arguments.log is not None:
        arguments.log.write_text("".join(soak.log))
    text = json.dumps(report, indent=1) + "\n"
    if arguments.output is not None:
        arguments.output.write_text(text)
    else:
        print(text)
    if not report["scheduler_gap_ms"]["count"]:
        print("no stream waited for a scheduler that was killed: the run was too short for that", file=sys.stderr)
    if not report["memory"]["processes"]:
        print("no process's memory was judged: the run was too short for that", file=sys.stderr)
    for problem in report["problems"]:
        print(f"problem: {problem}", file=sys.stderr)
    print("passed" if report["passed"] else f"failed; --seed {seed} draws the same again", file=sys.stderr)
    return 0 if report["passed"] else 1

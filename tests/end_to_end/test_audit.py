"""A real server whose scheduler's state is damaged while it serves: it says so, starts anew, and no stream notices."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ironbatch.kernels.violations import VIOLATIONS
from tests.end_to_end.server import FORMS, Server, generate_all, running, wait_until
from tests.scheduler.faults import FAULTS, VIOLATIONS_OF

pytestmark = pytest.mark.end_to_end

PLUG_IN = '''\
"""The mock; when the file $FAULTY_TRIGGER names a fault, the next step that can plants it, once."""

import os

from ironbatch.backends.mock import MockBackend
from tests.scheduler.faults import FAULTS


class FaultyBackend(MockBackend):
    def execute(self, plan):
        output = super().execute(plan)
        trigger = os.environ["FAULTY_TRIGGER"]
        if os.path.exists(trigger):
            with open(trigger) as file:
                fault = file.read()
            if FAULTS[fault](plan._arena):
                os.rename(trigger, trigger + ".planted")
        return output
'''
METADATA = "Metadata-Version: 2.1\nName: ironbatch-faulty\nVersion: 1\n"
ENTRY_POINTS = "[ironbatch.backends]\nfaulty = faulty:FaultyBackend\n"

OPTIONS = {"backend": "faulty", "total_kv_blocks": 256, "audit_every": 1, "mock_token_latency_us": 2_000}

PREFIXES = [list(range(1_000 * k, 1_000 * k + 50)) for k in range(1, 4)]
BODIES: list[dict[str, Any]] = [
    {
        "prompt_token_ids": [*PREFIXES[k % 3], *range(k % 7)],
        "max_new_tokens": 120 + k,
        "seed": k,
        "n": 1 + (k % 5 == 0),
        "details": True,
    }
    for k in range(24)
]


def install(folder: Path) -> None:
    """Put the plug-in into `folder` as an installer would."""
    info = folder / "ironbatch_faulty-1.dist-info"
    info.mkdir(parents=True)
    (folder / "faulty.py").write_text(PLUG_IN)
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text(ENTRY_POINTS)


def tokens(answer: bytes) -> dict[int, list[int]]:
    """The token ids of each choice of an answer that is whole."""
    found: dict[int, list[int]] = {}
    ended = set()
    for line in map(json.loads, answer.splitlines()):
        choice = line.get("choice", 0)
        assert line["token_index"] == len(found.setdefault(choice, []))
        assert choice not in ended
        found[choice].append(line["token_id"])
        if line["done"]:
            assert line["finish_reason"] == "length"
            ended.add(choice)
    assert ended == set(found)
    return found


@pytest.fixture(scope="module")
def trigger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where a fault's name is put; the plug-in is on the path of the servers of this module."""
    folder = tmp_path_factory.mktemp("faulty")
    install(folder / "installed")
    with pytest.MonkeyPatch.context() as patch:
        path = os.pathsep.join(filter(None, [str(folder / "installed"), os.environ.get("PYTHONPATH")]))
        patch.setenv("PYTHONPATH", path)
        patch.setenv("FAULTY_TRIGGER", str(folder / "trigger"))
        yield folder / "trigger"


def damage(server: Server, trigger: Path, fault: str) -> list[bytes]:
    """All bodies at once; after the first tokens the fault is planted. Returns the answers."""
    answers: list[bytes] = []
    doomed, before, received = server.scheduler(), server.scheduler_tokens(), server.metrics()["requests_received"]
    client = threading.Thread(target=lambda: answers.extend(generate_all(server.port, BODIES)))
    client.start()
    try:
        # All of them: after several deaths within seconds a new request is refused while the next scheduler waits.
        wait_until(lambda: server.metrics()["requests_received"] == received + len(BODIES), "all requests")
        wait_until(lambda: server.scheduler_tokens() > before + 200, "the first tokens")
        whole = trigger.with_suffix(".new")
        whole.write_text(fault)
        whole.rename(trigger)
        wait_until(trigger.with_suffix(".planted").exists, "the fault to be planted")
        wait_until(lambda: server.processes("scheduler") and server.scheduler().pid != doomed.pid, "a new scheduler")
    finally:
        client.join()
        for path in (trigger, trigger.with_suffix(".planted")):
            path.unlink(missing_ok=True)
    return answers


def critical_lines(server: Server) -> list[str]:
    return [line for line in server.output if re.search(r"\bcritical\b", line, re.IGNORECASE)]


@pytest.mark.parametrize("form", FORMS)
def test_one_fault_is_told_and_costs_no_stream_a_token(form: str, trigger: Path) -> None:
    with running(form, **OPTIONS) as server:
        undisturbed = [tokens(answer) for answer in generate_all(server.port, BODIES)]
        server.wait_idle()
        answers = damage(server, trigger, "aliased block")
        assert [tokens(answer) for answer in answers] == undisturbed
        metrics = server.wait_idle()
        assert metrics["audit_failures"] == 1
        assert metrics["scheduler_starts"] == 2
        assert metrics["requests_failed"] == metrics["sequences_failed"] == 0
        wait_until(lambda: critical_lines(server), "the log line")
        (line,) = critical_lines(server)
        assert any(VIOLATIONS[key] in line for key in VIOLATIONS_OF["aliased block"])
        assert server.is_healthy()
        assert server.stop() == 0
        server.assert_nothing_left()


@pytest.mark.slow
def test_every_kind_of_fault_in_turn(trigger: Path) -> None:
    """One server through all of them: each costs it a scheduler, and nobody a token."""
    with running("serve", **OPTIONS) as server:
        undisturbed = [tokens(answer) for answer in generate_all(server.port, BODIES)]
        for count, fault in enumerate(FAULTS, 1):
            server.wait_idle()
            answers = damage(server, trigger, fault)
            assert [tokens(answer) for answer in answers] == undisturbed, fault
            assert server.wait_idle()["audit_failures"] == count
            wait_until(lambda count=count: len(critical_lines(server)) == count, f"the log line of {fault}")
            line = critical_lines(server)[-1]
            assert any(VIOLATIONS[key] in line for key in VIOLATIONS_OF[fault]), (fault, line)
        metrics = server.metrics()
        assert metrics["scheduler_starts"] == len(FAULTS) + 1
        assert metrics["requests_failed"] == metrics["sequences_failed"] == 0


def test_sound_server_is_audited_and_nothing_is_found(trigger: Path) -> None:
    """Without a fault: the plug-in and its audits alone disturb nothing."""
    assert not trigger.exists()
    with running("serve", **OPTIONS) as server:
        generate_all(server.port, BODIES)
        metrics = server.wait_idle()
        assert metrics["audits"] > 100
        assert metrics["audit_failures"] == 0
        assert metrics["scheduler_starts"] == 1
        assert not critical_lines(server)

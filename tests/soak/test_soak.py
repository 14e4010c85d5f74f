"""A short soak, in both ways to start the server: `make soak` is the long one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end.server import FORMS
from tests.soak.accounts import FINISHED
from tests.soak.run import main

pytestmark = [pytest.mark.end_to_end, pytest.mark.slow]


@pytest.mark.parametrize("form", FORMS)
def test_short_run_passes_and_reports(form: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output, log = tmp_path / "soak.json", tmp_path / "soak.log"
    words = ["--duration-s", "12", "--seed", "11", "--form", form, "--output", str(output), "--log", str(log)]
    code = main(words)
    report = json.loads(output.read_text())
    assert report["problems"] == []
    assert code == 0
    assert report["passed"]
    assert report["requests"][FINISHED] > 50
    assert sum(report["faults"].values()) >= 2
    assert report["tokens"] > 1_000
    assert "hostname" not in output.read_text()

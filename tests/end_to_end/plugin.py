"""Backends of tests, installed as pip would: a module, and the entry point that names it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

STALLING = '''
"""A mock that stands still while a file is there, as a device that hangs within its longest step."""
import os, time
from ironbatch.backends.mock import MockBackend

class Stalling(MockBackend):
    def __init__(self, config):
        super().__init__(config)
        self.longest_step_ns = 600 * 10**9

    def execute(self, plan):
        while os.path.exists({gate!r}):
            time.sleep(0.005)
        return super().execute(plan)
'''


def install_stalling(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let servers that start from now on find the backend `stalling`. Returns the file that stalls it."""
    gate = directory / "gate"
    (directory / "stalling.py").write_text(STALLING.format(gate=str(gate)))
    info = directory / "stalling-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stalling\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ironbatch.backends]\nstalling = stalling:Stalling\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH")])))
    return gate

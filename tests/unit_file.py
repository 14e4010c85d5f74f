"""deploy/ironbatch.service, read without systemd; and what its filter of system calls lets through, with it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

UNIT = Path(__file__).parents[1] / "deploy" / "ironbatch.service"
PROGRAM = "/opt/ironbatch/.venv/bin/ironbatch"
SYSTEMD_ANALYZE = shutil.which("systemd-analyze")


def directives() -> list[tuple[str, str, str]]:
    """Section, name and value of each, in order. (configparser would refuse a name that comes twice.)"""
    found, section = [], ""
    for line in UNIT.read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            name, equals, value = line.partition("=")
            assert equals, line
            found.append((section, name, value))
    return found


def values(name: str) -> list[str]:
    """All values of a directive, in order."""
    return [value for _, found, value in directives() if found == name]


def value(name: str) -> str:
    """The value of a directive that stands there once."""
    (found,) = values(name)
    return found


def seconds(text: str) -> float:
    """A time span as the unit writes them: `45`, `5min`."""
    return float(text.removesuffix("min")) * 60 if text.endswith("min") else float(text)


def allowed_system_calls() -> set[str]:
    """Names. systemd adds @default to every list of what is allowed."""
    allowed = system_calls("@default")
    for words in values("SystemCallFilter"):
        named = set().union(*(system_calls(word) for word in words.removeprefix("~").split()))
        allowed = allowed - named if words.startswith("~") else allowed | named
    return allowed


def system_calls(name: str) -> set[str]:
    """A system call, or all in a group, as `systemd-analyze syscall-filter` lists it."""
    if not name.startswith("@"):
        return {name}
    assert SYSTEMD_ANALYZE is not None
    listing = subprocess.run(
        [SYSTEMD_ANALYZE, "syscall-filter", "--no-pager", name], capture_output=True, text=True, check=True
    ).stdout
    members = [line.strip() for line in listing.splitlines()[1:] if line.strip() and "#" not in line]
    return set().union(*map(system_calls, members))

"""An engine, made by a parent and handed down to a program that it starts."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from ironbatch.errors import StartError
from ironbatch.shm.engine import DOORBELLS_VARIABLE, SEGMENT_VARIABLE, Engine
from tests.shm.descriptors import open_descriptors
from tests.support import small_config

SHM = Path("/dev/shm")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def engine() -> Iterator[Engine]:
    found = Engine.create(small_config(workers=2), 0)
    yield found
    found.close()


def test_an_engine_has_a_bell_for_the_scheduler_and_each_lane(engine: Engine) -> None:
    assert len(engine.lane_bells) == small_config(workers=2).num_lanes == len(engine.segment.lanes)
    assert len(set(engine.descriptors)) == 1 + len(engine.lane_bells)
    assert engine.descriptors[0] == engine.scheduler_bell.descriptor


def test_the_round_trip_through_a_program(engine: Engine) -> None:
    program = """
    import os
    from ironbatch.shm.engine import Engine
    engine = Engine.from_environ(os.environ)
    assert engine.scheduler_bell.wait(0), "rung before it was started"
    engine.segment.slots[1]["seed"] = int(engine.segment.header["num_slots"])
    engine.lane_bells[2].ring()
    engine.segment.populate()
    engine.close()
    """
    engine.scheduler_bell.ring()
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
        cwd=ROOT,
        env={**os.environ, **engine.to_environ()},
        pass_fds=engine.descriptors,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert engine.segment.slots[1]["seed"] == engine.segment.header["num_slots"]
    assert [bell.wait(0) for bell in engine.lane_bells] == [lane == 2 for lane in range(len(engine.lane_bells))]
    assert not engine.scheduler_bell.wait(0)
    assert (SHM / engine.segment.name).exists(), "the creator removes it, nobody else"


def test_the_variables_say_no_more_than_they_must(engine: Engine) -> None:
    environ = engine.to_environ()
    assert set(environ) == {SEGMENT_VARIABLE, DOORBELLS_VARIABLE}
    assert environ[SEGMENT_VARIABLE] == engine.segment.name
    assert all(name.startswith("IRONBATCH_INTERNAL_") for name in environ)


def test_without_a_parent_there_is_none() -> None:
    with pytest.raises(StartError, match=r"no engine: start with `ironbatch serve`"):
        Engine.from_environ({})


def test_one_that_has_ended() -> None:
    gone = Engine.create(small_config(), 0)
    environ = gone.to_environ()
    gone.close()
    with pytest.raises(StartError, match="does not exist"):
        Engine.from_environ(environ)


def test_closing_it_leaves_neither_descriptors_nor_memory() -> None:
    Engine.create(small_config(), 0).close()  # now the resource tracker runs, and its pipe is open
    before = open_descriptors()
    engine = Engine.create(small_config(), 0)
    path = SHM / engine.segment.name
    engine.close()
    assert open_descriptors() == before
    assert not path.exists()


def test_no_descriptors_left_is_one_line_and_leaves_nothing(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.eventfd
    made: list[int] = []

    def eventfd(*arguments: int) -> int:
        if len(made) == 2:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        made.append(real(*arguments))
        return made[-1]

    monkeypatch.setattr(os, "eventfd", eventfd)
    try:
        with pytest.raises(StartError, match="open files"):
            Engine.create(small_config(), 0)
        assert not list(SHM.glob(f"{prefix}*"))
    finally:
        for descriptor in made:
            with contextlib.suppress(OSError):  # closed as it should be
                os.close(descriptor)

"""`ironbatch check-config`: its report says what is, as text and as JSON, and whether the segment fits."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ironbatch import check_config, layout
from ironbatch.check_config import SharedMemorySpace, report, report_lines, run
from ironbatch.config import Config, options
from ironbatch.errors import ConfigError
from ironbatch.shm import segment
from ironbatch.shm.segment import Segment

PAGE_BYTES = 4096
PLENTY = SharedMemorySpace(2**50, PAGE_BYTES)
Capture = pytest.CaptureFixture[str]


def memory(space: SharedMemorySpace, config: Config | None = None) -> dict[str, Any]:
    found: dict[str, Any] = report(config or Config(), {}, space)["shared_memory"]
    return found


def as_json(capsys: Capture, argv_values: dict[str, str], environ: dict[str, str]) -> dict[str, Any]:
    assert run(argv_values, environ, as_json=True) == 0
    out, err = capsys.readouterr()
    assert err == ""
    found: dict[str, Any] = json.loads(out)
    return found


def set_space(monkeypatch: pytest.MonkeyPatch, space: SharedMemorySpace) -> None:
    monkeypatch.setattr(SharedMemorySpace, "look", lambda: space)


def test_every_option_is_there_with_its_value_and_source(capsys: Capture) -> None:
    found = as_json(capsys, {"workers": "3"}, {"IRONBATCH_SEED": "9", "IRONBATCH_WORKERS": "4"})
    config = Config(workers=3, seed=9)
    sources = {"workers": "--workers", "seed": "IRONBATCH_SEED"}
    assert found["options"] == {
        option.name: {
            "value": getattr(config, option.name),
            "source": sources.get(option.name, "default"),
            "flag": option.flag,
            "variable": option.env,
        }
        for option in options()
    }
    assert found["warnings"] == []


def test_derived_limits(capsys: Capture) -> None:
    values = {"total_kv_blocks": "64", "max_batch_tokens": "100", "workers": "3", "max_queued_requests": "1"}
    assert as_json(capsys, values, {})["derived"] == {
        "max_request_tokens": 1024,
        "kv_capacity_tokens": 1024,
        "running_limit": 100,
        "num_slots": 257,
        "num_lanes": 8,
        "mock_longest_step_ns": 200_000,
        "mock_kv_bytes": 0,
        "backend_may_narrow": False,
    }


def test_warnings_are_in_the_json_too(capsys: Capture) -> None:
    assert len(as_json(capsys, {}, {"IRONBATCH_WORKRES": "4"})["warnings"]) == 1


def test_bad_configuration_is_not_reported() -> None:
    with pytest.raises(ConfigError):
        run({"workers": "0"}, {}, as_json=False)


def test_tables_add_up_to_what_the_engine_really_makes() -> None:
    config = Config(max_model_len=100, max_running_seqs=3, max_queued_requests=4, workers=1)
    found = memory(PLENTY, config)
    assert list(found["tables_bytes"]) == [
        "header",
        "lanes",
        "entries",
        "slots",
        "tokens",
        "texts",
        "running",
        "metrics",
    ]
    assert sum(found["tables_bytes"].values()) == found["segment_bytes"]
    assert found["tables_bytes"]["slots"] == 7 * layout.SLOT.itemsize
    assert found["tables_bytes"]["header"] == layout.HEADER.itemsize
    assert found["directory"] == segment.SHM_DIRECTORY
    made = Segment.create(config, 0)
    try:
        assert made.header["segment_bytes"] == found["segment_bytes"]
        on_disk = os.stat(f"{segment.SHM_DIRECTORY}/{made.name}")
        assert found["segment_bytes"] <= on_disk.st_size <= found["needed_bytes"]
    finally:
        made.close()


def test_text_says_the_same(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    set_space(monkeypatch, PLENTY)
    assert run({"workers": "3", "total_kv_blocks": "64"}, {"IRONBATCH_SEED": "9"}, as_json=False) == 0
    out, err = capsys.readouterr()
    assert err == ""
    rows = [line.split() for line in out.splitlines()]
    for option in options():
        assert any(row[:1] == [option.flag[2:]] for row in rows), option.flag
    assert ["workers", "3", "--workers"] in rows
    assert ["seed", "9", "IRONBATCH_SEED"] in rows
    assert ["backend-url", "none", "default"] in rows
    assert ["kv-block-size", "16", "default"] in rows
    assert "  slots                768     running and queued requests" in out
    assert "the KV pool: 64 blocks of 16" in out
    assert "24.9 MiB       all of them together" in out
    assert "it fits" in out
    columns = {line.rindex("default") for line in out.splitlines() if line.endswith("default")}
    assert len(columns) == 1, "the columns are aligned"


def test_text_names_what_binds() -> None:
    for config, told in (
        (Config(), "8192    prompt and output; --max-model-len"),
        (Config(total_kv_blocks=10), "160     prompt and output; the KV pool: 10 blocks of 16"),
        (Config(), "256     --max-running-seqs"),
        (Config(max_batch_tokens=9), "9       --max-batch-tokens: each takes a token of a step"),
    ):
        text = "\n".join(report_lines(report(config, {}, PLENTY)))
        assert any(" ".join(told.split()) in " ".join(line.split()) for line in text.splitlines()), told


def test_switches_are_true_or_false(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    set_space(monkeypatch, PLENTY)
    assert run({"mock_kv": "on"}, {"IRONBATCH_NO_PREFIX_CACHE": "0"}, as_json=False) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["mock-kv", "true", "--mock-kv"] in rows
    assert ["no-prefix-cache", "false", "IRONBATCH_NO_PREFIX_CACHE"] in rows
    found = as_json(capsys, {"mock_kv": "on"}, {})["options"]
    assert (found["mock_kv"]["value"], found["no_prefix_cache"]["value"]) == (True, False)


def test_memory_of_the_mocks_kv_is_told_where_it_is_kept() -> None:
    found = report(Config(mock_kv=True, total_kv_blocks=64, kv_block_size=8), {}, PLENTY)
    assert found["derived"]["mock_kv_bytes"] == 64 * (8 + 1) * 4
    lines = [" ".join(line.split()) for line in report_lines(found)]
    assert "mock KV 2.2 KiB host memory of the scheduler: 64 blocks of 8" in lines
    assert not any("mock KV" in line for line in report_lines(report(Config(), {}, PLENTY)))


def test_other_backends_have_no_mock_step() -> None:
    class Plugged:
        backend = "plug"

        def __getattr__(self, name: str) -> Any:
            return getattr(Config(), name)

    found = report(Plugged(), {}, PLENTY)  # type: ignore[arg-type]
    assert found["derived"]["mock_longest_step_ns"] is None
    assert "longest step" not in "\n".join(report_lines(found))


def test_it_fits_to_the_byte() -> None:
    needed = memory(PLENTY)["needed_bytes"]
    assert needed % PAGE_BYTES == 0
    assert 0 <= needed - memory(PLENTY)["segment_bytes"] < PAGE_BYTES
    assert memory(SharedMemorySpace(needed, PAGE_BYTES))["fits"]
    assert not memory(SharedMemorySpace(needed - 1, PAGE_BYTES))["fits"]
    assert memory(SharedMemorySpace(None, PAGE_BYTES))["fits"], "no limit"


@pytest.mark.parametrize("as_json", [False, True])
def test_what_does_not_fit_is_told_and_exits_1(
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    *,
    as_json: bool,
) -> None:
    set_space(monkeypatch, SharedMemorySpace(10 * 2**20, PAGE_BYTES))
    assert run({}, {}, as_json=as_json) == 1
    out, err = capsys.readouterr()
    assert err == (
        "ironbatch: error: the engine needs 24.8 MiB of shared memory, and /dev/shm has 10.0 MiB free; lower"
        " --max-queued-requests, --max-running-seqs or --max-model-len, or give it more (docker run --shm-size)\n"
    )
    if as_json:
        found = json.loads(out)["shared_memory"]
        assert (found["fits"], found["problem"]) == (False, err.removeprefix("ironbatch: error: ").rstrip())
    else:
        assert "free     10.0 MiB   IT DOES NOT FIT" in out


def test_space_of_a_real_directory(tmp_path: Path) -> None:
    space = SharedMemorySpace.look(str(tmp_path))
    assert space.problem is None
    assert space.free_bytes is None or space.free_bytes > 0
    assert space.page_bytes > 0


def test_space_of_a_missing_directory(tmp_path: Path) -> None:
    space = SharedMemorySpace.look(str(tmp_path / "none"))
    assert space.problem == f"{tmp_path / 'none'} can't be used: No such file or directory"
    assert memory(space)["problem"] == space.problem
    assert not memory(space)["fits"]


def test_space_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    space = SharedMemorySpace.look(str(tmp_path))
    assert memory(space)["problem"] == f"{tmp_path} can't be written by this user"


def test_tmpfs_without_a_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_blocks=0, f_bavail=0, f_frsize=PAGE_BYTES))
    space = SharedMemorySpace.look(str(tmp_path))
    assert space == SharedMemorySpace(None, PAGE_BYTES)
    assert "no limit" in "\n".join(report_lines(report(Config(), {}, space)))


@pytest.mark.parametrize(
    ("size_bytes", "shown"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (25_900_000, "24.7 MiB"), (3 * 2**29, "1.5 GiB")],
)
def test_sizes(size_bytes: int, shown: str) -> None:
    assert check_config._size(size_bytes) == shown

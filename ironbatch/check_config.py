"""`ironbatch check-config`: what `serve` would run with these flags and this environment, and whether it fits.

One mapping is the report: printed as JSON as it is, or as aligned text made from it.
"""

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ironbatch import layout
from ironbatch.config import Config, environment_warnings, given, options
from ironbatch.errors import EXIT_FAILED, EXIT_OK, ConfigError
from ironbatch.kinds import as_text
from ironbatch.limits import GIB, KIB, MIB
from ironbatch.named_files import file_problems

SHM_DIRECTORY: Final = "/dev/shm"  # noqa: S108 - where the segment will be
SMALLER: Final = "lower --max-queued-requests, --max-running-seqs or --max-model-len"

Row = tuple[str, object, str]


@dataclass(frozen=True, slots=True)
class SharedMemorySpace:
    """What /dev/shm has. `free_bytes` is None if it has no limit; `problem` says why it can't be used, or None."""

    free_bytes: int | None
    page_bytes: int
    problem: str | None = None

    @classmethod
    def look(cls, directory: str = SHM_DIRECTORY) -> "SharedMemorySpace":
        """Ask the file system."""
        try:
            stat = os.statvfs(directory)
        except OSError as error:
            return cls(0, layout.CACHE_LINE_BYTES, f"{directory} can't be used: {error.strerror}")
        problem = None if os.access(directory, os.W_OK | os.X_OK) else f"{directory} can't be written by this user"
        # tmpfs with size=0 has no limit, and says so by counting no blocks at all.
        return cls(stat.f_bavail * stat.f_frsize if stat.f_blocks else None, stat.f_frsize, problem)


def run(argv_values: Mapping[str, str], environ: Mapping[str, str], *, as_json: bool) -> int:
    """Print the report. Returns the exit code: 1 if the segment does not fit. Raises ConfigError."""
    config = Config.load(argv_values, environ)
    if problems := file_problems(config):
        raise ConfigError(problems)
    found = report(config, given(argv_values, environ), SharedMemorySpace.look())
    if as_json:
        print(json.dumps({**found, "warnings": environment_warnings(environ)}, indent=2))
    else:
        print("\n".join(report_lines(found)))
    problem = found["shared_memory"]["problem"]
    if problem is None:
        return EXIT_OK
    sys.stdout.flush()  # the report first, also where both go to one file
    print(f"ironbatch: error: {problem}", file=sys.stderr)
    return EXIT_FAILED


def report(config: Config, found: Mapping[str, tuple[str, str]], space: SharedMemorySpace) -> dict[str, Any]:
    """Everything there is to say. Sizes are in bytes; `source` is a flag, a variable's name, or "default"."""
    return {
        "options": {
            option.name: {
                "value": getattr(config, option.name),
                "source": found[option.name][0] if option.name in found else "default",
                "flag": option.flag,
                "variable": option.env,
            }
            for option in options()
        },
        "derived": {
            "max_request_tokens": config.max_request_tokens,
            "kv_capacity_tokens": config.kv_capacity_tokens,
            "running_limit": config.running_limit,
            "num_slots": config.num_slots,
            "num_lanes": config.num_lanes,
            "mock_longest_step_ns": config.mock_longest_step_ns if config.backend == "mock" else None,
            "mock_kv_bytes": config.mock_kv_bytes,
            "backend_may_narrow": config.backend != "mock",
        },
        "shared_memory": _shared_memory(config, space),
    }


def _shared_memory(config: Config, space: SharedMemorySpace) -> dict[str, Any]:
    offsets = layout.offsets(
        num_slots=config.num_slots,
        num_lanes=config.num_lanes,
        max_model_len=config.max_model_len,
        has_text=config.has_text,
    )
    starts = {"header": 0, **offsets._asdict()}
    total = starts.pop("total")
    ends = [*list(starts.values())[1:], total]
    needed = -(-total // space.page_bytes) * space.page_bytes
    problem = space.problem
    if problem is None and space.free_bytes is not None and space.free_bytes < needed:
        problem = (
            f"the engine needs {_size(needed)} of shared memory, and {SHM_DIRECTORY} has {_size(space.free_bytes)}"
            f" free; {SMALLER}, or give it more (docker run --shm-size)"
        )
    return {
        "tables_bytes": {name: end - start for (name, start), end in zip(starts.items(), ends, strict=True)},
        "segment_bytes": total,
        "needed_bytes": needed,
        "free_bytes": space.free_bytes,
        "directory": SHM_DIRECTORY,
        "fits": problem is None,
        "problem": problem,
    }


def report_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The report as text for people, from what `report` returned."""
    values = {name: option["value"] for name, option in found["options"].items()}
    derived, memory = found["derived"], found["shared_memory"]
    yield from _section(
        "options",
        ((option["flag"][2:], option["value"], option["source"]) for option in found["options"].values()),
    )
    yield ""
    before = "" if values["backend"] == "mock" else ", before what the backend declares when it starts"
    yield from _section(f"limits that follow{before}", _derived_rows(values, derived))
    yield ""
    sizes = memory["tables_bytes"]
    counts = {"lanes": derived["num_lanes"], "slots": derived["num_slots"], "tokens": derived["num_slots"]}
    if sizes["texts"]:
        counts["texts"] = derived["num_slots"]
    yield from _section(
        f"shared memory, in {memory['directory']}",
        [
            *((name, _size(size), f"{counts[name]} rows" if name in counts else "") for name, size in sizes.items()),
            ("segment", _size(memory["segment_bytes"]), "all of them together"),
            ("free", "no limit" if memory["free_bytes"] is None else _size(memory["free_bytes"]), _verdict(memory)),
        ],
    )


def _derived_rows(values: Mapping[str, Any], derived: Mapping[str, Any]) -> Iterator[Row]:
    """Each with the options that it comes from, so that one sees what to change."""
    kv = f"{values['total_kv_blocks']} blocks of {values['kv_block_size']}"
    is_kv_bound = derived["max_request_tokens"] < values["max_model_len"]
    is_batch_bound = derived["running_limit"] < values["max_running_seqs"]
    yield "KV pool, tokens", derived["kv_capacity_tokens"], kv
    yield (
        "tokens of a request",
        derived["max_request_tokens"],
        "prompt and output; " + (f"the KV pool: {kv}" if is_kv_bound else "--max-model-len"),
    )
    yield (
        "running sequences",
        derived["running_limit"],
        "--max-batch-tokens: each takes a token of a step" if is_batch_bound else "--max-running-seqs",
    )
    yield "slots", derived["num_slots"], "running and queued requests"
    yield "lanes", derived["num_lanes"], f"{values['workers']} workers, twice for a reload, and two spare"
    if derived["mock_longest_step_ns"] is not None:
        yield "longest step", f"{derived['mock_longest_step_ns'] / 1e6:g} ms", "the mock with a full batch"
    if derived["mock_kv_bytes"]:
        yield "mock KV", _size(derived["mock_kv_bytes"]), f"host memory of the scheduler: {kv}"


def _verdict(memory: Mapping[str, Any]) -> str:
    return "it fits" if memory["fits"] else "IT DOES NOT FIT"


def _section(title: str, rows: Iterable[Row]) -> Iterator[str]:
    """The title, then name, value and remark in columns; a remark may be empty."""
    table = [(name, "none" if value == "" else as_text(value), remark) for name, value, remark in rows]
    name_width, value_width = (max(len(row[column]) for row in table) for column in (0, 1))
    yield title
    for name, value, remark in table:
        yield f"  {name:<{name_width}}  {value:<{value_width}}  {remark}".rstrip()


def _size(size_bytes: int) -> str:
    """Such as 320 bytes, 48.0 KiB, 24.6 MiB."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.1f} {name}"
    return f"{size_bytes} bytes"

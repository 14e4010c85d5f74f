"""The command line: what it hands on, what it prints, and its exit codes."""

import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import ironbatch
from ironbatch.bench.options import FLAGS
from ironbatch.cli import main
from ironbatch.config import BACKEND_GROUP, Config, backend_names, options
from ironbatch.errors import ConfigError, IronbatchError, StartError

ROOT = Path(ironbatch.__file__).parents[1]
COMMANDS = ("serve", "check-config", "bench", "device")
DEADLINE_S = 60.0
HEAVY = ("numba", "llvmlite", "numpy", "uvloop", "falcon", "gunicorn", "msgspec", "asyncio", "rich")

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("IRONBATCH_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "")  # so that what a command sets is undone
    monkeypatch.setenv("COLUMNS", "1000")  # no line of help is wrapped


class FakeSupervisor(types.ModuleType):
    """Stands in for `ironbatch.supervisor`, which is heavy, and would serve."""

    def __init__(self) -> None:
        super().__init__("ironbatch.supervisor")
        self.configs: list[Config] = []
        self.code = 0
        self.problem: BaseException | None = None
        self.blas_threads: list[str | None] = []

    def serve(self, config: Config) -> int:
        self.configs.append(config)
        self.blas_threads.append(os.environ.get("OPENBLAS_NUM_THREADS"))
        if self.problem is not None:
            raise self.problem
        return self.code


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch) -> FakeSupervisor:
    fake = FakeSupervisor()
    monkeypatch.setitem(sys.modules, "ironbatch.supervisor", fake)
    return fake


def python(*argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A Python of its own, warnings being errors."""
    return subprocess.run(
        [sys.executable, "-W", "error", *argv],
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environ,
    )


def errors(argv: list[str], capsys: Capture, code: int = 2) -> list[str]:
    """The problems that a command tells, without their prefix; it prints nothing else."""
    assert main(argv) == code
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert lines
    assert all(line.startswith("ironbatch: error: ") for line in lines)
    return [line.removeprefix("ironbatch: error: ") for line in lines]


# ------------------------------------------------------------------------------------------------------------- help


@pytest.mark.parametrize("command", ["serve", "check-config"])
def test_help_lists_every_option_with_default_bounds_and_variable(command: str, capsys: Capture) -> None:
    assert main([command, "--help"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for option in options():
        value = f"[{option.metavar}]" if option.is_switch else option.metavar
        entry = re.search(rf"^  {option.flag} {re.escape(value)}\s+(.*)$", out, re.MULTILINE)
        assert entry is not None, option.flag
        default = "false" if option.is_switch else "none" if option.default == "" else option.default
        assert entry[1] == f"{option.help} (default: {default}; {option.kind.bounds}; {option.env})"
    assert "a flag outranks its variable" in out


def test_bench_help_lists_every_flag(capsys: Capture) -> None:
    assert main(["bench", "--help"]) == 0
    out = capsys.readouterr().out
    for flag in FLAGS:
        assert f"  {flag.text} {flag.metavar}" in out
        assert flag.help in out
        assert flag.default is None or f"(default: {flag.default})" in out
    assert "inter-token latency from token to token" in out


def test_top_help_lists_the_commands(capsys: Capture) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(re.search(rf"^    {command}\b", out, re.MULTILINE) for command in COMMANDS)


def test_version(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr() == (f"ironbatch {ironbatch.__version__}\n", "")


def test_module_is_the_command() -> None:
    ran = python("-m", "ironbatch", "--version")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, f"ironbatch {ironbatch.__version__}\n", "")


@pytest.mark.parametrize(
    ("argv", "allowed"),
    [
        (["--help"], ()),
        (["serve", "--help"], ()),
        (["bench", "--help"], ()),
        (["serve", "--workers", "0"], ()),
        (["bench", "--concurrency", "0"], ()),
        (["check-config"], ("numpy",)),
    ],
)
def test_nothing_heavy_is_imported_before_it_is_needed(argv: list[str], allowed: tuple[str, ...]) -> None:
    heavy = set(HEAVY) - set(allowed)
    script = f"import sys; from ironbatch.cli import main; main({argv}); sys.exit(repr({heavy} & sys.modules.keys()))"
    ran = python("-c", script)
    assert ran.stderr.splitlines()[-1] == "set()"


# ------------------------------------------------------------------------------------------------------------ serve


def test_serve_hands_on_flags_and_environment(supervisor: FakeSupervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IRONBATCH_SEED", "7")
    monkeypatch.setenv("IRONBATCH_WORKERS", "3")
    supervisor.code = 5
    assert main(["serve", "--workers", "4", "--addr=:0", "--mock-eos-prob", "0.02"]) == 5
    assert supervisor.configs == [Config(workers=4, addr=":0", mock_eos_prob=0.02, seed=7)]
    assert supervisor.blas_threads == ["1"], "before numpy is imported: the supervisor forks"


def test_serve_needs_no_flag(supervisor: FakeSupervisor) -> None:
    assert main(["serve"]) == 0
    assert supervisor.configs == [Config()]


def test_arguments_are_the_processes_own_by_default(
    supervisor: FakeSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["ironbatch", "serve", "--workers", "4"])
    assert main() == 0
    assert supervisor.configs == [Config(workers=4)]


ONLY_REAL = {"backend_model", "backend_api_key_file"}
GOOD_VALUES = {
    "addr": "[::1]:0",
    "kv_block_size": "32",
    "mock_eos_prob": "0.5",
    "log_level": "debug",
    "log_format": "json",
    "no_prefix_cache": "true",
    "mock_kv": "true",
    "backend_continue": "true",
    "tokenizer": "byte",
}


@pytest.mark.parametrize("option", options(), ids=lambda option: option.flag)
def test_every_option_is_a_flag(option: object, supervisor: FakeSupervisor, capsys: Capture) -> None:
    name, flag, default = option.name, option.flag, option.default  # type: ignore[attr-defined]
    if name in {"backend", "backend_url", "device", *ONLY_REAL}:  # these have no other value that stands alone
        (told,) = errors(["serve", flag, "true"], capsys)
        assert told.startswith(f"{flag}")
        return
    value = GOOD_VALUES.get(name) or str(default + 1)
    assert main(["serve", flag, value]) == 0
    (config,) = supervisor.configs
    assert str(getattr(config, name)) == (value.capitalize() if type(default) is bool else value)
    assert getattr(config, name) != default


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        ([], False),
        (["--mock-kv"], True),
        (["--mock-kv", "--seed", "1"], True),
        (["--mock-kv=true"], True),
        (["--mock-kv", "on"], True),
        (["--mock-kv=false"], False),
        (["--mock-kv", "0"], False),
        (["--mock-kv", "--mock-kv=no"], False),
    ],
)
def test_switch_stands_alone_or_has_a_value(argv: list[str], supervisor: FakeSupervisor, *, value: bool) -> None:
    assert main(["serve", *argv]) == 0
    assert supervisor.configs[0].mock_kv is value


def test_switch_outranks_its_variable(supervisor: FakeSupervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IRONBATCH_MOCK_KV", "yes")
    monkeypatch.setenv("IRONBATCH_NO_PREFIX_CACHE", "on")
    assert main(["serve", "--mock-kv=off"]) == 0
    (config,) = supervisor.configs
    assert (config.mock_kv, config.no_prefix_cache) == (False, True)


@pytest.mark.parametrize("argv", [["--mock-kv", "now"], ["--mock-kv=now"]])
def test_what_is_no_switch(argv: list[str], capsys: Capture) -> None:
    assert errors(["serve", *argv], capsys) == ["--mock-kv: 'now' is neither true nor false; use one of these"]


def test_all_problems_are_told_and_nothing_is_started(
    supervisor: FakeSupervisor, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("IRONBATCH_MAX_MODEL_LEN", "0")
    unknown = (
        f"--backend: 'none' is not a backend of this installation; use {' or '.join(backend_names())}, or install a"
        f" plug-in (entry-point group {BACKEND_GROUP})"
    )
    assert errors(["serve", "--workers", "65", "--seed", "-1", "--backend", "none"], capsys) == [
        "--workers: 65 is not between 1 and 64; use 64 or less",
        unknown,
        "IRONBATCH_MAX_MODEL_LEN: 0 is not between 2 and 1048576; use 2 or more",
        "--seed: -1 is not between 0 and 9223372036854775807; use 0 or more",
    ]
    assert supervisor.configs == []


@pytest.mark.parametrize(
    ("problem", "code", "told"),
    [
        (StartError("cannot listen on :80: taken"), 1, ["cannot listen on :80: taken"]),
        (ConfigError(["one", "two"]), 2, ["one", "two"]),
        (IronbatchError("else"), 1, ["else"]),
    ],
)
def test_errors_at_start(
    problem: Exception, code: int, told: list[str], supervisor: FakeSupervisor, capsys: Capture
) -> None:
    supervisor.problem = problem
    assert errors(["serve"], capsys, code) == told


def test_interrupt_is_quiet(supervisor: FakeSupervisor, capsys: Capture) -> None:
    supervisor.problem = KeyboardInterrupt()
    assert main(["serve"]) == 130
    assert capsys.readouterr() == ("", "")


def test_bug_is_not_swallowed(supervisor: FakeSupervisor) -> None:
    supervisor.problem = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        main(["serve"])


@pytest.mark.parametrize("command", ["serve", "check-config"])
def test_unknown_variables_are_warned_of(
    command: str, supervisor: FakeSupervisor, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("IRONBATCH_WORKRES", "3")
    assert main([command]) == 0
    assert capsys.readouterr().err == (
        "ironbatch: warning: IRONBATCH_WORKRES is not an option and has no effect; did you mean IRONBATCH_WORKERS?\n"
    )


# ------------------------------------------------------------------------------------------------------------ usage


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ([], "no command; use serve, check-config, bench or device, or --help"),
        (["srve"], "'srve' is no command; did you mean serve?"),
        (["checkconfig"], "'checkconfig' is no command; did you mean check-config?"),
        (["xyz"], "'xyz' is no command; use serve, check-config, bench or device"),
        (["\x1b[2J"], r"'\x1b[2J' is no command; use serve, check-config, bench or device"),
        (
            ["--addr", ":1", "serve"],
            "'--addr' is no flag of ironbatch itself; begin with a command: serve, check-config, bench or device",
        ),
        (["serve", "--kv-blocksize", "8"], "'--kv-blocksize' is no flag of serve; did you mean --kv-block-size?"),
        (["serve", "--worker=8"], "'--worker' is no flag of serve; did you mean --workers?"),
        (["serve", "--max-run", "8"], "'--max-run' is no flag of serve; did you mean --max-running-seqs?"),
        (["serve", "--xyzzy"], "'--xyzzy' is no flag of serve; `ironbatch serve --help` lists those there are"),
        (["serve", "--json"], "'--json' is no flag of serve; `ironbatch serve --help` lists those there are"),
        (["check-config", "--jsn"], "'--jsn' is no flag of check-config; did you mean --json?"),
        (["bench", "--concurency", "8"], "'--concurency' is no flag of bench; did you mean --concurrency?"),
        (
            ["bench", "--workers", "8"],
            "'--workers' is no flag of bench; `ironbatch bench --help` lists those there are",
        ),
        (["serve", "now"], "'now' is no argument of serve; `ironbatch serve --help` lists those there are"),
        (["serve", "--mock-k"], "'--mock-k' is no flag of serve; did you mean --mock-kv?"),
        (["serve", "--prefix-cache"], "'--prefix-cache' is no flag of serve; did you mean --no-prefix-cache?"),
        (["serve", "--addr"], "argument --addr: expected one argument; `ironbatch serve --help` says more"),
        (
            ["check-config", "--json=1"],
            "argument --json: ignored explicit argument '1'; `ironbatch check-config --help`",
        ),
    ],
)
def test_bad_usage_is_one_line_with_a_hint(
    argv: list[str], told: str, supervisor: FakeSupervisor, capsys: Capture
) -> None:
    (line,) = errors(argv, capsys)
    assert line.startswith(told)
    assert supervisor.configs == []


def test_each_unknown_flag_is_told(capsys: Capture) -> None:
    told = errors(["serve", "--wrkers", "1", "--sed", "2"], capsys)
    assert told == [
        "'--wrkers' is no flag of serve; did you mean --workers?",
        "'--sed' is no flag of serve; did you mean --seed?",
    ]


def test_last_of_a_repeated_flag_counts(supervisor: FakeSupervisor) -> None:
    assert main(["serve", "--workers", "3", "--workers", "4"]) == 0
    assert supervisor.configs[0].workers == 4


def test_bench_tells_all_bad_values(capsys: Capture) -> None:
    assert errors(["bench", "--concurrency", "0", "--url", "x"], capsys) == [
        "--url: 'x' is not an http:// or https:// URL with a host; use one such as http://127.0.0.1:8080",
        "--concurrency: 0 is not between 1 and 16384; use 1 or more",
    ]


# ----------------------------------------------------------------------------------------------------------- output


@pytest.mark.parametrize("argv", [["--help"], ["serve", "--help"], ["check-config"], ["check-config", "--json"]])
def test_reader_that_has_gone_ends_it_quietly(argv: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ran = subprocess.run(
            [sys.executable, "-W", "error", "-m", "ironbatch", *argv],
            stdout=writer,
            stderr=subprocess.PIPE,
            check=False,
            timeout=DEADLINE_S,
            env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""},  # argparse ignores a failing write
        )
    finally:
        os.close(writer)
    assert (ran.returncode, ran.stderr) == (141, b"")


def test_no_standard_output_at_all() -> None:
    ran = subprocess.run(
        ["/bin/sh", "-c", f"exec {sys.executable} -m ironbatch check-config >&-"],
        stderr=subprocess.PIPE,
        check=False,
        timeout=DEADLINE_S,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert (ran.returncode, ran.stderr) == (0, b"")


def test_check_config_as_json_is_json(capsys: Capture) -> None:
    assert main(["check-config", "--json", "--workers", "3"]) == 0
    assert json.loads(capsys.readouterr().out)["options"]["workers"]["value"] == 3

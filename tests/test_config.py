"""The configuration. The table below is written out on purpose: it is what we have promised, not what the code says."""

import dataclasses
import importlib.metadata
from collections.abc import Iterable
from importlib.metadata import EntryPoint
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ironbatch.config import Config, environment_warnings, options
from ironbatch.config import given as given_options
from ironbatch.errors import ConfigError, IronbatchError

MILLION = 2**20


class WholeNumber(NamedTuple):
    """A promised option: its default and bounds, and what the others must be for it to reach the upper one."""

    flag: str
    default: int
    low: int
    high: int
    beside_high: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        return self.flag[2:].replace("-", "_")

    @property
    def env(self) -> str:
        return f"IRONBATCH_{self.name.upper()}"


ONE_SEQUENCE = (("max_running_seqs", "1"), ("max_model_len", "16"))
REAL = (("backend", "real"), ("backend_url", "http://127.0.0.1:8000/v1"))
WHOLE_NUMBERS = [
    WholeNumber("--workers", 2, 1, 64),
    WholeNumber("--backend-slots", 0, 0, 65_536),
    WholeNumber("--backend-wait-s", 60, 0, 86_400),
    WholeNumber("--backend-timeout-s", 120, 1, 86_400),
    WholeNumber("--backend-retries", 2, 0, 100),
    WholeNumber("--total-kv-blocks", 4096, 1, 16 * MILLION),
    WholeNumber("--kv-block-size", 16, 1, 256),
    WholeNumber("--max-batch-tokens", 8192, 1, MILLION),
    WholeNumber("--max-running-seqs", 256, 1, 65_536),
    WholeNumber("--max-queued-requests", 512, 0, MILLION - 1, (("max_running_seqs", "1"),)),
    WholeNumber("--queue-timeout-s", 0, 0, 86_400),
    WholeNumber("--priority-aging-s", 10, 0, 86_400),
    WholeNumber("--audit-every", 2048, 0, 10**9),
    WholeNumber("--scheduler-timeout-s", 10, 0, 86_400),
    WholeNumber("--max-model-len", 8192, 2, MILLION),
    WholeNumber("--max-body-bytes", MILLION, 1024, 1024 * MILLION),
    WholeNumber("--header-timeout-s", 10, 1, 86_400),
    WholeNumber("--body-timeout-s", 30, 1, 86_400),
    WholeNumber("--write-timeout-s", 60, 1, 86_400),
    WholeNumber("--keepalive-timeout-s", 5, 1, 86_400),
    WholeNumber("--max-connections", 4096, 1, 10**6),
    WholeNumber("--drain-timeout-s", 30, 0, 86_400),
    WholeNumber("--seed", 0, 0, 2**63 - 1),
    WholeNumber("--mock-token-latency-us", 200, 0, 60_000_000),
    WholeNumber("--mock-prefill-token-latency-ns", 0, 0, 10**9, (("max_batch_tokens", "1000"),)),
    WholeNumber("--mock-sequence-latency-ns", 0, 0, 10**9, (("max_running_seqs", "1000"),)),
    WholeNumber("--mock-kv-token-latency-ns", 0, 0, 10**9, ONE_SEQUENCE),
]
OTHERS = {
    "--addr": "0.0.0.0:8080",
    "--backend": "mock",
    "--backend-url": "",
    "--backend-model": "",
    "--backend-api-key-file": "",
    "--tokenizer": "",
    "--device": "",
    "--mock-eos-prob": 0.0,
    "--log-level": "info",
    "--log-format": "text",
}

SWITCHES = ["--backend-continue", "--no-prefix-cache", "--mock-kv"]

MOCK_STEP_FLAGS = [
    *("--mock-token-latency-us", "--mock-prefill-token-latency-ns", "--mock-sequence-latency-ns"),
    *("--mock-kv-token-latency-ns", "--max-batch-tokens", "--max-running-seqs", "--max-model-len"),
    *("--total-kv-blocks", "--kv-block-size"),
]

whole_numbers = pytest.mark.parametrize("option", WHOLE_NUMBERS, ids=lambda option: option.flag)


def problems(argv_values: dict[str, str] | None = None, environ: dict[str, str] | None = None) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        Config.load(argv_values or {}, environ or {})
    assert all("\n" not in problem and len(problem) < 500 for problem in caught.value.problems)
    return caught.value.problems


def problem(argv_values: dict[str, str] | None = None, environ: dict[str, str] | None = None) -> str:
    (only,) = problems(argv_values, environ)
    return only


def test_every_option_is_promised_with_its_default() -> None:
    promised = {option.flag: option.default for option in WHOLE_NUMBERS} | OTHERS | dict.fromkeys(SWITCHES, False)
    assert {option.flag: option.default for option in options()} == promised
    assert Config() == Config.load({}, {})
    for option in options():
        assert option.env == "IRONBATCH_" + option.flag[2:].replace("-", "_").upper()
        assert getattr(Config(), option.name) == option.default
        assert type(getattr(Config(), option.name)) is type(option.default)
        assert option.help
        assert option.kind.bounds


@whole_numbers
def test_both_ends_of_a_bound_are_good(option: WholeNumber) -> None:
    for value, beside in ((option.low, {}), (option.high, dict(option.beside_high))):
        by_flag = Config.load({option.name: str(value), **beside}, {})
        by_env = Config.load(beside, {option.env: str(value)})
        assert getattr(by_flag, option.name) == value
        assert by_flag == by_env


@whole_numbers
@pytest.mark.parametrize("by_flag", [True, False])
def test_beyond_a_bound_tells_source_value_bound_and_remedy(option: WholeNumber, *, by_flag: bool) -> None:
    for value, remedy in ((option.low - 1, f"{option.low} or more"), (option.high + 1, f"{option.high} or less")):
        text = str(value)
        told = problem({option.name: text}) if by_flag else problem({}, {option.env: text})
        source = option.flag if by_flag else option.env
        assert told == f"{source}: {value} is not between {option.low} and {option.high}; use {remedy}"


@whole_numbers
@pytest.mark.parametrize("text", ["x", "1.5", "1e3", "true", "1_000", " 1", "+1", "٣"])
def test_what_is_not_a_whole_number_is_told_as_that(option: WholeNumber, text: str) -> None:
    told = problem({option.name: text})
    assert told.startswith(f"{option.flag}: {text!r} is not a whole number; give one between {option.low} and ")


@pytest.mark.parametrize("option", options(), ids=lambda option: option.flag)
def test_empty_variable_counts_as_unset_and_an_empty_flag_does_not(option: Any) -> None:
    assert Config.load({}, {option.env: ""}) == Config()
    if option.default != "":
        assert problem({option.name: ""}).startswith(f"{option.flag}: ''")


def test_flag_outranks_variable_outranks_default() -> None:
    environ = {"IRONBATCH_WORKERS": "3", "IRONBATCH_SEED": "4"}
    config = Config.load({"workers": "5"}, environ)
    assert (config.workers, config.seed, config.max_model_len) == (5, 4, 8192)
    assert given_options({"workers": "5"}, environ) == {
        "workers": ("--workers", "5"),
        "seed": ("IRONBATCH_SEED", "4"),
    }
    # A bad variable that a flag outranks is not read at all.
    assert Config.load({"workers": "5"}, {"IRONBATCH_WORKERS": "x"}).workers == 5


def test_all_problems_are_told_at_once_in_the_order_of_the_help() -> None:
    told = problems(
        {"workers": "0", "kv_block_size": "17", "addr": "nowhere", "mock_eos_prob": "2", "log_level": "loud"},
        {"IRONBATCH_MAX_MODEL_LEN": "x", "IRONBATCH_BACKEND": "nothing"},
    )
    assert [text.partition(":")[0] for text in told] == [
        "--addr",
        "--workers",
        "IRONBATCH_BACKEND",
        "--kv-block-size",
        "IRONBATCH_MAX_MODEL_LEN",
        "--mock-eos-prob",
        "--log-level",
    ]


def test_error_is_told_one_problem_a_line() -> None:
    error = ConfigError(["one", "two"])
    assert isinstance(error, IronbatchError)
    assert (error.problems, str(error)) == (("one", "two"), "one\ntwo")
    with pytest.raises(AssertionError):
        ConfigError([])


def name_of(flag: str) -> str:
    return flag[2:].replace("-", "_")


@pytest.mark.parametrize("flag", SWITCHES)
@pytest.mark.parametrize("text", ["true", "1", "yes", "on", "ON", "false", "0", "no", "off", "False", "No"])
def test_switches(flag: str, text: str) -> None:
    value = text.lower() in {"true", "1", "yes", "on"}
    name = name_of(flag)
    by_flag = Config.load({name: text}, {f"IRONBATCH_{name.upper()}": str(not value)})
    by_env = Config.load({}, {f"IRONBATCH_{name.upper()}": text})
    assert getattr(by_flag, name) is getattr(by_env, name) is value
    assert by_env.to_environ()[f"IRONBATCH_{name.upper()}"] == ("true" if value else "false")


@pytest.mark.parametrize("flag", SWITCHES)
@pytest.mark.parametrize("text", ["", "x", "2", "-1", "1.0", "y", "t", " true", "none"])
def test_what_is_no_switch(flag: str, text: str) -> None:
    assert problem({name_of(flag): text}) == f"{flag}: {text!r} is neither true nor false; use one of these"


def test_only_switches_can_stand_without_a_value() -> None:
    assert [option.flag for option in options() if option.is_switch] == SWITCHES


@pytest.mark.parametrize(
    ("text", "remedy"),
    [("3", "use 2 or 4"), ("17", "use 16 or 32"), ("255", "use 128 or 256"), ("100", "use 64 or 128")],
)
def test_kv_block_size_is_a_power_of_two(text: str, remedy: str) -> None:
    assert problem({"kv_block_size": text}) == (
        f"--kv-block-size: {text} is not a power of two between 1 and 256; {remedy}"
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0.0),
        ("1", 1.0),
        ("0.02", 0.02),
        (".5", 0.5),
        ("1.", 1.0),
        ("2e-2", 0.02),
        ("-0.0", 0.0),
        ("1E-300", 1e-300),
    ],
)
def test_probability(text: str, value: float) -> None:
    read = Config.load({"mock_eos_prob": text}, {}).mock_eos_prob
    assert (read, str(read)) == (value, str(value))


@pytest.mark.parametrize("text", ["", "x", "nan", "inf", "-inf", "1_0", " 0", "0x1", "0,5", "1e", "5%"])
def test_what_is_no_number(text: str) -> None:
    assert problem({"mock_eos_prob": text}) == (
        f"--mock-eos-prob: {text!r} is not a number; give one between 0 and 1, such as 0.02"
    )


@pytest.mark.parametrize("text", ["1.0001", "-0.1", "2", "1e999"])
def test_what_is_no_probability(text: str) -> None:
    assert problem({"mock_eos_prob": text}) == (
        f"--mock-eos-prob: {text!r} is not between 0 and 1; use a probability such as 0.02"
    )


def test_address_is_split_and_a_bad_one_tells_the_remedy() -> None:
    """All of them are in test_addresses.py."""
    config = Config.load({"addr": "[::1]:8080"}, {})
    assert (config.host, config.port) == ("::1", 8080)
    assert problem({"addr": "8080"}) == "--addr: '8080' is not a host and a port; use :8080"


def with_plugins(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    def entry_points(*, group: str) -> Iterable[EntryPoint]:
        return [EntryPoint(name, "package:Backend", group) for name in names if group == "ironbatch.backends"]

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)


def test_plug_ins_are_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    with_plugins(monkeypatch, "zeta", "alpha")
    config = Config.load({"backend": "zeta", "backend_url": "http://model:1/x?y"}, {})
    assert (config.backend, config.backend_url) == ("zeta", "http://model:1/x?y")
    assert problem({"backend": "beta"}) == (
        "--backend: 'beta' is not a backend of this installation; use mock or device or real or"
        " alpha or zeta,"
        " or install a plug-in (entry-point group ironbatch.backends)"
    )


@pytest.mark.parametrize(
    "url", ["http://a b", "http://a\n", "http://a\x00", "http://a\u00a0", "http://\udcff", "a\u202e"]
)
def test_backend_url_is_printable_and_without_spaces(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    with_plugins(monkeypatch, "plug")
    told = problem({"backend": "plug", "backend_url": url})
    assert told == f"--backend-url: {url!r} holds a space or a control character; percent-encode it"


def test_backend_url_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    with_plugins(monkeypatch, "plug")
    assert len(Config.load({"backend": "plug", "backend_url": "x" * 2048}, {}).backend_url) == 2048
    assert problem({"backend": "plug", "backend_url": "x" * 2049}) == (
        "--backend-url: 2049 characters are too many; use a URL of at most 2048"
    )


@pytest.mark.parametrize(
    ("path", "node"),
    [("software", ""), ("./software", "./software"), ("/run/ironbatch/device 0", None), ("d\u00e9", None)],
)
def test_device_is_a_path_or_the_word_software(path: str, node: str | None) -> None:
    config = Config.load({"backend": "device", "device": path}, {})
    assert (config.device, config.device_path) == (path, path if node is None else node)
    assert Config.load({"backend": "device"}, {"IRONBATCH_DEVICE": path}) == config
    assert Config.load({}, config.to_environ()) == config


def test_device_and_its_backend_need_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with_plugins(monkeypatch, "plug", "device")  # which can't take that name
    assert problem({"backend": "device"}) == (
        "--device, --backend: the device backend needs a device; name its node, such as --device"
        " /run/ironbatch/device0, or use --device software"
    )
    for backend in ("mock", "plug"):
        assert problem({"device": "/dev/x"}, {"IRONBATCH_BACKEND": backend}) == (
            f"--device, IRONBATCH_BACKEND: '/dev/x' means nothing to the backend '{backend}'; remove it, or use"
            " --backend device"
        )
    assert problem({"backend": "device", "device": "software", "backend_url": "http://x"}) == (
        "--backend-url, --backend: 'http://x' means nothing to the device backend; remove it, or choose a backend that"
        " uses a URL"
    )
    assert "'device' is not the mock" in problem({"backend": "device", "device": "software", "mock_kv": "on"})


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("x" * 4096, "4096 bytes are too many; use a path of at most 4095"),
        ("\u00e9" * 2048, "4096 bytes are too many; use a path of at most 4095"),
        ("/dev/\n", "'/dev/\\n' holds a control character; use a path without one"),
        ("/dev/\0", "'/dev/\\x00' holds a control character; use a path without one"),
    ],
)
def test_what_is_no_path_of_a_device(path: str, told: str) -> None:
    assert problem({"backend": "device", "device": path}) == f"--device: {told}"


@pytest.mark.parametrize("text", ["debug", "info", "warning", "error", "INFO", "Warning"])
def test_log_levels(text: str) -> None:
    assert Config.load({"log_level": text}, {}).log_level == text.lower()


@pytest.mark.parametrize("text", ["text", "json", "JSON"])
def test_log_formats(text: str) -> None:
    assert Config.load({"log_format": text}, {}).log_format == text.lower()


def test_no_log_format() -> None:
    assert problem({"log_format": "xml"}) == "--log-format: 'xml' is none of its values; use text or json"


def test_no_log_level() -> None:
    assert problem({"log_level": "loud"}) == (
        "--log-level: 'loud' is none of its values; use debug or info or warning or error"
    )


@pytest.mark.parametrize(
    ("values", "sources", "told"),
    [
        (
            {"max_running_seqs": "65536", "max_queued_requests": str(MILLION - 1)},
            "--max-running-seqs, --max-queued-requests",
            "65536 + 1048575 = 1114111 slots are over the limit of 1048576; lower them by 65535 together",
        ),
        (
            {"max_queued_requests": "20000", "max_model_len": str(MILLION)},
            "--max-running-seqs, --max-queued-requests, --max-model-len",
            "need 79.1 GiB of shared memory, over the limit of 64 GiB; lower one of them",
        ),
        (
            {"backend_url": "http://x"},
            "--backend-url, --backend",
            "'http://x' means nothing to the mock backend; remove it, or choose a backend that uses a URL",
        ),
        (
            {"backend": "real"},
            "--backend-url, --backend",
            "the real backend needs the URL of a model server, such as --backend-url http://127.0.0.1:8000/v1",
        ),
        (
            {"backend_model": "m"},
            "--backend-model, --backend",
            "the backend 'mock' is not the real one, to which alone it means something; remove it",
        ),
        (
            {**dict(REAL), "max_queued_requests": "10000", "max_model_len": str(MILLION)},
            "--max-running-seqs, --max-queued-requests, --max-model-len, --backend",
            "need 100.2 GiB of shared memory, over the limit of 64 GiB; lower one of them",
        ),
        (
            {"mock_kv": "true", "total_kv_blocks": str(16 * MILLION), "kv_block_size": "256"},
            "--mock-kv, --total-kv-blocks, --kv-block-size",
            "over the limit of 8 GiB; use fewer or smaller blocks, or leave --mock-kv out",
        ),
        (
            {"mock_prefill_token_latency_ns": str(10**9)},
            ", ".join(MOCK_STEP_FLAGS),
            "a full step of the mock could take 8193 s, over the limit of 3600 s; lower the latencies or the batch",
        ),
    ],
)
def test_relations(values: dict[str, str], sources: str, told: str) -> None:
    by_flags = problem(values)
    assert by_flags.startswith(f"{sources}: ")
    assert by_flags.endswith(told)
    name, value = values.popitem()
    by_both = problem(values, {f"IRONBATCH_{name.upper()}": value})
    assert f"IRONBATCH_{name.upper()}" in by_both.partition(": ")[0].split(", ")


def test_mock_kv_is_the_mocks(monkeypatch: pytest.MonkeyPatch) -> None:
    with_plugins(monkeypatch, "plug")
    told = "the backend 'plug' is not the mock, to which alone it means something; remove it"
    assert problem({"mock_kv": "true", "backend": "plug"}) == f"--mock-kv, --backend: {told}"
    by_both = problem({"backend": "plug"}, {"IRONBATCH_MOCK_KV": "on"})
    assert by_both == f"IRONBATCH_MOCK_KV, --backend: {told}"
    assert not Config.load({"mock_kv": "false", "backend": "plug"}, {}).mock_kv


def test_relation_of_a_bad_value_is_not_told() -> None:
    assert len(problems({"max_running_seqs": "x", "max_queued_requests": str(MILLION - 1)})) == 1


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"workers": 0}, "--workers: 0 is not between 1 and 64; use 1 or more"),
        ({"workers": True}, "--workers: 'True' is not a whole number; give one between 1 and 64"),
        ({"workers": 2.0}, "--workers: '2.0' is not a whole number; give one between 1 and 64"),
        ({"workers": "2"}, "--workers: '2' is not plain; use 2"),
        ({"addr": None}, "--addr: 'None' is not a host and a port; use host:port, such as 127.0.0.1:8080"),
        ({"log_level": "INFO"}, "--log-level: 'INFO' is not plain; use 'info'"),
        ({"mock_kv": 1}, "--mock-kv: 1 is not plain; use True"),
        ({"mock_kv": "true"}, "--mock-kv: 'true' is not plain; use True"),
        ({"no_prefix_cache": None}, "--no-prefix-cache: 'None' is neither true nor false; use one of these"),
        (
            {"mock_eos_prob": float("nan")},
            "--mock-eos-prob: 'nan' is not a number; give one between 0 and 1, such as 0.02",
        ),
    ],
)
def test_config_that_exists_is_valid(values: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(**values)
    assert caught.value.problems == (told,)


def test_config_that_exists_holds_all_relations_and_never_changes() -> None:
    with pytest.raises(ConfigError, match="slots are over the limit"):
        dataclasses.replace(Config(), max_running_seqs=65_536, max_queued_requests=MILLION - 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().workers = 3  # type: ignore[misc]


@given(
    st.fixed_dictionaries(
        {},
        optional={
            **{
                option.name: st.integers(option.low, option.high)
                for option in WHOLE_NUMBERS
                if not option.beside_high and option.name != "kv_block_size"
            },
            "kv_block_size": st.sampled_from([1, 2, 64, 256]),
            "mock_eos_prob": st.floats(0, 1),
            **{name_of(flag): st.booleans() for flag in SWITCHES},
            "log_level": st.sampled_from(["debug", "error"]),
            "log_format": st.sampled_from(["text", "json"]),
            "addr": st.sampled_from([":0", "[::1]:80", "example:1"]),
        },
    )
)
def test_child_process_loads_this_very_configuration(values: dict[str, Any]) -> None:
    fixed = {"max_queued_requests": 5, "max_model_len": 100}
    values["total_kv_blocks"] = max(values.get("total_kv_blocks", 2), 2)  # a pool of one token serves nobody
    if values.get("mock_kv"):
        values["total_kv_blocks"] = min(values["total_kv_blocks"], MILLION)
    config = Config(**{**values, **fixed})
    assert Config.load({}, config.to_environ()) == config


def test_a_pool_that_can_serve_no_request_is_refused() -> None:
    with pytest.raises(ConfigError, match="a request could have 1 token"):
        Config(total_kv_blocks=1, kv_block_size=1)
    assert Config(total_kv_blocks=1, kv_block_size=2).max_request_tokens == 2


def test_derived_values() -> None:
    config = Config(total_kv_blocks=64, kv_block_size=8, max_batch_tokens=100, workers=3, addr="[::1]:9")
    assert config.kv_capacity_tokens == 512
    assert config.max_request_tokens == 512
    assert dataclasses.replace(config, max_model_len=511).max_request_tokens == 511
    assert config.running_limit == 100
    assert dataclasses.replace(config, max_running_seqs=99).running_limit == 99
    assert (config.num_slots, config.num_lanes) == (768, 8)
    assert config.mock_longest_step_ns == 200_000
    assert config.mock_kv_bytes == 0
    assert dataclasses.replace(config, mock_kv=True).mock_kv_bytes == 64 * (8 + 1) * 4
    assert (config.host, config.port) == ("::1", 9)


def test_unknown_variables_are_told_with_what_they_may_have_meant() -> None:
    environ = {
        "IRONBATCH_WORKRES": "3",
        "IRONBATCH_QUITE_ELSE": "1",
        "IRONBATCH_WORKERS": "3",
        "IRONBATCH_CACHE_DIR": "/x",
        "IRONBATCH_INTERNAL_SEGMENT": "x",
        "PATH": "/bin",
    }
    assert environment_warnings(environ) == [
        "IRONBATCH_QUITE_ELSE is not an option and has no effect; `ironbatch serve --help` lists those there are",
        "IRONBATCH_WORKRES is not an option and has no effect; did you mean IRONBATCH_WORKERS?",
    ]
    assert environment_warnings({}) == []

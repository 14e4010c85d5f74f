"""The configuration: one frozen dataclass, where each option's flag, variable, default, bounds and help stand.

A value comes from the flag, else from the environment variable, else from the default. An empty variable counts
as unset (compose files and systemd units pass those). `Config.load` reports all problems together; a `Config`
that exists is valid, and nothing below checks it again.
"""

import dataclasses
import difflib
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from ironbatch import limits
from ironbatch.addresses import http_url_problem, split_addr
from ironbatch.errors import ConfigError
from ironbatch.kinds import PROBABILITY, SWITCH, Kind, as_text, choice, power_of_two, whole_number
from ironbatch.limits import Bound, quoted

ENV_PREFIX: Final = "IRONBATCH_"
ENV_INTERNAL_PREFIX: Final = "IRONBATCH_INTERNAL_"  # what our processes hand each other; no user sets these
ENV_NOT_OPTIONS: Final = frozenset({"IRONBATCH_CACHE_DIR"})
BACKEND_GROUP: Final = "ironbatch.backends"
BACKENDS: Final = ("mock", "device", "real")
"""Those that need no plug-in; the first is the default."""

TEXT_BACKENDS: Final = ("real",)
"""Those whose tokens are text from the beginning: the segment has text rows for them."""

BYTE_TOKENIZER: Final = "byte"
"""As a value of --tokenizer: no file, but the built-in one."""

SOFTWARE_DEVICE: Final = "software"
"""As a value of --device: none of the machine's, but one in the scheduler's process."""

LOG_LEVELS: Final = ("debug", "info", "warning", "error")
LOG_FORMATS: Final = ("text", "json")

Values = Mapping[str, Any]
Default = TypeVar("Default", bool, int, float, str)


def backend_names() -> tuple[str, ...]:
    """The backends this installation can run: our own, then the plug-ins found as entry points."""
    from importlib.metadata import entry_points  # noqa: PLC0415 - 15 ms that the mock and --help don't pay

    plugins = {entry.name for entry in entry_points(group=BACKEND_GROUP)}
    return (*BACKENDS, *sorted(plugins - set(BACKENDS)))


def _read_addr(text: str) -> str:
    split_addr(text)
    return text


def _read_backend(name: str) -> str:
    if name in BACKENDS:
        return name
    available = backend_names()
    remedy = f"use {' or '.join(available)}, or install a plug-in (entry-point group {BACKEND_GROUP})"
    if name not in available:
        raise ValueError(f"{quoted(name)} is not a backend of this installation; {remedy}")
    return name


def _read_url(url: str) -> str:
    if len(url) > limits.MAX_URL_CHARS:
        raise ValueError(f"{len(url)} characters are too many; use a URL of at most {limits.MAX_URL_CHARS}")
    if not url.isprintable() or " " in url:
        raise ValueError(f"{quoted(url)} holds a space or a control character; percent-encode it")
    return url


def _read_model(name: str) -> str:
    if len(name) > limits.MAX_MODEL_NAME_CHARS:
        raise ValueError(f"{len(name)} characters are too many; use a name of at most {limits.MAX_MODEL_NAME_CHARS}")
    if not name.isprintable():
        raise ValueError(f"{quoted(name)} holds a control character; use a name without one")
    return name


def _read_path(path: str) -> str:
    size = len(os.fsencode(path))
    if size > limits.MAX_PATH_BYTES:
        raise ValueError(f"{size} bytes are too many; use a path of at most {limits.MAX_PATH_BYTES}")
    if not path.isprintable():
        raise ValueError(f"{quoted(path)} holds a control character; use a path without one")
    return path


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """One option, as `--help`, the environment and messages know it."""

    name: str
    default: bool | int | float | str
    kind: Kind
    metavar: str
    help: str

    @property
    def flag(self) -> str:
        """Such as `--kv-block-size`."""
        return "--" + self.name.replace("_", "-")

    @property
    def is_switch(self) -> bool:
        """Whether the flag alone, without a value, turns it on."""
        return self.kind is SWITCH

    @property
    def env(self) -> str:
        """Such as `IRONBATCH_KV_BLOCK_SIZE`."""
        return ENV_PREFIX + self.name.upper()


def _option(default: Default, kind: Kind, metavar: str, text: str) -> Default:
    return dataclasses.field(default=default, metadata={"kind": kind, "metavar": metavar, "help": text})


def _whole(default: int, bound: Bound, metavar: str, text: str) -> int:
    return _option(default, whole_number(bound), metavar, text)


def _switch(text: str) -> bool:
    return _option(default=False, kind=SWITCH, metavar="BOOL", text=text)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A valid configuration. Building one raises ConfigError with every problem there is."""

    addr: str = _option(
        "0.0.0.0:8080",
        Kind("port 0..65535", _read_addr),
        "HOST:PORT",
        "listen here; :PORT for all interfaces, port 0 for any free",
    )
    workers: int = _whole(2, limits.WORKERS, "COUNT", "web worker processes")
    backend: str = _option(
        "mock", Kind("mock, device, real or a plug-in", _read_backend), "NAME", "what computes tokens"
    )
    backend_url: str = _option(
        "",
        Kind(f"at most {limits.MAX_URL_CHARS} characters", _read_url),
        "URL",
        "the model server of the real backend, such as http://127.0.0.1:8000/v1; or what a plug-in is to reach",
    )
    backend_model: str = _option(
        "",
        Kind(f"at most {limits.MAX_MODEL_NAME_CHARS} characters", _read_model),
        "NAME",
        "real: the model to ask for; without it the first that the server names",
    )
    backend_slots: int = _whole(
        0, limits.BACKEND_SLOTS, "COUNT", "real: streams that the server takes at once; 0: what it says itself"
    )
    backend_api_key_file: str = _option(
        "",
        Kind(f"at most {limits.MAX_PATH_BYTES} bytes", _read_path),
        "PATH",
        "real: a file whose first line is sent to the server as its key (Authorization: Bearer)",
    )
    backend_wait_s: int = _whole(
        60,
        limits.BACKEND_WAIT_S,
        "SECONDS",
        "real: seconds to wait for a server that is not there, at the start, and for a request that it has not begun",
    )
    backend_timeout_s: int = _whole(
        120, limits.BACKEND_TIMEOUT_S, "SECONDS", "real: seconds without a token after which a stream is given up"
    )
    backend_retries: int = _whole(
        2, limits.BACKEND_RETRIES, "COUNT", "real: how often a request is sent again that has failed before a token"
    )
    backend_continue: bool = _switch(
        "real: go on with a stream that breaks off, by sending prompt and output so far; its rest may differ a little"
    )
    tokenizer: str = _option(
        "",
        Kind(f"at most {limits.MAX_PATH_BYTES} bytes", _read_path),
        "PATH",
        f"a tokenizer.json for prompts that are text; {BYTE_TOKENIZER}: the built-in one, a token a byte, which all"
        " backends but real have by default (a file of that name: ./byte)",
    )
    device: str = _option(
        "",
        Kind(f"at most {limits.MAX_PATH_BYTES} bytes", _read_path),
        "PATH",
        f"the device backend's node; {SOFTWARE_DEVICE}: one in the scheduler's process (a node of that name: ./"
        f"{SOFTWARE_DEVICE})",
    )
    total_kv_blocks: int = _whole(4096, limits.TOTAL_KV_BLOCKS, "BLOCKS", "KV blocks in the pool")
    kv_block_size: int = _option(16, power_of_two(limits.KV_BLOCK_SIZE), "TOKENS", "tokens that one KV block holds")
    max_batch_tokens: int = _whole(
        8192,
        limits.MAX_BATCH_TOKENS,
        "TOKENS",
        "tokens computed in one step, prefill chunks and decodes together",
    )
    max_running_seqs: int = _whole(256, limits.MAX_RUNNING_SEQS, "COUNT", "sequences that run at the same time")
    max_queued_requests: int = _whole(
        512,
        limits.MAX_QUEUED_REQUESTS,
        "COUNT",
        "sequences that may wait, one a choice; beyond them it is 503",
    )
    queue_timeout_s: int = _whole(
        0,
        limits.QUEUE_TIMEOUT_S,
        "SECONDS",
        "seconds that a request may wait to be scheduled for the first time; then it is 503; 0: as long as it takes",
    )
    no_prefix_cache: bool = _switch("compute every prompt whole, also where its beginning is in the KV pool already")
    priority_aging_s: int = _whole(
        10,
        limits.PRIORITY_AGING_S,
        "SECONDS",
        "seconds after which a waiting request rises by a class; 0: never",
    )
    audit_every: int = _whole(
        2048, limits.AUDIT_EVERY, "STEPS", "check all of the scheduler's state every so many steps; 0: never"
    )
    scheduler_timeout_s: int = _whole(
        10,
        limits.SCHEDULER_TIMEOUT_S,
        "SECONDS",
        "seconds without progress, beyond the backend's longest step, after which the scheduler is replaced; 0: never",
    )
    max_model_len: int = _whole(8192, limits.MAX_MODEL_LEN, "TOKENS", "longest sequence, prompt and output together")
    max_body_bytes: int = _whole(
        limits.MAX_BODY_BYTES_DEFAULT,
        limits.MAX_BODY_BYTES,
        "BYTES",
        "largest request body; a larger one is 413",
    )
    header_timeout_s: int = _whole(
        10, limits.HTTP_TIMEOUT_S, "SECONDS", "seconds that a request's head may take to come; then it is 408"
    )
    body_timeout_s: int = _whole(
        30, limits.HTTP_TIMEOUT_S, "SECONDS", "seconds without a byte of an announced body; then it is 408"
    )
    write_timeout_s: int = _whole(
        60,
        limits.HTTP_TIMEOUT_S,
        "SECONDS",
        "seconds without a client's taking what waits for it; then it is cut",
    )
    keepalive_timeout_s: int = _whole(
        5, limits.HTTP_TIMEOUT_S, "SECONDS", "seconds that an idle connection may stay for its next request"
    )
    max_connections: int = _whole(
        4096,
        limits.MAX_CONNECTIONS,
        "COUNT",
        "connections of each web worker; fewer if its descriptors do not suffice; beyond them it is 503",
    )
    drain_timeout_s: int = _whole(
        30,
        limits.DRAIN_TIMEOUT_S,
        "SECONDS",
        "seconds that running streams get to end at a stop or a reload; then they end with an error line",
    )
    seed: int = _whole(0, limits.SEED, "SEED", "sampling seed of requests that name none")
    mock_token_latency_us: int = _whole(
        200, limits.MOCK_TOKEN_LATENCY_US, "US", "mock, software device: microseconds a step takes, whatever its batch"
    )
    mock_prefill_token_latency_ns: int = _whole(
        0, limits.MOCK_TERM_LATENCY_NS, "NS", "mock: nanoseconds more per prefill token of the step"
    )
    mock_sequence_latency_ns: int = _whole(
        0, limits.MOCK_TERM_LATENCY_NS, "NS", "mock: nanoseconds more per sequence of the step"
    )
    mock_kv_token_latency_ns: int = _whole(
        0, limits.MOCK_TERM_LATENCY_NS, "NS", "mock: nanoseconds more per KV token the step reads"
    )
    mock_eos_prob: float = _option(
        0.0,
        PROBABILITY,
        "P",
        "mock: chance that a token ends its sequence; 0 gives exactly the tokens asked for",
    )
    mock_kv: bool = _switch("mock: keep a KV cache in host memory, and derive each token from the context read back")
    log_level: str = _option("info", choice(*LOG_LEVELS), "LEVEL", "least severe message that is logged")
    log_format: str = _option(
        "text", choice(*LOG_FORMATS), "FORMAT", "how each message is written: a line for people, or a JSON object"
    )

    def __post_init__(self) -> None:
        values = {option.name: getattr(self, option.name) for option in options()}
        problems = []
        for option in options():
            try:
                plain = option.kind.read(str(values[option.name]))
            except ValueError as error:
                problems.append(f"{option.flag}: {error}")
            else:
                # 1 and 1.0 equal True, but are not written as it is.
                if plain != values[option.name] or (option.is_switch and plain is not values[option.name]):
                    problems.append(f"{option.flag}: {values[option.name]!r} is not plain; use {plain!r}")
        # A value of the wrong type has no place in the relations' arithmetic.
        problems = problems or _relation_problems(values, {option.name: option.flag for option in options()})
        if problems:
            raise ConfigError(problems)

    @classmethod
    def load(cls, argv_values: Mapping[str, str], environ: Mapping[str, str]) -> "Config":
        """Read raw strings: `argv_values` by field name (`total_kv_blocks`), `environ` by variable name.

        Raises ConfigError with all problems, each naming the flag or variable that the value came from.
        """
        values: dict[str, Any] = {}
        sources = {option.name: option.flag for option in options()}
        assert argv_values.keys() <= sources.keys(), "the command line has other options than these"
        problems = []
        found = given(argv_values, environ)
        for option in options():
            if option.name not in found:
                values[option.name] = option.default
                continue
            sources[option.name], text = found[option.name]
            try:
                values[option.name] = option.kind.read(text)
            except ValueError as error:
                problems.append(f"{sources[option.name]}: {error}")
        problems += _relation_problems(values, sources)
        if problems:
            raise ConfigError(problems)
        return cls(**values)

    def to_environ(self) -> dict[str, str]:
        """Every option as a variable, so that a child process loads this very configuration."""
        return {option.env: as_text(getattr(self, option.name)) for option in options()}

    @property
    def host(self) -> str:
        """The host to bind, without brackets."""
        return split_addr(self.addr)[0]

    @property
    def port(self) -> int:
        """The port to bind; 0 for any free one."""
        return split_addr(self.addr)[1]

    @property
    def num_slots(self) -> int:
        """Slots in the segment: running + queued."""
        return limits.num_slots(self.max_running_seqs, self.max_queued_requests)

    @property
    def num_lanes(self) -> int:
        """Lanes in the segment: more than workers, see `limits.num_lanes`."""
        return limits.num_lanes(self.workers)

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens that the KV pool holds."""
        return self.total_kv_blocks * self.kv_block_size

    @property
    def max_request_tokens(self) -> int:
        """The most tokens, prompt and output together, that one request can ever have."""
        return limits.max_request_tokens(self.max_model_len, self.kv_capacity_tokens)

    @property
    def running_limit(self) -> int:
        """The most sequences that can run: each takes at least one token of a step."""
        return limits.running_limit(self.max_running_seqs, self.max_batch_tokens)

    @property
    def device_path(self) -> str:
        """The device's node; empty where there is none."""
        return "" if self.device == SOFTWARE_DEVICE else self.device

    @property
    def has_text(self) -> bool:
        """Whether the backend's tokens are text from the beginning, which then stands in the segment."""
        return self.backend in TEXT_BACKENDS

    @property
    def mock_kv_bytes(self) -> int:
        """Host memory that the mock's KV takes; 0 if it keeps none."""
        return limits.mock_kv_bytes(self.total_kv_blocks, self.kv_block_size) if self.mock_kv else 0

    @property
    def mock_longest_step_ns(self) -> int:
        """The mock's longest possible step: a full batch, all of it prefill, every context at its longest."""
        return limits.mock_longest_step_ns(*(getattr(self, name) for name in _MOCK_STEP_FIELDS))


def options() -> tuple[Option, ...]:
    """All options, in the order in which `--help` shows them."""
    return _OPTIONS


_OPTIONS: Final = tuple(
    Option(item.name, item.default, **item.metadata)  # type: ignore[arg-type]
    for item in dataclasses.fields(Config)
)


def given(argv_values: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """By field name: the flag or variable that decides the option, and its raw text. Defaults are not in it."""
    found = {}
    for option in options():
        if option.name in argv_values:
            found[option.name] = option.flag, argv_values[option.name]
        elif environ.get(option.env):
            found[option.name] = option.env, environ[option.env]
    return found


def environment_warnings(environ: Mapping[str, str]) -> list[str]:
    """One line for each `IRONBATCH_` variable that nothing reads, with the option it may have meant."""
    known = {option.env for option in options()} | ENV_NOT_OPTIONS
    warnings = []
    for name in sorted(environ):
        if name in known or not name.startswith(ENV_PREFIX) or name.startswith(ENV_INTERNAL_PREFIX):
            continue
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        meant = f"did you mean {close[0]}?" if close else "`ironbatch serve --help` lists those there are"
        warnings.append(f"{name} is not an option and has no effect; {meant}")
    return warnings


def _text_segment_problem(
    max_running_seqs: int, max_queued_requests: int, max_model_len: int, backend: str
) -> str | None:
    """Whether the segment stays small enough with its text rows, if it does so without them."""
    sizes = (max_running_seqs, max_queued_requests, max_model_len)
    if backend not in TEXT_BACKENDS or limits.segment_problem(*sizes):
        return None
    return limits.segment_problem(*sizes, has_text=True)


def _backend_url_problem(url: str, backend: str) -> str | None:
    if backend == "real":
        if not url:
            return "the real backend needs the URL of a model server, such as --backend-url http://127.0.0.1:8000/v1"
        return http_url_problem(url)
    if not url or backend not in BACKENDS:
        return None
    return f"{quoted(url)} means nothing to the {backend} backend; remove it, or choose a backend that uses a URL"


def _only_real_problem(value: object, backend: str) -> str | None:
    """Of an option of the real backend alone."""
    if not value or backend == "real":
        return None
    return f"the backend {quoted(backend)} is not the real one, to which alone it means something; remove it"


def _device_problem(device: str, backend: str) -> str | None:
    if backend == "device" and not device:
        return (
            "the device backend needs a device; name its node, such as --device /run/ironbatch/device0, or use --device"
            f" {SOFTWARE_DEVICE}"
        )
    if device and backend != "device":
        return f"{quoted(device)} means nothing to the backend {quoted(backend)}; remove it, or use --backend device"
    return None


def _mock_kv_problem(mock_kv: bool, backend: str) -> str | None:  # noqa: FBT001 - a relation takes plain values
    if not mock_kv or backend == "mock":
        return None
    return f"the backend {quoted(backend)} is not the mock, to which alone it means something; remove it"


# Each relation between options: the fields it needs, and a function of these that gives the problem or None.
_MOCK_STEP_FIELDS: Final = tuple(inspect.signature(limits.mock_longest_step_ns).parameters)
_RELATIONS: Final[tuple[tuple[tuple[str, ...], Callable[..., str | None]], ...]] = (
    (("max_running_seqs", "max_queued_requests"), limits.slots_problem),
    (("max_running_seqs", "max_queued_requests", "max_model_len"), limits.segment_problem),
    (("max_running_seqs", "max_queued_requests", "max_model_len", "backend"), _text_segment_problem),
    (("max_model_len", "total_kv_blocks", "kv_block_size"), limits.request_problem),
    (("backend_url", "backend"), _backend_url_problem),
    (("backend_model", "backend"), _only_real_problem),
    (("backend_api_key_file", "backend"), _only_real_problem),
    (("device", "backend"), _device_problem),
    (("mock_kv", "backend"), _mock_kv_problem),
    (("mock_kv", "total_kv_blocks", "kv_block_size"), limits.mock_kv_problem),
    (_MOCK_STEP_FIELDS, limits.mock_step_problem),
)


def _relation_problems(values: Values, sources: Mapping[str, str]) -> list[str]:
    """The relations that don't hold, of those whose fields are all in `values`."""
    problems = []
    for names, check in _RELATIONS:
        if values.keys() >= set(names) and (problem := check(*(values[name] for name in names))):
            problems.append(f"{', '.join(sources[name] for name in names)}: {problem}")
    return problems

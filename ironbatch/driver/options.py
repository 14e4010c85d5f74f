"""The flags of `ironbatch device`: name, default and help, each said once; and what they say, valid."""

from __future__ import annotations

import argparse
import grp
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Final

from ironbatch.driver import abi
from ironbatch.driver.faults import KINDS, Faults
from ironbatch.driver.spec import DeviceSpec
from ironbatch.errors import ConfigError
from ironbatch.kinds import PROBABILITY, SWITCH, choice
from ironbatch.limits import SEED, quoted

AUTO: Final = "auto"
PASSTHROUGH: Final = "passthrough"
NAMED: Final = "named"
"""How clients come by the memory: by mapping the node itself, or by opening the file that GET_MEM_PATH names."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag, and a reader of its text that raises ValueError with the value and the remedy."""

    name: str
    metavar: str
    default: str | None
    help: str
    read: Callable[[str], object]
    is_switch: bool = False

    @property
    def text(self) -> str:
        """Such as `--block-bytes`."""
        return "--" + self.name.replace("_", "-")


# ------------------------------------------------------------------------------------------------------------- readers


def _read_whole(text: str) -> int:
    """A number whose bounds the spec checks."""
    if re.fullmatch("-?[0-9]{1,18}", text) is None:
        raise ValueError(f"{quoted(text)} is not a whole number; give one such as 64")
    return int(text)


def _read_words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def _read_caps(text: str) -> int:
    caps = 0
    for word in _read_words(text):
        if word not in abi.CAPS:
            raise ValueError(f"{quoted(word)} is no capability; use some of {', '.join(abi.CAPS)}")
        caps |= abi.CAPS[word]
    return caps


def _read_buckets(text: str) -> tuple[int, ...]:
    return tuple(_read_whole(word) for word in _read_words(text))


def _read_abi(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,5})\.([0-9]{1,5})", text)
    if match is None:
        raise ValueError(f"{quoted(text)} is no version; use one such as {abi.ABI_MAJOR}.{abi.ABI_MINOR}")
    return int(match[1]), int(match[2])


def _read_mode(text: str) -> int:
    if re.fullmatch("0?[0-7]{3}", text) is None:
        raise ValueError(f"{quoted(text)} is no mode; use three octal digits such as 0660")
    return int(text, 8)


def _read_group(text: str) -> int:
    """Its number. The runner's own for an empty text."""
    if not text:
        return os.getegid()
    try:
        return grp.getgrnam(text).gr_gid
    except KeyError:
        if re.fullmatch("[0-9]{1,9}", text) is None:
            raise ValueError(f"there is no group {quoted(text)}; name one that there is, or its number") from None
        return int(text)


def _read_path(text: str) -> str:
    if not text or "\0" in text:
        raise ValueError(f"{quoted(text)} is no path; name a file to serve, such as /run/ironbatch/device0")
    return text


# --------------------------------------------------------------------------------------------------------------- flags

_DEFAULTS: Final = {field.name: field.default for field in fields(DeviceSpec)}


def _number(name: str, metavar: str, text: str) -> Flag:
    return Flag(name, metavar, str(_DEFAULTS[name]), text, _read_whole)


FLAGS: Final = (
    Flag("node", "PATH", None, "where to serve; a file is made there if there is none", _read_path),
    _number("blocks", "COUNT", "KV blocks"),
    _number("block_bytes", "BYTES", "of a KV block; 4 a token position"),
    _number("ring_bytes", "BYTES", "of each context's ring"),
    _number("contexts", "COUNT", "how many may have it open at the same time"),
    _number("step_latency_us", "US", "microseconds that a batch takes; one runs at a time"),
    _number("longest_step_us", "US", "within so many microseconds a fence is signalled, or else is taken for lost"),
    Flag(
        "caps",
        "LIST",
        ",".join(abi.CAPS),
        "what it can do, with commas between; without mmap as --memory named",
        _read_caps,
    ),
    _number("max_seqs", "COUNT", "sequences of a batch; 0: no limit"),
    _number("max_tokens", "COUNT", "new tokens of a batch; 0: no limit"),
    _number("max_prefill_seqs", "COUNT", "prefill chunks of a batch; 0: no limit"),
    _number("max_in_flight", "COUNT", "batches that are submitted and not over, of one context"),
    _number("max_batch_context", "COUNT", "sequences x longest context of a batch; 0: no limit"),
    Flag("no_mix", "BOOL", "false", "a batch holds decodes only or prefill chunks only", SWITCH.read, is_switch=True),
    Flag("seq_buckets", "LIST", "", "batches are padded to so many sequences, with commas between", _read_buckets),
    Flag("token_buckets", "LIST", "", "and to so many tokens", _read_buckets),
    Flag(
        "memory",
        "WAY",
        AUTO,
        "how clients come by the memory: passthrough, they map the node (root, Linux 6.9);"
        " named, they open another file; auto, the first that works",
        choice(AUTO, PASSTHROUGH, NAMED).read,
    ),
    Flag("mode", "MODE", "0660", "the node's permissions, octal", _read_mode),
    Flag("group", "GROUP", "", "the node's group, by name or number; the runner's own without it", _read_group),
    Flag(
        "allow_other",
        "BOOL",
        "false",
        "not as root: let other users in, within --mode (/etc/fuse.conf must say user_allow_other)",
        SWITCH.read,
        is_switch=True,
    ),
    Flag(
        "inject",
        "LIST",
        "",
        f"faults, with commas between: {', '.join(KINDS)}; with @N only the Nth batch has it",
        _read_words,
    ),
    Flag(
        "inject_rate", "RATE", "0.01", "the probability that a batch has one of the faults without @N", PROBABILITY.read
    ),
    Flag("inject_seed", "SEED", "0", "of the faults: the same ones for the same seed", SEED.read),
    Flag(
        "abi", "VERSION", f"{abi.ABI_MAJOR}.{abi.ABI_MINOR}", "the ABI version that it says, to test clients", _read_abi
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """What `ironbatch device` is to serve, and where. `mode` are permission bits, `gid` is the node's group."""

    path: str
    spec: DeviceSpec
    faults: Faults
    memory: str
    mode: int
    gid: int
    is_for_all: bool

    @classmethod
    def read(cls, arguments: argparse.Namespace) -> NodeOptions:
        """Read what the parser has found, texts by flag. Raises ConfigError with all problems."""
        values: dict[str, Any] = {}
        problems: list[str] = []
        for flag in FLAGS:
            text = getattr(arguments, flag.name)
            if text is None:
                problems.append(f"{flag.text} is missing; name a file to serve, such as /run/ironbatch/device0")
                continue
            try:
                values[flag.name] = flag.read(str(text))
            except ValueError as error:
                problems.append(f"{flag.text}: {error}")
        spec = _checked(lambda: _spec(values), problems)
        faults = _checked(lambda: _faults(values), problems)
        _check_memory(values, problems)
        if problems:
            raise ConfigError(problems)
        return cls(
            path=values["node"],
            spec=spec,
            faults=faults,
            memory=values["memory"] if spec.caps & abi.CAP_MMAP else NAMED,
            mode=values["mode"],
            gid=values["group"],
            is_for_all=values["allow_other"],
        )


def _spec(values: dict[str, Any]) -> DeviceSpec:
    names = {field.name for field in fields(DeviceSpec)} - {"mixes"}
    return DeviceSpec(mixes=not values.get("no_mix", False), **{name: values[name] for name in values.keys() & names})


def _faults(values: dict[str, Any]) -> Faults:
    return Faults(values["inject"], values.get("inject_rate", 0.0), values.get("inject_seed", 0))


def _checked(make: Callable[[], Any], problems: list[str]) -> Any:
    """What `make` makes, or None, and its problems are among the others."""
    try:
        return make()
    except ConfigError as error:
        problems += error.problems
        return None


def _check_memory(values: dict[str, Any], problems: list[str]) -> None:
    if values.get("memory") == PASSTHROUGH and not values.get("caps", abi.CAP_MMAP) & abi.CAP_MMAP:
        problems.append("--memory: passthrough is how the capability mmap is had; add mmap to --caps, or use named")

"""BENCHMARKS.md and its figure, from the result files alone: `python perf/render.py`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

import results
from results import Figures
from yardsticks import REPOSITORY

from ironbatch.config import Config

PAGE = REPOSITORY / "BENCHMARKS.md"
FIGURE = results.DIRECTORY / "step_cost.svg"
AUDIT_EVERY = Config().audit_every
RUNNING = (8, 64, 256, 1024, 4096)
DEVICE_RUNNING = (1, 32, 256)
STREAMS = ("1-stream", "64-streams", "256-streams")
MODEL_STREAMS = {"1-stream": "one stream", "8-streams": "8 streams", "64-streams": "64 streams"}
MODEL_TTFT = {
    "1-stream": "a request alone",
    "8-streams": "a request while seven other streams run",
    "8-at-once": "eight requests at once",
}
PACES = {"one-line": "one", "eight-lines": "eight", "flat-out": "all that wait"}
EMPTY = "empty_call"
POOLS = {
    "default": "default options, 4,096 blocks",
    "65536_blocks": "256 running, 65,536 blocks",
    "1048576_blocks": "4096 running, 1,048,576 blocks",
}
WIDTH = 120


class Page:
    """The text of BENCHMARKS.md from the result files in one folder."""

    def __init__(self, directory: Path) -> None:
        self._files = {name: Figures(directory, name) for name in results.NAMES}

    def text(self) -> str:
        """All sections."""
        sections = (
            self._head(),
            self._targets(),
            self._step(),
            self._features(),
            self._prefix_cache(),
            self._audit(),
            self._mock_kv(),
            self._device(),
            self._kernel_call(),
            self._shared_memory(),
            self._wake_up(),
            self._http(),
            self._model_server(),
            self._start(),
        )
        return "\n".join(line for section in sections for line in (*section, ""))

    def _head(self) -> Iterator[str]:
        host = self._files["scheduler_step"].metadata
        commits = sorted({str(figures.metadata.get("commit", "unknown")) for figures in self._files.values()})
        yield "# Benchmarks"
        yield ""
        spread = self._files["scheduler_step"].spread(EMPTY)
        yield from paragraph(f"""
            Made by `make bench` from the files in [perf/results](perf/results); nothing here is written by hand.
            [docs/performance.md](docs/performance.md) says what was tried to get here, and
            [perf/README.md](perf/README.md) how to repeat it. Figures are medians; less is better, and a ratio below 1
            is less than the bare thing takes. Compare ratios, not figures: each is of two things that were measured in
            one run. Half of the yardstick's values in `perf/scheduler_step.py` lie within {spread:.0%} of their median.
        """)
        yield ""
        yield from table(
            ("host", ""),
            (
                ("CPU", f"{host['cpu_model_name']}, {host['cpu_count']} cores, {host.get('cpu_freq', '')}"),
                ("system", str(host["platform"])),
                ("Python", f"{host['python_version']}, {host['python_compiler']}"),
                ("packages", ", ".join(f"{name} {host[f'{name}_version']}" for name in packages(host))),
                ("commit", ", ".join(commits)),
            ),
        )

    def _targets(self) -> Iterator[str]:
        step, wake, http = (self._files[name] for name in ("scheduler_step", "wake_up", "http_stream"))
        features, prefix, model_server = (self._files[name] for name in ("features", "prefix_cache", "model_server"))
        steady, line = step["steady/256/alone"], "http_stream/64-streams/one-line"
        one_line = http[f"{line}/ironbatch"] / http[f"{line}/bare"]
        eight_us = 1e6 * http["http_stream/64-streams/eight-lines/ironbatch"]
        rows = (
            ("step at 256 running sequences, by an empty call, timed apart", steady / step[EMPTY], 120.0),
            ("the same, timed in turns", features["by_empty_call/256/plain"], 120.0),
            ("with all features used, timed apart", features["steady/256/all"] / features[EMPTY], 120.0),
            ("the same, timed in turns", features["by_empty_call/256/all"], 120.0),
            ("prefix lookup, ns a block of 16", 1e9 * prefix["lookup/cold"], 100.0),
            ("audit, % of the steps it is spread over", 100 * max(map(self._audit_share, POOLS)), 5.0),
            ("step at 4096 by step at 256", step["steady/4096/alone"] / steady, 20.0),
            ("step with 256 admissions, by a steady one", step["first/256/alone"] / steady, 3.0),
            ("submit and wait on a node, by two bare ioctls on it", self._by_two_ioctls(), 5.0),
            ("wake to collected token, by a bare eventfd", wake["token/ironbatch"] / wake["token/bare_event"], 1.5),
            ("CPU a line, by a bare protocol; 64 streams, one line a send", one_line, 1.8),
            ("CPU us a line; 64 streams, eight lines a send", eight_us, 2.5),
            ("ms that a model server's first token comes later", 1e3 * self._added_s("1-stream"), 1.5),
            ("the same, while seven other streams run", 1e3 * self._added_s("8-streams"), 1.5),
            *(
                (f"CPU us a line of a model server's; {what}", 1e6 * model_server[f"cpu/{streams}"], 60.0)
                for streams, what in MODEL_STREAMS.items()
            ),
        )
        yield "## What was to be reached"
        yield ""
        yield from table(
            ("", "at most", "measured", "so it is"),
            ((what, f"{most:g}", f"{value:.2f}", "met" if value <= most else "missed") for what, value, most in rows),
        )
        yield ""
        yield from paragraph("""
            Timed apart: two medians of one script, minutes from each other. In turns: some hundred microseconds of the
            one after some of the other, so that a clock that changes meanwhile is in both.
        """)

    def _step(self) -> Iterator[str]:
        step = self._files["scheduler_step"]
        yield "## One step of the scheduler"
        yield ""
        yield from paragraph("""
            `Scheduler.step` with a backend that takes no time. Steady: every sequence decodes. First: all of them have
            just been submitted. Read: while a process on the other core reads all slots as fast as it can; what that
            costs depends on how often the two meet on a cache line, and varies most. (`perf/scheduler_step.py`)
        """)
        yield ""
        rows = []
        for running in RUNNING:
            steady, first = step[f"steady/{running}/alone"], step[f"first/{running}/alone"]
            rows.append(
                (
                    f"{running}",
                    seconds(steady),
                    f"{steady / step[EMPTY]:.0f}",
                    f"{1e9 * steady / running:.1f}",
                    seconds(step[f"steady/{running}/read"]),
                    seconds(first),
                    f"{first / steady:.1f}",
                    seconds(step[f"first/{running}/read"]),
                )
            )
        yield from table(
            ("running", "steady", "/ empty call", "ns a sequence", "read", "first", "/ steady", "first, read"), rows
        )
        yield ""
        oracle, times = step["oracle_step"], step["oracle_step"] / step["steady/64/alone"]
        yield from paragraph(f"""
            An empty call takes {seconds(step[EMPTY])}. A step of the tests' scheduler, which is plain Python and slow
            on purpose, takes {seconds(oracle)} at 64 sequences, {times:.0f} times as long.
        """)
        yield ""
        yield f"![cost of a step by running sequences](perf/results/{FIGURE.name})"

    def _features(self) -> Iterator[str]:
        features = self._files["features"]
        yield "## What the features cost"
        yield ""
        yield from paragraph("""
            The same steady step, by requests that use nothing, and by requests with token ids in the prefix cache, two
            choices each, five priorities, under device limits of every kind. (`perf/features.py`)
        """)
        yield ""
        rows = []
        for running in RUNNING:
            plain, full = features[f"steady/{running}/plain"], features[f"steady/{running}/all"]
            rows.append(
                (f"{running}", seconds(plain), seconds(full), ratio(full, plain), f"{full / features[EMPTY]:.0f}")
            )
        yield from table(("running", "plain", "all features", "ratio", "/ empty call"), rows)
        yield ""
        plain, waiting, displace = (features[name] for name in ("steady/256/plain", "waiting/256", "displace/256"))
        yield from paragraph(f"""
            With 256 more requests waiting in five classes that age, a step at 256 takes {seconds(waiting)},
            {ratio(waiting, plain)} of the plain one. A request of a higher class that takes the place of one of 256,
            and its return: {seconds(displace)}, two steps included.
        """)

    def _prefix_cache(self) -> Iterator[str]:
        prefix = self._files["prefix_cache"]
        yield "## Finding a prompt in the prefix cache"
        yield ""
        yield from paragraph("""
            A block of 16 tokens: hash, chain, and comparison of the tokens and the parent. Hot: the same prompt again.
            Cold: one of 64 of 4080 tokens each. Beside a Python dict. (`perf/prefix_cache.py`)
        """)
        yield ""
        yield from beside(
            (f"a block, {side}", prefix, f"lookup/{side}", "lookup/bare_dict", "dict") for side in ("hot", "cold")
        )

    def _audit_share(self, pool: str) -> float:
        audit = self._files["audit"]
        return audit[f"audit/{pool}"] / (audit[f"step/{pool}"] * AUDIT_EVERY)

    def _audit(self) -> Iterator[str]:
        audit = self._files["audit"]
        yield "## The audit"
        yield ""
        yield from paragraph(f"""
            All private state derived anew, once in {AUDIT_EVERY} steps by default; its share is of steps that take no
            time in the backend, and falls with every microsecond that they do. (`perf/audit.py`)
        """)
        yield ""
        rows = (
            (what, seconds(audit[f"audit/{pool}"]), seconds(audit[f"step/{pool}"]), f"{self._audit_share(pool):.1%}")
            for pool, what in POOLS.items()
        )
        yield from table(("", "an audit", "a step", "share"), rows)

    def _mock_kv(self) -> Iterator[str]:
        mock = self._files["mock_kv"]
        yield "## The mock that reads its KV back"
        yield ""
        yield from paragraph("""
            A step of 64 sequences of about 1000 tokens, each read through its block table; beside the plain mock, and
            numpy gathering the same blocks. (`perf/mock_kv.py`)
        """)
        yield ""
        rows = (
            ("with KV", mock, "step/kv", "step/bare_numpy", "numpy"),
            ("without", mock, "step/plain", "step/bare_numpy", "numpy"),
        )
        yield from beside(rows)

    def _by_two_ioctls(self) -> float:
        device = self._files["device"]
        return device["submit_and_wait/node"] / (2 * device["ioctl/node"])

    def _device(self) -> Iterator[str]:
        device = self._files["device"]
        yield "## Devices"
        yield ""
        yield from paragraph(f"""
            The reference device, in the scheduler's process and as a node in a process of its own, through the kernel;
            it takes no time itself. A bare ioctl asks for the free blocks; one on /dev/urandom, which no process has to
            answer, takes {seconds(device["ioctl/urandom"])}. (`perf/device.py`)
        """)
        yield ""
        names = {"ioctl": "a bare ioctl", "submit_and_wait": "submit one sequence, and wait"}
        names |= {f"step/{running}": f"a step of the server's at {running} running" for running in DEVICE_RUNNING}
        rows = []
        for name, what in names.items():
            node, software = device[f"{name}/node"], device[f"{name}/software"]
            rows.append((what, seconds(node), f"{node / device['ioctl/node']:.1f}", seconds(software)))
        yield from table(("", "node", "/ bare ioctl", "software device"), rows)

    def _kernel_call(self) -> Iterator[str]:
        call = self._files["kernel_call"]
        names = {
            "entry_point": "a kernel of three integers, as the scheduler calls it",
            "dispatcher": "the same through numba's dispatcher",
            "three_arrays": "a kernel of three arrays and an integer",
            "builtin": "a C function of three integers",
        }
        yield "## Calling a kernel"
        yield ""
        rows = ((text, seconds(call[name]), f"{call[name] / call[EMPTY]:.1f}") for name, text in names.items())
        yield from table(("", "a call", "/ empty call"), rows)

    def _shared_memory(self) -> Iterator[str]:
        lane, slot = self._files["lane_hand_off"], self._files["slot_publish_collect"]
        yield "## Lanes and slots"
        yield ""
        yield from paragraph("""
            A hint through a lane; and 256 slots with a new token each, beside numpy moving the same words without
            order, checks or accounts. (`perf/lane_hand_off.py`, `perf/slot_publish_collect.py`)
        """)
        yield ""
        rows = (
            ("push and drain, by Python", lane, "push_and_drain/lane", "push_and_drain/simple_queue", "`SimpleQueue`"),
            ("hand-off between cores", lane, "between_cores/lane", "between_cores/bare_words", "two bare words"),
            ("publish 256", slot, "publish/ironbatch", "publish/bare_numpy", "numpy"),
            ("collect 256", slot, "collect/ironbatch", "collect/bare_numpy", "numpy"),
        )
        yield from beside(rows)

    def _wake_up(self) -> Iterator[str]:
        wake = self._files["wake_up"]
        yield "## Waking a sleeper"
        yield ""
        yield from paragraph("""
            One way, between two processes on a core each. `token` is from before the step that publishes it until the
            worker has collected it, beside an eventfd that a uvloop event loop watches; the waking side awake, or after
            a pause in which both go cold. (`perf/wake_up.py`)
        """)
        yield ""
        rows = (
            ("half of a ping-pong", wake, "one_way/doorbell", "one_way/bare_eventfd", "blocking eventfd"),
            ("token", wake, "token/ironbatch", "token/bare_event", "eventfd, uvloop"),
            ("token", wake, "token/ironbatch", "token/bare_read", "eventfd, blocking"),
            (
                "token, after a pause",
                wake,
                "token_after_pause/ironbatch",
                "token_after_pause/bare_event",
                "eventfd, uvloop",
            ),
        )
        yield from beside(rows)

    def _http(self) -> Iterator[str]:
        http = self._files["http_stream"]
        yield "## Streaming over HTTP"
        yield ""
        yield from paragraph("""
            CPU time of the serving process for each line, beside a bare uvloop protocol that writes the same bytes in
            as many writes. A step takes 20 ms, or, for the last, so little that the worker is always behind. With one
            stream a line pays for the worker's wake all alone. (`perf/http_stream.py`)
        """)
        yield ""
        rows = []
        for pace, lines in PACES.items():
            for streams in STREAMS:
                name = f"http_stream/{streams}/{pace}"
                sent = float(http.note(f"{name}/ironbatch", "lines_per_send"))
                rows.append((lines, f"{sent:.1f}", streams.replace("-", " "), *self._sides(name)))
        name = "http_stream/64-connections/one-token"
        rows.append(("a request for one token", "", "64 connections", *self._sides(name)))
        yield from table(("lines a send", "seen", "", "Ironbatch", "bare", "ratio"), rows)

    def _sides(self, name: str) -> tuple[str, str, str]:
        http = self._files["http_stream"]
        ours, bare = http[f"{name}/ironbatch"], http[f"{name}/bare"]
        return seconds(ours), seconds(bare), ratio(ours, bare)

    def _added_s(self, case: str) -> float:
        model_server = self._files["model_server"]
        return model_server[f"ttft/{case}/ironbatch"] - model_server[f"ttft/{case}/direct"]

    def _model_server(self) -> Iterator[str]:
        model_server = self._files["model_server"]
        yield "## In front of a model server"
        yield ""
        yield from paragraph("""
            Time to first token through Ironbatch, and of the model server when it is asked directly: one that computes
            nothing, and answers 5 ms after it was asked. (`perf/model_server.py`)
        """)
        yield ""
        rows = []
        for case, what in MODEL_TTFT.items():
            direct, ours = (model_server[f"ttft/{case}/{side}"] for side in ("direct", "ironbatch"))
            rows.append((what, seconds(direct), seconds(ours), seconds(ours - direct)))
        yield from table(("time to first token", "directly", "by Ironbatch", "added"), rows)
        yield ""
        yield from paragraph("""
            CPU time of web worker and scheduler for each line, when the tokens of all streams come together every 20
            ms. What is woken for a step's tokens is shared by all of its lines: one stream pays for it alone.
        """)
        yield ""
        yield from table(
            ("", "CPU a line"),
            ((what, seconds(model_server[f"cpu/{streams}"])) for streams, what in MODEL_STREAMS.items()),
        )

    def _start(self) -> Iterator[str]:
        start = self._files["start_and_idle"]
        yield "## Start and idle"
        yield ""
        yield from table(
            ("", ""),
            (
                ("start until /health is 200, nothing compiled", seconds(start["start/cold"])),
                ("with compiled kernels", seconds(start["start/warm"])),
                ("CPU of all processes of an idle server", f"{100 * start['idle/cpu_per_second']:.2f} %"),
            ),
        )


def paragraph(text: str) -> list[str]:
    """Its lines."""
    return textwrap.wrap(" ".join(text.split()), WIDTH)


def packages(host: dict[str, object]) -> Iterator[str]:
    """The packages whose versions are known."""
    for name in ("numba", "numpy", "uvloop", "gunicorn", "falcon"):
        if f"{name}_version" in host:
            yield name


def beside(rows: Iterable[tuple[str, Figures, str, str, str]]) -> Iterator[str]:
    """A table of measures, each with its bare counterpart."""
    yield from table(
        ("", "Ironbatch", "bare", "", "ratio"),
        (
            (what, seconds(file[ours]), seconds(file[bare]), bare_name, ratio(file[ours], file[bare]))
            for what, file, ours, bare, bare_name in rows
        ),
    )


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Markdown; the first column is text, the others stand at the right."""
    yield "| " + " | ".join(head) + " |"
    yield "|" + "|".join(["---", *("---:" for _ in head[1:])]) + "|"
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def seconds(value_s: float) -> str:
    """Three significant digits, with a unit: 31.2 ns, 2.90 us, 15.1 s."""
    for unit, scale in (("ns", 1e9), ("us", 1e6), ("ms", 1e3), ("s", 1.0)):
        scaled = value_s * scale
        if scaled < 999.5 or unit == "s":
            break
    return f"{scaled:.{max(0, 2 - len(str(int(scaled))) + 1)}f} {unit}"


def ratio(ours: float, bare: float) -> str:
    """How many times as long."""
    return f"{ours / bare:.2f}"


def draw(directory: Path, path: Path) -> None:
    """The cost of a step against the running sequences."""
    import matplotlib as mpl  # noqa: PLC0415  half a second that rendering the text does not need
    from matplotlib.figure import Figure  # noqa: PLC0415

    step = Figures(directory, "scheduler_step")
    mpl.rcParams["svg.hashsalt"] = "ironbatch"  # the same figures, the same file
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for case, colour in (("steady", "C0"), ("first", "C1")):
        for side, style in (("alone", "-"), ("read", ":")):
            costs_us = [1e6 * step[f"{case}/{running}/{side}"] for running in RUNNING]
            label = f"{case}{', while another core reads' if side == 'read' else ''}"
            axes.plot(RUNNING, costs_us, style, color=colour, marker="o", label=label)
    axes.axhline(1e6 * step["oracle_step"], color="C7", linewidth=1, label="plain Python (tests' oracle) at 64, steady")
    axes.axhline(1e6 * step[EMPTY], color="C7", linewidth=1, linestyle="--", label="an empty Python call")
    axes.set(xscale="log", yscale="log", xlabel="running sequences", ylabel="us a step")
    axes.set_xticks(RUNNING, [str(running) for running in RUNNING])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, metadata={"Date": None})


def write() -> None:
    """Renew both."""
    PAGE.write_text(Page(results.DIRECTORY).text().rstrip() + "\n")
    draw(results.DIRECTORY, FIGURE)
    print(f"wrote {PAGE.name} and {FIGURE.name}")


if __name__ == "__main__":
    write()

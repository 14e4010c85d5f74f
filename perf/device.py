"""The device node beside the software device: `python perf/device.py`.

Three things, each on the software device, and on a reference node that runs in a process of its own, through the real
kernel: one call that asks and changes nothing, a submitted batch of one sequence that is waited for, and a whole
`Scheduler.step` on the device backend. No device takes any time of its own (`--step-latency-us 0`). Beside them an
ioctl on /dev/urandom, which is the cheapest that there is.

Where no node can be served, without /dev/fuse say, it says so and measures nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from engine import BLOCK_SIZE, MODEL_LEN, StepEngine
from results import CANNOT_RUN
from yardsticks import runner

from ironbatch.backends.device import DeviceBackend
from ironbatch.config import Config
from ironbatch.driver.handle import DeviceHandle
from ironbatch.driver.ioctl import IoctlDevice
from ironbatch.driver.software import SoftwareDevice
from ironbatch.driver.spec import DeviceSpec
from tests.driver import records
from tests.driver.node_process import running_node, unusable_reason

RUNNING = (1, 32, 256)
RNDGETENTCNT: Final = 0x80045200  # include/uapi/linux/random.h
KV_BLOCKS = 65_536
SPEC = {"blocks": KV_BLOCKS, "block_bytes": 4 * BLOCK_SIZE, "step_latency_us": 0, "ring_bytes": 8 << 20}

_at_exit = contextlib.ExitStack()
_nodes: list[str] = []


def node_path() -> str:
    """Of this process's node, which is started once."""
    if not _nodes:
        folder = Path(_at_exit.enter_context(tempfile.TemporaryDirectory()))
        flags = [word for name, value in SPEC.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        _nodes.append(str(_at_exit.enter_context(running_node(folder, *flags)).path))
    return _nodes[0]


def open_node() -> DeviceHandle:
    """A handle on the node."""
    return IoctlDevice(node_path())


def open_software() -> DeviceHandle:
    """A handle on a device in this process."""
    return SoftwareDevice(DeviceSpec(**SPEC))


OPENERS: dict[str, Callable[[], DeviceHandle]] = {"software": open_software, "node": open_node}


def time_urandom(loops: int) -> float:
    """Seconds of `loops` ioctls on /dev/urandom."""
    descriptor, answer = os.open("/dev/urandom", os.O_RDONLY), bytearray(4)
    start_s = time.perf_counter()
    for _ in range(loops):
        fcntl.ioctl(descriptor, RNDGETENTCNT, answer)
    elapsed_s = time.perf_counter() - start_s
    os.close(descriptor)
    return elapsed_s


def time_ioctl(loops: int, side: str) -> float:
    """Seconds of `loops` QUERY_FREE_BLOCKS."""
    with OPENERS[side]() as device:
        start_s = time.perf_counter()
        for _ in range(loops):
            device.free_blocks()
        return time.perf_counter() - start_s


def time_submit_and_wait(loops: int, side: str) -> float:
    """Seconds of `loops` batches of one sequence, each waited for."""
    with OPENERS[side]() as device:
        submit = records.one_decode(device)
        far_ns = time.monotonic_ns() + 600 * 10**9
        start_s = time.perf_counter()
        for _ in range(loops):
            device.wait(submit(), far_ns)
        return time.perf_counter() - start_s


def time_step(loops: int, side: str, running: int) -> float:
    """Seconds of `loops` decode steps of the scheduler."""
    device = "software" if side == "software" else node_path()
    config = Config(
        backend="device",
        device=device,
        max_model_len=MODEL_LEN,
        total_kv_blocks=KV_BLOCKS,
        max_running_seqs=running,
        mock_token_latency_us=0,  # which is the software device's too
    )
    engine = StepEngine(running, DeviceBackend(config))
    elapsed_s = engine.time_steps(loops)
    engine.close()
    return elapsed_s


def main() -> None:
    """Run all cases."""
    if reason := unusable_reason():
        print(f"skipped: {reason}", file=sys.stderr)
        raise SystemExit(CANNOT_RUN)
    made = runner(__doc__)
    with _at_exit:
        made.bench_time_func("ioctl/urandom", time_urandom)
        for side in OPENERS:
            made.bench_time_func(f"ioctl/{side}", partial(time_ioctl, side=side))
            made.bench_time_func(f"submit_and_wait/{side}", partial(time_submit_and_wait, side=side))
            for running in RUNNING:
                made.bench_time_func(f"step/{running}/{side}", partial(time_step, side=side, running=running))


if __name__ == "__main__":
    main()

"""Whether the engine can serve, judged from the segment's header alone: one judgement for HTTP and for systemd."""

from __future__ import annotations

from typing import Any

from ironbatch.layout import BACKEND_PROBLEMS, CALL_OPENING, CALL_STEP

NS_PER_S = 1_000_000_000
HEALTH_GRACE_NS = 2 * NS_PER_S
"""How long beyond the backend's longest step, or its longest silence, the heart may miss its beat."""


def health_problem(header: Any, now_ns: int) -> str | None:
    """Why the engine cannot serve now, or None when it can.

    It asks for progress, not for life: a scheduler that is stopped, or hangs in its device, still has a pid.
    """
    if header["draining"]:
        return "the engine is shutting down"
    if header["device_hung"]:
        return (
            f"device hung: the scheduler (process {header['scheduler_pid']}) was killed and does not end, being in a"
            " call to its device that cannot be interrupted"
        )
    if told := BACKEND_PROBLEMS.get(int(header["backend_problem"])):
        return told
    if not header["scheduler_ready"]:
        return f"the scheduler is starting, or opens its backend (start {header['epoch']}); the server's log says more"
    return progress_problem(header, now_ns)


def progress_problem(header: Any, now_ns: int) -> str | None:
    """How long the heart has missed its beat beyond what a step may take, or None while it has not."""
    silent_ns = now_ns - int(header["heartbeat_ns"])
    if silent_ns > int(header["longest_step_ns"]) + HEALTH_GRACE_NS:
        silence = f"the scheduler has made no progress for {silent_ns / NS_PER_S:.1f} s"
        if header["in_device_call"] == CALL_OPENING:
            return f"the scheduler has lost its backend, and opens it anew for {silent_ns / NS_PER_S:.1f} s"
        if header["in_device_call"] == CALL_STEP:
            return f"device hung: {silence}, in a call to its backend"
        return f"{silence}, outside its backend"
    return None

"""The process that serves a node, from mount to unmount."""

from __future__ import annotations

import contextlib
import ctypes
import signal
from collections.abc import Callable
from dataclasses import replace

from ironbatch.driver import abi, fuse
from ironbatch.driver.fuse import Connection
from ironbatch.driver.mount import MountedNode, mount_node
from ironbatch.driver.node import Node
from ironbatch.driver.node_memory import NodeMemory
from ironbatch.driver.options import NodeOptions
from ironbatch.driver.reference import ReferenceDevice
from ironbatch.errors import EXIT_FAILED, EXIT_OK, StartError
from ironbatch.processes import open_standard_streams, set_process_name, signal_pipe

PR_SET_TIMERSLACK = 29  # prctl(2)


def serve(options: NodeOptions, say: Callable[[str], None]) -> int:
    """Serve until SIGTERM, SIGINT or SIGHUP, or until the node is unmounted. Returns the exit code.

    Args:
        options: what, and where.
        say: is given a line when it serves, and one when somebody else has ended that.

    Raises:
        StartError: it can't serve.
    """
    open_standard_streams()
    set_process_name("device")
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)  # ns by which the kernel may be late; 50 us otherwise
    memory = NodeMemory(options.spec.map_bytes)
    with signal_pipe(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as stop, contextlib.closing(memory):
        mounted = mount_node(options.path, is_for_all=options.is_for_all)
        connection = Connection(mounted.fd)
        try:
            node = _made(options, connection, memory)
            way = "passthrough" if node.is_mappable else "name"
            spec = options.spec
            say(f"serving {options.path} ({spec.blocks} blocks of {spec.block_bytes} bytes, memory by {way})")
            node.serve(stop)
        except fuse.Disconnected as end:
            return _tell_end(mounted, end, say)
        else:
            return EXIT_OK
        finally:
            mounted.unmount()
            connection.close()


def _made(options: NodeOptions, connection: Connection, memory: NodeMemory) -> Node:
    """The node, after what kernel and memory allow is known."""
    try:
        negotiated = connection.negotiate()
    except fuse.TooOld as problem:
        raise StartError(f"the kernel can't serve a node: {problem}; use a newer one") from None
    backing_id = memory.offer(connection, options.memory, has_passthrough=negotiated.has_passthrough)
    spec, path = options.spec, None
    if not backing_id:
        spec, path = replace(spec, caps=spec.caps & ~abi.CAP_MMAP), memory.packed_path()
    device = ReferenceDevice(spec, memory.array, faults=options.faults, mem_path=path)
    return Node(connection, device, backing_id=backing_id, mode=options.mode, gid=options.gid)


def _tell_end(mounted: MountedNode, end: fuse.Disconnected, say: Callable[[str], None]) -> int:
    """Somebody has unmounted the node, or has cut it off from its clients (`abort_connection`)."""
    if end.is_aborted or mounted.find() is not None:
        say(f"{mounted.path}: its connection was aborted; start it again")
        return EXIT_FAILED
    say(f"{mounted.path} was unmounted")
    return EXIT_OK

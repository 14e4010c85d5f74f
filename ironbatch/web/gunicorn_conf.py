"""gunicorn's settings and hooks: `ironbatch serve` runs with this file, and deploy/gunicorn.conf.py imports it.

The hooks tie gunicorn to the engine. Under `ironbatch serve` the engine is there already and the arbiter finds it in
its environment; started alone, the arbiter makes one in `on_starting`. What the hooks keep hangs on gunicorn's server
object, since HUP executes a configuration file anew.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import gc
import math
import os
import signal
import subprocess
import sys
import time
import types
from typing import Any

import falcon.asgi  # noqa: F401  loaded before the fork, so that a worker is ready in milliseconds
import gunicorn
import gunicorn.arbiter
import uvloop  # noqa: F401  likewise
from gunicorn.errors import HaltServer

from ironbatch import logs
from ironbatch.clock import MonotonicClock
from ironbatch.config import Config
from ironbatch.draining import ERROR_LINE_S, WEB_STOP_S
from ironbatch.errors import EXIT_FAILED, EXIT_USAGE, ConfigError, StartError
from ironbatch.limits import num_lanes
from ironbatch.listener import LISTEN_BACKLOG, few_descriptors_problem
from ironbatch.named_files import file_problems
from ironbatch.processes import (
    CHILD_ENVIRONMENT,
    OUT_OF_MEMORY,
    die_with_parent,
    ignore_reload_signals,
    is_out_of_memory,
    open_standard_streams,
    set_process_name,
)
from ironbatch.web.gunicorn_log import GunicornLogger


def _load_config() -> Config:
    try:
        return Config.load({}, os.environ)
    except ConfigError as problem:
        logs.complain(problem.problems)
        sys.exit(EXIT_USAGE)


open_standard_streams()
ignore_reload_signals()
_config = _load_config()
logs.configure(_config.log_level, _config.log_format)
GunicornLogger.log_format = _config.log_format

os.environ.update(CHILD_ENVIRONMENT)
# After the log is set up: these load the web side's kernels, or compile them, which may be worth a warning.
try:
    from ironbatch.shm.engine import SEGMENT_VARIABLE, Engine
    from ironbatch.web import arbiter, collector  # noqa: F401
    from ironbatch.web.drain import WORKER_KEY
    from ironbatch.web.lanes import LANE_VARIABLE, LaneBook
    from ironbatch.web.wire import KNOWN_GUNICORN, KNOWN_PROTOCOLS
except (MemoryError, ImportError, OSError) as problem:
    if not is_out_of_memory(problem):
        raise
    logs.complain([OUT_OF_MEMORY])
    sys.exit(EXIT_FAILED)

ENGINE_STOP_S = 5.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGQUIT, signal.SIGINT)

# The configuration's, so that both ways to start are configured in one way.
bind = _config.addr
workers = _config.workers
loglevel = _config.log_level
logger_class = GunicornLogger

# In place of "gunicorn" in the arbiter's title.
proc_name = "ironbatch"

# gunicorn's asgi worker with our guard for each connection; its own alone where its release is not the known one.
# Another kind may not stop a stream when its client has gone: the uvicorn worker did not.
worker_class = "ironbatch.web.worker.Worker" if KNOWN_PROTOCOLS else "asgi"
asgi_loop = "uvloop"

# The collector starts and stops with the event loop. "auto" would serve without it where its start fails.
asgi_lifespan = "on"

# A client that goes frees its KV blocks at once, not 3 s later: there is nothing that a stream would have to finish.
asgi_disconnect_grace_period = 0

# The application belongs to a worker: it holds a lane, which is given out after the fork.
preload_app = False

# One way to control an engine is enough: signals.
control_socket_disable = True

# A worker shows life by touching a file. On a disk that could block it for as long as the disk is busy, and an engine
# has /dev/shm anyway.
worker_tmp_dir = "/dev/shm"  # noqa: S108  a file without a name

# Seconds without a sign of life before the arbiter replaces a worker. Its event loop gives it, so a stream may take as
# long as it likes; only a worker that hangs is silent.
timeout = 30

# Seconds until the arbiter kills workers that it has told to end: what running streams get (--drain-timeout-s), and the
# time that workers need to end those which are left.
graceful_timeout = _config.drain_timeout_s + math.ceil(ERROR_LINE_S + WEB_STOP_S)

# Seconds that an idle connection may stay for its next request.
keepalive = _config.keepalive_timeout_s

# Connections that wait to be accepted: a burst should wait for its answer, or its 503, not for TCP's next try.
backlog = LISTEN_BACKLOG


# The arbiter measures the time that streams get at its stop by the wall clock. One that is set forward meanwhile would
# cut them all, and one that is set back would let the stop last until it has caught up.
gunicorn.arbiter.time = types.SimpleNamespace(**vars(time) | {"time": time.monotonic})


@dataclasses.dataclass
class _Engine:
    """What the arbiter holds of its engine."""

    engine: Engine
    book: LaneBook
    process: subprocess.Popen[bytes] | None  # the supervisor without the web role, when the arbiter has started it
    pid: int


def on_starting(server: Any) -> None:
    """Find the engine, or make one."""
    process = None
    try:
        if SEGMENT_VARIABLE in os.environ:
            die_with_parent(os.getppid())
            engine = Engine.from_environ(os.environ)
        else:
            _refuse_wrong_files()
            # -w on gunicorn's command line outranks the environment; TTIN may add as many again.
            sized = dataclasses.replace(_config, workers=max(server.cfg.workers, 1))
            engine = Engine.create(sized, MonotonicClock().now_ns())
            os.environ.update(sized.to_environ())
            os.environ.update(engine.to_environ())
            if problem := few_descriptors_problem(sized):
                server.log.warning("%s", problem)
            process = _start_engine_process(engine)
    except (StartError, ConfigError) as error:
        logs.complain([str(error)])
        sys.exit(EXIT_FAILED)
    server.ironbatch = _Engine(engine, LaneBook(engine), process, os.getpid())
    atexit.register(_stop_engine, server)  # a bind that fails ends the arbiter without on_exit


def _refuse_wrong_files() -> None:
    """End, if a file that the configuration names is not as it should be. `ironbatch serve` has looked already."""
    if problems := file_problems(_config):
        logs.complain(problems)
        sys.exit(EXIT_USAGE)


def _start_engine_process(engine: Engine) -> subprocess.Popen[bytes]:
    """The supervisor without the web role. Its stdin is its lifeline: the end of file says that the arbiter is gone."""
    return subprocess.Popen(
        [sys.executable, "-m", "ironbatch.supervisor"],
        stdin=subprocess.PIPE,
        pass_fds=engine.descriptors,
        env={**os.environ, **CHILD_ENVIRONMENT},
        start_new_session=True,
    )


def when_ready(server: Any) -> None:
    """Changes to the arbiter for which it has no hook.

    It refuses USR2; it notices its engine's end; it lives on if a worker cannot be forked, and tries again a second
    later; and a worker that is stopped just after its fork stops. gunicorn's own would take the signal with a handler
    of the arbiter's, and be waited for until the graceful time-out.
    """
    reap_workers, spawn_worker = server.reap_workers, server.spawn_worker

    def refuse_usr2() -> None:
        server.log.error("USR2 is refused, it would start a second engine: use HUP to reload, or restart the service")

    def reap_workers_and_engine() -> None:
        reap_workers()
        process = server.ironbatch.process
        is_stopping = not server.LISTENERS
        if process is not None and not is_stopping and process.poll() is not None:
            server.kill_workers(signal.SIGQUIT)  # at once: their streams cannot go on
            raise HaltServer("the engine has ended", EXIT_FAILED)

    def spawn_worker_with_signals_held() -> Any:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            return spawn_worker()
        except OSError as problem:  # no process, descriptor or file to be had: no reason to end the workers there are
            if os.getpid() != server.pid:
                os._exit(EXIT_FAILED)  # it was forked, and must not go on as a second arbiter
            server.log.error("cannot start a web worker: %s; it is tried again", problem.strerror)
            return None
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    if not KNOWN_PROTOCOLS:
        server.log.warning(
            "gunicorn %s is not the release that Ironbatch knows (%s): its connections have no header, body and write"
            " time-outs and no limit of their number, and streams cost more",
            *(gunicorn.__version__, ".".join(map(str, KNOWN_GUNICORN))),
        )
    server.handle_usr2 = refuse_usr2
    server.spawn_worker = spawn_worker_with_signals_held
    server.reap_workers = reap_workers_and_engine
    # A reload starts as many as configured beside those that there are.
    most_workers = num_lanes(_config.workers) - _config.workers
    arbiter.adapt(server, server.ironbatch.engine.segment.header, _config.drain_timeout_s, most_workers)


def pre_fork(server: Any, worker: Any) -> None:
    """Give the worker a lane; without one it answers 503."""
    worker.ironbatch_lane = server.ironbatch.book.assign(worker, server.WORKERS)
    if worker.ironbatch_lane is None:
        server.log.error("no lane is free for another worker; it will answer 503")


def post_fork(server: Any, worker: Any) -> None:
    """In the worker: its name, its lane, and its end with the arbiter's."""
    die_with_parent(worker.ppid)
    holder = worker.ironbatch_lane
    os.environ.pop(LANE_VARIABLE, None)
    if holder is not None:
        os.environ[LANE_VARIABLE] = f"{holder.lane}:{holder.generation}"
        set_process_name(f"web worker {holder.lane}")


def post_worker_init(worker: Any) -> None:
    """In the worker, which has loaded the application and is about to listen."""
    worker.state[WORKER_KEY] = worker
    # gunicorn's asgi worker forgets its own `backlog`, and uvloop would listen anew with 100: of 256 clients that come
    # at once some wait for a second until their SYN is sent again.
    worker.loop.create_server = functools.partial(worker.loop.create_server, backlog=worker.cfg.backlog)
    # From here on it reads requests, and what it logs must not quote them.
    logs.hide_request_text("gunicorn.error", "gunicorn.access")
    worker.loop.set_exception_handler(logs.log_loop_problem)
    # A full collection would walk all that was imported, 30 to 70 ms in which every stream stands still.
    gc.collect()
    gc.freeze()
    # Its own signal handlers work as soon as its event loop runs.
    worker.loop.call_soon(signal.pthread_sigmask, signal.SIG_UNBLOCK, STOP_SIGNALS)


def child_exit(server: Any, worker: Any) -> None:
    """In the arbiter: a worker has ended, whatever of."""
    server.ironbatch.book.release(worker)


def on_exit(server: Any) -> None:
    """Stop the engine that `on_starting` has made."""
    _stop_engine(server)


def _stop_engine(server: Any) -> None:
    mine: _Engine = server.ironbatch
    if mine.pid != os.getpid():  # a worker inherits the arbiter's atexit handlers
        return
    if mine.process is not None:
        process, mine.process = mine.process, None
        assert process.stdin is not None
        process.stdin.close()  # its lifeline
        process.terminate()  # which it heeds while it starts
        try:
            process.wait(ENGINE_STOP_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    mine.engine.segment.close()

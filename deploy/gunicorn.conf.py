"""Ironbatch under a gunicorn that you start yourself:

    gunicorn -c deploy/gunicorn.conf.py ironbatch.web.app:app

The engine is configured by IRONBATCH_... variables (`ironbatch serve --help` lists them). All settings come from the
package, and ironbatch/web/gunicorn_conf.py gives the reason of each value; what you set below outranks them. A flag on
gunicorn's command line outranks both.

Leave these as they are, or the engine does not work as documented:

- worker_class, asgi_loop: another worker has no time-outs for slow clients, and may not notice that one has gone, and
  go on generating for it.
- asgi_lifespan: without it a worker collects no tokens.
- asgi_disconnect_grace_period: any other value keeps the KV blocks of clients that have gone.
- preload_app: the application needs a lane, which a worker gets after its fork.
- logger_class: gunicorn's own would write another format (docs/logging.md), and wait for a log that nobody reads.
- control_socket_disable: what the socket can do beside signals, the engine does not expect.
- on_starting, when_ready, pre_fork, post_fork, post_worker_init, child_exit, on_exit: the hooks that tie gunicorn to
  the engine. One of your own must call the one it replaces.
- graceful_timeout: set IRONBATCH_DRAIN_TIMEOUT_S, which it follows. Whoever kills a gunicorn that does not stop waits
  for 15 s longer.
- daemon, reload, reuse_port: leave them off. The engine stays with the process that made it, HUP reloads, and all
  workers share one socket.

Under systemd use `ironbatch serve` (see ironbatch.service): gunicorn reports READY=1 as soon as it listens, before
there is an engine, and knows nothing of the watchdog.
"""

from ironbatch.web.gunicorn_conf import *  # noqa: F403

# Where it listens. Better set IRONBATCH_ADDR, which `ironbatch check-config` shows too.
# bind = "0.0.0.0:8080"

# How many web workers. Better set IRONBATCH_WORKERS, by which the segment is sized; one for each core that the
# scheduler and the backend leave free.
# workers = 2

# What gunicorn logs. Better set IRONBATCH_LOG_LEVEL, which the engine heeds too. (IRONBATCH_LOG_FORMAT is for both.)
# loglevel = "info"

# Where requests are logged; "-" is stdout. Off unless you set it: a line a request costs time in the worker that also
# streams.
# accesslog = "-"

# Seconds that an idle connection may stay. Better set IRONBATCH_KEEPALIVE_TIMEOUT_S. Behind a load balancer set it
# above the balancer's own idle time, so that the balancer is the one to close.
# keepalive = 5

# Seconds of silence after which a worker counts as hung and is replaced, with its streams. A stream's length does not
# matter. Raise it on a machine that is so busy that healthy workers are replaced.
# timeout = 30

# Connections that wait to be accepted; the kernel caps it at net.core.somaxconn.
# backlog = 2048

# Where workers touch the files that show their life. Any directory in memory will do.
# worker_tmp_dir = "/dev/shm"

"""Ironbatch under a gunicorn that you start yourself:

    gunicorn -c deploy/gunicorn.conf.py ironbatch.web.app:app

The engine is configured by IRONBATCH_... variables (`ironbatch serve --help` lists them). The hooks, and the settings
that they depend on, come from the package, with their reasons; what you set below outranks them. Leave worker_class,
asgi_lifespan, asgi_disconnect_grace_period and preload_app as they are.
"""

from ironbatch.web.gunicorn_conf import *  # noqa: F403

# bind = "0.0.0.0:8080"      # IRONBATCH_ADDR
# workers = 2                # IRONBATCH_WORKERS; one a core that the scheduler leaves free
# graceful_timeout = 30      # seconds that running streams get at a shutdown or a reload
# keepalive = 5              # seconds that an idle connection may stay open

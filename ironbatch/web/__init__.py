"""The web workers: Falcon resources on gunicorn's asgi worker, and the collector that feeds their streams."""

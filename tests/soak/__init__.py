"""The soak: one server, random load and random deaths for as long as you like, and every stream judged.

    make soak                                     # ten minutes; the report is perf/results/soak.json
    python -m tests.soak --duration-s 120 --seed 7 --form gunicorn --output look.json

`plans` draws from a seed what each client does, `client` does it, `faults` kills and stops processes, `memory` watches
them, `accounts` judges all of it, `run` joins them.
"""

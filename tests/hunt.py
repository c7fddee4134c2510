"""Goes through many random programs: ``python -m tests.hunt --programs 5000 --seed 0``.

Each program is identified by its number. With ``--keep FILE``, a line of JSON is added for each,
and those already in the file are skipped, so a hunt can be interrupted and resumed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import jax

from benchmarks.json_lines import JsonLines
from tests import conftest  # noqa: F401 - eight devices
from tests.random_programs import DEVICES, draw, failures


def main(arguments: list[str] | None = None) -> int:
    """Runs a hunt; the exit status says whether something was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.hunt", description=__doc__)
    parser.add_argument("--programs", type=int, default=5000, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="the number of the first one")
    parser.add_argument("--keep", type=Path, help="a file to add a line of JSON for each to")
    parser.add_argument("--devices", nargs="+", default=list(DEVICES), help="to plan for")
    parser.add_argument("--trace", action="store_true", help="do not run what is traced")
    options = parser.parse_args(arguments)
    kept = JsonLines(options.keep) if options.keep else None
    known = {(one["seed"], tuple(one["devices"])) for one in (kept.rows if kept else ())}
    count = refused = failed = 0
    for seed in range(options.seed, options.seed + options.programs):
        if (seed, tuple(options.devices)) in known:
            continue
        start = time.perf_counter()
        with jax.enable_x64(True):
            found = failures(draw(seed), options.devices, run=not options.trace)
        count += 1
        refused += found is None
        failed += bool(found)
        line = {
            "seed": seed,
            "devices": options.devices,
            "run": not options.trace,
            "jax": jax.__version__,
            "taken_by_jax": found is not None,
            "failures": found or [],
            "seconds": round(time.perf_counter() - start, 2),
        }
        if kept:
            kept.append(line)
        for one in found or ():
            print(f"{seed}: {one}", flush=True)
        if count % 50 == 0:
            # What XLA compiled is never asked for again.
            jax.clear_caches()
    print(f"{count} programs, {refused} of which JAX does not take; {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    # Here, not above: tests import this module.
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")
    # We are looking for wrong programs, not slow ones.
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_backend_optimization_level=0".strip()
    sys.exit(main())

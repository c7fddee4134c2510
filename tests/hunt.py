"""Goes through many random programs: ``python -m tests.hunt --programs 5000 --seed 0``.

Each program is identified by its number. With ``--keep FILE``, a line of JSON is added for each,
and those already in the file are skipped, so a hunt can be interrupted and resumed. ``--jobs 2``
takes as many processes.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import jax

from benchmarks.json_lines import JsonLines
from remat_opt.solvers import local_search
from tests import conftest  # eight devices, too
from tests.random_programs import DEVICES, UNSTEADY, How, draw, failures

#: After so many programs of a process, what XLA compiled is forgotten: most of it whole programs.
_MOST_COMPILED = 100
_number = itertools.count(1)
#: One program of so many is searched thoroughly whatever its size; others as in fast tests.
_THOROUGH = 4


def check(seed: int, devices: Sequence[str] = DEVICES, how: How = "op by op") -> dict[str, Any]:
    """What is found about a program, as a line to keep."""
    start = time.perf_counter()
    small = local_search.SMALL if seed % _THOROUGH == 0 else conftest.QUICK_SMALL
    with jax.enable_x64(True), mock.patch.object(local_search, "SMALL", small):
        found = failures(draw(seed), devices, how)
    if next(_number) % _MOST_COMPILED == 0:
        jax.clear_caches()
    return {
        "seed": seed,
        "devices": devices,
        "how": how,
        "jax": jax.__version__,
        "taken_by_jax": found is not None,
        "steady": UNSTEADY not in (found or []),
        "failures": [one for one in found or [] if one != UNSTEADY],
        "seconds": round(time.perf_counter() - start, 2),
    }


@contextlib.contextmanager
def _checked(seeds: Sequence[int], jobs: int, **options: Any) -> Iterator[Iterator[dict[str, Any]]]:
    """A line for each program, as soon as it is known."""
    one = functools.partial(check, **options)
    if jobs == 1:
        yield map(one, seeds)
        return
    # JAX runs threads, so that a process must not be forked.
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield pool.imap_unordered(one, seeds)


def main(arguments: list[str] | None = None) -> int:
    """Runs a hunt; the exit status says whether something was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.hunt", description=__doc__)
    parser.add_argument("--programs", type=int, default=5000, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="the number of the first one")
    parser.add_argument("--keep", type=Path, help="a file to add a line of JSON for each to")
    parser.add_argument("--devices", nargs="+", default=list(DEVICES), help="to plan for")
    parser.add_argument("--how", choices=get_args(How), default="op by op", help="to run them")
    parser.add_argument("--jobs", type=int, default=1, help="how many processes")
    options = parser.parse_args(arguments)
    kept = JsonLines(options.keep) if options.keep else None
    known = {(one["seed"], tuple(one["devices"])) for one in (kept.rows if kept else ())}
    seeds = [
        seed
        for seed in range(options.seed, options.seed + options.programs)
        if (seed, tuple(options.devices)) not in known
    ]
    refused = unsteady = failed = 0
    with _checked(seeds, options.jobs, devices=options.devices, how=options.how) as lines:
        for line in lines:
            refused += not line["taken_by_jax"]
            unsteady += not line["steady"]
            failed += bool(line["failures"])
            if kept:
                kept.append(line)
            for one in line["failures"]:
                print(f"{line['seed']}: {one}", flush=True)
    print(
        f"{len(seeds)} programs: JAX does not take {refused}, {unsteady} give different results "
        f"without the decorator; {failed} failed"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    # Here, not above: tests import this module. JAX was imported before the tests' settings.
    jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
    sys.exit(main())

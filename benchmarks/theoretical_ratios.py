"""The theoretical column of Re-forwarding's Table 1, recomputed.

    python -m benchmarks.theoretical_ratios --json

prints one JSON object a line for each network: the optimum's share of the bytes of all vertices,
with source and target (what the paper reports, correction 1) and without, beside the paper's.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from benchmarks.paper_networks import TABLE_1
from remat_opt.solvers import arbitrary_graph


def rows() -> list[dict[str, Any]]:
    """One row per network."""
    found = []
    for name, build, paper in TABLE_1:
        graph = build()
        start = time.perf_counter()
        checkpoints = arbitrary_graph.solve(graph).figures.checkpoints
        seconds = time.perf_counter() - start
        everything = sum(graph.bytes)
        found.append(
            {
                "network": name,
                "vertices": len(graph),
                "kept": len(checkpoints.kept),
                "bytes_per_image": everything,
                "optimum_bytes_per_image": checkpoints.total_bytes,
                "ratio": round(checkpoints.total_bytes / everything, 4),
                "ratio_without_ends": round(checkpoints.total_without_ends_bytes / everything, 4),
                "paper_ratio": paper,
                "solve_seconds": round(seconds, 4),
            }
        )
    return found


def main(arguments: list[str] | None = None) -> int:
    """Prints the table, or with ``--json`` its rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args(arguments)
    if options.json:
        for row in rows():
            print(json.dumps(row))
        return 0
    print(f"{'network':10} {'vertices':>8} {'kept':>5} {'ratio':>6} {'paper':>6}")
    for row in rows():
        print(
            f"{row['network']:10} {row['vertices']:8} {row['kept']:5} "
            f"{row['ratio']:6.3f} {row['paper_ratio']:6.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The order of hashes decides nothing: processes with different hash seeds print the same."""

from __future__ import annotations

import pytest

from tests.hash_order import printed_with_two_seeds

SCRIPT = """
from remat_opt.schedule import plain
from remat_opt.solvers import joint_chain, local_search, portfolio
from remat_opt.solvers.coarsening import as_it_is
from tests.graphs import INSTANCES, network, sampled

for graph in (INSTANCES["dense_9"], network(6), *(sampled(s, max_vertices=12) for s in range(12))):
    print(*joint_chain.schedules(graph, [tuple(range(0, len(graph), 2)), (0,)]), sep="\\n")
print("--")
for graph in (network(4), *(sampled(seed, max_vertices=8) for seed in range(6))):
    print(*local_search.front(as_it_is(graph), [plain(graph)]), sep="\\n")
print("--")
for graph in (INSTANCES["dense_9"], network(3), *(sampled(s, max_vertices=8) for s in range(12))):
    print(*portfolio.frontier(graph), sep="\\n")
"""


@pytest.mark.slow
def test_order_of_hashes_decides_nothing() -> None:
    printed = printed_with_two_seeds(SCRIPT)
    joint, local, portfolio = printed[0].split("--\n")
    assert joint.count("Schedule(") > 50
    assert local.count("Candidate(") > 10
    assert portfolio.count("Candidate(") > 50
    assert printed[0] == printed[1]

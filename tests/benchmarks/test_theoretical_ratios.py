"""Re-forwarding's Table 1: the theoretical ratios, from graphs built in ``benchmarks``."""

from __future__ import annotations

import json

import pytest

from benchmarks import theoretical_ratios
from benchmarks.paper_networks import TABLE_1
from remat_opt.solvers import arbitrary_graph, linear_chain


@pytest.mark.parametrize(("name", "build", "paper"), TABLE_1, ids=[row[0] for row in TABLE_1])
def test_within_a_hundredth_of_the_paper(name, build, paper):
    graph = build()
    found = arbitrary_graph.solve(graph)
    assert found.objective / sum(graph.bytes) == pytest.approx(paper, abs=0.01)
    found.schedule.check(graph)
    # AlexNet and VGG are chains, ResNet is not.
    assert linear_chain.is_chain(graph) == (not name.startswith("resnet"))
    if linear_chain.is_chain(graph):
        assert linear_chain.solve(graph).objective == found.objective


def test_json_has_a_line_for_each_network(capsys):
    assert theoretical_ratios.main(["--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["network"] for row in rows] == [name for name, *_ in TABLE_1]
    assert all(abs(row["ratio"] - row["paper_ratio"]) <= 0.01 for row in rows)
    assert all(row["ratio_without_ends"] < row["ratio"] for row in rows)


def test_table(capsys):
    assert theoretical_ratios.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["network", "vertices", "kept", "ratio", "paper"]
    assert len(lines) == 1 + len(TABLE_1)

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import hypothesis
import pytest
from hypothesis import strategies as st

from remat_opt.errors import GraphError
from remat_opt.graph import Graph
from remat_opt.offload.chain import Chain, in_grains, stages
from tests.chains import chains


def example() -> Chain:
    return Chain(
        forward_seconds=(1.0, 2.0),
        backward_seconds=(2.0, 4.0),
        activation_bytes=(10, 20, 5),
        gradient_bytes=(1, 2, 3),
        forward_extra_bytes=(4, 0),
        backward_extra_bytes=(0, 7),
        bandwidth_bytes_per_second=4,
        device_bytes=40,
    )


def test_memory_needed_by_each_operation():
    # m_{F_i} = ex^F + x_0 + ... + x_{i+1}; m_{B_i} adds y_i and y_{i+1}.
    assert example().needed_bytes == (4 + 30, 35, 30 + 1 + 2, 35 + 2 + 3 + 7)
    assert example().peak_bytes == 47
    assert example().least_device_bytes == max(34, 25, 33, 37)
    assert example().excess_bytes == 7


def test_lower_bound_is_the_longer_of_computing_and_sending_twice():
    assert example().lower_bound_seconds == 9.0
    slow = dataclasses.replace(example(), bandwidth_bytes_per_second=1)
    assert slow.lower_bound_seconds == 2 * 7 / 1
    roomy = dataclasses.replace(slow, device_bytes=100)
    assert roomy.lower_bound_seconds == roomy.compute_seconds == 9.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"forward_seconds": (), "backward_seconds": ()}, "no stages"),
        ({"backward_seconds": (1.0,)}, "backward_seconds has 1 entries for 2 stages"),
        ({"activation_bytes": (1, 2)}, r"must have 3 \(x_0 to x_\{L\+1\}\)"),
        ({"gradient_bytes": (1, 2)}, "gradient_bytes has 2 entries"),
        ({"forward_extra_bytes": (1,)}, "forward_extra_bytes has 1 entries"),
        ({"forward_seconds": (1.0, math.nan)}, "Stage 1 has forward_seconds = nan"),
        ({"backward_seconds": (-1.0, 0.0)}, "Stage 0 has backward_seconds = -1.0"),
        ({"forward_seconds": (math.inf, 0.0)}, "finite"),
        ({"activation_bytes": (1, -2, 3)}, "Entry 1 of activation_bytes is -2"),
        ({"gradient_bytes": (1, 2, 2.5)}, "whole number of bytes"),
        ({"backward_extra_bytes": (True, 2)}, "Entry 0 of backward_extra_bytes is True"),
        ({"bandwidth_bytes_per_second": 0}, "cannot offload"),
        ({"bandwidth_bytes_per_second": math.inf}, "bandwidth is inf"),
        ({"device_bytes": -1}, "The device has -1 bytes"),
        ({"device_bytes": 1.5}, "whole number"),
    ],
)
def test_bad_chains_are_refused(change, message):
    with pytest.raises(GraphError, match=message):
        dataclasses.replace(example(), **change)


@hypothesis.given(chains(), st.floats(1e-9, 1e3), st.floats(1e-6, 1e12), st.integers(0, 2**50))
def test_grains_are_exact(chain, seconds, bandwidth, device_bytes):
    chain = dataclasses.replace(
        chain,
        forward_seconds=(seconds,) * len(chain),
        bandwidth_bytes_per_second=bandwidth,
        device_bytes=device_bytes,
    )
    exact = in_grains(chain)
    fine = exact.grains_per_byte
    assert exact.forward[0] == Fraction(seconds) * Fraction(bandwidth) * fine
    assert exact.bytes(exact.device) == device_bytes
    assert exact.seconds(exact.forward[0]) == seconds
    assert [exact.bytes(size) for size in exact.activations] == list(chain.activation_bytes)


def test_stages_of_graphs():
    def of(count, edges):
        return stages(Graph.from_edges([1] * count, edges))

    assert of(1, []) == ((0,),)
    assert of(3, [(0, 1), (1, 2)]) == ((0,), (1,), (2,))
    # A value that skips a vertex keeps it inside a stage.
    assert of(4, [(0, 1), (1, 2), (0, 2), (2, 3)]) == ((0,), (1, 2), (3,))
    # Nothing is cut where nothing crosses, or where two values do.
    assert of(4, [(0, 2), (1, 2), (2, 3)]) == ((0,), (1, 2), (3,))
    assert of(2, []) == ((0, 1),)
    # The value of 0 crosses twice, past a vertex that nothing reads: one cut.
    assert of(3, [(0, 1), (0, 2)]) == ((0,), (1, 2))


def test_a_backward_step_that_reads_across_joins_stages():
    graph = Graph.from_edges([1] * 4, [(0, 1), (1, 2), (2, 3)])
    assert len(stages(graph)) == 4
    across = dataclasses.replace(graph, needs=((0,), (0, 1), (1, 2), (0, 3)))
    assert stages(across) == ((0,), (1, 2, 3))


def test_chain_of_a_plain_graph():
    graph = Graph.from_edges([8, 4, 2], [(0, 1), (1, 2)], seconds=[1.0, 2.0, 3.0])
    chain = Chain.from_graph(
        graph, device_bytes=100, bandwidth_bytes_per_second=1.0, input_bytes=16
    )
    assert chain.activation_bytes == (16, 8, 4, 2)
    assert chain.gradient_bytes == (0, 8, 4, 2)
    assert chain.forward_seconds == (1.0, 2.0, 3.0)
    assert chain.backward_seconds == (2.0, 4.0, 6.0)
    assert chain.forward_extra_bytes == chain.backward_extra_bytes == (0, 0, 0)


def test_chain_of_a_graph_with_a_block():
    # 0 -> 1 -> 2 -> 3 -> 4, and 1 skips to 3, all of different size.
    edges = [(0, 1), (1, 2), (1, 3), (2, 3), (3, 4)]
    graph = dataclasses.replace(
        Graph.from_edges([1, 10, 100, 1000, 10000], edges),
        needs=((), (0,), (), (2,), (3,)),
        internal_bytes=(0, 0, 5, 0, 0),
    )
    chain = Chain.from_graph(
        graph,
        device_bytes=20000,
        bandwidth_bytes_per_second=1,
        backward_seconds=(1, 2, 3, 4, 5),
    )
    assert stages(graph) == ((0,), (1,), (2, 3), (4,))
    # x_3 is the value of vertex 3, that of 2 (which 3's backward step reads), and 5 inside.
    assert chain.activation_bytes == (0, 1, 10, 1000 + 100 + 5, 10000)
    assert chain.backward_seconds == (1.0, 2.0, 7.0, 5.0)
    assert chain.forward_extra_bytes == (0, 0, 0, 0)
    assert chain.backward_extra_bytes == (0, 0, 100, 0)
    # If no backward step reads vertex 2, it only waits for its forward reader.
    unread = dataclasses.replace(graph, needs=((), (0,), (), (3,), (3,)))
    chain = Chain.from_graph(unread, device_bytes=20000, bandwidth_bytes_per_second=1)
    assert chain.activation_bytes == (0, 1, 10, 1005, 10000)
    assert chain.forward_extra_bytes == (0, 0, 100, 0)


def test_backward_seconds_must_match_the_graph():
    graph = Graph.from_edges([1, 1], [(0, 1)])
    with pytest.raises(GraphError, match="backward_seconds has 1 entries for 2 vertices"):
        Chain.from_graph(
            graph, device_bytes=1, bandwidth_bytes_per_second=1, backward_seconds=(1.0,)
        )

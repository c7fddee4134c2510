"""A chain of stages: what the offloading solvers see of a training step.

Problem. Offloading is planned for sequential networks: stage i computes x_{i+1} from x_i
(forward, F_i) and later y_i from x_i, x_{i+1} and y_{i+1} (backward, B_i). Stages are
numbered 0..L, so there are L + 2 activations x_0..x_{L+1} and as many gradients. A general
graph becomes such a chain at its cut vertices.

Method. ``Chain`` holds the paper's numbers as measured: seconds, bytes, bytes per second.
``Chain.from_graph`` cuts a graph wherever a single value crosses from what came before to
what comes after, and sums up what lies between two cuts. ``LinkChain`` is the same chain in
whole numbers: time is measured in what the link could move meanwhile, in *grains*, so that
one number serves for bytes and for time, nothing is ever divided, and two ways to compute a
schedule can be compared for equality instead of closeness.

Why not a ready-made tool: networkx's articulation points know neither the order of execution nor
what a backward step reads.

Complexity: linear in the edges for the cuts, linear in the stages for the rest.

Guarantee: ``in_grains`` is exact: a float is a fraction, and a grain is chosen fine enough that
every product of a time and the bandwidth is a whole number of grains. ``from_graph`` errs on the
safe side: everything that a stage's backward step reads is held from its forward step to its
backward step.

What is left out: values that skip a cut (there are none, by definition), and more than one link or
device.

Reference: Beaumont, Eyraud-Dubois, Shilova, *Optimal GPU-CPU Offloading Strategies for Deep
Neural Network Training* (Euro-Par 2020), Sec. 3.1, Props. 2 and 3.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction

from remat_opt.errors import GraphError
from remat_opt.graph import Graph

#: A backward step takes about two products of the size of the one its forward step takes:
#: the gradients with respect to the input and to the parameters.
BACKWARD_PER_FORWARD = 2.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A training step as a chain of L + 1 stages, and the machine it runs on.

    Attributes:
      forward_seconds: time of F_0..F_L.
      backward_seconds: time of B_0..B_L.
      activation_bytes: bytes of x_0..x_{L+1}.
      gradient_bytes: bytes of y_0..y_{L+1}.
      forward_extra_bytes: ex^F, what F_0..F_L hold beside their input and output.
      backward_extra_bytes: ex^B, what B_0..B_L hold beside x_i, x_{i+1}, y_i and y_{i+1}.
      bandwidth_bytes_per_second: of the link to the host; one transfer at a time.
      device_bytes: memory of the device, M_GPU.
    """

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    activation_bytes: tuple[int, ...]
    gradient_bytes: tuple[int, ...]
    forward_extra_bytes: tuple[int, ...]
    backward_extra_bytes: tuple[int, ...]
    bandwidth_bytes_per_second: float
    device_bytes: int

    def __post_init__(self) -> None:
        _validate(self)

    def __len__(self) -> int:
        return len(self.forward_seconds)

    @property
    def compute_seconds(self) -> float:
        """Time of all operations, without any waiting."""
        return math.fsum((*self.forward_seconds, *self.backward_seconds))

    @property
    def needed_bytes(self) -> tuple[int, ...]:
        """m_{F_0}..m_{F_L}, m_{B_0}..m_{B_L} (Sec. 3.2): held during each, on both sides."""
        produced = [self.activation_bytes[0]]
        for size in self.activation_bytes[1:]:
            produced.append(produced[-1] + size)
        forward = [
            extra + produced[stage + 1] for stage, extra in enumerate(self.forward_extra_bytes)
        ]
        backward = [
            extra
            + self.gradient_bytes[stage]
            + self.gradient_bytes[stage + 1]
            + produced[stage + 1]
            for stage, extra in enumerate(self.backward_extra_bytes)
        ]
        return (*forward, *backward)

    @property
    def peak_bytes(self) -> int:
        """M_peak: what the chain takes when nothing is offloaded."""
        return max(self.needed_bytes)

    @property
    def least_device_bytes(self) -> int:
        """The least memory in which the chain runs, if everything that may leave has left.

        That is the largest operation with its own inputs and outputs.
        """
        produced = 0
        before = []
        for size in self.activation_bytes[:-2]:
            before.append(produced)
            produced += size
        before.append(produced)
        return max(
            needed - before[stage % len(self)] for stage, needed in enumerate(self.needed_bytes)
        )

    @property
    def excess_bytes(self) -> int:
        """M_peak - M_GPU, or 0 if the chain fits: what any schedule must offload (Prop. 2)."""
        return max(0, self.peak_bytes - self.device_bytes)

    @property
    def lower_bound_seconds(self) -> float:
        """Prop. 3: no schedule is shorter than the operations, nor than the least transfers."""
        return max(self.compute_seconds, 2 * self.excess_bytes / self.bandwidth_bytes_per_second)

    @classmethod
    def from_graph(
        cls,
        graph: Graph,
        *,
        device_bytes: int,
        bandwidth_bytes_per_second: float,
        backward_seconds: Sequence[float] | None = None,
        input_bytes: int = 0,
    ) -> Chain:
        """The chain between a graph's cut vertices.

        x_{i+1} is the value that leaves stage i, together with all values inside the stage that
        backward steps read: they live equally long, from F_i to the end of B_i. ex^F and ex^B are
        the most that stage i holds besides: forward values that only wait for a reader, and
        cotangents inside the stage.

        Args:
          graph: a forward computation.
          device_bytes: memory for the temporaries.
          bandwidth_bytes_per_second: of the link to the host.
          backward_seconds: time of each vertex's backward step; by default, twice the time of its
            forward step.
          input_bytes: bytes of x_0, if the input is not an argument (arguments are not temporaries,
            so they do not count).

        Raises:
          GraphError: ``backward_seconds`` does not have one entry per vertex, or a number is wrong.
        """
        if backward_seconds is None:
            backward_seconds = tuple(BACKWARD_PER_FORWARD * time for time in graph.seconds)
        if len(backward_seconds) != len(graph):
            raise GraphError(
                f"backward_seconds has {len(backward_seconds)} entries for {len(graph)} vertices."
            )
        needed = {vertex for needs in graph.needs for vertex in needs}
        activations, gradients = [input_bytes], [0]
        forward_extra, backward_extra = [], []
        parts = stages(graph)
        for part in parts:
            leaving = _leaving(graph, part)
            activations.append(
                sum(
                    graph.internal_bytes[vertex]
                    + (graph.bytes[vertex] if vertex == leaving or vertex in needed else 0)
                    for vertex in part
                )
            )
            gradients.append(graph.cotangent_bytes[leaving])
            forward_extra.append(_forward_extra_bytes(graph, part, leaving, needed))
            backward_extra.append(_backward_extra_bytes(graph, part, leaving))
        return cls(
            forward_seconds=tuple(math.fsum(graph.seconds[v] for v in part) for part in parts),
            backward_seconds=tuple(math.fsum(backward_seconds[v] for v in part) for part in parts),
            activation_bytes=tuple(activations),
            gradient_bytes=tuple(gradients),
            forward_extra_bytes=tuple(forward_extra),
            backward_extra_bytes=tuple(backward_extra),
            bandwidth_bytes_per_second=bandwidth_bytes_per_second,
            device_bytes=device_bytes,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinkChain:
    """A chain in whole numbers of grains, for bytes and for time alike.

    A grain is a number of bytes, and also the time in which the link moves them.

    Attributes:
      forward: u_{F_i} * beta.
      backward: u_{B_i} * beta.
      activations: |x_0|..|x_{L+1}|.
      gradients: |y_0|..|y_{L+1}|.
      forward_extra: ex^F.
      backward_extra: ex^B.
      device: M_GPU.
      grains_per_byte: how fine a grain is.
      grains_per_second: the same for time.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    activations: tuple[int, ...]
    gradients: tuple[int, ...]
    forward_extra: tuple[int, ...]
    backward_extra: tuple[int, ...]
    device: int
    grains_per_byte: Fraction
    grains_per_second: Fraction

    def __len__(self) -> int:
        return len(self.forward)

    def seconds(self, grains: int) -> float:
        """A time in seconds."""
        return float(grains / self.grains_per_second)

    def bytes(self, grains: int) -> int:
        """An amount in bytes, rounded up."""
        return math.ceil(grains / self.grains_per_byte)


def in_grains(chain: Chain) -> LinkChain:
    """The chain in whole numbers, without any rounding.

    >>> chain = Chain(
    ...     forward_seconds=(0.5,), backward_seconds=(0.75,), activation_bytes=(3, 4),
    ...     gradient_bytes=(0, 0), forward_extra_bytes=(0,), backward_extra_bytes=(0,),
    ...     bandwidth_bytes_per_second=1, device_bytes=8)
    >>> exact = in_grains(chain)
    >>> exact.forward, exact.backward, exact.activations, exact.device
    ((2,), (3,), (12, 16), 32)
    """
    bandwidth = Fraction(chain.bandwidth_bytes_per_second)
    forward = [Fraction(time) * bandwidth for time in chain.forward_seconds]
    backward = [Fraction(time) * bandwidth for time in chain.backward_seconds]
    fine = math.lcm(*(moved.denominator for moved in (*forward, *backward)))
    return LinkChain(
        forward=tuple(int(moved * fine) for moved in forward),
        backward=tuple(int(moved * fine) for moved in backward),
        activations=tuple(size * fine for size in chain.activation_bytes),
        gradients=tuple(size * fine for size in chain.gradient_bytes),
        forward_extra=tuple(size * fine for size in chain.forward_extra_bytes),
        backward_extra=tuple(size * fine for size in chain.backward_extra_bytes),
        device=chain.device_bytes * fine,
        grains_per_byte=Fraction(fine),
        grains_per_second=fine * bandwidth,
    )


def stages(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """The vertices between two neighbouring cuts, in order; together they are all vertices.

    A cut is a position in the order of execution that exactly one vertex's value crosses, to be
    read by a later vertex or its backward step. If the same value crosses several positions, the
    first is the cut.

    >>> stages(Graph.from_edges([1] * 5, [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4)]))
    ((0,), (1, 2, 3), (4,))
    """
    last_read = list(range(len(graph)))
    for reader in range(len(graph)):
        for read in (*graph.predecessors[reader], *graph.needs[reader]):
            last_read[read] = max(last_read[read], reader)
    found: list[tuple[int, ...]] = []
    crossing: set[int] = set()
    start, previous = 0, -1
    for position in range(len(graph) - 1):
        crossing = {vertex for vertex in (*crossing, position) if last_read[vertex] > position}
        if len(crossing) == 1:
            (vertex,) = crossing
            if vertex != previous:
                found.append(tuple(range(start, position + 1)))
                start, previous = position + 1, vertex
    found.append(tuple(range(start, len(graph))))
    return tuple(found)


def _leaving(graph: Graph, part: tuple[int, ...]) -> int:
    """The vertex whose value leaves a stage; for the last stage, its last vertex."""
    end = part[-1]
    for reader in range(end + 1, len(graph)):
        for read in (*graph.predecessors[reader], *graph.needs[reader]):
            if read <= end:
                return read
    return end


def _forward_extra_bytes(
    graph: Graph, part: tuple[int, ...], leaving: int, needed: set[int]
) -> int:
    """The most that waits inside a stage for a forward reader only."""
    last_reader = {vertex: vertex for vertex in part}
    for reader in part:
        for read in graph.predecessors[reader]:
            if read in last_reader:
                last_reader[read] = reader
    passing = [vertex for vertex in part if vertex != leaving and vertex not in needed]
    return max(
        sum(graph.bytes[v] for v in passing if v <= moment <= last_reader[v]) for moment in part
    )


def _backward_extra_bytes(graph: Graph, part: tuple[int, ...], leaving: int) -> int:
    """The most that the cotangents inside a stage take at once."""
    last_reader = {vertex: vertex for vertex in part}
    for reader in part:
        for read in graph.predecessors[reader]:
            if read in last_reader:
                last_reader[read] = reader
    inside = [vertex for vertex in part if vertex != leaving]
    # Alive from the first backward step of a reader, which is that of the last reader.
    return max(
        sum(graph.cotangent_bytes[v] for v in inside if v <= moment <= last_reader[v])
        for moment in part
    )


def _validate(chain: Chain) -> None:
    count = len(chain.forward_seconds)
    if count == 0:
        raise GraphError("The chain has no stages: there is nothing to plan.")
    for field, expected in (
        ("backward_seconds", count),
        ("activation_bytes", count + 1),
        ("gradient_bytes", count + 1),
        ("forward_extra_bytes", count),
        ("backward_extra_bytes", count),
    ):
        entries = getattr(chain, field)
        if len(entries) != expected:
            raise GraphError(
                f"{field} has {len(entries)} entries for {count} stages; it must have {expected}"
                + (" (x_0 to x_{L+1})." if field == "activation_bytes" else ".")
            )
    for field in ("forward_seconds", "backward_seconds"):
        for stage, number in enumerate(getattr(chain, field)):
            if not (math.isfinite(number) and number >= 0):
                raise GraphError(
                    f"Stage {stage} has {field} = {number}; it must be a finite number, 0 or more."
                )
    for field in (
        "activation_bytes",
        "gradient_bytes",
        "forward_extra_bytes",
        "backward_extra_bytes",
    ):
        for stage, number in enumerate(getattr(chain, field)):
            if not isinstance(number, int) or isinstance(number, bool) or number < 0:
                raise GraphError(
                    f"Entry {stage} of {field} is {number!r}; it must be a whole number of bytes, "
                    "0 or more."
                )
    bandwidth = chain.bandwidth_bytes_per_second
    if not (math.isfinite(bandwidth) and bandwidth > 0):
        raise GraphError(
            f"The bandwidth is {bandwidth} bytes per second; it must be a finite number above 0. "
            "A machine without a link to its host cannot offload."
        )
    if (
        not isinstance(chain.device_bytes, int)
        or isinstance(chain.device_bytes, bool)
        or chain.device_bytes < 0
    ):
        raise GraphError(
            f"The device has {chain.device_bytes!r} bytes; it must be a whole number, 0 or more."
        )

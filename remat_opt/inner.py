"""The model of a program, including what its inner programs take.

In the graph, an inner ``jax.checkpoint``, a branch or a loop is one vertex. JAX says what it keeps
for its backward pass, but what it holds only while that runs does not show outside. A checkpoint
runs its body again when its turn comes, with that body's peak; a ``scan`` goes back through one
iteration at a time; of a ``cond``, the largest branch counts. So each body gets its own model, and
the peak of its backward pass, less what is held for it anyway, is the vertex's workspace.

Complexity: that of a model for every distinct body.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from remat_opt import _jax_internals as internals
from remat_opt import _jax_meshes, policies
from remat_opt.compilers import model as models
from remat_opt.compilers import put_off
from remat_opt.compilers.compiler import Compiler
from remat_opt.compilers.effects import Effect, Figures
from remat_opt.compilers.model import Model, computes_nothing
from remat_opt.compilers.stacks import as_written_bytes, takes_entries
from remat_opt.gradients import Gradients
from remat_opt.program import bodies
from remat_opt.program.dataflow import ALIASES
from remat_opt.program.linearization import linearize
from remat_opt.program.record import Equation, Linearization, Program
from remat_opt.schedule import Region, Schedule, unchanged
from remat_opt.simulator import demand
from remat_opt.units import format_share

#: How many levels of nested bodies are looked into.
_DEPTH = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Inside:
    """What the backward pass of one body takes.

    Attributes:
      workspace_bytes: what it takes while it runs, beside what is kept for it.
      kept_bytes: what is kept for it, if that is not what JAX hands from one pass to the other.
      again_share: what the function's own checkpoints compute again in it, as a share of its
        forward time.
      put_off_bytes: what waits from then on in the unchanged function.
    """

    workspace_bytes: int = 0
    kept_bytes: int | None = None
    again_share: float = 0.0
    put_off_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Existing(Effect):
    """What the function's own checkpoints compute again, whatever the plan.

    Attributes:
      places: source lines.
      share: as a share of a forward pass's time.
    """

    places: tuple[str, ...]
    share: float

    def notes(self, schedule: Schedule) -> Iterator[str]:
        """Says how much that is, and what to do."""
        yield (
            f"The function's own checkpoints stay as they are ({_told(self.places)}). They compute "
            f"{format_share(self.share)} of a forward pass again, with or without this plan; "
            'existing="replace" lets the plan decide about the values under them.'
        )

    def remedy(self) -> str:
        """Says how to let the plan decide about them too."""
        return (
            f"The function's own checkpoints ({_told(self.places)}) stay as they are, with all "
            'that they take: existing="replace" lets the plan decide about the values under them.'
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Advice(Effect):
    """Something that no plan decides about, though the user can change that.

    Attributes:
      text: what it is, and what to do.
    """

    text: str

    def notes(self, schedule: Schedule) -> Iterator[str]:
        """Says so, whatever the plan."""
        yield self.text

    def remedy(self) -> str:
        """Says what to do."""
        return self.text


def _told(places: Sequence[str]) -> str:
    """The first few source lines."""
    return ", ".join([*places[:4], *(["..."] if len(places) > 4 else [])])


def model(
    program: Program,
    linearization: Linearization,
    compiler: Compiler,
    gradients: Gradients,
    depth: int = _DEPTH,
) -> Model:
    """Builds the model of a program, as ``compilers.model`` does, inner programs included.

    Args:
      program: a traced function.
      linearization: what its backward steps read.
      compiler: the compiler.
      gradients: what happens to the gradients.
      depth: how many levels of nested bodies are looked into.
    """
    found = _with_insides(program, linearization, compiler, gradients, depth)
    return found.with_vector_memory()


def _with_insides(
    program: Program,
    linearization: Linearization,
    compiler: Compiler,
    gradients: Gradients,
    depth: int,
) -> Model:
    expected = models.model(program, linearization, compiler, gradients)
    if depth == _DEPTH:
        advice = (_Advice(text=text) for text in _advice(program, linearization))
        expected = dataclasses.replace(expected, effects=(*expected.effects, *advice))
    found = _insides(program, linearization, compiler, gradients, depth)
    if not found:
        return expected
    as_it_is = expected.as_it_is
    expected = _with(program, expected, found)
    if as_it_is is not None:
        expected = dataclasses.replace(expected, as_it_is=_with(program, as_it_is, found))
    if any(one.put_off_bytes for one in found.values()):
        expected = dataclasses.replace(expected, as_it_is=_putting_off(expected, found))
    again_share = _again_share(expected, found)
    if not again_share:
        return expected
    places = dict.fromkeys(
        internals.source_line(program.equations[index].jax_equation)
        for index, inside in found.items()
        if inside.again_share
    )
    existing = _Existing(places=tuple(filter(None, places)), share=again_share)
    return dataclasses.replace(expected, effects=(*expected.effects, existing))


def _advice(program: Program, linearization: Linearization) -> Iterator[str]:
    """What to say of each ``shard_map`` that cannot be opened, and of collectives in the others."""
    if mapped := tuple(_mapped(program, linearization)):
        places = tuple(dict.fromkeys(filter(None, mapped)))
        told = f" ({_told(places)})" if places else ""
        yield (
            f"A shard_map{told} is planned as one piece, whatever it keeps, because it leaves axes "
            "of the mesh to the compiler or changes arrays from outside. To plan what is in it, "
            "decorate the function that it maps: jax.shard_map(optimal_remat(fn), ...)."
        )
    opened = [
        bodies.mapped_of(program.equations[index], frozenset())
        for index in linearization.derivatives
        if bodies.is_open_map(program.equations[index])
    ]
    if gathering := tuple(dict.fromkeys(one for body in opened for one in _gathering(body))):
        yield (
            f"Collectives ({_told(gathering)}) run once, and what they return is kept if the "
            'backward pass reads it: collectives="recompute" lets the plan run them again.'
        )


def _mapped(program: Program, linearization: Linearization) -> Iterator[str]:
    """The source lines of each ``shard_map`` that keeps something and cannot be opened."""
    for index, derivative in linearization.derivatives.items():
        equation = program.equations[index]
        if (
            equation.operation.primitive == "shard_map"
            and derivative.internal_bytes
            and not bodies.is_open_map(equation)
        ):
            yield internals.source_line(equation.jax_equation)


def _gathering(body: Program) -> Iterator[str]:
    """The source lines of collectives that run once and return more than they read.

    Only those in the body of an open map itself, and of loops in it.
    """
    for equation in body.equations:
        operation = equation.operation
        if equation.once and bodies.is_open_loop(equation):
            yield from _gathering(bodies.body_of(equation, frozenset()))
        elif equation.once and operation.output_bytes > operation.input_bytes:
            yield internals.source_line(equation.jax_equation) or operation.primitive


def _with(program: Program, expected: Model, found: Mapping[int, _Inside]) -> Model:
    """A model whose vertices include what their inner programs take."""
    figures = Figures.of(expected.graph)
    inside: dict[int, int] = {}
    for vertex, root in enumerate(expected.roots):
        if root in found:
            # The cotangent it starts from is there in both.
            own = min(expected.graph.cotangent_bytes[vertex], found[root].workspace_bytes)
            if (kept_bytes := found[root].kept_bytes) is not None:
                figures.internal_bytes[vertex] = kept_bytes
                own += gradients_inside_bytes(program, vertex, expected)
            inside[vertex] = found[root].workspace_bytes - own
            figures.workspace_bytes[vertex] += inside[vertex]
    return dataclasses.replace(expected, graph=figures.put_into(expected.graph), inside=inside)


def _putting_off(expected: Model, found: Mapping[int, _Inside]) -> Model:
    """The model of the unchanged function, where something waits that checkpoints compute again."""
    as_it_is = expected.as_it_is or expected
    figures, waiting = Figures.of(as_it_is.graph), 0
    for vertex, root in reversed([*enumerate(as_it_is.roots)]):
        figures.workspace_bytes[vertex] += waiting
        if root in found:
            waiting += found[root].put_off_bytes
    return dataclasses.replace(as_it_is, graph=figures.put_into(as_it_is.graph))


def gradients_inside_bytes(program: Program, vertex: int, expected: Model) -> int:
    """Bytes of gradients that the program counts, though the program inside a vertex does too.

    They are of the parameters that no other equation reads.

    Args:
      program: a traced function.
      vertex: a map.
      expected: the program's model.
    """
    if expected.gradients is Gradients.RESULTS:
        return 0
    readers, root = program.readers(), expected.roots[vertex]
    own = {v for v in program.equations[root].value_inputs if readers[v] == [root]}
    own_bytes = sum(
        expected.compiler.buffer_bytes(program.types[value])
        for value in own.intersection(program.differentiated)
    )
    return min(own_bytes, expected.gradient_bytes[vertex])


def _insides(
    program: Program,
    linearization: Linearization,
    compiler: Compiler,
    gradients: Gradients,
    depth: int,
) -> dict[int, _Inside]:
    """What the backward pass of each equation with inner programs takes."""
    found: dict[int, _Inside] = {}
    if not depth:
        return found
    known: dict[Any, _Inside] = {}
    given = bodies.varying(program)
    # An iteration's carry is no parameter.
    outermost = depth == _DEPTH or not program.is_part
    parameters = put_off.parameters(program) if outermost else {}
    for index, derivative in linearization.derivatives.items():
        equation = program.equations[index]
        if derivative.assumed or not equation.operation.bodies:
            continue
        checkpoint = internals.checkpoint_of(equation.jax_equation)
        read = tuple(
            (atom in given, parameters.get(atom)) if isinstance(atom, int) else None
            for atom in equation.inputs
        )
        # Policies are functions: the parameters' text has only their names.
        policy = id(checkpoint.policy) if checkpoint is not None else 0
        operation = equation.operation
        key = (operation.primitive, equation.parameters, operation.inputs, read, policy)
        if key not in known:
            known[key] = _inside(
                equation, checkpoint, given, parameters, compiler, gradients, depth
            )
        if known[key] != _Inside():
            found[index] = known[key]
    return found


def _inside(
    equation: Equation,
    checkpoint: internals.Checkpoint | None,
    given: Set[int],
    parameters: Mapping[int, put_off.Form],
    compiler: Compiler,
    gradients: Gradients,
    depth: int,
) -> _Inside:
    if checkpoint is not None:
        body = bodies.under_checkpoint(equation, given)
        waiting = _put_off_bytes(body, put_off.inside(equation, body, parameters), compiler)
        found = _backward(body, compiler, depth, checkpoint)
        return dataclasses.replace(found, put_off_bytes=waiting)
    if equation.operation.primitive == "scan":
        return _of_loop(equation, given, compiler, depth)
    if equation.operation.primitive == "cond":
        branches = [
            _backward(branch, compiler, depth) for branch in bodies.branches_of(equation, given)
        ]
        return _Inside(
            workspace_bytes=max(one.workspace_bytes for one in branches),
            again_share=max(one.again_share for one in branches),
        )
    if bodies.is_open_map(equation):
        return _jax_meshes.within_map(
            equation.jax_equation,
            lambda: _of_map(bodies.mapped_of(equation, given), compiler, gradients, depth),
        )
    return _Inside()


def _put_off_bytes(body: Program, forms: Mapping[int, put_off.Form], compiler: Compiler) -> int:
    """What waits from the turn of a checkpoint by hand on, in maps under it, too."""
    if not forms:
        return 0
    found = put_off.put_off_bytes(body, forms, compiler)
    for equation in body.equations:
        if bodies.is_open_map(equation):
            mapped = bodies.mapped_of(equation, bodies.varying(body))
            found += _put_off_bytes(mapped, put_off.inside(equation, mapped, forms), compiler)
    return found


def _of_loop(equation: Equation, given: Set[int], compiler: Compiler, depth: int) -> _Inside:
    """What the backward pass of an iteration of a loop takes."""
    scan = internals.scan_of(equation.jax_equation)
    body = bodies.body_of(equation, given)
    first = scan.constants + scan.carries
    carries, entries = body.arguments[scan.constants : first], body.arguments[first:]
    found = _backward(body, compiler, depth, read=(carries, entries))
    computing = [one for one in body.equations if one.operation.primitive not in ALIASES]
    if len(computing) != 1 or not takes_entries(compiler):
        return found
    checkpoint = internals.checkpoint_of(computing[0].jax_equation)
    if checkpoint is None:
        return found
    # All that an iteration does is under one checkpoint.
    inputs = computing[0].inputs
    varying = bodies.varying(body)
    inside = bodies.under_checkpoint(computing[0], varying)
    if computes_nothing(inside) or not inside.differentiated:
        return found
    expected = model(inside, linearize(inside), compiler, Gradients.CONSUMED, depth - 1)
    expected = _running_again(expected).without_updates().as_written()
    workspace_bytes = as_written_bytes(
        inside,
        [inside.arguments[p] for p, atom in enumerate(inputs) if atom in carries],
        [inside.arguments[p] for p, atom in enumerate(inputs) if atom in entries],
        expected,
        _region(checkpoint, inside, expected),
        reads_copies=checkpoint.prevents_cse,
    )
    return dataclasses.replace(found, workspace_bytes=workspace_bytes)


def _of_map(body: Program, compiler: Compiler, gradients: Gradients, depth: int) -> _Inside:
    """What the body of a map takes: the compiler sees it as a part of the program around it."""
    if computes_nothing(body) or not body.differentiated:
        return _Inside()
    linearization = linearize(body, inside=True)
    expected = model(body, linearization, compiler, gradients, depth - 1)
    own, schedule = expected.under(unchanged(expected.graph))
    kept_bytes = sum(own.graph.internal_bytes)
    kept_bytes += sum(own.graph.bytes[vertex] for vertex in demand(own.graph, schedule).stored)
    deeper = _insides(body, linearization, compiler, gradients, depth - 1)
    return _Inside(
        workspace_bytes=max(0, expected.unchanged_peak_bytes() - kept_bytes),
        kept_bytes=kept_bytes,
        again_share=_again_share(expected, deeper),
    )


def _backward(
    body: Program,
    compiler: Compiler,
    depth: int,
    checkpoint: internals.Checkpoint | None = None,
    read: tuple[Sequence[int], Sequence[int]] | None = None,
) -> _Inside:
    """What the backward pass of a body takes, under a checkpoint or not.

    Args:
      body: the body.
      compiler: which one it is.
      depth: how many levels of nested bodies are looked into.
      checkpoint: that it is under.
      read: if it is that of a loop, its arguments that are carried, and those that are entries of
        stacks.
    """
    if computes_nothing(body) or not body.differentiated:
        return _Inside()
    linearization = linearize(body, inside=True)
    expected = model(body, linearization, compiler, Gradients.CONSUMED, depth - 1)
    if checkpoint is None:
        # Nothing in it is rewritten.
        expected, schedule = expected.under(unchanged(expected.graph))
        kept_bytes = sum(expected.graph.internal_bytes)
    else:
        expected = _running_again(expected)
        schedule = _region(checkpoint, body, expected)
        kept_bytes = 0
    graph = expected.graph
    wanted = demand(graph, schedule)
    again_seconds = sum(graph.seconds[vertex] for vertex in wanted.all_recomputed())
    kept_bytes += sum(graph.bytes[vertex] for vertex in wanted.stored)
    deeper = _insides(body, linearization, compiler, Gradients.CONSUMED, depth - 1)
    workspace_bytes = max(0, expected.peak_bytes(schedule) - kept_bytes)
    if read is not None and takes_entries(compiler):
        expected = expected.without_updates()
        workspace_bytes = as_written_bytes(body, *read, expected, schedule)
    return _Inside(
        workspace_bytes=workspace_bytes,
        again_share=again_seconds / (graph.forward_seconds or 1.0) + _again_share(expected, deeper),
    )


def _running_again(expected: Model) -> Model:
    """The model of what is under a checkpoint by hand, which repeats everything in it."""
    graph = expected.graph
    if not any(graph.pinned):
        return expected
    return dataclasses.replace(
        expected, graph=dataclasses.replace(graph, pinned=(False,) * len(graph))
    )


def _again_share(expected: Model, found: Mapping[int, _Inside]) -> float:
    """What checkpoints inside compute again, as a share of the whole forward time."""
    graph = expected.graph
    seconds = sum(
        found[root].again_share * graph.seconds[vertex]
        for vertex, root in enumerate(expected.roots)
        if root in found
    )
    return seconds / (graph.forward_seconds or 1.0)


def _region(checkpoint: internals.Checkpoint, body: Program, expected: Model) -> Schedule:
    """The body of a checkpoint as a region, which keeps what the policy does."""
    vertices = tuple(range(len(expected.graph)))
    kept = _kept(checkpoint, body, expected.roots)
    return Schedule(regions=(Region(vertices=vertices, kept=kept),))


def _kept(checkpoint: internals.Checkpoint, body: Program, roots: Sequence[int]) -> tuple[int, ...]:
    """The vertices that the policy of a checkpoint keeps."""
    if checkpoint.policy is None:
        return ()
    return tuple(sorted(policies.kept(checkpoint.policy, body, roots)))

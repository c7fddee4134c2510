"""Which of a product's gradients comes first, and what is alive then."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from remat_opt import planning, verification
from remat_opt.compilers.compiler import Rules
from remat_opt.compilers.rewrites import Place, rewrites
from remat_opt.compilers.turns import activations, weight_places
from remat_opt.device import get_device
from remat_opt.gradients import Gradients
from remat_opt.plan import Objective
from remat_opt.program import bodies, tracing
from remat_opt.schedule import Region, Schedule, plain
from remat_opt.transform import turns
from remat_opt.transform.steps import Rewriting, steps_of
from tests.compiler_graphs import W, X, changed, graph_of, names
from tests.devices import needs_cuda_plugin

WIDE = jnp.ones((8, 32)), jnp.ones((32, 8))
NVIDIA = Rules(platform="cuda")


def layer(x, w, act=jnp.tanh):
    u = x @ w[0]
    return x + (u * act(u)) @ w[1]


def mlp(weights, x, act=jnp.tanh, layer=layer):
    layers, head = weights
    for w in layers:
        x = layer(x, w, act)
    return jnp.sum(jnp.sin(x @ head))


def test_an_operand_is_gone_when_its_cotangent_comes() -> None:
    def loss(w, x):
        return jnp.sum(jnp.cos(jnp.sin(x @ w[0]) @ w[1]))

    _, _, graph = graph_of(loss, [W, W], X)
    _, product = [v for v, name in enumerate(names(graph)) if name == "dot_general"]
    assert graph.workspace_bytes[product] < 0


def test_what_something_else_reads_stays() -> None:
    def loss(w, x):
        y = jnp.exp(x @ w[0])
        return jnp.sum(jnp.sin(y @ w[1])) + jnp.sum(y * y * y)

    _, _, graph = graph_of(loss, [W, W], X)
    assert min(graph.workspace_bytes) >= 0


def found_in(fn, *args):
    program = tracing.trace(fn, *args)
    return program, list(activations(program, NVIDIA))


def test_activations_with_dear_functions_are_found() -> None:
    program, found = found_in(mlp, ([WIDE] * 2, W), X)
    equations = program.equations
    products = [i for i, e in enumerate(equations) if e.operation.primitive == "dot_general"]
    # The first reads two arguments.
    assert list(weight_places(program)) == products[1:]
    assert [one.product for one in found] == [products[1], products[3]]
    for one, source in zip(found, (products[0], products[2]), strict=True):
        assert one.sources == set(equations[source].outputs)
        assert {equations[i].operation.primitive for i in one.dear} == {"tanh"}
        assert one.weight[-1] in program.arguments
    assert not found_in(functools.partial(mlp, act=jax.nn.sigmoid), ([WIDE] * 2, W), X)[1]
    assert not list(activations(program, Rules(platform="tpu")))
    assert not list(
        activations(program, Rules(platform="cuda", off=frozenset({"activations_late"})))
    )


def test_an_activation_that_is_read_elsewhere_is_not_late() -> None:
    def loss(w, x):
        u = x @ w[0]
        y = u * jnp.tanh(u)
        return jnp.sum(jnp.sin(y @ w[1])) + jnp.sum(y)

    assert not found_in(loss, WIDE, X)[1]

    def shared(w, x):
        for _ in range(2):
            u = x @ w[0]
            x = (u * jnp.tanh(u)) @ w[1]
        return jnp.sum(jnp.sin(x))

    assert not found_in(shared, WIDE, X)[1]


def per_layer(graph, count: int) -> Schedule:
    """A checkpoint for every layer of ``mlp``, the rest unchanged."""
    layers = names(graph).count("tanh")
    assert layers == count
    size = names(graph).index("add") + 1
    regions = [Region(vertices=tuple(range(k * size, (k + 1) * size))) for k in range(layers)]
    rest = tuple(range(layers * size, len(graph)))
    return Schedule(regions=(*regions, Region(vertices=rest, checkpointed=False)))


def test_a_dear_result_is_no_array_where_one_kernel_reads_it() -> None:
    _, found, graph = graph_of(mlp, ([WIDE] * 2, W), X)
    tanhs = [v for v, name in enumerate(names(graph)) if name == "tanh"]
    size = X.shape[0] * 32 * 4
    assert [graph.bytes[v] for v in tanhs] == [size] * 2
    for schedule in (None, plain(graph)):
        assert [changed(found, schedule).bytes[v] for v in tanhs] == [size] * 2
    schedule = per_layer(graph, 2)
    assert [changed(found, schedule).bytes[v] for v in tanhs] == [0, 0]
    # Not if it is kept, nor if the product runs again for what comes after.
    first, second, rest = schedule.regions
    kept = Region(vertices=first.vertices, kept=(tanhs[0],))
    assert changed(found, Schedule(regions=(kept, second, rest))).bytes[tanhs[0]] == size
    both = Region(vertices=first.vertices + second.vertices)
    planned = changed(found, Schedule(regions=(both, rest)))
    assert [planned.bytes[v] for v in tanhs] == [size, 0]


def test_sources_and_weight_are_tied_in_place_of_the_product() -> None:
    program, found, graph = graph_of(mlp, ([WIDE] * 2, W), X)
    stages = found.stages(per_layer(graph, 2))
    ways = rewrites(program, NVIDIA, recomputes=True)
    rewriting_ = Rewriting(program=program, summed=bodies.varying(program), ways=ways)
    first, second, rest = steps_of(program, stages)
    one, other = ways.activations
    for step, activation in ((first, one), (second, other)):
        ties = turns.ties(rewriting_, step)
        (tied,) = ties.ahead.values()
        assert tied == activation.sources | {activation.weight[-1]}
        assert activation.product not in ties.inputs
    assert not turns.ties(rewriting_, rest).ahead


def test_in_an_iteration_all_runs_again_though_no_stage_is_checkpointed() -> None:
    def block(w, x):
        return jnp.sum(layer(jnp.tanh(x), w))

    program, found, graph = graph_of(block, WIDE, X)
    stages = found.stages(plain(graph))
    (late,) = activations(program, NVIDIA)
    for place, count in ((Place.TOP, 0), (Place.ITERATION, 1), (Place.BRANCH, 0)):
        ways = rewrites(program, NVIDIA, recomputes=False, place=place)
        assert ways.ordered is ways.runs_again is (place is Place.ITERATION)
        rewriting_ = Rewriting(program=program, summed=bodies.varying(program), ways=ways)
        # The sum reads the product, which an iteration keeps.
        (step,) = steps_of(program, stages, frozenset({late.product}))
        ties = turns.ties(rewriting_, step)
        assert len(ties.ahead) == count


@pytest.mark.slow
@needs_cuda_plugin
@pytest.mark.parametrize("act", [jnp.tanh, jax.scipy.special.erfc, jax.nn.sigmoid])
def test_a_checkpoint_per_layer_takes_what_was_predicted(act) -> None:
    shape = functools.partial(jax.ShapeDtypeStruct, dtype="float32")
    weights = [(shape((1024, 4096)), shape((4096, 1024)))] * 4, shape((1024, 1024))
    arguments = weights, shape((4096, 1024))
    device = get_device("h200")
    program = tracing.trace(functools.partial(mlp, act=act), *arguments)
    of = planning.problem(program, device, gradients=Gradients.CONSUMED)
    objective = Objective(gradients=Gradients.CONSUMED)
    chosen = planning.named_defaults(of)["nothing_saveable, per block"]
    plan = planning.describe(of, program, chosen, objective)
    flat = jax.tree.leaves(arguments)
    compiled = verification.measure_plan(plan, program, flat, device).temporary_bytes
    assert compiled == pytest.approx(plan.predicted.temporary_bytes, rel=0.1)
    # No more than a user's own checkpoints.
    by_hand = functools.partial(mlp, act=act, layer=jax.checkpoint(layer, static_argnums=2))

    def run(constants, given):
        return [by_hand(*jax.tree.unflatten(jax.tree.structure(arguments), given))]

    hand = verification.measure_run(run, program, flat, device, Gradients.CONSUMED)
    assert compiled <= hand.temporary_bytes * 1.01

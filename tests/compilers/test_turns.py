"""Which of a product's gradients comes first, and what is alive then."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from remat_opt import planning
from remat_opt.compilers.compiler import Rules
from remat_opt.compilers.rewrites import Place
from remat_opt.compilers.turns import starts, weight_places
from remat_opt.program import tracing
from remat_opt.schedule import Region, Schedule, plain
from remat_opt.solvers.base import judge
from remat_opt.transform import turns
from remat_opt.transform.steps import prepared
from tests.compiler_graphs import InStep, W, X, graph_of, names
from tests.devices import needs_cuda_plugin
from tests.programs import ones

WIDE = ones(8, 32), ones(32, 8)
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


def test_the_places_of_weights() -> None:
    program = tracing.trace(mlp, ([WIDE] * 2, W), X)
    products = [
        i for i, one in enumerate(program.equations) if one.operation.primitive == "dot_general"
    ]
    # The first reads two arguments.
    assert weight_places(program) == dict.fromkeys(products[1:], 1)


def towers(weights, x, y):
    for w in weights[:2]:
        x = jnp.sin(x @ w)
    for w in weights[2:]:
        y = jnp.sin(y @ w)
    return jnp.sum(x * y)


def test_a_second_tower_waits_for_the_first() -> None:
    program, found, graph = graph_of(towers, [W] * 4, X, X)
    products = [
        i for i, one in enumerate(program.equations) if one.operation.primitive == "dot_general"
    ]
    # The first tower starts the program, and waits for nothing.
    assert starts(program) == {products[2]}
    middle = [v for v, root in enumerate(found.roots) if root < products[2]]
    halves = Schedule(
        regions=(
            Region(vertices=tuple(middle)),
            Region(vertices=tuple(range(len(middle), len(graph)))),
        )
    )
    rewriting_, steps = prepared(program, found.stages(halves), NVIDIA)
    first, second = list(turns.in_turn(rewriting_, steps))[:2]
    assert not first.before
    assert not second.delayed
    tied = second.before
    # Its weight and its input pass a barrier with the first tower's result.
    assert {program.arguments.index(v) for v in tied if v in program.arguments} == {2, 5}
    assert len(tied) == 3
    assert tied[-1] in first.step.outputs


@pytest.mark.parametrize("size", [8, 256])
def test_no_gradient_of_a_table_waits_for_that_of_another(size: int) -> None:
    def loss(weights, x, rows):
        *tables, w = weights
        y = jnp.sin(x @ w)
        return jnp.sum(y * sum(table[rows] for table in tables))

    program, found, graph = graph_of(
        loss, [*[jnp.ones((size, 8))] * 3, W], X, jnp.arange(16) % size
    )
    lookups = [i for i, one in enumerate(program.equations) if one.operation.primitive == "gather"]
    assert starts(program) == {*lookups}
    first = [v for v, root in enumerate(found.roots) if root < lookups[0]]
    chain = Schedule(
        regions=(
            Region(vertices=tuple(first)),
            Region(vertices=tuple(range(len(first), len(graph))), checkpointed=False),
        )
    )
    rewriting_, steps = prepared(program, found.stages(chain), NVIDIA)
    _, second = turns.in_turn(rewriting_, steps)
    # They are looked up behind the first region, but their gradients do not wait.
    assert {program.arguments.index(v) for v in second.delayed[:-1]} == {0, 1, 2}
    assert not second.before


def test_where_a_tower_starts_inside_a_region_the_next_waits_for_the_first_towers_end() -> None:
    program, found, graph = graph_of(towers, [W] * 4, X, X)
    start = min(starts(program))
    # The first region ends with the start, the second with the second tower.
    ends = [v for v, root in enumerate(found.roots) if root <= start]
    first = tuple(range(len(ends)))
    second = tuple(range(len(ends), len(graph) - 1))
    chain = Schedule(
        regions=(
            Region(vertices=first),
            Region(vertices=second),
            Region(vertices=(len(graph) - 1,), checkpointed=False),
        )
    )
    rewriting_, steps = prepared(program, found.stages(chain), NVIDIA)
    first_turn, turn = list(turns.in_turn(rewriting_, steps))[:2]
    step, tied = first_turn.step, turn.before
    assert len(step.outputs) == 2
    # The end of the first tower, which only the last region reads, and the start of the second.
    assert set(tied) == set(step.outputs)


def test_in_an_iteration_gradients_come_in_turn_though_no_stage_is_checkpointed() -> None:
    def block(w, x):
        return jnp.sum(layer(jnp.tanh(x), w))

    program, found, graph = graph_of(block, WIDE, X)
    stages = found.stages(plain(graph))
    for place in Place:
        rewriting_, (step,) = prepared(program, stages, NVIDIA, place=place)
        assert rewriting_.ways.ordered is (place is Place.ITERATION)
        assert bool(turns.ties(rewriting_, step).inputs) is rewriting_.ways.ordered


@pytest.mark.slow
@needs_cuda_plugin
@pytest.mark.parametrize("act", [jnp.tanh, jax.scipy.special.erfc, jax.nn.sigmoid])
def test_a_checkpoint_per_layer_takes_what_was_predicted(act) -> None:
    shape = functools.partial(jax.ShapeDtypeStruct, dtype="float32")
    weights = [(shape((1024, 4096)), shape((4096, 1024)))] * 4, shape((1024, 1024))
    step = InStep(functools.partial(mlp, act=act), weights, shape((4096, 1024)))
    plan = step.plan(planning.named_defaults(step.problem)["nothing_saveable, per block"])
    compiled = step.compiled_bytes(plan)
    assert compiled == pytest.approx(plan.predicted.temporary_bytes, rel=0.1)
    # No more than a user's own checkpoints.
    by_hand = functools.partial(mlp, act=act, layer=jax.checkpoint(layer, static_argnums=2))
    assert compiled <= step.unplanned_bytes(by_hand) * 1.01


@pytest.mark.slow
@pytest.mark.cuda
@needs_cuda_plugin
def test_two_towers_that_meet_in_the_loss_take_what_was_predicted() -> None:
    def block(h, w):
        return h + jax.nn.gelu(h @ w[0]) @ w[1]

    def contrasted(weights, x, y):
        for w in weights[0]:
            x = block(x, w)
        for w in weights[1]:
            y = block(y, w)
        return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(x[:512] @ y.T)))

    shape = functools.partial(jax.ShapeDtypeStruct, dtype="float32")
    weights = [[(shape((512, 2048)), shape((2048, 512)))] * 4] * 2
    step = InStep(contrasted, weights, shape((8192, 512)), shape((512, 512)))
    plan = step.plan()
    assert step.compiled_bytes(plan) == pytest.approx(plan.predicted.temporary_bytes, rel=0.1)


def test_on_a_cpu_lookups_in_a_region_run_one_by_one() -> None:
    """All rows would be there at once, and all their cotangents, also where nothing runs again."""

    def bags(tables, weights, ids):
        found = [jnp.sum(table[ids[:, n]], axis=1) for n, table in enumerate(tables)]
        x = jnp.stack(found, axis=1)
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x)

    count, rows, width = 6, 2048, 32
    tables = [jax.ShapeDtypeStruct((100, width), "float32")] * count
    weights = [jax.ShapeDtypeStruct((width, width), "float32")] * 2
    ids = jax.ShapeDtypeStruct((rows, count, 8), "int32")
    step = InStep(bags, tables, weights, ids, device="cpu")
    graph = step.problem.model.graph
    plan = step.plan(judge(graph, plain(graph)))
    bag = 4 * rows * 8 * width
    spared = step.compiled_bytes(plan, ["starts_in_turn"]) - step.compiled_bytes(plan)
    assert spared >= 2 * bag

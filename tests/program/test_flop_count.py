import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import remat_opt
from remat_opt import _jax_internals as internals
from remat_opt.errors import TraceError
from remat_opt.program.flop_count import forward_flops, gradient_flops

pytestmark = pytest.mark.usefixtures("quick_search")

N = 32
MATRIX = jax.ShapeDtypeStruct((N, N), "float32")
PRODUCT = 2 * N**3


def sines(weights, x):
    for w in weights:
        x = jnp.sin(x @ w)
    return jnp.sum(x)


def recomputed(wrapped, plain, *args, **options) -> int:
    return gradient_flops(wrapped, *args, **options) - gradient_flops(plain, *args, **options)


def test_forward_counts_products_and_additions():
    assert forward_flops(lambda x, y: x @ y + 1, MATRIX, MATRIX) == PRODUCT + N * N


def test_forward_leaves_out_what_no_output_needs():
    def fn(x):
        _ = x @ x
        return x + 1

    assert forward_flops(fn, MATRIX) == N * N


def test_forward_looks_into_nested_jit_and_multiplies_loops():
    @jax.jit
    def step(x, _):
        return x @ x, None

    assert forward_flops(lambda x: lax.scan(step, x, None, length=7)[0], MATRIX) == 7 * PRODUCT


def test_gradient_of_a_chain_of_products_is_three_forward_passes_but_for_one():
    # Each layer: forward, and two products backward; the first needs none for its input.
    flops = gradient_flops(sines, [MATRIX] * 4, MATRIX)
    assert flops == pytest.approx((3 * 4 - 1) * PRODUCT, rel=0.02)


def test_a_checkpoint_round_the_whole_repeats_every_product():
    args = ([MATRIX] * 4, MATRIX)
    # sin needs its input, so that all products but none of the sum run again.
    share = recomputed(jax.checkpoint(sines), sines, *args) / forward_flops(sines, *args)
    assert share == pytest.approx(1.0, abs=0.01)


def test_a_policy_that_keeps_products_repeats_none():
    policy = jax.checkpoint_policies.dots_saveable
    wrapped = jax.checkpoint(sines, policy=policy)
    assert recomputed(wrapped, sines, [MATRIX] * 4, MATRIX) < 0.01 * PRODUCT


def test_keeping_everything_costs_nothing_although_jax_marks_what_is_kept():
    wrapped = jax.checkpoint(sines, policy=jax.checkpoint_policies.everything_saveable)
    closed, _ = internals.make_jaxpr(jax.grad(wrapped), [MATRIX] * 2, MATRIX)
    assert "reduce_precision" in str(closed)
    assert recomputed(wrapped, sines, [MATRIX] * 2, MATRIX) == 0


def test_rounding_to_fewer_bits_is_counted():
    assert forward_flops(lambda x: lax.reduce_precision(x, 8, 7), MATRIX) == N * N


def test_a_checkpoint_in_a_loop_is_counted_for_every_turn():
    def fn(body, w, x):
        return jnp.sum(lax.scan(body, x, None, length=5)[0])

    def layer(w, x, _):
        return jnp.sin(x @ w), None

    def loss(w, x, wrap=lambda f: f):
        return fn(wrap(functools.partial(layer, w)), w, x)

    again = recomputed(functools.partial(loss, wrap=jax.checkpoint), loss, MATRIX, MATRIX)
    # Plain JAX keeps cos(x @ w) and, for the weights, the layer's input.
    assert again == pytest.approx(5 * PRODUCT, rel=0.02)


def test_all_options_of_a_gradient():
    def loss(x, w, depth, *, kind, scale):
        for _ in range(depth):
            x = getattr(jnp, kind)(x @ w)
        return jnp.sum(x) * scale, x

    flops = gradient_flops(
        *(loss, MATRIX, MATRIX, 3),
        argnums=(0, 1),
        has_aux=True,
        static_argnums=2,
        static_argnames="kind",
        kind="sin",
        scale=2.0,
    )
    assert flops == pytest.approx(9 * PRODUCT, rel=0.02)


def test_a_wrong_argument_is_named():
    with pytest.raises(TraceError, match="argnums names argument 5"):
        gradient_flops(sines, [MATRIX], MATRIX, argnums=5)


def test_nothing_is_computed_but_for_shapes():
    huge = jax.ShapeDtypeStruct((1_000_000, 1_000_000), "float32")
    assert gradient_flops(lambda x: jnp.sum(x @ x), huge) > 10**18


def test_contract_dead_code_inside_a_checkpoint_is_left_out():
    # Assumed of JAX: dce_jaxpr cleans the body of a checkpoint equation too.
    def fn(x):
        return jax.checkpoint(lambda y: (jnp.sin(y), y @ y))(x)[0]

    def unclean(x):
        return jax.make_jaxpr(fn)(x)

    live = internals.without_dead_code(unclean(MATRIX))
    assert "sin" in str(live)
    assert "dot_general" not in str(live)


def residual_network(params, x):
    """Convolutions wide enough that they, not what is fused around them, are the work."""
    for block in params:
        y = x
        for kernel in block:
            y = jax.nn.relu(
                lax.conv_general_dilated(
                    *(y, kernel, (1, 1), "SAME"), dimension_numbers=("NHWC", "HWIO", "NHWC")
                )
            )
        x = x + y
    return jnp.sum(x**2)


def multilayer_perceptron(params, x):
    for w, b in params:
        x = jax.nn.relu(x @ w + b)
    return jnp.sum(x**2)


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, "float32")


NETWORKS = {
    "cnn": (residual_network, [[shape(3, 3, 64, 64)] * 2] * 3, shape(2, 16, 16, 64)),
    "mlp": (multilayer_perceptron, [(shape(128, 128), shape(128))] * 8, shape(256, 128)),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("limit", [0.0, 0.2, 0.5, None])
def test_what_a_plan_predicts_to_recompute_is_what_is_counted(name, limit):
    fn, *args = NETWORKS[name]
    plan = remat_opt.make_plan(fn, *args, device="h200", overhead="flops", max_overhead=limit)
    counted = recomputed(remat_opt.apply_plan(plan, fn), fn, *args)
    forward = forward_flops(fn, *args)
    assert plan.predicted.forward_flops == pytest.approx(forward, rel=0.01)
    # The prediction leaves out what the compiler fuses.
    assert counted / forward == pytest.approx(plan.predicted.recomputed_share, abs=0.02)

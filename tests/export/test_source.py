"""Exported code needs no remat_opt, gives the same gradients, and compiles to the same bytes."""

import dataclasses
import functools
import json
import os
import pickle
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_opt
from remat_opt.errors import PlanFileError, RematError
from remat_opt.export import support
from remat_opt.measurement.compilation import attached_device, compiler_options
from remat_opt.program import blocks
from remat_opt.schedule import Loop, Part, Stage
from tests.programs import EXAMPLES, lstm
from tests.rewritten import always_rewritten

pytestmark = pytest.mark.usefixtures("quick_search")

RANDOM = np.random.default_rng(0)


def array(*shape, scale=0.3):
    return RANDOM.normal(size=shape, scale=scale).astype(np.float32)


def mlp(params, x):
    for w in params:
        x = jnp.tanh(x @ w) + jax.nn.relu(x)
    return jnp.mean(x**2)


def rounded_logits(params, x):
    logits = (jnp.sin(x @ params[0]) @ params[1]).astype(jnp.bfloat16).astype(jnp.float32)
    picked = jnp.take_along_axis(logits, jnp.arange(len(x))[:, None] % 3, axis=1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - picked[:, 0])


def reordered(params, x):
    for w in params[:2]:
        x = x + jnp.sin(jnp.take_along_axis(jnp.sin(x @ w), jnp.argsort(x, axis=0), axis=0) @ w)
    return jnp.mean(x**2)


def joined_layers(params, x):
    first = x
    for into, _, out, _ in (params[:4], params[4:]):
        x = jnp.tanh(jnp.concatenate([jnp.sin(x @ into), first], axis=-1) @ jnp.tile(out, (2, 1)))
    return jnp.mean(x**2)


def interactions(params, x):
    for first, second in (params[:2], params[2:4]):
        features = jnp.sin(x @ first).reshape(-1, 4, 8)
        x = jnp.einsum("bif,bjf->bij", features, features).reshape(-1, 8) @ second
    return jnp.mean(x**2)


def gated_layers(params, x):
    for _ in range(2):
        (into, gate, out, _), params = params[:4], params[4:]
        y = jnp.sin(x)
        x = x + (jnp.tanh(y @ gate) * (y @ into)) @ out
    return jnp.mean(x**2)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(4, (3, 3))(x)))
        return nn.relu(x + nn.Conv(4, (3, 3))(y))


class ConvolutionalNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(4):
            x = Block()(x)
        return nn.max_pool(x, (2, 2), strides=(2, 2))


def convolutional(variables, images):
    outputs, updates = ConvolutionalNet().apply(variables, images, mutable="batch_stats")
    return jnp.mean(outputs**2), updates["batch_stats"]


def convolutional_variables():
    init = ConvolutionalNet().init
    shapes = jax.eval_shape(lambda: init(jax.random.key(0), np.ones((1, 8, 8, 4))))
    return jax.tree.map(lambda leaf: array(*leaf.shape), shapes)


def layer_norm(x):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)


def transformer(layers, x, mask):
    for layer in layers:
        q, k, v = jnp.split(layer_norm(x) @ layer["qkv"], 3, axis=-1)
        scores = jnp.where(mask, q @ k.swapaxes(-1, -2), -1e9)
        x = x + jax.nn.softmax(scores) @ v
        x = x + jax.nn.gelu(layer_norm(x) @ layer["up"]) @ layer["down"]
    return jnp.mean(x**2)


def recurrent(params, sequence):
    """A scan backward, with stacked outputs; a plan for 40 % of its memory has parts or chunks."""
    return lstm(params, sequence, reverse=True)


def chunked(weights, x):
    return jnp.mean(jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, weights)[0] ** 2)


def layers(count, width):
    return [
        {
            "qkv": array(width, 3 * width),
            "up": array(width, 4 * width),
            "down": array(4 * width, width),
        }
        for _ in range(count)
    ]


CASES = {
    "mlp": (mlp, ([array(32, 32)] * 8, array(128, 32)), {"budget": 0.4, "overhead": "flops"}),
    "convolutional": (
        convolutional,
        (convolutional_variables(), array(8, 8, 8, 4)),
        {"budget": 0.5, "has_aux": True},
    ),
    "transformer": (
        transformer,
        (layers(3, 16), array(4, 32, 16), np.tril(np.ones((32, 32), bool))),
        {"budget": 0.5},
    ),
    "recurrent": (
        recurrent,
        ({"input": array(8, 64), "state": array(16, 64), "bias": array(64)}, array(48, 8, 8)),
        {"budget": 0.4},
    ),
    "chunked": (chunked, (array(64, 16, 16), array(64, 16)), {"budget": 0.35}),
}

# Runs in a process in which importing remat_opt fails.
ELSEWHERE = """
import importlib.util, json, pickle, sys
sys.modules["remat_opt"] = None
import jax, numpy as np
found = {}
for name, path, args, has_aux, options in pickle.load(open(sys.argv[1], "rb")):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    gradient = jax.jit(jax.grad(getattr(module, name), has_aux=has_aux), compiler_options=options)
    compiled = gradient.lower(*args).compile()
    leaves = [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(compiled(*args))]
    found[name] = compiled.memory_analysis().temp_size_in_bytes, leaves
json.dump(found, sys.stdout)
"""


@pytest.fixture(scope="module")
def planned():
    return {
        name: (remat_opt.optimal_remat(fn, device="cpu", **options), args, options)
        for name, (fn, args, options) in CASES.items()
    }


@pytest.fixture(scope="module")
def sources(planned):
    # Made on request: the fast tests use two.
    return functools.cache(lambda name: planned[name][0].to_source(*planned[name][1]))


@pytest.fixture(scope="module")
def elsewhere(planned, sources, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    tasks = []
    for name, (_, args, options) in planned.items():
        sources(name).save(folder / f"{name}.py")
        arguments = jax.tree.map(np.asarray, args)
        has_aux = options.get("has_aux", False)
        compiled_with = compiler_options(attached_device())
        tasks.append((name, str(folder / f"{name}.py"), arguments, has_aux, compiled_with))
    with open(folder / "tasks", "wb") as file:
        pickle.dump(tasks, file)
    run = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(folder / "tasks")],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.parametrize("name", CASES)
def test_without_remat_opt_it_compiles_to_the_same_bytes(name, planned, elsewhere):
    fn, args, options = planned[name]
    gradient = jax.grad(fn, has_aux=options.get("has_aux", False))
    jitted = jax.jit(gradient, compiler_options=compiler_options(attached_device()))
    compiled = jitted.lower(*args).compile()
    temporary_bytes, leaves = elsewhere[name]
    assert temporary_bytes == compiled.memory_analysis().temp_size_in_bytes
    plain = jax.jit(jax.grad(fn.__wrapped__, has_aux=options.get("has_aux", False)))
    assert temporary_bytes < plain.lower(*args).compile().memory_analysis().temp_size_in_bytes
    for here, there in zip(jax.tree.leaves(compiled(*args)), leaves, strict=True):
        np.testing.assert_allclose(there, here, rtol=1e-6, atol=1e-7)


def test_code_read_back_gives_the_same_gradient():
    fn, args, options = CASES["mlp"]
    decorated = remat_opt.optimal_remat(fn, device="cpu", **options)
    here, there = (
        jax.jit(jax.grad(of))(*args) for of in (decorated, decorated.to_source(*args).load())
    )
    for one, other in zip(here, there, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("fn", "device", "written"),
    [
        (gated_layers, "h200", "stored(sin"),
        (rounded_logits, "v5e", "summed("),
        (reordered, "h200", "of_flat("),
        (joined_layers, "v5e", "in_pieces("),
        (interactions, "v5e", "symmetric("),
    ],
)
def test_what_is_written_in_another_way_gives_the_same_gradient(fn, device, written):
    args = [array(8, 8)] * 8, array(256, 8)
    least = remat_opt.make_plan(fn, *args, device=device)
    # So small, it may gain nothing.
    planned = remat_opt.apply_plan(dataclasses.replace(least, unchanged=False), fn)
    with always_rewritten():
        source = planned.to_source(*args)
        here, there = (jax.jit(jax.grad(of))(*args) for of in (planned, source.load()))
    assert written in source.text
    for one, other, plain in zip(here, there, jax.jit(jax.grad(fn))(*args), strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(one, plain, rtol=1e-4, atol=1e-6)


def test_parts_and_chunks_compile_to_the_same_bytes():
    def loss(weights, x):
        def layer(h, w):
            return h + jnp.tanh(h @ w), jnp.sum(h)

        h, sums = jax.lax.scan(layer, x, weights)
        return jnp.mean(h**2) + jnp.sum(sums)

    args = (array(12, 16, 16), array(64, 16))
    plan = remat_opt.make_plan(loss, *args, device="cpu", max_overhead=1.0)
    (loop,) = plan.loops
    leaf = loop.parts[0]
    while leaf.inside:
        leaf = leaf.inside[0]
    three, one, four = (dataclasses.replace(leaf, length=length) for length in (3, 1, 4))
    parts = (Part(length=8, inside=(three, one)), four)
    plan = dataclasses.replace(plan, loops=(Loop(root=loop.root, parts=parts),))
    found = []
    for fn in (
        remat_opt.apply_plan(plan, loss),
        remat_opt.to_source(plan, loss, *args).load(),
    ):
        options = compiler_options(attached_device())
        compiled = jax.jit(jax.grad(fn), compiler_options=options).lower(*args).compile()
        found.append((compiled.memory_analysis().temp_size_in_bytes, compiled(*args)))
    (here, gradient), (there, exported) = found
    assert here == there
    np.testing.assert_array_equal(gradient, exported)


def test_the_cases_hold_every_form_of_loop(sources):
    # For a loop in one part without chunks, the code does not say what derivatives reach.
    assert "reach=(" in sources("recurrent").text
    assert "jax.checkpoint(" in sources("chunked").text


def test_reads_as_the_plan(sources):
    text = sources("mlp").text
    assert text.startswith('"""mlp, with what is kept for its gradient and what is computed again')
    assert "  params[*]: float32[32, 32], 8 times\n" in text
    assert "policy=jax.checkpoint_policies.save_only_these_names(" in text
    assert "# test_source.py:" in text


def depth(params, x):
    """Layers that call the user's own function."""

    def normalized(x, scale):
        return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale

    def layer(params, x):
        y = jnp.tanh(normalized(x, params["first"]) @ params["up"])
        return x + normalized(y @ params["down"], params["second"])

    for of_layer in params:
        x = layer(of_layer, x)
    return jnp.mean(x**2)


def deep_arguments(count):
    kinds = {"first": (16,), "up": (16, 32), "down": (32, 16), "second": (16,)}
    layer = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in kinds.items()}
    return [layer] * count, jax.ShapeDtypeStruct((64, 16), "float32")


def own_lines(source):
    """The lines that are not helpers."""
    functions = source.text.split("\n\n\n")
    return [
        line
        for text in functions[1:]
        if not hasattr(support, text.removeprefix("def ").partition("(")[0])
        for line in text.splitlines()
    ]


def one_region_a_layer(count):
    """A plan for ``depth`` in which every layer is a region that keeps its product."""
    args = deep_arguments(count)
    plan = remat_opt.make_plan(depth, *args, budget=0.6, device="cpu")
    program = remat_opt.optimal_remat(depth).program(*args)
    layers = blocks.blocks(program)
    assert len(layers) == count
    stages = [
        Stage(
            roots=tuple(layer),
            kept=tuple(n for n in layer if program.equations[n].operation.primitive == "tanh"),
            checkpointed=True,
        )
        for layer in layers
    ]
    last = tuple(range(layers[-1].stop, len(program.equations)))
    stages.append(Stage(roots=last, kept=(), checkpointed=False))
    return dataclasses.replace(plan, stages=tuple(stages), loops=()), args


def test_layers_that_are_the_same_are_written_once_and_called_in_a_loop():
    found = {}
    for count in (4, 6):
        plan, args = one_region_a_layer(count)
        source = remat_opt.to_source(plan, depth, *args)
        lines = own_lines(source)
        assert sum("lax.tanh" in line for line in lines) <= 2
        assert "def layer(" in source.text
        assert "def normalized(" in source.text
        # The first layer reads an argument, which has no derivative.
        assert f"    for i in range(1, {count}):" in lines
        found[count] = len(lines)
    assert found[4] == found[6] < 120


def test_regions_in_a_region_keep_by_names_of_their_own():
    # All layers are one function; what one region keeps, the region around it must recompute.
    args = [array(32, 32)] * 4, array(128, 32)
    plan = remat_opt.make_plan(mlp, *args, device="cpu", budget=1.0)
    layers = [tuple(range(4 * n, 4 * n + 4)) for n in range(4)]
    inner = [Stage(roots=layer, kept=layer[1:2], checkpointed=True) for layer in layers[:3]]
    outer = Stage(roots=sum(layers[:3], ()), kept=(9, 11), checkpointed=True, inside=tuple(inner))
    last = Stage(roots=(*layers[3], 16, 17, 18), kept=(), checkpointed=False)
    plan = dataclasses.replace(plan, stages=(outer, last), loops=())
    gradients = [
        jax.make_jaxpr(jax.grad(loss))(*args)
        for loss in (remat_opt.to_source(plan, mlp, *args).load(), remat_opt.apply_plan(plan, mlp))
    ]
    exported, decorated = (str(one).count("= dot_general") for one in gradients)
    assert exported == decorated


def test_functions_are_named_after_modules(sources):
    lines = sources("convolutional").text.splitlines()
    names = {line.split("(")[0].removeprefix("def ") for line in lines if line.startswith("def ")}
    assert any(name.startswith("block") for name in names)


def test_without_structure_every_region_is_a_function():
    def loss(w, x):
        for n in range(1, 6):
            x = jnp.tanh(x @ w[: 16 - n, : 15 - n])
        return jnp.mean(x**2)

    args = array(16, 16), array(64, 15)
    plan = remat_opt.make_plan(loss, *args, device="cpu", max_overhead=1.0)
    source = remat_opt.to_source(plan, loss, *args)
    assert source.text.count("def region_") >= len(plan.stages)
    np.testing.assert_allclose(
        jax.jit(jax.grad(source.load()))(*args),
        jax.jit(jax.grad(loss))(*args),
        rtol=1e-5,
        atol=1e-6,
    )


def test_asks_for_nothing_but_jax_and_numpy(sources):
    for name in ("mlp", "recurrent"):
        text = sources(name).text
        lines = [line for line in text.splitlines() if line.startswith(("import", "from"))]
        roots = {line.split()[1].partition(".")[0] for line in lines}
        assert roots <= {"__future__", "collections", "functools", "jax", "numpy", "typing"}


REFUSED = {
    "callback_without_effect": "pure_callback cannot be written as code",
    "custom_vjp": "custom_vjp_call cannot be written as code",
    "custom_vjp_symbolic_zeros": "custom_vjp_call cannot be written as code",
    "flax_nnx": "flax.nnx modules, which code cannot hold",
    "linear_algebra": "custom_linear_solve cannot be written as code",
}
#: Those whose arguments an exported function takes in a different way.
OTHER_ARGUMENTS = {"static_arguments", "loop_differentiated_forward"}


# Whether code has the equations and results of a program is checked wherever it is written.
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(EXAMPLES) - set(REFUSED) - OTHER_ARGUMENTS))
def test_gives_the_same_gradients(name):
    example = EXAMPLES[name]()
    fn = remat_opt.optimal_remat(example.fn, device="cpu", **example.options)
    exported = fn.to_source(*example.args, **example.kwargs).load()

    def result(of):
        gradient = jax.value_and_grad(of, example.argnums, example.has_aux, allow_int=True)
        return gradient(*example.args, **example.kwargs)

    here, there = result(fn), result(exported)
    assert jax.tree.structure(here) == jax.tree.structure(there)
    # Called without jit, one is compiled as a whole and the other equation by equation.
    rounding = 2e-3 if name == "bfloat16" else 1e-5
    numbers = [
        np.abs(leaf).max()
        for leaf in map(jnp.asarray, jax.tree.leaves(here))
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and leaf.size
    ]
    # What cancels, like a bias before a normalization, is off in proportion to its terms.
    size = max(numbers)
    for one, other in zip(jax.tree.leaves(here), jax.tree.leaves(there), strict=True):
        if jnp.issubdtype(jnp.asarray(one).dtype, jnp.inexact):
            np.testing.assert_allclose(one, other, rtol=rounding, atol=rounding * size)
        elif not jnp.issubdtype(jnp.asarray(one).dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_names_what_it_cannot_write(name):
    example = EXAMPLES[name]()
    fn = remat_opt.optimal_remat(example.fn, device="cpu", **example.options)
    with pytest.raises(RematError, match=REFUSED[name]):
        fn.to_source(*example.args, **example.kwargs)


def test_a_plan_from_elsewhere_is_written_for_its_own_program_alone():
    fn, args, options = CASES["mlp"]
    plan = remat_opt.make_plan(fn, *args, **options, device="cpu")
    assert remat_opt.to_source(plan, fn, *args).text.count("jax.checkpoint,") > 1
    with pytest.raises(PlanFileError, match="made for another program"):
        remat_opt.to_source(plan, fn, [args[0][0]] * 2, args[1])


def test_a_region_without_names_comes_before_the_same_one_with_names():
    fn, args, _ = CASES["mlp"]
    plan = remat_opt.make_plan(fn, *args, budget=0.7, device="cpu")
    first, second = (stage for stage in plan.stages[:2])
    assert len(first.roots) == len(second.roots)
    assert (first.kept, first.checkpointed) == ((), False)
    assert second.kept
    exported = remat_opt.to_source(plan, fn, *args).load()
    here, there = (jax.jit(jax.grad(of))(*args) for of in (fn, exported))
    for one, other in zip(here, there, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_constants_are_handed_in():
    scales = jnp.asarray(array(100))

    @remat_opt.optimal_remat(device="cpu")
    def loss(w):
        return jnp.sum(jnp.sin(w * scales))

    source = loss.to_source(scales)
    assert "def loss(w, *, constants):" in source.text
    assert "0. float32[100]" in source.text
    np.testing.assert_array_equal(
        jax.grad(source.load())(scales), jax.grad(loss.__wrapped__)(scales)
    )


def test_another_number_of_arrays_is_refused():
    source = remat_opt.optimal_remat(mlp, device="cpu").to_source([array(4, 4)], array(4, 4))
    with pytest.raises(ValueError, match="2 arrays are wanted, not 3"):
        source.load()([array(4, 4)] * 2, array(4, 4))

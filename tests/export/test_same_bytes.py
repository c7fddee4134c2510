"""Exported code compiles to the bytes of the decorated function, for any device."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import remat_opt
from tests.devices import needs_cuda_plugin, needs_libtpu
from tests.lowered import operations
from tests.programs import lstm

pytestmark = pytest.mark.usefixtures("quick_search")

Array = jax.ShapeDtypeStruct


def residual_mlp(layers, x):
    for layer in layers:
        y = x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
        x = x + jax.nn.gelu(y @ layer["up"] + layer["bias"]) @ layer["down"]
    return jnp.mean(x**2)


def towers(both, inputs):
    """The second one starts anew, from arguments."""
    return sum(map(residual_mlp, both, inputs))


def noisy(layers, inputs):
    """Dropout in each layer, drawn from keys that one is split into."""
    x, keys = inputs["x"], jax.random.split(inputs["key"], len(layers))
    for layer, key in zip(layers, keys, strict=True):
        y = jax.nn.relu(x @ layer["up"]) @ layer["down"]
        x = x + jnp.where(jax.random.bernoulli(key, 0.9, y.shape), y / 0.9, 0)
    return jnp.mean(x**2)


class Block(nn.Module):
    channels: int

    @nn.compact
    def __call__(self, x):
        y = nn.Conv(self.channels, (3, 3), use_bias=False)(x)
        y = nn.relu(nn.BatchNorm(use_running_average=False)(y))
        y = nn.Conv(self.channels, (3, 3), use_bias=False)(y)
        return nn.relu(x + nn.BatchNorm(use_running_average=False)(y))


class ConvolutionalNet(nn.Module):
    @nn.compact
    def __call__(self, images):
        x = nn.relu(nn.Conv(16, (3, 3))(images))
        for _ in range(4):
            x = Block(16)(x)
        x = nn.max_pool(nn.Conv(8, (3, 3))(x), (2, 2), strides=(2, 2))
        return nn.Dense(10)(jnp.mean(x, axis=(1, 2)))


def convolutional(variables, images):
    logits, updates = ConvolutionalNet().apply(variables, images, mutable="batch_stats")
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1)), updates["batch_stats"]


def layer_norm(x, scale):
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale


def attention(layer, x):
    batch, length, width = x.shape
    qkv = (x @ layer["qkv"]).reshape(batch, length, 3, 4, width // 4)
    query, key, value = (qkv[:, :, n] for n in range(3))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(width // 4)
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)
    return mixed.reshape(batch, length, width) @ layer["out"]


def transformer(params, tokens):
    x = params["tokens"][tokens]
    for layer in params["layers"]:
        x = x + attention(layer, layer_norm(x, layer["first"]))
        x = x + jax.nn.gelu(layer_norm(x, layer["second"]) @ layer["up"]) @ layer["down"]
    return jnp.mean(jax.nn.logsumexp(x @ params["tokens"].T, axis=-1))


def array(*shape):
    return Array(shape, "float32")


def _variables():
    shapes = jax.eval_shape(
        ConvolutionalNet().init, jax.random.key(0), jnp.ones((1, 32, 32, 3), "float32")
    )
    return shapes


#: Functions, their arguments, and whether they have auxiliary results.
NETWORKS = {
    "residual_mlp": (
        residual_mlp,
        (
            [{"up": array(256, 1024), "bias": array(1024), "down": array(1024, 256)}] * 6,
            array(2048, 256),
        ),
        False,
    ),
    "towers": (
        towers,
        (
            [[{"up": array(64, 256), "bias": array(256), "down": array(256, 64)}] * 3] * 2,
            [array(512, 64)] * 2,
        ),
        False,
    ),
    "noisy": (
        noisy,
        (
            [{"up": array(64, 256), "down": array(256, 64)}] * 4,
            {"x": array(512, 64), "key": jax.eval_shape(jax.random.key, 0)},
        ),
        False,
    ),
    "convolutional": (convolutional, (_variables(), array(16, 64, 64, 3)), True),
    "transformer": (
        transformer,
        (
            {
                "tokens": array(512, 128),
                "layers": [
                    {
                        "first": array(128),
                        "qkv": array(128, 384),
                        "out": array(128, 128),
                        "second": array(128),
                        "up": array(128, 512),
                        "down": array(512, 128),
                    }
                ]
                * 4,
            },
            Array((8, 128), "int32"),
        ),
        False,
    ),
    "recurrent": (
        lstm,
        (
            {"input": array(64, 512), "state": array(128, 512), "bias": array(512)},
            array(64, 512, 64),
        ),
        False,
    ),
}

DEVICES = {
    "cpu": [pytest.mark.slow],
    "v5e": [pytest.mark.slow, pytest.mark.tpu, needs_libtpu],
    "h200": [pytest.mark.slow, pytest.mark.cuda, needs_cuda_plugin],
}
#: Networks of a device that the everyday tests look at.
EVERYDAY = [("cpu", "recurrent"), ("v5e", "convolutional"), ("h200", "towers")]


def marks(device):
    """Each JAX takes those for CPU and TPU."""
    return [*DEVICES[device], *[pytest.mark.versions] * (device != "h200")]


def adam_step(loss, has_aux):
    """A step of Adam as a function of (parameters, moments, batch)."""

    def step(params, moments, batch):
        gradient = jax.grad(loss, has_aux=has_aux, allow_int=True)(params, batch)
        gradient = gradient[0] if has_aux else gradient

        def update(parameter, moment, slope):
            first, second = moment
            first, second = 0.9 * first + 0.1 * slope, 0.99 * second + 0.01 * slope**2
            return parameter - 1e-3 * first / (jnp.sqrt(second) + 1e-8), (first, second)

        is_pair = lambda node: isinstance(node, tuple)  # noqa: E731
        both = jax.tree.map(update, params, moments, gradient)
        return (
            jax.tree.map(lambda one: one[0], both, is_leaf=is_pair),
            jax.tree.map(lambda one: one[1], both, is_leaf=is_pair),
        )

    return step


@pytest.mark.parametrize(
    ("device", "name"),
    [
        *EVERYDAY,
        # Without the plug-in for CUDA, nothing else looks at these.
        *(
            pytest.param("h200", name, marks=pytest.mark.slow)
            for name in NETWORKS
            if ("h200", name) not in EVERYDAY
        ),
    ],
)
def test_is_the_same_program(device, name):
    """Up to names, what is compiled is the same to the last operation, and in the same order."""
    fn, (params, batch), has_aux = NETWORKS[name]
    plan = remat_opt.make_plan(fn, params, batch, budget=0.7, device=device, has_aux=has_aux)

    exported = plan.to_source(fn, params, batch, has_aux=has_aux).load()
    decorated = remat_opt.apply_plan(plan, fn, has_aux=has_aux)
    ours, theirs = (
        operations(jax.grad(loss, has_aux=has_aux, allow_int=True), params, batch)
        for loss in (exported, decorated)
    )
    assert ours == theirs


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(
    "device", [pytest.param(device, marks=marks(device)) for device in DEVICES]
)
def test_compiles_to_the_same_bytes(device, name):
    """What is the same program, up to names, is not compiled for other devices: that takes long."""
    fn, (params, batch), has_aux = NETWORKS[name]
    plan = remat_opt.make_plan(fn, params, batch, budget=0.45, device=device, has_aux=has_aux)
    decorated = remat_opt.apply_plan(plan, fn, has_aux=has_aux)
    exported = remat_opt.to_source(plan, fn, params, batch, has_aux=has_aux).load()
    moments = jax.tree.map(lambda one: (one, one), params)

    def gradient(loss):
        return jax.grad(loss, has_aux=has_aux, allow_int=True), (params, batch), ()

    def step(loss):
        return adam_step(loss, has_aux), (params, moments, batch), (0, 1)

    def temporary_bytes(fn, args, donated):
        return remat_opt.measure(fn, *args, device=device, donate_argnums=donated).temporary_bytes

    for around in (gradient, step):
        ours, theirs = around(exported), around(decorated)
        if device == "cpu" or operations(ours[0], *ours[1]) != operations(theirs[0], *theirs[1]):
            assert temporary_bytes(*ours) == temporary_bytes(*theirs)

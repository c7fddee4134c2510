"""The benchmark networks are the published ones, and wrapping their blocks changes no result."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks.networks import (
    BLOCK_POLICIES,
    TUNED,
    Network,
    build,
    default_batch,
    densenet,
    gpt,
    inception,
    lstm,
    resnet,
    unet,
    vit,
)
from tests.lowered import operations


def double_convolution(inputs: int, width: int) -> int:
    return 9 * inputs * width + 9 * width**2 + 2 * width


# ResNets, DenseNet, Inception (27,161,264 less those of the auxiliary classifier) and vision
# transformer: torchvision's published counts. U-Net: the paper gives none; the two convolutions of
# each stage, the transposed convolutions between them, and the last layer. LSTM: per layer, four
# gates that read input and state. GPT: tokens and positions, per layer two norms and the four dense
# maps of 12 width**2 weights and 9 width biases, and the final norm.
PARAMETER_COUNTS = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "densenet121": 7_978_856,
    "inception_v3": 23_834_568,
    "vit_b16": 86_567_656,
    "unet": double_convolution(1, 64)
    + sum(double_convolution(width, 2 * width) for width in (64, 128, 256, 512))
    + sum(double_convolution(2 * width, width) for width in (64, 128, 256, 512))
    + sum(4 * 2 * width * width + width for width in (64, 128, 256, 512))
    + (64 + 1) * 2,
    "lstm": 4 * 1024 * (50 + 1024 + 1) + 3 * (4 * 1024 * (1024 + 1024 + 1)) + (1024 + 1) * 5000,
    "gpt": (32_000 + 1024) * 1024 + 12 * (12 * 1024**2 + 13 * 1024) + 2 * 1024,
}

SMALL_GPT = gpt.Size(layers=2, width=16, heads=2, vocabulary=11, length=6)
SMALL: dict[str, tuple[Any, Any]] = {
    "resnet": (resnet, resnet.Size(blocks=(1, 1), block=resnet.BasicBlock, image=16, classes=5)),
    "densenet": (densenet, densenet.Size(layers=(2, 2), growth=4, image=16, classes=5)),
    "inception": (inception, inception.Size(pooled=(4,), inner=(), last=0, image=75, classes=5)),
    "unet": (unet, unet.Size(widths=(4, 8), image=20, classes=3)),
    "vit": (vit, vit.Size(layers=2, width=16, heads=2, patch=4, image=8, classes=5)),
    "lstm": (lstm, lstm.Size(layers=2, width=8, inputs=3, classes=5, steps=4)),
    "gpt": (gpt, SMALL_GPT),
}
SLOW = [pytest.mark.slow]
#: Large, and of a kind of which the default tests trace a smaller one.
LARGE = {"resnet34", "resnet101", "resnet152", "densenet121", "inception_v3"}
EACH = [pytest.param(name, marks=SLOW) if name in LARGE else name for name in TUNED]
# Those with large compilations even when small are slow.
FAMILIES = [pytest.param(name, marks=SLOW) if name != "lstm" else name for name in sorted(SMALL)]
built = functools.cache(build)


def small(family: str, block_policy: str | None) -> Network:
    module, size = SMALL[family]
    network: Network = module.network("small", size, 2, block_policy)
    return network


@functools.cache
def made(family: str) -> tuple[Any, Any]:
    # One compilation; drawing each parameter by itself would take dozens.
    network = small(family, None)
    arguments: tuple[Any, Any] = jax.jit(network.make_arguments, static_argnums=0)(0)
    return arguments


def types(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


def test_every_network_has_a_published_parameter_count() -> None:
    assert set(PARAMETER_COUNTS) == set(TUNED)


@pytest.mark.parametrize("name", EACH)
def test_parameter_count(name: str) -> None:
    params, _ = built(name, 2).arguments
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)) == PARAMETER_COUNTS[name]


@pytest.mark.parametrize("block_policy", [None, pytest.param("nothing_saveable", marks=SLOW)])
@pytest.mark.parametrize("name", EACH)
def test_loss_is_a_float32_scalar(name: str, block_policy: str | None) -> None:
    network = built(name, 2) if block_policy is None else build(name, 2, block_policy=block_policy)
    result = jax.eval_shape(network.loss_fn, *network.arguments)
    if network.has_aux:
        loss, batch_stats = result
        assert types(batch_stats) == types(network.arguments[1]["batch_stats"])
    else:
        loss = result
    assert (loss.shape, loss.dtype) == ((), jnp.float32)


def test_arguments_are_shapes_and_follow_the_batch() -> None:
    network = build("resnet50", 3)
    leaves = jax.tree.leaves(network.arguments)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert network.arguments[1]["images"].shape == (3, 224, 224, 3)
    assert build("gpt", 3).arguments[1]["tokens"].shape == (3, 1024)
    assert build("lstm", 3).arguments[1]["inputs"].shape == (3, 64, 50)


def test_every_network_has_a_batch_of_its_own() -> None:
    assert {name: default_batch(name) for name in TUNED} == {
        "resnet18": 64,
        "resnet34": 64,
        "resnet50": 64,
        "resnet101": 32,
        "resnet152": 16,
        "densenet121": 32,
        "inception_v3": 32,
        "unet": 8,
        "vit_b16": 64,
        "lstm": 64,
        "gpt": 8,
    }


def test_unet_labels_the_middle_of_an_image_as_in_the_paper() -> None:
    network = build("unet", 3)
    assert network.arguments[1]["images"].shape == (3, 572, 572, 1)
    assert network.arguments[1]["labels"].shape == (3, 388, 388)


@pytest.mark.slow
def test_inception_reaches_the_published_shapes() -> None:
    # Table 1 of the paper: 35x35, 17x17, 8x8; 2,048 channels before the classifier.
    network = built("inception_v3", 2)
    assert network.arguments[1]["images"].shape == (2, 299, 299, 3)
    text = str(jax.make_jaxpr(network.loss_fn)(*network.arguments))
    for shape in ("2,35,35,288", "2,17,17,768", "2,8,8,1280", "2,8,8,2048"):
        assert f"f32[{shape}]" in text


@pytest.mark.slow
def test_densenet_layers_read_all_features_before_them() -> None:
    network = built("densenet121", 2)
    text = str(jax.make_jaxpr(network.loss_fn)(*network.arguments))
    for shape in ("2,56,56,256", "2,28,28,512", "2,14,14,1024", "2,7,7,1024"):
        assert f"f32[{shape}] = concatenate" in text


def test_gpt_parameters_are_bfloat16() -> None:
    params, _ = build("gpt", 1).arguments
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        pytest.param("resnet50", 16, marks=pytest.mark.slow),
        ("resnet18", 8),
        pytest.param("densenet121", 58, marks=pytest.mark.slow),
        pytest.param("inception_v3", 11, marks=pytest.mark.slow),
        ("unet", 9),
        pytest.param("vit_b16", 12, marks=pytest.mark.slow),
        ("lstm", 64),
        ("gpt", 12),
    ],
)
def test_block_policy_wraps_each_block_once(name: str, blocks: int) -> None:
    network = build(name, 2, block_policy="dots_saveable")
    text = str(jax.make_jaxpr(network.loss_fn)(*network.arguments))
    assert len(re.findall(r"\bcheckpoint\[|\bremat2?\[", text)) == blocks


@pytest.mark.parametrize("block_policy", BLOCK_POLICIES)
def test_block_policies_exist(block_policy: str) -> None:
    assert callable(getattr(jax.checkpoint_policies, block_policy))


@pytest.mark.parametrize("family", FAMILIES)
def test_block_policy_changes_no_result(family: str) -> None:
    plain, wrapped = (small(family, policy) for policy in (None, "nothing_saveable"))
    assert operations(plain.loss_fn, *plain.arguments) == operations(
        wrapped.loss_fn, *wrapped.arguments
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_made_arguments_have_the_promised_shapes(family: str) -> None:
    assert types(made(family)) == types(small(family, None).arguments)


@pytest.mark.slow
def test_gpt_does_not_look_ahead() -> None:
    network = small("gpt", None)
    params, batch = made("gpt")
    # Larger embeddings, so that logits differ by more than rounding.
    params = {**params, "tokens": 50 * params["tokens"]}

    loss = jax.jit(network.loss_fn)

    def first_position(tokens: jax.Array) -> float:
        # Only the first target differs, so every other position's loss drops out.
        first, second = (batch["targets"].at[:, 0].set(target) for target in (3, 7))
        return float(
            loss(params, {"tokens": tokens, "targets": first})
            - loss(params, {"tokens": tokens, "targets": second})
        )

    def change(position: int) -> jax.Array:
        tokens: jax.Array = batch["tokens"]
        return tokens.at[:, position].set((tokens[:, position] + 1) % SMALL_GPT.vocabulary)

    before = first_position(batch["tokens"])
    assert first_position(change(-1)) == pytest.approx(before, abs=1e-5)
    assert abs(first_position(change(0)) - before) > 1e-2


def test_unknown_network() -> None:
    message = r"unknown network 'resnet51': give one of resnet18, .*gpt, .*deeplab"
    with pytest.raises(ValueError, match=message):
        build("resnet51", 2)
    with pytest.raises(ValueError, match=message):
        default_batch("resnet51")


@pytest.mark.parametrize("block_policy", ["dots", "save_only_these_names"])
def test_unknown_block_policy(block_policy: str) -> None:
    message = rf"unknown block policy '{block_policy}': give one of everything_saveable, .* None"
    with pytest.raises(ValueError, match=message):
        build("gpt", 2, block_policy=block_policy)


def test_batch_must_be_positive() -> None:
    with pytest.raises(ValueError, match=r"batch is 0: give at least 1 example"):
        build("gpt", 0)

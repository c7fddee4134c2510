"""Models of Keras and KerasHub on JAX, written by others, which nothing here was made for.

Classifiers of images as they come, and small language, speech and image models: real widths, two to
twelve layers. The packages are no dependency; ``benchmarks/README.md`` says how to install them.
Dropout and batch statistics are on, and everything is in float32. A classifier's loss is its
cross-entropy; that of the others, which have no head, the mean square of what they return.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.networks.record import Contents, Network, random_batch

#: What is in a batch of so many examples.
_Batch = Callable[[int], Contents]

_SIDE = 224
_WORDS = 32_000
_WIDE = {"num_heads": 12, "hidden_dim": 768, "intermediate_dim": 3072}


def _tokens(length: int, *names: str) -> _Batch:
    """Batches of integers: tokens and masks."""
    return lambda batch: dict.fromkeys(names, ((batch, length), 256))


_TEXT = "token_ids", "padding_mask"
_PAIR = tuple(f"{side}_{name}" for side in ("encoder", "decoder") for name in _TEXT)

#: Classifiers of images, with the examples in a batch.
_CLASSIFIERS = {
    "convnext_tiny": ("ConvNeXtTiny", 32),
    "efficientnetv2_b0": ("EfficientNetV2B0", 32),
    "mobilenetv3_large": ("MobileNetV3Large", 32),
    "nasnet_mobile": ("NASNetMobile", 32),
    "resnet50v2": ("ResNet50V2", 32),
    "xception": ("Xception", 32),
}

# name -> class, its arguments, what is in a batch, examples in one
_BACKBONES: dict[str, tuple[str, dict[str, Any], _Batch, int]] = {
    "bert": (
        "BertBackbone",
        {"vocabulary_size": 30_522, "num_layers": 6, **_WIDE},
        _tokens(512, *_TEXT, "segment_ids"),
        32,
    ),
    "deberta": (
        "DebertaV3Backbone",
        {"vocabulary_size": _WORDS, "num_layers": 4, "bucket_size": 128, **_WIDE},
        _tokens(256, *_TEXT),
        16,
    ),
    "llama3": (
        "Llama3Backbone",
        {
            "vocabulary_size": _WORDS,
            "num_layers": 4,
            "num_query_heads": 16,
            "num_key_value_heads": 4,
            "hidden_dim": 1024,
            "intermediate_dim": 3072,
        },
        _tokens(2048, *_TEXT),
        4,
    ),
    "gemma3": (
        "Gemma3Backbone",
        {
            "vocabulary_size": _WORDS,
            "image_size": None,
            "num_layers": 6,
            "num_query_heads": 8,
            "num_key_value_heads": 2,
            "hidden_dim": 1024,
            "intermediate_dim": 4096,
            "head_dim": 128,
            "sliding_window_size": 512,
            "vision_encoder": None,
        },
        _tokens(2048, *_TEXT),
        4,
    ),
    "mixtral": (
        "MixtralBackbone",
        {
            "vocabulary_size": _WORDS,
            "num_layers": 3,
            "num_query_heads": 16,
            "num_key_value_heads": 4,
            "hidden_dim": 1024,
            "intermediate_dim": 2048,
            "num_experts": 4,
            "top_k": 2,
        },
        _tokens(1024, *_TEXT),
        2,
    ),
    "bart": (
        "BartBackbone",
        {"vocabulary_size": 50_265, "num_layers": 4, **_WIDE},
        _tokens(256, *_PAIR),
        16,
    ),
    "whisper": (
        "WhisperBackbone",
        {
            "vocabulary_size": 51_864,
            "num_layers": 4,
            "num_heads": 6,
            "hidden_dim": 384,
            "intermediate_dim": 1536,
            "max_encoder_sequence_length": 1000,
            "max_decoder_sequence_length": 256,
        },
        lambda batch: {
            "encoder_features": ((batch, 1000, 80), None),
            **_tokens(256, "decoder_token_ids", "decoder_padding_mask")(batch),
        },
        8,
    ),
    "segformer": (
        "MiTBackbone",
        {
            "layerwise_num_heads": [1, 2, 5, 8],
            "num_layers": 4,
            "hidden_dims": [32, 64, 160, 256],
            "image_shape": (_SIDE, _SIDE, 3),
            "max_drop_path_rate": 0.1,
            "layerwise_sr_ratios": [8, 4, 2, 1],
            "layerwise_patch_sizes": [7, 3, 3, 3],
            "layerwise_strides": [4, 2, 2, 2],
            "layerwise_depths": [2, 2, 2, 2],
        },
        lambda batch: {"images": ((batch, _SIDE, _SIDE, 3), None)},
        16,
    ),
}

#: For each name the examples in a batch that it is measured with.
KERAS: dict[str, int] = {
    **{f"keras_{name}": batch for name, (_, batch) in _CLASSIFIERS.items()},
    **{f"keras_{name}": batch for name, (*_, batch) in _BACKBONES.items()},
}


def _packages() -> Any:
    """Keras and KerasHub, told to use JAX.

    Raises:
        ImportError: One is not installed, or Keras uses something else already.
    """
    os.environ.setdefault("KERAS_BACKEND", "jax")
    try:
        import keras
        import keras_hub
    except ImportError as error:
        raise ImportError(
            "The networks keras_* are models of Keras and KerasHub, which are not installed: see "
            "benchmarks/README.md."
        ) from error
    if keras.backend.backend() != "jax":
        raise ImportError("Keras uses another backend: set KERAS_BACKEND=jax.")
    return keras, keras_hub


def network(name: str, batch: int) -> Network:
    """Builds the loss of one of `KERAS`.

    Args:
        name: Its name.
        batch: Examples in a batch.

    Raises:
        ImportError: The packages are not installed.
    """
    keras, keras_hub = _packages()
    short = name.removeprefix("keras_")
    classifies = short in _CLASSIFIERS
    contents: Contents
    if classifies:
        kind, _ = _CLASSIFIERS[short]
        model = getattr(keras.applications, kind)(weights=None, input_shape=(_SIDE, _SIDE, 3))
        contents = {"images": ((batch, _SIDE, _SIDE, 3), None), "labels": ((batch,), 1000)}
    else:
        kind, sizes, of_batch, _ = _BACKBONES[short]
        model, contents = getattr(keras_hub.models, kind)(**sizes), of_batch(batch)
    moving = [one.value for one in model.trainable_variables]
    state = [one.value for one in model.non_trainable_variables]

    def loss_fn(params: Any, given: Any) -> Any:
        inputs = given["inputs"]
        read = inputs.get("images", inputs)
        found, new_state = model.stateless_call(params, given["state"], read, training=True)
        if classifies:
            labels = inputs["labels"][:, None]
            loss = -jnp.mean(jnp.take_along_axis(jnp.log(found + 1e-7), labels, axis=-1))
        else:
            loss = jnp.sum(jnp.stack([jnp.mean(jnp.square(one)) for one in jax.tree.leaves(found)]))
        return loss, new_state

    def make_arguments(seed: int) -> tuple[Any, Any]:
        key = jax.random.key(seed)
        inputs = random_batch(key, contents)
        # No token is padding, and all are in one segment.
        ones = [name for name in inputs if name.endswith(("mask", "segment_ids"))]
        inputs |= {name: jnp.ones_like(inputs[name]) for name in ones}
        return moving, {"inputs": inputs, "state": state}

    return Network(name=name, loss_fn=loss_fn, has_aux=True, make_arguments=make_arguments)

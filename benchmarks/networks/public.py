"""Models of a public package, written by others, which nothing here was made for.

They are Flax models of ``transformers`` 4, small ones: real widths, three or four layers. The
package is not a dependency, and its newer versions have no Flax models; ``benchmarks/README.md``
says how to install it. Dropout is on, and compute is in bfloat16 except where a name says so.

They have no blocks to put a policy round: what a user of the package would write is not known.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.networks.record import Contents, Network, random_batch

_WIDE = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}
_VOCABULARY = 8192
_LAYERS = 4
#: What ``clip`` in the package is called with, which ``jax.numpy`` no longer takes.
_RENAMED = {"a_min": "min", "a_max": "max"}

#: What is in a batch of so many examples.
_Batch = Callable[[int], Contents]


def _package() -> Any:
    """The package ``transformers``, told to use Flax.

    Raises:
        ImportError: It is not installed, or has no Flax models.
    """
    os.environ.setdefault("USE_FLAX", "1")
    os.environ.setdefault("USE_TORCH", "0")
    try:
        import transformers

        transformers.FlaxPreTrainedModel  # noqa: B018
    except (ImportError, AttributeError) as error:
        raise ImportError(
            "The public networks are models of transformers 4.48.3, which is not installed: see "
            "benchmarks/README.md."
        ) from error
    return transformers


def _tokens(length: int, *names: str) -> _Batch:
    """Batches of integers below the vocabulary's size."""
    return lambda batch: dict.fromkeys(names, ((batch, length), _VOCABULARY))


def _images(side: int) -> _Batch:
    """Batches of images, channels first, and one of 1,000 labels each."""
    return lambda batch: {"images": ((batch, 3, side, side), None), "labels": ((batch,), 1000)}


def _entropy(logits: Any, labels: Any) -> Any:
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _next_token(model: Any, given: Mapping[str, Any], **options: Any) -> Any:
    ids = given["ids"]
    logits = model(ids, attention_mask=jnp.ones_like(ids), **options).logits
    return _entropy(logits[:, :-1], ids[:, 1:])


def _masked(model: Any, given: Mapping[str, Any], **options: Any) -> Any:
    return _entropy(model(given["ids"], **options).logits, given["labels"])


def _translated(model: Any, given: Mapping[str, Any], **options: Any) -> Any:
    found = model(given["ids"], decoder_input_ids=given["decoded"], **options)
    return _entropy(found.logits, given["labels"])


def _transcribed(model: Any, given: Mapping[str, Any], **options: Any) -> Any:
    return _entropy(model(given["sound"], given["decoded"], **options).logits, given["labels"])


def _classified(model: Any, given: Mapping[str, Any], **options: Any) -> Any:
    return _entropy(model(given["images"], **options).logits, given["labels"])


def _classified_by_statistics(model: Any, given: Mapping[str, Any], **options: Any) -> Any:
    del options["dropout_rng"]
    found, _ = model(given["images"], **options)
    return _entropy(found.logits, given["labels"])


def _contrasted(model: Any, given: Mapping[str, Any], **options: Any) -> Any:
    logits = model(given["ids"], given["images"], **options).logits_per_text
    pairs = jnp.arange(len(logits))
    return _entropy(logits, pairs) + _entropy(logits.T, pairs)


def _decoder(model: str, config: str, **sizes: Any) -> tuple[Any, ...]:
    return model, config, {"vocab_size": _VOCABULARY, **sizes}, _next_token, _tokens(512, "ids"), 16


def _encoder(model: str, config: str, **sizes: Any) -> tuple[Any, ...]:
    sizes = {"vocab_size": _VOCABULARY, "num_hidden_layers": _LAYERS, **_WIDE, **sizes}
    return model, config, sizes, _masked, _tokens(512, "ids", "labels"), 16


_BOTH = {
    "d_model": 512,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_ffn_dim": 2048,
    "decoder_ffn_dim": 2048,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
    "vocab_size": _VOCABULARY,
}
_TOWER = {**_WIDE, "num_hidden_layers": _LAYERS, "projection_dim": 512}
_GROUPED = {**_WIDE, "num_hidden_layers": _LAYERS, "max_position_embeddings": 512}

# name -> model, its configuration, sizes, loss, what is in a batch, examples in one
_MODELS: dict[str, tuple[Any, ...]] = {
    "gpt2": _decoder(
        "FlaxGPT2LMHeadModel", "GPT2Config", n_layer=_LAYERS, n_embd=512, n_head=8, n_positions=512
    ),
    "gpt_neo": _decoder(
        "FlaxGPTNeoForCausalLM",
        "GPTNeoConfig",
        num_layers=_LAYERS,
        hidden_size=512,
        num_heads=8,
        attention_types=[[["global", "local"], 2]],
        max_position_embeddings=512,
        window_size=128,
    ),
    "llama": _decoder("FlaxLlamaForCausalLM", "LlamaConfig", **_GROUPED, num_key_value_heads=2),
    "gemma": _decoder(
        "FlaxGemmaForCausalLM", "GemmaConfig", **_GROUPED, num_key_value_heads=1, head_dim=64
    ),
    "bert": _encoder("FlaxBertForMaskedLM", "BertConfig"),
    "bert_float32": _encoder("FlaxBertForMaskedLM", "BertConfig"),
    "albert": _encoder("FlaxAlbertForMaskedLM", "AlbertConfig"),
    "t5": (
        "FlaxT5ForConditionalGeneration",
        "T5Config",
        {"num_layers": 3, "d_model": 512, "d_ff": 2048, "num_heads": 8, "vocab_size": _VOCABULARY},
        _translated,
        _tokens(256, "ids", "decoded", "labels"),
        16,
    ),
    "bart": (
        "FlaxBartForConditionalGeneration",
        "BartConfig",
        {**_BOTH, "max_position_embeddings": 256},
        _translated,
        _tokens(256, "ids", "decoded", "labels"),
        16,
    ),
    "whisper": (
        "FlaxWhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **_BOTH,
            "max_source_positions": 1500,
            **dict.fromkeys(
                ("decoder_start_token_id", "pad_token_id", "bos_token_id", "eos_token_id"), 0
            ),
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        _transcribed,
        lambda batch: {
            "sound": ((batch, 80, 3000), None),
            **_tokens(256, "decoded", "labels")(batch),
        },
        8,
    ),
    "vit": (
        "FlaxViTForImageClassification",
        "ViTConfig",
        {**_WIDE, "num_hidden_layers": _LAYERS, "num_labels": 1000},
        _classified,
        _images(224),
        64,
    ),
    "beit": (
        "FlaxBeitForImageClassification",
        "BeitConfig",
        {**_WIDE, "num_hidden_layers": _LAYERS, "num_labels": 1000},
        _classified,
        _images(224),
        64,
    ),
    "clip": (
        "FlaxCLIPModel",
        "CLIPConfig",
        {
            "text_config": _TOWER,
            "vision_config": {**_TOWER, "image_size": 224, "patch_size": 16},
            "projection_dim": 512,
        },
        _contrasted,
        lambda batch: {**_tokens(77, "ids")(batch), **_images(224)(batch)},
        64,
    ),
    "resnet": (
        "FlaxResNetForImageClassification",
        "ResNetConfig",
        {"depths": [2, 2, 2, 2], "num_labels": 1000},
        _classified_by_statistics,
        _images(224),
        32,
    ),
}

#: For each name the examples in a batch that it is measured with.
PUBLIC: dict[str, int] = {f"public_{name}": one[-1] for name, one in _MODELS.items()}


@contextlib.contextmanager
def _old_names() -> Iterator[None]:
    """Lets ``jnp.clip`` take the names of its limits that the package uses."""
    clip = jnp.clip

    def clipped(x: Any, **limits: Any) -> Any:
        return clip(x, **{_RENAMED.get(name, name): limit for name, limit in limits.items()})

    jnp.clip = clipped  # type: ignore[assignment]
    try:
        yield
    finally:
        jnp.clip = clip


def network(name: str, batch: int) -> Network:
    """Builds the loss of one of `PUBLIC`.

    Args:
        name: Its name.
        batch: Examples in a batch.

    Raises:
        ImportError: The package is not installed.
    """
    package = _package()
    kind, config, sizes, loss, contents, _ = _MODELS[name.removeprefix("public_")]
    dtype = jnp.float32 if name.endswith("float32") else jnp.bfloat16
    with _old_names():
        model = getattr(package, kind)(
            getattr(package, config)(**sizes), _do_init=False, dtype=dtype
        )

    def loss_fn(params: Any, given: Any) -> Any:
        with _old_names():
            return loss(model, given, params=params, dropout_rng=given["key"], train=True)

    def make_arguments(seed: int) -> tuple[Any, Any]:
        key = jax.random.PRNGKey(seed)
        given = random_batch(key, contents(batch))
        with _old_names():
            return model.init_weights(key, model.input_shape), {**given, "key": key}

    return Network(
        name=name,
        loss_fn=loss_fn,
        has_aux=False,
        make_arguments=make_arguments,
    )
